// The timeline: a lane for each sequence, and rows of numbers below. All have one x axis.

import { announce, count, duration, percent, say, some, tip } from "./dom.js";
import { describe } from "./lanes.js";
import { box, colour, disc, fill, font, hatch, ink, path, rect, stroke, Surface, write } from "./paint.js";
import { change, isSelected, nameOf, redraw, seek, select, store } from "./store.js";

const MAX_LANES = 60;
const RATE_STEPS = 200; // steps over which the hit rate is counted
const FEWEST = 8; // steps that are shown at most enlarged

/** Rows of numbers. `parts` are stacked, `lines` are drawn over them. */
const CHARTS = [
  { name: "tokens", parts: [["prefill", "num_prefill_tokens", 0], ["decode", "num_decode_tokens", 2]], shows: count },
  { name: "KV use", parts: [["used", "num_blocks_used", 0], ["cached", "num_blocks_cached", 5]], line: ["waste", wasted, 6], top: (run) => run.numBlocks, shows: (value, run) => percent(value, run.numBlocks) },
  { name: "queue", parts: [["running", "num_running", 2], ["waiting", "num_waiting", 1]], shows: count },
  { name: "hit rate", parts: [["hits", hits, 3]], top: () => 1, shows: (value) => percent(value, 1) },
  { name: "step time", parts: [["schedule", "schedule_seconds", 1], ["run", "run_seconds", 0], ["update", "update_seconds", 3]], shows: duration },
];

function wasted(step, run) {
  return run.value(step, "num_slots_empty") / run.blockSize;
}

function hits(step, run) {
  const [hit, asked] = run.prefix(step.step, RATE_STEPS);
  return asked ? hit / asked : 0;
}

const valueOf = (step, field, run) => (typeof field === "function" ? field(step, run) : run.value(step, field));

/** @type {(chart: any) => any[]} */
const seriesOf = ({ parts, line }) => (line ? [...parts, line] : parts);

export class Timeline {
  steps; from; to; lanes; lanesTop; pitch; chartsTop; chartHeight; marks;

  constructor(canvas, charts = CHARTS) {
    this.charts = charts;
    this.surface = new Surface(canvas, () => redraw("timeline"));
    canvas.addEventListener("pointerdown", (event) => this.press(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", () => { this.isDragging = false; });
    canvas.addEventListener("pointerleave", () => tip(null));
  }

  range() {
    const { run, window: chosen } = store;
    const [first, last] = [run.first, Math.max(run.last, run.first + 1)];
    if (!chosen) return [first, last];
    const size = Math.min(chosen.size, last - first);
    const end = Math.max(first + size, Math.min(last, store.follows ? last : chosen.end));
    return [end - size, end];
  }

  zoom(factor, at = store.step) {
    const { run } = store;
    if (!run) return;
    const [from, to] = this.range();
    const size = Math.max(FEWEST, (to - from) * factor);
    if (size >= run.last - run.first) return change({ window: null });
    const share = (at - from) / (to - from || 1);
    change({ window: { size, end: Math.round(at + size * (1 - share)) } });
  }

  reveal() {
    const { window: chosen, step } = store;
    if (!chosen) return;
    const [from, to] = this.range();
    if (step < from || step > to) store.window = { ...chosen, end: Math.round(step + chosen.size / 2) };
  }

  /** Prepare the x axis: a position for the end of each step in the range. */
  measure() {
    const { run, axis } = store;
    const [from, to] = this.range();
    const { rem } = ink;
    this.left = (this.surface.width < 34 * rem ? 3.4 : 5.2) * rem;
    const width = this.surface.width - this.left - 0.4 * rem;
    const start = run.indexOf(from) + 1;
    const steps = run.between(from + 1, to);
    const sizeOf = {
      step: null,
      tokens: (step) => Math.max(1, run.value(step, "num_prefill_tokens") + run.value(step, "num_decode_tokens")),
      time: (step) => Math.max(1e-9, run.value(step, "seconds")),
    }[axis];
    Object.assign(this, { steps, from, to });
    if (!sizeOf) {
      this.x = (step) => this.left + (width * (step - from)) / (to - from);
      this.stepAt = (x) => Math.ceil(from + ((x - this.left) / width) * (to - from));
      return;
    }
    const ends = new Float64Array(steps.length + 1);
    steps.forEach((step, i) => { ends[i + 1] = ends[i] + sizeOf(step); });
    const whole = ends[steps.length] || 1;
    this.x = (step) => {
      if (step <= from) return this.left + Math.min(0, step - from);
      const index = Math.min(steps.length, run.indexOf(step) + 1 - start);
      return this.left + (width * ends[Math.max(0, index)]) / whole;
    };
    this.stepAt = (x) => {
      const target = ((x - this.left) / width) * whole;
      let index = 0;
      while (index < steps.length - 1 && ends[index + 1] < target) index += 1;
      return steps[index]?.step ?? from;
    };
  }

  draw() {
    const { run } = store;
    const { rem } = ink;
    this.surface.width = this.surface.canvas.parentElement.clientWidth;
    if (!this.isDragging) this.reveal();
    this.measure();
    const lanes = [...run.lanes.all.values()]
      .filter((lane) => (lane.end ?? Infinity) >= this.from && lane.born <= this.to && isSought(lane));
    const chosen = mostTelling(lanes).sort((a, b) => a.number - b.number || a.index - b.index);
    const room = Math.max(11 * rem, Math.min(26 * rem, 0.34 * innerHeight));
    const pitch = Math.max(0.34 * rem, Math.min(1.35 * rem, room / Math.max(4, chosen.length)));
    const chartHeight = 3.3 * rem;
    const lanesTop = 0.3 * rem;
    const chartsTop = lanesTop + Math.max(3, chosen.length) * pitch + 0.8 * rem;
    Object.assign(this, { lanes: chosen, lanesTop, pitch, chartsTop, chartHeight, marks: [] });
    const height = chartsTop + this.charts.length * chartHeight + 1.4 * rem;
    const pen = this.surface.begin(Math.ceil(height));
    chosen.forEach((lane, i) => this.lane(pen, lane, lanesTop + i * pitch, pitch));
    const current = run.steps[Math.max(0, run.indexOf(store.step))];
    this.charts.forEach((chart, i) => this.chart(pen, chart, chartsTop + i * chartHeight, chartHeight, current));
    this.axis(pen, height);
    this.cursor(pen, height);
    this.describe(lanes.length - chosen.length);
  }

  lane(pen, lane, y, pitch) {
    const { rem } = ink;
    const own = colour(lane.number);
    const isLit = isSelected(lane.name);
    const middle = y + pitch / 2;
    const thick = Math.max(2, pitch * 0.72);
    const right = this.surface.width - 0.4 * rem;
    pen.globalAlpha = store.selected?.kind === "seq" && !isLit ? 0.3 : 1;
    if (pitch > 0.7 * rem) {
      write(pen, nameOf(lane.name), 0.2 * rem, middle, { size: Math.min(0.74, (pitch / rem) * 0.72), weight: isLit ? 800 : 600, tone: ink.text, width: this.left - 0.5 * rem });
    }
    rect(pen, own, this.left - 0.45 * rem, middle - thick / 2, 0.22 * rem, thick);
    for (const part of lane.parts) this.part(pen, part, lane, own, middle, thick, right);
    if (pitch > 0.5 * rem) for (const mark of lane.marks) this.mark(pen, mark, lane, middle, thick);
    pen.globalAlpha = 1;
  }

  part(pen, part, lane, own, middle, thick, right) {
    const to = part.to ?? Math.max(part.from, store.run.last);
    if (to < this.from || part.from > this.to) return;
    const computes = part.kind === "prefill" || part.kind === "decode";
    const a = Math.max(this.left, this.x(computes ? part.from - 1 : part.from));
    const b = Math.min(right, Math.max(this.x(computes ? to : Math.max(to - 1, part.from)), a + (computes ? 1 : 0)));
    const width = b - a;
    if (width <= 0) return;
    if (part.kind === "prefill") {
      rect(pen, own, a, middle - thick / 2, Math.max(1.2, width - (width > 4 ? 1 : 0)), thick);
      if (thick > 0.6 * ink.rem && width > (String(part.count).length * 0.45 + 0.2) * ink.rem) {
        write(pen, String(part.count), (a + b) / 2, middle + 0.5, { size: Math.min(0.64, (thick / ink.rem) * 0.8), weight: 700, tone: readable(own), align: "center" });
      }
    } else if (part.kind === "decode") {
      rect(pen, `${own}66`, a, middle - thick * 0.22, width, thick * 0.44);
      const pitch = this.x(to) - this.x(to - 1);
      if (pitch >= 3.5 && store.axis === "step") {
        for (let step = to; step >= part.from && this.x(step) > a; step -= 1) {
          if (this.x(step) > b + 0.1) continue;
          rect(pen, own, this.x(step) - 2, middle - thick * 0.34, 1.6, thick * 0.68);
          const drafts = lane.verified.get(step);
          if (drafts) this.drafts(pen, drafts, own, this.x(step) - 2, pitch, middle, thick);
        }
      }
    } else {
      const isLost = part.kind !== "waiting";
      const h = isLost ? thick * 0.6 : Math.max(2, thick * 0.22);
      rect(pen, isLost ? hatch(pen) : ink.line, a, middle - h / 2, width, h);
      if (isLost) {
        box(pen, a + 0.5, middle - h / 2 + 0.5, width - 1, h - 1, 0);
        stroke(pen, part.kind === "swapped" ? ink.accent : ink.bad, 1);
      }
    }
  }

  /** Draw a disc for each draft of a step before the step's end, hollow if the draft was dropped. */
  drafts(pen, { kept, count: number }, own, end, pitch, middle, thick) {
    const radius = Math.min(thick * 0.24, pitch / (2.6 * number + 2));
    for (let i = 0; i < number; i += 1) {
      pen.beginPath();
      pen.arc(end - 2.6 * radius * (number - i), middle, Math.max(0.8, radius), 0, 2 * Math.PI);
      fill(pen, i < kept ? own : ink.panel);
      if (radius > 1.5) stroke(pen, i < kept ? ink.panel : ink.bad, 1);
    }
  }

  mark(pen, mark, lane, middle, thick) {
    if (mark.step < this.from || mark.step > this.to) return;
    const { kind, event } = mark;
    if (kind === "admit" || kind === "drop" || kind === "depart") return;
    const x = Math.max(this.left, this.x(["hit", "resume", "preempt", "import", "read"].includes(kind) ? mark.step - 1 : mark.step));
    const y = kind === "read" ? middle - thick * 0.5 : middle; // an import follows
    const r = Math.max(2.5, thick * 0.36);
    this.marks.push({ x, y, r: r + 3, mark, lane });
    const show = (tone, edge) => {
      fill(pen, tone);
      if (edge) stroke(pen, edge, 1.3);
    };
    if (kind === "hit") {
      path(pen, [x, y - r], [x + r, y], [x, y + r], [x - r, y], [x, y - r]);
      show(ink.good, ink.panel);
    } else if (kind === "preempt") {
      for (const [style, width] of [[ink.panel, 4], [ink.bad, 2.2]]) {
        for (const turn of [r, -r]) {
          path(pen, [x - r, y - turn], [x + r, y + turn]);
          stroke(pen, style, width);
        }
      }
    } else if (kind === "finish") {
      const tone = event.reason === "abort" || event.reason === "error" ? ink.bad : ink.text;
      disc(pen, x, y, r * 0.7);
      if (event.reason === "stop") show(tone);
      else rect(pen, tone, x - 1, y - thick / 2, 2, thick);
    } else if (kind === "fork" || kind === "copy") {
      disc(pen, x, y, r * 0.6);
      show(ink.panel, kind === "copy" ? ink.text : ink.soft);
    } else {
      const up = (kind === "export" ? -r : r) * 0.6;
      path(pen, [x - r * 0.8, y - up], [x + r * 0.8, y - up], [x, y + up]);
      show(kind === "read" ? ink.disk : ink.accent);
    }
  }

  chart(pen, chart, y, height, current) {
    const { run } = store;
    const { rem } = ink;
    const [top, base] = [y + 0.95 * rem, y + height - 0.2 * rem];
    const right = this.surface.width - 0.4 * rem;
    const value = (step, field) => valueOf(step, field, run);
    const columns = this.columns(right);
    const peaks = columns.map((steps) => chart.parts.map(([, field]) => steps.reduce((most, step) => Math.max(most, value(step, field)), 0)));
    const most = chart.top?.(run) || peaks.reduce((high, parts) => Math.max(high, parts.reduce((sum, part) => sum + part, 0)), 0) || 1;
    const scale = (base - top) / most;
    rect(pen, ink.sunk, this.left, top, right - this.left, base - top);
    const drawn = chart.parts.map(() => []);
    columns.forEach((steps, i) => {
      if (!steps.length) return;
      const a = this.bounds[i];
      const b = Math.max(this.bounds[i + 1], a + 0.7);
      let at = base;
      peaks[i].forEach((part, k) => {
        const h = Math.min(part * scale, at - top);
        drawn[k].push([a, at - h, b - a, h]);
        at -= h;
      });
    });
    drawn.forEach((boxes, k) => {
      pen.fillStyle = ink.of[chart.parts[k][2]];
      pen.globalAlpha = k ? 0.75 : 0.95;
      for (const each of boxes) pen.fillRect(...each);
    });
    pen.globalAlpha = 1;
    if (chart.line) {
      const [, field, tone] = chart.line;
      pen.beginPath();
      columns.forEach((steps, i) => {
        if (steps.length) pen.lineTo((this.bounds[i] + this.bounds[i + 1]) / 2, base - value(steps.at(-1), field) * scale);
      });
      stroke(pen, ink.of[tone], 1.5);
    }
    this.key(pen, chart, y + 0.5 * rem, current);
  }

  /** Write a chart's name and its numbers at the step that is shown. */
  key(pen, chart, y, current) {
    const { run } = store;
    const { rem } = ink;
    const isNarrow = this.left < 5 * rem;
    write(pen, chart.name, 0.2 * rem, isNarrow ? y : y + this.chartHeight / 2 - 0.2 * rem, { size: 0.68, weight: 650, tone: ink.text });
    let x = isNarrow ? pen.measureText(chart.name).width + rem : this.left;
    for (const [name, field, tone] of seriesOf(chart)) {
      rect(pen, ink.of[tone], x, y - 0.25 * rem, 0.5 * rem, 0.5 * rem);
      const text = current ? `${name} ${chart.shows(valueOf(current, field, run), run)}` : name;
      write(pen, text, x + 0.75 * rem, y);
      x += pen.measureText(text).width + 1.7 * rem;
    }
  }

  /** Return the steps of each column (a step or a pixel wide), and note where it begins. */
  columns(right) {
    if (this.columned?.steps === this.steps && this.columned.right === right) return this.columned.columns;
    const width = right - this.left;
    const columns = [];
    this.bounds = [];
    const isWide = this.steps.length <= width;
    for (const step of this.steps) {
      const x = isWide ? this.x(step.step - 1) : Math.floor(this.x(step.step));
      if (isWide || x !== this.bounds.at(-1)) {
        columns.push([]);
        this.bounds.push(x);
      }
      columns.at(-1).push(step);
    }
    this.bounds.push(right);
    this.columned = { steps: this.steps, right, columns };
    return columns;
  }

  axis(pen, height) {
    const { rem } = ink;
    const right = this.surface.width - 0.4 * rem;
    const y = height - 0.7 * rem;
    const x = this.x(store.step);
    // The number of the step shown would cover a number near it.
    if (x - this.left > 3 * rem) write(pen, count(this.from), this.left, y);
    if (right - x > 4 * rem) write(pen, count(this.to), right, y, { align: "right" });
  }

  cursor(pen, height) {
    const { rem } = ink;
    const x = Math.round(Math.max(this.left, Math.min(this.surface.width - 0.4 * rem, this.x(store.step)))) + 0.5;
    path(pen, [x, 0], [x, height - 1.2 * rem]);
    stroke(pen, ink.accent, 1.5);
    pen.font = font(0.66, 700);
    const text = count(store.step);
    const w = pen.measureText(text).width + 0.7 * rem;
    const left = Math.max(0, Math.min(this.surface.width - w, x - w / 2));
    box(pen, left, height - 1.25 * rem, w, 1.15 * rem, 4);
    fill(pen, ink.accent);
    write(pen, text, left + 0.35 * rem, height - 0.66 * rem, { weight: 700, tone: ink.dark ? ink.bg : ink.panel });
  }

  describe(numHidden) {
    const { run, step } = store;
    const values = { min: run.first, max: run.last, now: step, text: this.sentence() };
    for (const [name, value] of Object.entries(values)) this.surface.canvas.setAttribute(`aria-value${name}`, value);
    const text = `${some(this.lanes.length, "lane")}${numHidden > 0 ? `, ${numHidden} others hidden` : ""}, steps ${count(this.from)} to ${count(this.to)}`;
    say("timeline-note", text);
    say("timeline-say", values.text);
  }

  sentence() {
    const { run, step } = store;
    const [found] = run.between(step, step);
    if (!found) return `Step ${step}: the beginning`;
    const of = (name) => run.value(found, name);
    const notable = found.events.filter((event) => ["preempt", "read", "depart", "hit", "copy", "evict", "finish", "resume"].includes(event.kind));
    const words = notable.slice(0, 3).map((event) => event.kind === "evict"
      ? `block ${event.block} evicted`
      : `${nameOf(event.seq)} ${describe({ kind: event.kind, event }, nameOf)}`);
    const more = notable.length > 3 ? ` and ${notable.length - 3} more events` : "";
    return `Step ${count(step)}: ${of("num_prefill_tokens")} prefill and ${of("num_decode_tokens")} decode tokens, ${of("num_running")} running, ${of("num_waiting")} waiting, ${duration(of("seconds"))}${words.length ? `. ${words.join("; ")}${more}` : ""}`;
  }

  // Input.

  press(event) {
    if (!this.marks) return;
    const [x, y] = this.surface.point(event);
    if (x < this.left) {
      const lane = this.lanes[Math.floor((y - this.lanesTop) / this.pitch)];
      if (lane) select({ kind: "seq", id: lane.name });
      return;
    }
    this.isDragging = true;
    this.surface.canvas.setPointerCapture(event.pointerId);
    seek(this.stepAt(x));
  }

  move(event) {
    if (!this.marks) return;
    const [x, y] = this.surface.point(event);
    if (this.isDragging) {
      tip(null);
      seek(this.stepAt(x));
      return;
    }
    const found = this.marks.filter((each) => Math.hypot(each.x - x, each.y - y) <= each.r);
    const lines = found.length
      ? found.map(({ mark, lane }) => `${nameOf(lane.name)} at step ${mark.step}: ${describe(mark, nameOf)}`)
      : this.lines(x, y);
    tip(lines, event);
  }

  /** Describe a place: a part of a lane, or the numbers of a step. */
  lines(x, y) {
    const { run } = store;
    if (x < this.left) return [];
    const step = Math.max(this.from, Math.min(this.to, this.stepAt(x)));
    const lane = y < this.chartsTop ? this.lanes[Math.floor((y - this.lanesTop) / this.pitch)] : null;
    if (lane) {
      const part = lane.parts.find((each) => each.from <= step && (each.to ?? Infinity) >= step);
      if (!part) return [];
      const drafts = lane.verified.get(step);
      const decode = drafts ? `${part.kind}, ${drafts.kept} of ${drafts.count} drafts kept` : part.kind;
      const text = part.kind === "prefill" ? `prefill of ${part.count} tokens from ${part.start}` : decode;
      return [`${nameOf(lane.name)} at step ${count(step)}: ${text}`];
    }
    const [found] = run.between(step, step);
    const chart = this.charts[Math.floor((y - this.chartsTop) / this.chartHeight)];
    if (!found || !chart) return [];
    return [`Step ${count(step)}`, ...seriesOf(chart).map(([name, field]) => `${name}: ${chart.shows(valueOf(found, field, run), run)}`)];
  }

  say() {
    announce(this.sentence());
  }
}

/** Return whether a lane is one that the search names, by its letters or its request. */
function isSought(lane) {
  const text = store.search.trim().toLowerCase();
  return !text || nameOf(lane.name).toLowerCase().startsWith(text) || lane.requestId.toLowerCase().includes(text);
}

/** Return the lanes that are drawn: of the selection, those that run, the next to run, then the latest. */
function mostTelling(lanes) {
  if (lanes.length <= MAX_LANES) return lanes;
  const { step } = store;
  const ranked = lanes.map((lane) => {
    const part = lane.parts.findLast((each) => each.from <= step);
    const isThere = lane.born <= step && (lane.end ?? Infinity) >= step;
    const waits = ["waiting", "swapped", "preempted"].includes(part?.kind);
    const rank = isSelected(lane.name) ? 0 : !isThere ? 3 : waits ? 2 : 1;
    return { lane, rank, place: rank === 3 ? -lane.number : lane.number };
  });
  return ranked.sort((a, b) => a.rank - b.rank || a.place - b.place).slice(0, MAX_LANES).map(({ lane }) => lane);
}

/** Return black or white, whichever is readable on a colour. */
function readable(hex) {
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16) / 255);
  return 0.299 * r + 0.587 * g + 0.114 * b > 0.5 ? "#10141b" : "#ffffff";
}
