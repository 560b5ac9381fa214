// The memory map: a cell for each block, or a tile for many, and the tables of a selected request.

import { announce, count, percent, say, some, tip, visible } from "./dom.js";
import { box, colour, disc, hatch, ink, label, path, prefersStill, rect, requests, Surface, wrap, write } from "./paint.js";
import { change, redraw, select, shown, store } from "./store.js";

const FADE = 1400; // milliseconds that an arrow or an eviction stays visible
const MAX_LINES = 400; // lines from a table that are still told apart
const DETAIL = 6000; // blocks that get a cell each at most
const CELLS = [72, 64, 56, 50, 45, 40, 36, 32, 28, 25, 22, 20, 17, 14, 12, 10, 8, 7]; // heights that are tried

/** Return the grid for a number of blocks: tiles stand for `per` blocks each. */
export function grid(numBlocks, width, height, rem) {
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

export class MemoryMap {
  constructor(canvas) {
    this.surface = new Surface(canvas, () => redraw("map"));
    this.effects = [];
    this.lastStep = null;
    canvas.addEventListener("pointermove", (event) => this.hover(event));
    canvas.addEventListener("pointerleave", () => tip(null));
    canvas.addEventListener("click", (event) => this.click(event));
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  draw() {
    const state = shown();
    const { run, selected } = store;
    const rem = ink.rem;
    const width = this.surface.canvas.parentElement.clientWidth;
    const tables = this.tables(state, selected);
    const room = Math.max(16 * rem, Math.min(0.46 * innerHeight, 70 * rem));
    const gutter = width > 30 * rem ? 2.6 * rem : 0;
    const lay = grid(run.numBlocks, width - gutter, room, rem);
    const hosts = run.numHostBlocks ? grid(run.numHostBlocks, width - gutter, room / 3, rem) : null;
    const strip = tables.length ? tables.length * 1.75 * rem + 2.2 * rem : 0;
    const top = strip;
    const bottom = top + lay.rows * (lay.h + lay.gap);
    const hostTop = bottom + 1.9 * rem;
    const height = hosts ? hostTop + hosts.rows * (hosts.h + hosts.gap) : bottom;
    Object.assign(this, { lay, hosts, gutter, top, hostTop, placed: [] });
    const pen = this.surface.begin(Math.ceil(height) + 2);
    this.collect(run);
    if (lay.per === 1) this.cells(pen, state, tables);
    else this.tiles(pen, state, tables);
    this.labels(pen, lay, top);
    if (hosts) this.host(pen, state, hosts, hostTop, bottom);
    this.lines(pen, tables);
    this.marks(pen);
    this.outline(pen);
    this.say(state);
  }

  /** Return the sequences whose tables are drawn: the selected one, or all choices of its request. */
  tables(state, selected) {
    if (selected?.kind !== "seq") return [];
    const [number] = selected.id.split(".");
    const named = [...state.seqs.values()].filter((seq) => seq.name === selected.id || (selected.all && seq.name.split(".")[0] === number));
    return named.filter((seq) => seq.blocks.length).slice(0, 6);
  }

  place(block) {
    const { lay, gutter, top } = this;
    const index = Math.floor(block / lay.per);
    return [gutter + (index % lay.cols) * (lay.w + lay.gap), top + Math.floor(index / lay.cols) * (lay.h + lay.gap)];
  }

  cells(pen, state, tables) {
    const { run, selected } = store;
    const { lay } = this;
    const lit = new Set(tables.flatMap((seq) => seq.blocks));
    const holders = state.holders();
    for (let block = 0; block < run.numBlocks; block += 1) {
      const [x, y] = this.place(block);
      pen.globalAlpha = lit.size && !lit.has(block) && selected ? 0.28 : 1;
      const names = holders.get(block) ?? [];
      if (lay.h >= 24 * (ink.rem / 16)) this.card(pen, state, block, names, x, y, lay.w, lay.h);
      else this.chip(pen, state, block, names, x, y, lay.w, lay.h);
    }
    pen.globalAlpha = 1;
  }

  /** Draw a small cell: colour, fill, hatching. */
  chip(pen, state, block, names, x, y, w, h) {
    rect(pen, ink.free, x, y, w, h);
    if (!state.refs[block]) return;
    const share = state.fill[block] / store.run.blockSize;
    if (!names.length) {
      rect(pen, hatch(pen), x, y, w * share, h);
      pen.strokeStyle = ink.hatch;
      pen.lineWidth = 1;
      pen.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1);
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
    const rem = ink.rem;
    const refs = state.refs[block];
    const fill = state.fill[block];
    const share = fill / run.blockSize;
    const owners = requests(names);
    box(pen, x + 0.5, y + 0.5, w - 1, h - 1, 0.3 * rem);
    pen.fillStyle = ink.free;
    pen.fill();
    const isBig = h >= 2.4 * rem;
    const pad = 0.3 * rem;
    if (refs) {
      pen.save();
      pen.clip();
      if (!owners.length) {
        rect(pen, hatch(pen), x, y, w * share, h);
        pen.fillStyle = `${ink.panel}80`;
        if (isBig) pen.fillRect(x, y, w, h);
      }
      const shownOwners = owners.slice(0, 4);
      shownOwners.forEach((owner, i) => {
        rect(pen, `${colour(owner)}${ink.dark ? "40" : "3a"}`, x, y + (h * i) / shownOwners.length, w * share, h / shownOwners.length);
      });
      this.slots(pen, shownOwners, fill, x, y, w, h);
      pen.restore();
      box(pen, x + 0.5, y + 0.5, w - 1, h - 1, 0.3 * rem);
      pen.strokeStyle = owners.length ? colour(owners[0]) : ink.hatch;
      pen.lineWidth = 1;
      pen.setLineDash(owners.length ? [] : [3, 2]);
      pen.stroke();
      pen.setLineDash([]);
    }
    const ids = String(block);
    if (isBig || !names.length) write(pen, ids, x + pad, y + (isBig ? 0.62 * rem : h / 2), { weight: 500, tone: refs ? ink.text : ink.soft, width: w - 2 * pad });
    if (names.length) {
      const who = names.length > 3 ? `${this.name(names[0])}+${names.length - 1}` : names.map((name) => this.name(name)).join(" ");
      const at = isBig ? x + pad + Math.max(1.6 * rem, pen.measureText(`${ids} `).width) : x + pad;
      write(pen, who, at, y + (isBig ? 0.62 * rem : h / 2 - 1), { size: 0.7, weight: 700, tone: ink.text, width: x + w - at - 0.4 * rem - Math.min(4, refs - 1) * 0.34 * rem });
    }
    this.dots(pen, refs - 1, x, y, w - pad * 0.6, 0.13 * rem);
    if (isBig && refs) {
      const lines = h >= 3.4 * rem ? Math.floor((h - 1.7 * rem) / (0.8 * rem)) : 1;
      wrap(pen, visible(run.textOfBlock(state, block, names)), x + pad, y + 1.5 * rem, lines, 0.8 * rem, { size: 0.64, width: w - 2 * pad });
    }
  }

  /** Draw the slots as a bar at the bottom, in the owners' colours. */
  slots(pen, owners, fill, x, y, w, h) {
    const size = store.run.blockSize;
    const bar = Math.max(2.5, h * 0.09);
    const slot = w / size;
    owners.forEach((owner, i) => {
      rect(pen, colour(owner), x, y + h - bar + (bar * i) / owners.length, slot * fill, bar / owners.length);
    });
    if (slot < 4) return;
    pen.fillStyle = ink.panel;
    for (let i = 1; i < size; i += 1) pen.fillRect(x + slot * i - 0.5, y + h - bar, 1, bar);
  }

  /** Draw a mark for each extra reference. */
  dots(pen, extra, x, y, w, radius) {
    if (extra <= 0) return;
    pen.fillStyle = ink.text;
    for (let i = 0; i < Math.min(extra, 4); i += 1) {
      disc(pen, x + w - radius * (2 + 2.6 * i), y + radius * 2.4, radius);
      pen.fill();
    }
  }

  name(name) {
    return label(name, store.run.numChoices(name));
  }

  /** Draw tiles that stand for many blocks: the share in use, cached and free, and the commonest owner. */
  tiles(pen, state, tables) {
    const { lay } = this;
    const { numBlocks } = store.run;
    const owner = state.owner();
    const lit = tables.length ? new Uint8Array(numBlocks) : null;
    for (const seq of tables) for (const block of seq.blocks) lit[block] = 1;
    const hatching = hatch(pen);
    const counts = new Map();
    for (let from = 0; from < numBlocks; from += lay.per) {
      const to = Math.min(numBlocks, from + lay.per);
      let [used, cached, isLit] = [0, 0, 0];
      let [most, best] = [0, 0];
      counts.clear();
      for (let block = from; block < to; block += 1) {
        if (owner[block] >= 0) {
          used += 1;
          const number = (counts.get(owner[block]) ?? 0) + 1;
          counts.set(owner[block], number);
          if (number > most) [most, best] = [number, owner[block]];
        } else if (state.refs[block]) cached += 1;
        if (lit) isLit |= lit[block];
      }
      const [x, y] = this.place(from);
      pen.globalAlpha = lit && !isLit ? 0.25 : 1;
      rect(pen, ink.free, x, y, lay.w, lay.h);
      const [a, b] = [(lay.h * used) / (to - from), (lay.h * cached) / (to - from)];
      rect(pen, colour(isLit ? tables[0].number : best), x, y + lay.h - a, lay.w, a);
      rect(pen, hatching, x, y + lay.h - a - b, lay.w, b);
    }
    pen.globalAlpha = 1;
  }

  /** Write the first block's number beside the rows. */
  labels(pen, lay, top) {
    if (!this.gutter) return;
    const pitch = lay.h + lay.gap;
    const every = Math.max(1, Math.ceil((1.1 * ink.rem) / pitch));
    for (let row = 0; row < lay.rows; row += every) {
      write(pen, count(row * lay.cols * lay.per), this.gutter - 0.5 * ink.rem, top + row * pitch + lay.h / 2, { size: 0.62, align: "right" });
    }
  }

  host(pen, state, lay, top, bottom) {
    const rem = ink.rem;
    const owner = state.hostOwner();
    write(pen, "Host memory", this.gutter, bottom + 1.05 * rem, { size: 0.72, weight: 600 });
    for (let from = 0; from < store.run.numHostBlocks; from += lay.per) {
      const index = from / lay.per;
      const [x, y] = [this.gutter + (index % lay.cols) * (lay.w + lay.gap), top + Math.floor(index / lay.cols) * (lay.h + lay.gap)];
      const name = owner.get(from);
      box(pen, x + 0.5, y + 0.5, lay.w - 1, lay.h - 1, 0.25 * rem);
      pen.fillStyle = name ? `${colour(Number(name.split(".")[0]))}60` : ink.free;
      pen.fill();
      pen.strokeStyle = name ? colour(Number(name.split(".")[0])) : ink.line;
      pen.setLineDash([3, 2]);
      if (lay.h > 10) pen.stroke();
      pen.setLineDash([]);
      if (lay.h >= rem && lay.per === 1) {
        write(pen, name ? this.name(name) : String(from), x + 0.3 * rem, y + lay.h / 2, { weight: name ? 700 : 400, tone: name ? ink.text : ink.soft, width: lay.w - 0.5 * rem });
      }
    }
  }

  /** Collect what copies and evictions the steps since the last frame had. */
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

  /** Draw an arrow for each copy, and frames around what was evicted. They fade while time goes on. */
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
        arrow(pen, ax + w / 2, ay + h / 2, bx + w / 2, by + h / 2, alpha);
        continue;
      }
      const [x, y] = this.place(effect.block);
      const size = Math.max(3, Math.min(h * 0.3, 0.7 * ink.rem));
      pen.globalAlpha = alpha;
      pen.strokeStyle = pen.fillStyle = ink.bad;
      pen.lineWidth = 1.5;
      pen.setLineDash([3, 3]);
      pen.strokeRect(x + 0.75, y + 0.75, w - 1.5, h - 1.5);
      pen.setLineDash([]);
      path(pen, [x + w, y + h], [x + w - size, y + h], [x + w, y + h - size]);
      pen.fill();
    }
    pen.globalAlpha = 1;
    if (isMoving && !prefersStill()) redraw("map");
  }

  /** Draw the tables of the selected request, and a line from each entry to its block. */
  lines(pen, tables) {
    const rem = ink.rem;
    tables.forEach((seq, row) => {
      const y = row * 1.75 * rem;
      const own = colour(Number(seq.name.split(".")[0]));
      write(pen, this.name(seq.name), 0, y + 0.8 * rem, { size: 0.72, weight: 700, tone: ink.text });
      const left = 2.6 * rem;
      const size = seq.blocks.length;
      const w = Math.min(3.2 * rem, (this.surface.width - left) / size);
      seq.blocks.forEach((block, i) => {
        const x = left + i * w;
        const bottom = y + 1.5 * rem;
        const inset = w > 6 ? 1 : 0;
        pen.globalAlpha = 1;
        box(pen, x + inset, y + 0.15 * rem, w - 2 * inset, 1.3 * rem, 3);
        pen.fillStyle = `${own}44`;
        pen.fill();
        if (w > 1.3 * rem) write(pen, String(i), x + w / 2, y + 0.82 * rem, { size: 0.62, weight: 600, tone: ink.text, align: "center" });
        this.placed.push({ x, y, w, h: 1.5 * rem, block });
        if (size > MAX_LINES && i % Math.ceil(size / MAX_LINES)) return;
        const [bx, by] = this.place(block);
        const [tx, ty] = [bx + this.lay.w / 2, by + 1];
        pen.globalAlpha = size > 60 ? 0.35 : 0.85;
        pen.strokeStyle = own;
        pen.lineWidth = size > 60 ? 1 : 1.6;
        pen.beginPath();
        pen.moveTo(x + w / 2, bottom);
        pen.bezierCurveTo(x + w / 2, bottom + 1.6 * rem, tx, Math.max(this.top - 1.2 * rem, ty - 2.4 * rem), tx, ty);
        pen.stroke();
        disc(pen, tx, ty, 2.2);
        pen.fillStyle = own;
        pen.fill();
      });
    });
    pen.globalAlpha = 1;
  }

  outline(pen) {
    const { selected } = store;
    if (selected?.kind !== "block" && selected?.kind !== "tile") return;
    const [x, y] = this.place(selected.id);
    pen.strokeStyle = ink.accent;
    pen.lineWidth = 2.5;
    box(pen, x - 0.5, y - 0.5, this.lay.w + 1, this.lay.h + 1, this.lay.h > 20 ? 0.3 * ink.rem : 1);
    pen.stroke();
  }

  /** Return what is at a place. */
  at(x, y) {
    const { lay, gutter, top, hosts, hostTop } = this;
    if (!lay) return null;
    for (const cell of this.placed) if (x >= cell.x && x < cell.x + cell.w && y >= cell.y && y < cell.y + cell.h) return { kind: "block", id: cell.block };
    const within = (grid, start, total) => {
      const [col, row] = [Math.floor((x - gutter) / (grid.w + grid.gap)), Math.floor((y - start) / (grid.h + grid.gap))];
      const first = (row * grid.cols + col) * grid.per;
      return col >= 0 && col < grid.cols && row >= 0 && row < grid.rows && first < total ? first : null;
    };
    const block = y >= top ? within(lay, top, store.run.numBlocks) : null;
    if (block !== null) return { kind: lay.per === 1 ? "block" : "tile", id: block };
    const host = hosts && y >= hostTop ? within(hosts, hostTop, store.run.numHostBlocks) : null;
    return host !== null ? { kind: "host", id: host } : null;
  }

  hover(event) {
    if (!store.run) return;
    const thing = this.at(...this.surface.point(event));
    this.surface.canvas.style.cursor = thing ? "pointer" : "default";
    tip(thing && this.describe(thing), event);
  }

  /** Say what a block, a tile or a host block is, in lines. */
  describe(thing) {
    const state = shown();
    const { run } = store;
    if (thing.kind === "host") {
      const name = state.hostOwner().get(thing.id);
      return [`Host block ${thing.id}`, name ? `has blocks of ${this.name(name)}, which was swapped out` : "free"];
    }
    if (thing.kind === "tile") {
      const to = Math.min(run.numBlocks, thing.id + this.lay.per);
      const owner = state.owner();
      let [used, cached] = [0, 0];
      for (let block = thing.id; block < to; block += 1) {
        if (owner[block] >= 0) used += 1;
        else if (state.refs[block]) cached += 1;
      }
      return [`Blocks ${count(thing.id)} … ${count(to - 1)}`, `${used} in use, ${cached} only cached, ${to - thing.id - used - cached} free`];
    }
    return describeBlock(state, thing.id);
  }

  click(event) {
    if (!store.run) return;
    const thing = this.at(...this.surface.point(event));
    select(thing?.kind === "host" ? ownerOf(thing.id) : thing);
  }

  key(event) {
    const { run, selected } = store;
    if (!run || !this.lay) return;
    const { cols, per } = this.lay;
    const moves = { ArrowLeft: -per, ArrowRight: per, ArrowUp: -cols * per, ArrowDown: cols * per, PageUp: -8 * cols * per, PageDown: 8 * cols * per };
    if (!(event.key in moves) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    const kind = per === 1 ? "block" : "tile";
    const at = selected?.kind === kind ? selected.id + moves[event.key] : 0;
    const id = Math.max(0, Math.min(Math.floor((run.numBlocks - 1) / per) * per, at));
    change({ selected: { kind, id } });
    announce(this.describe({ kind, id }).join(". "));
  }

  say(state) {
    const { run } = store;
    const total = state.totals();
    const text = `${some(run.numBlocks, "block")} of ${run.blockSize} tokens: ${count(total.used)} in use, ${count(total.cached)} only cached, ${count(total.free)} free${total.saved ? `; sharing saves ${count(total.saved)}` : ""}${this.lay.per > 1 ? `; a tile stands for ${this.lay.per}` : ""}`;
    say("map-note", text);
    this.surface.canvas.setAttribute("aria-label", `Memory map after step ${store.step}. ${percent(total.used, run.numBlocks)} of the blocks are in use. Arrow keys select a block.`);
  }
}

function ownerOf(host) {
  const name = shown().hostOwner().get(host);
  return name ? { kind: "seq", id: name } : null;
}

/** Say what a block is, in lines. */
export function describeBlock(state, block) {
  const { run } = store;
  const refs = state.refs[block];
  if (!refs) return [`Block ${block}`, "free"];
  const names = state.holders().get(block) ?? [];
  const isCached = Number(state.tree.has(block));
  const pins = refs - names.length - isCached;
  const who = [
    names.length ? `${names.length > 1 ? "tables" : "table"} of ${names.map((name) => label(name, run.numChoices(name))).join(", ")}` : "",
    isCached ? "the prefix tree" : "",
    pins > 0 ? some(pins, "copy", "copies") : "",
  ].filter(Boolean);
  const text = run.textOfBlock(state, block, names);
  return [`Block ${block}`, `${some(refs, "reference")}: ${who.join(", ")}`, `${state.fill[block]} of ${run.blockSize} slots filled`, ...(text ? [`“${visible(text)}”`] : [])];
}

/** Draw a bent arrow. */
function arrow(pen, ax, ay, bx, by, alpha) {
  const [dx, dy] = [bx - ax, by - ay];
  const length = Math.hypot(dx, dy) || 1;
  const bend = Math.min(60, length * 0.3);
  const [mx, my] = [(ax + bx) / 2 + (dy / length) * bend, (ay + by) / 2 - (dx / length) * bend];
  const angle = Math.atan2(by - my, bx - mx);
  const head = 0.5 * ink.rem;
  pen.globalAlpha = alpha;
  for (const [style, width] of [[ink.panel, 5], [ink.text, 2.2]]) {
    pen.strokeStyle = pen.fillStyle = style;
    pen.lineWidth = width;
    pen.lineCap = "round";
    pen.beginPath();
    pen.moveTo(ax, ay);
    pen.quadraticCurveTo(mx, my, bx, by);
    pen.stroke();
    path(pen, [bx, by], ...[-0.45, 0.45].map((turn) => [bx - head * Math.cos(angle + turn), by - head * Math.sin(angle + turn)]));
    pen.fill();
  }
  disc(pen, ax, ay, 3.2);
  pen.fill();
  pen.globalAlpha = 1;
  pen.lineCap = "butt";
}
