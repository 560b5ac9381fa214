// The timeline: a lane for each sequence, and rows of numbers below. All have one x axis.

import { announce, count, duration, percent, say, some, tip } from "./dom.js";
import { describe } from "./lanes.js";
import { colour, font, hatch, ink, label, path, rect, Surface, write } from "./paint.js";
import { change, redraw, seek, select, store } from "./store.js";

const MAX_LANES = 60;
const RATE_STEPS = 200; // steps over which the hit rate is counted
const FEWEST = 8; // steps that are shown at most enlarged

/** Rows of numbers. `parts` are stacked, `lines` are drawn over them. */
const CHARTS = [
  { name: "tokens", parts: [["prefill", "num_prefill_tokens", 0], ["decode", "num_decode_tokens", 2]], shows: count },
  { name: "KV use", parts: [["used", "num_blocks_used", 0], ["cached", "num_blocks_cached", 5]], lines: [["waste", wasted, 6]], top: (run) => run.numBlocks, shows: (value, run) => percent(value, run.numBlocks) },
  { name: "queue", parts: [["running", "num_running", 2], ["waiting", "num_waiting", 1]], shows: count },
  { name: "hit rate", parts: [["hits", hits, 3]], top: () => 1, shows: (value) => percent(value, 1) },
  { name: "step time", parts: [["schedule", "schedule_seconds", 1], ["run", "run_seconds", 0], ["update", "update_seconds", 3]], shows: duration },
];

function wasted(row, run) {
  return row[run.column.num_slots_empty] / run.blockSize;
}

function hits(row, run, step) {
  const [hit, asked] = run.prefix(step.step, RATE_STEPS);
  return asked ? hit / asked : 0;
}

const valueOf = (step, field, run) => (typeof field === "function" ? field(step.row, run, step) : step.row[run.column[field]]);

export class Timeline {
  constructor(canvas) {
    this.surface = new Surface(canvas, () => redraw("timeline"));
    canvas.addEventListener("pointerdown", (event) => this.press(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", () => { this.isDragging = false; });
    canvas.addEventListener("pointerleave", () => tip(null));
  }

  /** Return the steps that are shown, as a range of numbers. */
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

  /** Keep the step that is shown inside the range. */
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
    const rem = ink.rem;
    this.left = (this.surface.width < 34 * rem ? 3.4 : 5.2) * rem;
    const width = this.surface.width - this.left - 0.4 * rem;
    const start = run.indexOf(from) + 1;
    const steps = run.steps.slice(start, run.indexOf(to) + 1);
    const sizeOf = {
      step: null,
      tokens: ({ row }) => Math.max(1, row[run.column.num_prefill_tokens] + row[run.column.num_decode_tokens]),
      time: ({ row }) => Math.max(1e-9, row[run.column.seconds]),
    }[axis];
    this.steps = steps;
    this.from = from;
    this.to = to;
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
    const rem = ink.rem;
    this.surface.width = this.surface.canvas.parentElement.clientWidth;
    if (!this.isDragging) this.reveal();
    this.measure();
    const lanes = [...run.lanes.all.values()]
      .filter((lane) => (lane.end ?? Infinity) >= this.from && lane.born <= this.to)
      .sort((a, b) => a.number - b.number || a.index - b.index);
    const chosen = lanes.slice(-MAX_LANES);
    const room = Math.max(11 * rem, Math.min(26 * rem, 0.34 * innerHeight));
    const pitch = Math.max(0.34 * rem, Math.min(1.35 * rem, room / Math.max(4, chosen.length)));
    const chartHeight = 3.3 * rem;
    this.lanesTop = 0.3 * rem;
    this.pitch = pitch;
    this.lanes = chosen;
    this.chartsTop = this.lanesTop + Math.max(3, chosen.length) * pitch + 0.8 * rem;
    this.chartHeight = chartHeight;
    const height = this.chartsTop + CHARTS.length * chartHeight + 1.4 * rem;
    const pen = this.surface.begin(Math.ceil(height));
    this.marks = [];
    chosen.forEach((lane, i) => this.lane(pen, lane, this.lanesTop + i * pitch, pitch));
    const at = Math.max(0, Math.min(run.steps.length - 1, run.indexOf(store.step)));
    CHARTS.forEach((chart, i) => this.chart(pen, chart, this.chartsTop + i * chartHeight, chartHeight, run.steps[at]));
    this.axis(pen, height);
    this.cursor(pen, height);
    this.describe(lanes.length - chosen.length);
  }

  lane(pen, lane, y, pitch) {
    const rem = ink.rem;
    const own = colour(lane.number);
    const { selected } = store;
    const isLit = selected?.kind === "seq" && (selected.id === lane.name || (selected.all && selected.id.split(".")[0] === String(lane.number)));
    const middle = y + pitch / 2;
    const thick = Math.max(2, pitch * 0.72);
    const right = this.surface.width - 0.4 * rem;
    pen.globalAlpha = selected?.kind === "seq" && !isLit ? 0.3 : 1;
    if (pitch > 0.7 * rem) {
      write(pen, label(lane.name, lane.n), 0.2 * rem, middle, { size: Math.min(0.74, (pitch / rem) * 0.72), weight: isLit ? 800 : 600, tone: ink.text, width: this.left - 0.5 * rem });
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
      const pitch = width / (to - part.from + 1);
      if (pitch >= 3.5 && store.axis === "step") {
        pen.fillStyle = own;
        for (let x = b - 1.2; x >= a - 0.1; x -= pitch) pen.fillRect(x - 0.8, middle - thick * 0.34, 1.6, thick * 0.68);
      }
    } else if (part.kind === "kept") {
      rect(pen, `${own}33`, a, middle - 1, width, 2);
    } else {
      const isLost = part.kind !== "waiting";
      pen.fillStyle = isLost ? hatch(pen) : ink.line;
      const h = isLost ? thick * 0.6 : Math.max(2, thick * 0.22);
      pen.fillRect(a, middle - h / 2, width, h);
      if (isLost) {
        pen.strokeStyle = part.kind === "swapped" ? ink.accent : ink.bad;
        pen.lineWidth = 1;
        pen.strokeRect(a + 0.5, middle - h / 2 + 0.5, width - 1, h - 1);
      }
    }
  }

  mark(pen, mark, lane, middle, thick) {
    if (mark.step < this.from || mark.step > this.to) return;
    if (mark.kind === "admit" || mark.kind === "drop") return;
    const x = Math.max(this.left, this.x(["hit", "resume", "preempt", "import"].includes(mark.kind) ? mark.step - 1 : mark.step));
    const r = Math.max(2.5, thick * 0.36);
    this.marks.push({ x, y: middle, r: r + 3, mark, lane });
    pen.beginPath();
    pen.lineWidth = 1.6;
    if (mark.kind === "hit") {
      path(pen, [x, middle - r], [x + r, middle], [x, middle + r], [x - r, middle]);
      pen.closePath();
      pen.fillStyle = ink.good;
      pen.fill();
      pen.strokeStyle = ink.panel;
      pen.lineWidth = 1;
      pen.stroke();
    } else if (mark.kind === "preempt") {
      for (const [style, width] of [[ink.panel, 4], [ink.bad, 2.2]]) {
        pen.beginPath();
        pen.strokeStyle = style;
        pen.lineWidth = width;
        pen.moveTo(x - r, middle - r);
        pen.lineTo(x + r, middle + r);
        pen.moveTo(x + r, middle - r);
        pen.lineTo(x - r, middle + r);
        pen.stroke();
      }
    } else if (mark.kind === "finish") {
      pen.fillStyle = mark.event.reason === "abort" || mark.event.reason === "error" ? ink.bad : ink.text;
      if (mark.event.reason === "stop") pen.arc(x, middle, r * 0.7, 0, 7);
      else pen.rect(x - 1, middle - thick / 2, 2, thick);
      pen.fill();
    } else if (mark.kind === "resume" || mark.kind === "import" || mark.kind === "export") {
      const up = mark.kind === "export" ? -1 : 1;
      path(pen, [x - r * 0.8, middle - r * 0.6 * up], [x + r * 0.8, middle - r * 0.6 * up], [x, middle + r * 0.7 * up]);
      pen.fillStyle = ink.accent;
      pen.fill();
    } else if (mark.kind === "fork" || mark.kind === "copy") {
      pen.arc(x, middle, r * 0.6, 0, 7);
      pen.fillStyle = ink.panel;
      pen.fill();
      pen.strokeStyle = mark.kind === "copy" ? ink.text : ink.soft;
      pen.stroke();
    }
  }

  chart(pen, chart, y, height, current) {
    const { run } = store;
    const rem = ink.rem;
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
    for (const [, field, tone] of chart.lines ?? []) {
      pen.strokeStyle = ink.of[tone];
      pen.lineWidth = 1.5;
      pen.beginPath();
      columns.forEach((steps, i) => {
        if (steps.length) pen.lineTo((this.bounds[i] + this.bounds[i + 1]) / 2, base - value(steps[steps.length - 1], field) * scale);
      });
      pen.stroke();
    }
    this.key(pen, chart, y + 0.5 * rem, current);
  }

  /** Write a chart's name and its numbers at the step that is shown. */
  key(pen, chart, y, current) {
    const { run } = store;
    const rem = ink.rem;
    const isNarrow = this.left < 5 * rem;
    write(pen, chart.name, 0.2 * rem, isNarrow ? y : y + this.chartHeight / 2 - 0.2 * rem, { size: 0.68, weight: 650, tone: ink.text });
    let x = isNarrow ? pen.measureText(chart.name).width + rem : this.left;
    for (const [name, field, tone] of [...chart.parts, ...(chart.lines ?? [])]) {
      rect(pen, ink.of[tone], x, y - 0.25 * rem, 0.5 * rem, 0.5 * rem);
      const text = current ? `${name} ${chart.shows(valueOf(current, field, run), run)}` : name;
      write(pen, text, x + 0.75 * rem, y);
      x += pen.measureText(text).width + 1.7 * rem;
    }
  }

  /** Return the steps of each column, which is a step or a pixel wide, and note where columns begin. */
  columns(right) {
    if (this.columned?.steps === this.steps && this.columned.right === right) return this.columned.columns;
    const width = right - this.left;
    const columns = [];
    this.bounds = [];
    if (this.steps.length <= width) {
      for (const step of this.steps) {
        columns.push([step]);
        this.bounds.push(this.x(step.step - 1));
      }
    } else {
      let last = -1;
      for (const step of this.steps) {
        const pixel = Math.floor(this.x(step.step));
        if (pixel !== last) {
          columns.push([]);
          this.bounds.push(pixel);
          last = pixel;
        }
        columns[columns.length - 1].push(step);
      }
    }
    this.bounds.push(right);
    this.columned = { steps: this.steps, right, columns };
    return columns;
  }

  axis(pen, height) {
    const rem = ink.rem;
    const right = this.surface.width - 0.4 * rem;
    const y = height - 0.7 * rem;
    write(pen, count(this.from), this.left, y);
    write(pen, count(this.to), right, y, { align: "right" });
  }

  cursor(pen, height) {
    const rem = ink.rem;
    const x = Math.round(Math.max(this.left, Math.min(this.surface.width - 0.4 * rem, this.x(store.step)))) + 0.5;
    pen.strokeStyle = ink.accent;
    pen.lineWidth = 1.5;
    pen.beginPath();
    pen.moveTo(x, 0);
    pen.lineTo(x, height - 1.2 * rem);
    pen.stroke();
    pen.font = font(0.66, 700);
    const text = count(store.step);
    const w = pen.measureText(text).width + 0.7 * rem;
    const left = Math.max(0, Math.min(this.surface.width - w, x - w / 2));
    pen.fillStyle = ink.accent;
    pen.beginPath();
    pen.roundRect(left, height - 1.25 * rem, w, 1.15 * rem, 4);
    pen.fill();
    write(pen, text, left + 0.35 * rem, height - 0.66 * rem, { weight: 700, tone: ink.dark ? ink.bg : ink.panel });
  }

  describe(numHidden) {
    const { run, step } = store;
    const canvas = this.surface.canvas;
    canvas.setAttribute("aria-valuemin", run.first);
    canvas.setAttribute("aria-valuemax", run.last);
    canvas.setAttribute("aria-valuenow", step);
    canvas.setAttribute("aria-valuetext", this.sentence());
    const text = `${some(this.lanes.length, "lane")}${numHidden > 0 ? `, ${numHidden} earlier ones hidden` : ""}, steps ${count(this.from)} to ${count(this.to)}`;
    say("timeline-note", text);
    say("timeline-say", this.sentence());
  }

  /** Say what the step does. */
  sentence() {
    const { run, step } = store;
    const found = run.between(step, step)[0];
    if (!found) return `Step ${step}: the beginning`;
    const of = (name) => found.row[run.column[name]];
    const notable = found.events.filter((event) => ["preempt", "hit", "copy", "evict", "finish", "resume"].includes(event.kind));
    const words = notable.slice(0, 3).map((event) => event.kind === "evict"
      ? `block ${event.block} evicted`
      : `${label(event.seq, run.numChoices(event.seq))} ${describe({ kind: event.kind, event }, (name) => label(name, run.numChoices(name)))}`);
    const more = notable.length > 3 ? ` and ${notable.length - 3} more events` : "";
    return `Step ${count(step)}: ${of("num_prefill_tokens")} prefill and ${of("num_decode_tokens")} decode tokens, ${of("num_running")} running, ${of("num_waiting")} waiting, ${duration(of("seconds"))}${words.length ? `. ${words.join("; ")}${more}` : ""}`;
  }

  // Input.

  press(event) {
    if (!store.run) return;
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
    if (!store.run || !this.stepAt) return;
    const [x, y] = this.surface.point(event);
    if (this.isDragging) {
      tip(null);
      seek(this.stepAt(x));
      return;
    }
    const found = this.marks?.filter((each) => Math.hypot(each.x - x, each.y - y) <= each.r) ?? [];
    const name = (each) => label(each, store.run.numChoices(each));
    const lines = found.length
      ? found.map(({ mark, lane }) => `${name(lane.name)} at step ${mark.step}: ${describe(mark, name)}`)
      : this.lines(x, y);
    tip(lines, event);
  }

  /** Say what is at a place: a part of a lane, or the numbers of a step. */
  lines(x, y) {
    const { run } = store;
    if (x < this.left) return [];
    const step = Math.max(this.from, Math.min(this.to, this.stepAt(x)));
    const lane = y < this.chartsTop ? this.lanes?.[Math.floor((y - this.lanesTop) / this.pitch)] : null;
    if (lane) {
      const part = lane.parts.find((each) => each.from <= step && (each.to ?? Infinity) >= step);
      if (!part) return [];
      const text = part.kind === "prefill" ? `prefill of ${part.count} tokens from ${part.start}` : part.kind;
      return [`${label(lane.name, lane.n)} at step ${count(step)}: ${text}`];
    }
    const found = run.between(step, step)[0];
    const chart = CHARTS[Math.floor((y - this.chartsTop) / this.chartHeight)];
    if (!found || !chart) return [];
    return [`Step ${count(step)}`, ...[...chart.parts, ...(chart.lines ?? [])].map(([name, field]) => `${name}: ${chart.shows(valueOf(found, field, run), run)}`)];
  }

  say() {
    announce(this.sentence());
  }
}

/** Return black or white, whichever is readable on a colour. */
function readable(hex) {
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16) / 255);
  return 0.299 * r + 0.587 * g + 0.114 * b > 0.5 ? "#10141b" : "#ffffff";
}
