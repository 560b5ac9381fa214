// The memory map: a cell for each block, or a tile for many, and the tables of a selected request.

import { around, listen } from "./canvas.js";
import { $, count, percent, say, some, visible } from "./dom.js";
import { band, box, colour, disc, fill, flag, hatch, ink, numberOf, path, prefersStill, rect, requests, stroke, Surface, wrap, write } from "./paint.js";
import { isSelected, nameOf, redraw, redrawRested, select, shown, store } from "./store.js";

const FADE = 1400; // milliseconds that an arrow or an eviction stays visible
const MAX_LINES = 400; // lines from a table that are still told apart
const DETAIL = 6000; // blocks that get a cell each at most
const SMALL = 256; // blocks that are always drawn
const MAX_SLOT_ROOM = 0.34; // of the map's height
const CELLS = [72, 64, 56, 50, 45, 40, 36, 32, 28, 25, 22, 20, 17, 14, 12, 10, 8, 7]; // heights that are tried

/** Return the grid for a number of blocks: tiles stand for `per` blocks each. */
function grid(numBlocks, width, height, rem) {
  const scale = rem / 16;
  if (numBlocks <= DETAIL) {
    for (const size of CELLS) {
      const h = size * scale;
      const w = h * (size >= 50 ? 2.1 : size >= 30 ? 1.7 : size >= 20 ? 1.4 : 1.1);
      const gap = size >= 20 ? 4 * scale : size >= 12 ? 2 : 1;
      let cols = Math.max(1, Math.floor((width + gap) / (w + gap)));
      if (cols > 8) cols -= cols % (cols > 32 ? 8 : 4);
      cols = Math.min(cols, numBlocks);
      const rows = Math.ceil(numBlocks / cols);
      if (rows * (h + gap) <= height) return { per: 1, cols, rows, w: Math.min((width + gap) / cols - gap, w * 2.2), h, gap };
    }
  }
  const size = 7 * Math.max(1, scale * 0.9);
  let cols = Math.max(8, Math.floor(width / (size + 1)));
  cols -= cols % 8;
  const per = Math.max(1, Math.ceil(numBlocks / (cols * Math.floor(height / (size + 1)))));
  return { per, cols, rows: Math.ceil(numBlocks / per / cols), w: (width + 1) / cols - 1, h: size, gap: 1 };
}

/** Return how many blocks are drawn of a large pool: those that were ever used, and as many again at most. */
function overview({ numBlocks, numTouched }) {
  const most = Math.max(SMALL, 2 ** Math.ceil(Math.log2(numTouched + 1)));
  return Math.min(numBlocks, most);
}

export class MemoryMap {
  numShown; lay; hosts; states; gutter; top; stateTop; hostTop; placed;
  isWhole = false; // whether blocks that were never used are drawn, too

  constructor(canvas) {
    this.surface = new Surface(canvas, () => redraw("map"));
    this.effects = [];
    this.lastStep = null;
    listen(this);
  }

  draw() {
    const state = shown();
    const { run } = store;
    const { rem } = ink;
    const width = this.surface.canvas.parentElement.clientWidth;
    const tables = [...state.seqs.values()].filter((seq) => isSelected(seq.name) && seq.blocks.length).slice(0, 6);
    const room = Math.max(16 * rem, Math.min(0.46 * innerHeight, 70 * rem));
    const gutter = width > 30 * rem ? 2.6 * rem : 0;
    const numShown = this.isWhole ? run.numBlocks : overview(run);
    const lay = grid(numShown, width - gutter, room, rem);
    const hosts = run.numHostBlocks ? grid(run.numHostBlocks, width - gutter, room / 3, rem) : null;
    const top = tables.length ? tables.length * 1.75 * rem + 2.2 * rem : 0;
    const bottom = top + lay.rows * (lay.h + lay.gap);
    const states = run.numSlots ? grid(run.numSlots, width - gutter, MAX_SLOT_ROOM * room, rem) : null;
    const stateTop = bottom + 1.9 * rem;
    const stateBottom = states ? stateTop + states.rows * (states.h + states.gap) : bottom;
    const hostTop = stateBottom + 1.9 * rem;
    const height = hosts ? hostTop + hosts.rows * (hosts.h + hosts.gap) : stateBottom;
    Object.assign(this, { numShown, lay, hosts, states, gutter, top, stateTop, hostTop, placed: [] });
    const pen = this.surface.begin(Math.ceil(height) + 2);
    this.collect(run);
    if (!state.isKnown) this.unknown(pen);
    else if (lay.per === 1) this.cells(pen, state, tables);
    else this.tiles(pen, state, tables);
    this.labels(pen, lay, top);
    if (states) this.strip(pen, "States of recurrent layers, after so many tokens", states, stateTop, run.numSlots, (slot) => slotOwner(state, slot));
    if (hosts) this.strip(pen, "Host memory", hosts, hostTop, run.numHostBlocks, (block) => owned(state.hostOwner().get(block)));
    this.lines(pen, tables);
    this.marks(pen);
    this.outline(pen);
    this.say(state);
  }

  /** Return the place of a block's cell, in the pool or in another grid. */
  place(block, lay = this.lay, top = this.top) {
    const index = Math.floor(block / lay.per);
    return [this.gutter + (index % lay.cols) * (lay.w + lay.gap), top + Math.floor(index / lay.cols) * (lay.h + lay.gap)];
  }

  cells(pen, state, tables) {
    const { lay } = this;
    const lit = new Set(tables.flatMap((seq) => seq.blocks));
    const [holders, slots] = [state.holders(), state.slotOf()];
    for (let block = 0; block < this.numShown; block += 1) {
      const [x, y] = this.place(block);
      pen.globalAlpha = lit.size && !lit.has(block) ? 0.28 : 1;
      const names = holders.get(block) ?? [];
      this[lay.h >= 1.5 * ink.rem ? "card" : "chip"](pen, state, block, names, x, y, lay.w, lay.h);
      if (slots.has(block)) flag(pen, x, y, lay.w, lay.h);
      if (state.heat.get(block)?.disk) band(pen, x, y, lay.w, lay.h);
    }
    pen.globalAlpha = 1;
  }

  /** Hatch every cell. */
  unknown(pen) {
    const { lay } = this;
    const hatching = hatch(pen);
    for (let block = 0; block < this.numShown; block += lay.per) rect(pen, hatching, ...this.place(block), lay.w, lay.h);
  }

  chip(pen, state, block, names, x, y, w, h) {
    rect(pen, ink.free, x, y, w, h);
    if (!state.refs[block]) return;
    const share = state.fill[block] / store.run.blockSize;
    if (!names.length) {
      rect(pen, hatch(pen), x, y, w * share, h);
      box(pen, x + 0.5, y + 0.5, w - 1, h - 1, 0);
      stroke(pen, ink.hatch, 1);
      return;
    }
    const owners = requests(names).slice(0, 4);
    owners.forEach((owner, i) => {
      const [from, to] = [y + (h * i) / owners.length, y + (h * (i + 1)) / owners.length];
      rect(pen, `${colour(owner)}55`, x, from, w, to - from);
      rect(pen, colour(owner), x, from, Math.max(1, w * share), to - from);
    });
    if (h >= 10) this.dots(pen, state.refs[block] - 1, x, y, w, 1.3);
  }

  /** Draw a large cell: also slots, owners, id and text. */
  card(pen, state, block, names, x, y, w, h) {
    const { run } = store;
    const { rem } = ink;
    const refs = state.refs[block];
    const filled = w * (state.fill[block] / run.blockSize);
    const owners = requests(names).slice(0, 4);
    box(pen, x + 0.5, y + 0.5, w - 1, h - 1, 0.3 * rem);
    fill(pen, ink.free);
    const isBig = h >= 2.4 * rem;
    const pad = 0.3 * rem;
    if (refs) {
      pen.save();
      pen.clip();
      if (!owners.length) {
        rect(pen, hatch(pen), x, y, filled, h);
        if (isBig) rect(pen, `${ink.panel}80`, x, y, w, h);
      }
      owners.forEach((owner, i) => rect(pen, `${colour(owner)}3d`, x, y + (h * i) / owners.length, filled, h / owners.length));
      this.slots(pen, owners, filled, x, y, w, h);
      pen.restore();
      box(pen, x + 0.5, y + 0.5, w - 1, h - 1, 0.3 * rem);
      if (owners.length) stroke(pen, colour(owners[0]), 1);
      else stroke(pen, ink.hatch, 1, [3, 2]);
    }
    if (isBig || !names.length) write(pen, String(block), x + pad, y + (isBig ? 0.62 * rem : h / 2), { weight: 500, tone: refs ? ink.text : ink.soft, width: w - 2 * pad });
    if (names.length) {
      const who = names.length > 3 ? `${nameOf(names[0])}+${names.length - 1}` : names.map(nameOf).join(" ");
      const at = isBig ? x + pad + Math.max(1.6 * rem, pen.measureText(`${block} `).width) : x + pad;
      write(pen, who, at, y + (isBig ? 0.62 * rem : h / 2 - 1), { size: 0.7, weight: 700, tone: ink.text, width: x + w - at - 0.4 * rem - Math.min(4, refs - 1) * 0.34 * rem });
    }
    this.dots(pen, refs - 1, x, y, w - pad * 0.6, 0.13 * rem);
    if (isBig && refs) {
      const lines = h >= 3.4 * rem ? Math.floor((h - 1.7 * rem) / (0.8 * rem)) : 1;
      wrap(pen, visible(run.textOfBlock(state, block, names)), x + pad, y + 1.5 * rem, lines, 0.8 * rem, { size: 0.64, width: w - 2 * pad });
    }
  }

  slots(pen, owners, filled, x, y, w, h) {
    const bar = Math.max(2.5, h * 0.09);
    const slot = w / store.run.blockSize;
    owners.forEach((owner, i) => rect(pen, colour(owner), x, y + h - bar + (bar * i) / owners.length, filled, bar / owners.length));
    for (let left = slot; left < w - 1 && slot >= 4; left += slot) rect(pen, ink.panel, x + left - 0.5, y + h - bar, 1, bar);
  }

  dots(pen, extra, x, y, w, radius) {
    for (let i = 0; i < Math.min(extra, 4); i += 1) {
      disc(pen, x + w - radius * (2 + 2.6 * i), y + radius * 2.4, radius);
      fill(pen, ink.text);
    }
  }

  /** Draw tiles that stand for many blocks: the share in use, cached and free, and the commonest owner. */
  tiles(pen, state, tables) {
    const { lay } = this;
    const lit = new Set(tables.flatMap((seq) => seq.blocks).map((block) => Math.floor(block / lay.per)));
    const hatching = hatch(pen);
    for (let from = 0; from < this.numShown; from += lay.per) {
      const { size, used, cached, best } = this.tile(state, from);
      const isLit = lit.has(from / lay.per);
      const [x, y] = this.place(from);
      pen.globalAlpha = lit.size && !isLit ? 0.25 : 1;
      rect(pen, ink.free, x, y, lay.w, lay.h);
      const [a, b] = [(lay.h * used) / size, (lay.h * cached) / size];
      rect(pen, colour(isLit ? tables[0].number : best), x, y + lay.h - a, lay.w, a);
      rect(pen, hatching, x, y + lay.h - a - b, lay.w, b);
    }
    pen.globalAlpha = 1;
  }

  /** Count the blocks of a tile, and find the request that has most of them. */
  tile(state, from) {
    const to = Math.min(this.numShown, from + this.lay.per);
    const owner = state.owner();
    const counts = new Map();
    let [used, cached, most, best] = [0, 0, 0, 0];
    for (let block = from; block < to; block += 1) {
      if (owner[block] >= 0) {
        used += 1;
        const number = (counts.get(owner[block]) ?? 0) + 1;
        counts.set(owner[block], number);
        if (number > most) [most, best] = [number, owner[block]];
      } else if (state.refs[block]) cached += 1;
    }
    return { size: to - from, used, cached, best };
  }

  labels(pen, lay, top) {
    if (!this.gutter) return;
    const pitch = lay.h + lay.gap;
    const every = Math.max(1, Math.ceil((1.1 * ink.rem) / pitch));
    for (let row = 0; row < lay.rows; row += every) {
      write(pen, count(row * lay.cols * lay.per), this.gutter - 0.5 * ink.rem, top + row * pitch + lay.h / 2, { size: 0.62, align: "right" });
    }
  }

  /** Draw a pool beside that of the blocks. `ownerOf` returns the text of a cell, and its colour unless it is hatched. */
  strip(pen, title, lay, top, size, ownerOf) {
    const { rem } = ink;
    write(pen, title, this.gutter, top - 0.85 * rem, { size: 0.72, weight: 600 });
    for (let from = 0; from < size; from += lay.per) {
      const [x, y] = this.place(from, lay, top);
      const owner = ownerOf(from);
      const own = owner?.colour;
      box(pen, x + 0.5, y + 0.5, lay.w - 1, lay.h - 1, 0.25 * rem);
      fill(pen, !owner ? ink.free : own ? `${own}60` : hatch(pen));
      if (owner && !own) fill(pen, `${ink.panel}80`);
      if (lay.h > 10) stroke(pen, own ?? (owner ? ink.hatch : ink.line), 1, [3, 2]);
      if (lay.h >= rem && lay.per === 1) {
        write(pen, owner?.text ?? String(from), x + 0.3 * rem, y + lay.h / 2, { weight: own ? 700 : 400, tone: owner ? ink.text : ink.soft, width: lay.w - 0.5 * rem });
      }
      if (owner && !own && lay.h > 10) flag(pen, x, y, lay.w, lay.h);
    }
  }

  /** Collect the copies and evictions since the last frame. */
  collect(run) {
    const { step } = store;
    if (step === this.lastStep) return;
    const from = this.lastStep !== null && step > this.lastStep && step - this.lastStep <= 60 ? this.lastStep + 1 : step;
    const born = performance.now();
    this.effects = this.effects.filter((effect) => born - effect.born < FADE && from !== step);
    for (const each of run.between(Math.max(from, step - 8), step)) {
      for (const event of each.events) {
        if (event.kind === "copy" || event.kind === "evict") this.effects.push({ ...event, born, step: each.step });
      }
    }
    this.effects = this.effects.slice(-200);
    this.lastStep = step;
  }

  strength(effect, now) {
    if (effect.step === store.step && !store.follows) return 1;
    return prefersStill() ? Number(effect.step === store.step) : Math.max(0, 1 - (now - effect.born) / FADE);
  }

  /** Draw an arrow for each copy, and frames around evicted blocks. They fade with time. */
  marks(pen) {
    const now = performance.now();
    const { w, h } = this.lay;
    let isMoving = false;
    for (const effect of this.effects) {
      const alpha = this.strength(effect, now);
      if (alpha <= 0) continue;
      isMoving ||= alpha < 1 || store.follows;
      if (effect.kind === "copy") {
        const [[ax, ay], [bx, by]] = [this.place(effect.source), this.place(effect.target)];
        arrow(pen, ax + w / 2, ay + 0.8 * h, bx + w / 2, by + 0.8 * h, alpha);
        continue;
      }
      const [x, y] = this.place(effect.block);
      const size = Math.max(3, Math.min(h * 0.3, 0.7 * ink.rem));
      pen.globalAlpha = alpha;
      box(pen, x + 0.75, y + 0.75, w - 1.5, h - 1.5, 0);
      stroke(pen, ink.bad, 1.5, [3, 3]);
      path(pen, [x + w, y + h], [x + w - size, y + h], [x + w, y + h - size]);
      fill(pen, ink.bad);
    }
    pen.globalAlpha = 1;
    if (isMoving && !prefersStill()) redrawRested("map");
  }

  /** Draw the selected request's tables, and a line from each entry to its block. */
  lines(pen, tables) {
    const { rem } = ink;
    tables.forEach((seq, row) => {
      const y = row * 1.75 * rem;
      const own = colour(seq.number);
      write(pen, nameOf(seq.name), 0, y + 0.8 * rem, { size: 0.72, weight: 700, tone: ink.text });
      const left = 2.6 * rem;
      const size = seq.blocks.length;
      const w = Math.min(3.2 * rem, (this.surface.width - left) / size);
      seq.blocks.forEach((block, i) => {
        const x = left + i * w;
        const bottom = y + 1.5 * rem;
        const inset = w > 6 ? 1 : 0;
        pen.globalAlpha = 1;
        box(pen, x + inset, y + 0.15 * rem, w - 2 * inset, 1.3 * rem, 3);
        fill(pen, `${own}44`);
        if (w > 1.3 * rem) write(pen, String(i), x + w / 2, y + 0.82 * rem, { size: 0.62, weight: 600, tone: ink.text, align: "center" });
        this.placed.push({ x, y, w, h: 1.5 * rem, block });
        if (size > MAX_LINES && i % Math.ceil(size / MAX_LINES)) return;
        const [bx, by] = this.place(block);
        const [tx, ty] = [bx + this.lay.w / 2, by + 1];
        pen.globalAlpha = size > 60 ? 0.35 : 0.85;
        pen.beginPath();
        pen.moveTo(x + w / 2, bottom);
        pen.bezierCurveTo(x + w / 2, bottom + 1.6 * rem, tx, Math.max(this.top - 1.2 * rem, ty - 2.4 * rem), tx, ty);
        stroke(pen, own, size > 60 ? 1 : 1.6);
        disc(pen, tx, ty, 2.2);
        fill(pen, own);
      });
    });
    pen.globalAlpha = 1;
  }

  outline(pen) {
    const { selected } = store;
    if (selected?.kind !== "block" && selected?.kind !== "tile") return;
    const [x, y] = this.place(selected.id);
    box(pen, x - 0.5, y - 0.5, this.lay.w + 1, this.lay.h + 1, this.lay.h > 20 ? 0.3 * ink.rem : 1);
    stroke(pen, ink.accent, 2.5);
  }

  at(x, y) {
    const { lay, gutter, top, hosts, states, stateTop, hostTop } = this;
    const entry = this.placed.find(around(x, y));
    if (entry) return { kind: "block", id: entry.block };
    const within = ({ w, h, gap, cols, rows, per }, start, total) => {
      const [col, row] = [Math.floor((x - gutter) / (w + gap)), Math.floor((y - start) / (h + gap))];
      const first = (row * cols + col) * per;
      return col >= 0 && col < cols && row >= 0 && row < rows && first < total ? first : null;
    };
    const block = y >= top ? within(lay, top, this.numShown) : null;
    if (block !== null) return { kind: lay.per === 1 ? "block" : "tile", id: block };
    const host = hosts && y >= hostTop ? within(hosts, hostTop, store.run.numHostBlocks) : null;
    if (host !== null) return { kind: "host", id: host };
    const slot = states && y >= stateTop ? within(states, stateTop, store.run.numSlots) : null;
    return slot !== null ? { kind: "slot", id: slot } : null;
  }

  describe(thing) {
    const state = shown();
    if (!state.isKnown) return [store.run.whyUnknown(store.step)];
    if (thing.kind === "host") {
      const name = state.hostOwner().get(thing.id);
      return [`Host block ${thing.id}`, name ? `has blocks of ${nameOf(name)}, which was swapped out or read from a disk` : "free"];
    }
    if (thing.kind === "slot") return [`Slot ${thing.id}`, describeSlot(state, thing.id)];
    if (thing.kind === "tile") {
      const { size, used, cached } = this.tile(state, thing.id);
      return [`Blocks ${count(thing.id)} … ${count(thing.id + size - 1)}`, `${used} in use, ${cached} only cached, ${size - used - cached} free`];
    }
    return describeBlock(state, thing.id);
  }

  click(thing) {
    if (thing?.kind !== "host" && thing?.kind !== "slot") return select(thing);
    const owner = (thing.kind === "host" ? shown().hostOwner() : shown().slots).get(thing.id);
    select(owner === undefined ? null : { kind: typeof owner === "number" ? "block" : "seq", id: owner });
  }

  key(event) {
    const { selected } = store;
    const { cols, per } = this.lay;
    const moves = { ArrowLeft: -per, ArrowRight: per, ArrowUp: -cols * per, ArrowDown: cols * per, PageUp: -8 * cols * per, PageDown: 8 * cols * per };
    if (!(event.key in moves)) return null;
    const kind = per === 1 ? "block" : "tile";
    const at = selected?.kind === kind ? selected.id + moves[event.key] : 0;
    return { kind, id: Math.max(0, Math.min(Math.floor((this.numShown - 1) / per) * per, at)) };
  }

  say(state) {
    const { run, step } = store;
    if (!state.isKnown) return say("map-note", run.whyUnknown(step));
    const total = state.totals();
    const text = `${some(run.numBlocks, "block")} of ${run.blockSize} tokens: ${count(total.used)} in use, ${count(total.cached)} only cached, ${count(total.free)} free${total.saved ? `; sharing saves ${count(total.saved)}` : ""}${run.numSlots ? `; ${count(state.slots.size)} of ${some(run.numSlots, "slot")} of states in use` : ""}${this.lay.per > 1 ? `; a tile stands for ${this.lay.per}` : ""}${this.numShown < run.numBlocks ? `; the first ${count(this.numShown)} are drawn, and no other was ever used` : ""}`;
    say("map-note", text);
    const whole = $("map-whole");
    if (whole) {
      whole.hidden = overview(run) === run.numBlocks;
      whole.setAttribute("aria-pressed", String(this.isWhole));
    }
    this.surface.canvas.setAttribute("aria-label", `Memory map after step ${store.step}. ${percent(total.used, run.numBlocks)} of the blocks are in use. Arrow keys select a block.`);
  }
}

const owned = (name) => name && { text: nameOf(name), colour: colour(numberOf(name)) };

/** The owner of a slot of states, in the form of a strip. A snapshot has no colour. */
function slotOwner(state, slot) {
  const owner = state.slots.get(slot);
  if (owner === undefined) return null;
  if (typeof owner === "number") return { text: count(state.depth(owner)) };
  const { text, colour: own } = owned(owner);
  return { text: `${text} ${count(state.seqs.get(owner).num_computed)}`, colour: own };
}

export function describeSlot(state, slot) {
  const owner = state.slots.get(slot);
  if (owner === undefined) return "free";
  if (typeof owner === "number") return `snapshot of the state after ${some(state.depth(owner), "token")}, which end in block ${owner}`;
  return `state of ${nameOf(owner)} after ${some(state.seqs.get(owner).num_computed, "token")}`;
}

export function describeBlock(state, block) {
  const { run } = store;
  const refs = state.refs[block];
  if (!refs) return [`Block ${block}`, "free"];
  const names = state.holders().get(block) ?? [];
  const isCached = Number(state.tree.has(block));
  const pins = refs - names.length - isCached;
  const who = [
    names.length ? `${names.length > 1 ? "tables" : "table"} of ${names.map(nameOf).join(", ")}` : "",
    isCached ? "the prefix tree" : "",
    pins > 0 ? some(pins, "copy", "copies") : "",
  ].filter(Boolean);
  const text = run.textOfBlock(state, block, names);
  const slot = state.slotOf().get(block);
  if (state.heat.get(block)?.disk) who.push("read from a disk");
  return [`Block ${block}`, ...(slot === undefined ? [] : [`slot ${slot}: ${describeSlot(state, slot)}`]), `${some(refs, "reference")}: ${who.join(", ")}`, `${state.fill[block]} of ${run.blockSize} slots filled`, ...(text ? [`“${visible(text)}”`] : [])];
}

function arrow(pen, ax, ay, bx, by, alpha) {
  const [dx, dy] = [bx - ax, by - ay];
  const length = Math.hypot(dx, dy) || 1;
  const bend = Math.min(60, length * 0.3);
  const [mx, my] = [(ax + bx) / 2 + (dy / length) * bend, (ay + by) / 2 - (dx / length) * bend];
  const angle = Math.atan2(by - my, bx - mx);
  const head = 0.5 * ink.rem;
  pen.globalAlpha = alpha;
  for (const [style, width] of [[ink.panel, 5], [ink.text, 2.2]]) {
    pen.lineCap = "round";
    pen.beginPath();
    pen.moveTo(ax, ay);
    pen.quadraticCurveTo(mx, my, bx, by);
    stroke(pen, style, width);
    path(pen, [bx, by], ...[-0.45, 0.45].map((turn) => [bx - head * Math.cos(angle + turn), by - head * Math.sin(angle + turn)]));
    fill(pen, style);
  }
  disc(pen, ax, ay, 3.2);
  fill(pen, ink.text);
  pen.globalAlpha = 1;
  pen.lineCap = "butt";
}
