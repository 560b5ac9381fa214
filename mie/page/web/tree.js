// The prefix tree: x is the position in the text, so that a node is as wide as its tokens.

import { around, listen } from "./canvas.js";
import { count, say, some, visible } from "./dom.js";
import { describeBlock } from "./map.js";
import { box, colour, fill, flag, font, hatch, ink, rect, requests, stroke, Surface, wrap, write } from "./paint.js";
import { isBlock, nameOf, redraw, select, shown, store } from "./store.js";

const MAX_LEAVES = 150;
const NARROWEST = 6; // pixels of a box, which stands for several blocks if need be

/** Return the children of each node, the places of idle leaves in the order of eviction, and the most uses. */
export function shape(state) {
  return state.kept("shape", () => {
    const children = new Map();
    for (const [block, { parent }] of state.tree) {
      const place = parent ?? -1;
      if (!children.has(place)) children.set(place, []);
      children.get(place).push(block);
    }
    for (const list of children.values()) list.sort((a, b) => a - b);
    const order = [...state.tree.keys()]
      .filter((block) => !children.has(block) && typeof state.heat.get(block)?.idle === "number")
      .sort((a, b) => state.heat.get(a).idle - state.heat.get(b).idle || a - b);
    let most = 1;
    for (const { uses } of state.heat.values()) most = Math.max(most, uses);
    return { children, ranks: new Map(order.map((block, i) => [block, i + 1])), most };
  }, state.treeVersion);
}

/** Return rows of chains: each is a run of nodes that have one child. */
function chains(state) {
  const { children } = shape(state);
  const placed = [];
  let row = 0;
  let numHidden = 0;
  const visit = (roots, depth) => {
    for (const root of roots) {
      if (row >= MAX_LEAVES) {
        numHidden += 1;
        continue;
      }
      const chain = [root];
      let below = children.get(root) ?? [];
      while (below.length === 1) {
        chain.push(below[0]);
        below = children.get(below[0]) ?? [];
      }
      const entry = { chain, depth, row, rows: 1 };
      placed.push(entry);
      if (below.length) visit(below, depth + chain.length);
      else row += 1;
      entry.rows = Math.max(1, row - entry.row);
    }
  };
  visit(children.get(-1) ?? [], 0);
  const depth = placed.reduce((most, each) => Math.max(most, each.depth + each.chain.length), 1);
  return { placed, rows: row, depth, numHidden };
}

export class PrefixTree {
  constructor(canvas) {
    this.surface = new Surface(canvas, () => redraw("tree"));
    listen(this);
  }

  draw() {
    const state = shown();
    const { rem } = ink;
    const found = state.kept("chains", () => chains(state), state.treeVersion);
    const width = this.surface.canvas.parentElement.clientWidth;
    const room = Math.max(12 * rem, Math.min(30 * rem, 0.4 * innerHeight));
    const pitch = Math.max(4, Math.min(3 * rem, room / Math.max(3, found.rows)));
    const height = Math.max(5 * rem, found.rows * pitch) + 1.3 * rem;
    const pen = this.surface.begin(Math.ceil(height));
    const unit = Math.min((width - 2) / found.depth, 14 * rem);
    this.boxes = [];
    const { ranks, most } = shape(state);
    for (const each of found.placed) this.chain(pen, state, each, unit, pitch, ranks, most);
    this.fork = store.run.departed(state, store.selected?.kind === "seq" ? store.selected.id : null);
    if (this.fork) this.departure(pen, this.fork, unit);
    this.scale(pen, found.depth, unit, height, width);
    if (!found.placed.length) write(pen, state.isKnown ? "Nothing is cached at this step." : store.run.whyUnknown(store.step), width / 2, 2.4 * rem, { size: 0.85, align: "center" });
    this.say(state, found, ranks.size);
  }

  chain(pen, state, { chain, depth, row, rows }, unit, pitch, ranks, most) {
    const { rem } = ink;
    const gap = pitch > 10 ? 3 : 1;
    const y = row * pitch;
    const h = rows * pitch - gap;
    const x = depth * unit;
    const w = chain.length * unit - gap;
    rect(pen, ink.free, x, y, w, h);
    const every = Math.ceil(Math.max(1, NARROWEST / unit));
    const slots = state.slotOf();
    const owners = every > 1 ? state.owner() : null;
    for (let i = 0; i < chain.length; i += every) {
      const block = chain[i];
      const left = x + i * unit;
      const holders = owners ? (owners[block] < 0 ? [] : [owners[block]]) : requests(state.holders().get(block) ?? []);
      const width = Math.min(every, chain.length - i) * unit - (i + every >= chain.length ? gap : 0);
      const { uses, disk } = state.heat.get(block) ?? { uses: 0, disk: 0 };
      if (uses || disk) {
        pen.globalAlpha = 0.12 + 0.3 * Math.log1p(uses + disk) / Math.log1p(most + disk);
        rect(pen, disk ? ink.disk : ink.accent, left, y, width, h);
        pen.globalAlpha = 1;
      }
      const bar = Math.max(2, Math.min(0.3 * rem, h * 0.2));
      if (!holders.length) rect(pen, hatch(pen), left, y + h - bar, width, bar);
      holders.slice(0, 8).forEach((owner, k, all) => {
        rect(pen, colour(owner), left + (width * k) / all.length, y + h - bar, width / all.length, bar);
      });
      if (i && unit > 8) rect(pen, ink.panel, left - 0.5, y, 1, h);
      if (chain.slice(i, i + every).some((each) => slots.has(each))) flag(pen, left, y, width, h);
      this.boxes.push({ x: left, y, w: every * unit, h: rows * pitch, block });
    }
    const rank = ranks.get(chain.at(-1));
    this.words(pen, state, chain, x, y, w, h, rank);
    if (rank && pitch > 0.7 * rem) {
      pen.font = font(0.6, 700);
      const text = String(rank);
      const size = Math.max(pen.measureText(text).width + 0.5 * rem, Math.min(1.05 * rem, h));
      box(pen, x + w - size - 2, y + 2, size, Math.min(1.05 * rem, h - 2), 4);
      fill(pen, ink.panel);
      write(pen, text, x + w - size / 2 - 2, y + 2.5 + Math.min(1.05 * rem, h - 2) / 2, { size: 0.6, weight: 700, tone: rank === 1 ? ink.bad : ink.text, align: "center" });
    }
    const i = chain.findIndex(isBlock);
    if (i < 0) return;
    box(pen, x + i * unit + 1, y + 1, unit - gap, h - 2, 0);
    stroke(pen, ink.accent, 2.5);
  }

  words(pen, state, chain, x, y, w, h, isRanked) {
    const { rem } = ink;
    if (h < 0.7 * rem || w < 3 * rem) return;
    let text = "";
    for (const block of chain) {
      if (text.length > w) break; // more letters than fit three lines
      text += visible(store.run.textOfBlock(state, block));
    }
    const lines = Math.max(1, Math.min(3, Math.floor((h - 0.3 * rem) / (0.9 * rem))));
    const start = lines > 1 ? y + 0.65 * rem : y + h * 0.42;
    wrap(pen, text, x + 0.35 * rem, start, lines, 0.9 * rem, { size: Math.min(0.7, (h / rem) * 0.6), tone: ink.text, width: w - (isRanked ? 1.9 : 0.8) * rem });
  }

  /** Mark the token at which a prompt departs from a cached one, in both branches. */
  departure(pen, { position, nearest, own }, unit) {
    const x = (position / store.run.blockSize) * unit;
    const found = this.boxes.filter(({ block }) => block === nearest || block === own);
    for (const { y, h } of found) rect(pen, ink.bad, Math.max(0, x - 1), y, 2.5, h - 1);
  }

  scale(pen, depth, unit, height, width) {
    const { rem } = ink;
    const size = store.run.blockSize;
    const every = Math.max(1, Math.ceil((4 * rem) / unit));
    for (let i = 0; i <= depth; i += every) {
      const x = Math.min(width - 2, i * unit);
      if (x < width - 2.5 * rem) write(pen, i === 0 ? "token 0" : count(i * size), x, height - 0.5 * rem, { size: 0.62, align: i === 0 ? "left" : "center" });
    }
  }

  at(x, y) {
    const found = this.boxes.find(around(x, y));
    return found ? { kind: "block", id: found.block } : null;
  }

  describe({ id: block }) {
    const state = shown();
    const heat = state.heat.get(block);
    const rank = shape(state).ranks.get(block);
    return [...describeBlock(state, block), ...(heat ? [`taken from the tree ${some(heat.uses, "time")}`] : []), ...(rank ? [rank === 1 ? "evicted next" : `number ${rank} to be evicted`] : [])];
  }

  click(node) {
    select(node);
  }

  /** Move between nodes: left to the parent, right to the first child, up and down between rows. */
  key(event) {
    if (!["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown"].includes(event.key) || !this.boxes.length) return null;
    const state = shown();
    const now = this.boxes.find((each) => isBlock(each.block));
    let next = this.boxes[0];
    if (now) {
      const parent = state.tree.get(now.block)?.parent;
      const across = (sign) => this.boxes.filter((each) => each.x === now.x && (each.y - now.y) * sign > 0).sort((a, b) => (a.y - b.y) * sign)[0];
      if (event.key === "ArrowLeft") next = this.boxes.find((each) => each.block === parent) ?? now;
      else if (event.key === "ArrowRight") next = this.boxes.find((each) => state.tree.get(each.block)?.parent === now.block) ?? now;
      else next = across(event.key === "ArrowUp" ? -1 : 1) ?? now;
    }
    return { kind: "block", id: next.block };
  }

  say(state, found, numIdle) {
    const numRead = [...state.heat.values()].filter(({ disk }) => disk).length;
    const more = [
      numRead ? `${count(numRead)} read from a disk` : "",
      this.fork ? `red: ${nameOf(this.fork.seq)} departs from a cached prompt at token ${count(this.fork.position)}` : "",
      found.numHidden ? `${found.numHidden} branches hidden` : "",
    ].filter(Boolean).map((each) => `; ${each}`).join("");
    const text = state.tree.size
      ? `${some(state.tree.size, "full block")}, ${some(found.rows, "branch", "branches")}; ${!state.heat.size ? "hits are unknown at this step" : `shade: hits; ${numIdle ? `numbers: order of eviction of ${some(numIdle, "idle leaf", "idle leaves")}` : "no leaf is idle"}`}${more}`
      : "";
    say("tree-note", text);
    this.surface.canvas.setAttribute("aria-label", `Prefix tree after step ${store.step}: ${text}. Arrow keys move between nodes.`);
  }
}
