// What is selected: a block, a sequence or a range of blocks, and why a sequence waits.

import { $, chip, count, el, facts, percent, some, visible } from "./dom.js";
import { describe } from "./lanes.js";
import { colour, numberOf } from "./paint.js";
import { askOf } from "./source.js";
import { KINDS } from "./state.js";
import { change, nameOf, redraw, seek, select, shown, store } from "./store.js";
import { shape } from "./tree.js";

const WHY_EVERY = 700; // milliseconds between two questions to the server

export class Inspector {
  constructor({ isLive }) {
    this.isLive = isLive;
    this.why = null;
    $("clear").addEventListener("click", () => change({ selected: null }));
  }

  draw() {
    const state = shown();
    const { selected } = store;
    $("clear").hidden = !selected;
    const key = `${store.run.title} ${state.version} ${store.step} ${JSON.stringify(selected)} ${this.why?.sentence ?? ""} ${store.textVersion}`;
    if (key === this.key) return;
    this.key = key;
    $("inspector").replaceChildren(...this.make(state, selected).filter(Boolean));
  }

  make(state, selected) {
    if (!state.isKnown) return [el("p", { className: "note" }, store.run.whyUnknown(store.step))];
    if (selected?.kind === "block") return this.block(state, selected.id);
    if (selected?.kind === "seq") return this.seq(state, selected.id);
    const [first] = state.queues().waits;
    const hint = el("p", { className: "note" }, "Select a block, a request or a node of the tree.");
    if (!first) return [hint];
    return [hint, el("p", {}, this.button(first.name), " waits first."), this.reason(state, first)];
  }

  button(name) {
    return chip([el("i"), nameOf(name)], () => select({ kind: "seq", id: name }, true), { vars: { "--of": colour(numberOf(name)) } });
  }

  toBlock(block) {
    return chip(String(block), () => select({ kind: "block", id: block }, true));
  }

  block(state, block) {
    const { run } = store;
    const names = state.holders().get(block) ?? [];
    const node = state.tree.get(block);
    const heat = state.heat.get(block);
    const rank = shape(state).ranks.get(block);
    const text = run.textOfBlock(state, block, names);
    return [
      facts([
        ["block", String(block)],
        ["state", KINDS[state.kind[block]]],
        ["references", state.refs[block] ? String(state.refs[block]) : null],
        ["slots", state.refs[block] ? `${state.fill[block]} of ${run.blockSize} filled` : null],
        ["tables of", names.length ? el("span", {}, names.slice(0, 24).map((name) => this.button(name))) : null],
        ["in the tree", node ? [heat && `taken ${some(heat.uses, "time")}`, node.parent === null ? "first of its branch" : null].filter(Boolean).join(", ") || "yes" : null],
        ["after", node && node.parent !== null ? this.toBlock(node.parent) : null],
        ["from", heat?.disk ? "a disk" : null],
        ["snapshot", state.slotOf().has(block) ? `after ${some(state.depth(block), "token")}, in slot ${state.slotOf().get(block)}` : null],
        ["eviction", rank ? (rank === 1 ? "next" : `number ${rank}`) : null],
      ]),
      text && el("p", { className: "text" }, text),
    ];
  }

  seq(state, name) {
    const { run } = store;
    const lane = run.lanes.all.get(name);
    const seq = state.seqs.get(name);
    const marks = (lane?.marks ?? []).filter((mark) => mark.step <= store.step);
    const history = marks.slice(-7).reverse().map((mark) => el("tr", {},
      el("td", {}, chip(count(mark.step), () => seek(mark.step))),
      el("td", { className: "long" }, describe(mark, nameOf))));
    const size = run.blockSize;
    const fork = run.departed(state, name);
    const text = seq ? seq.blocks.map((block) => run.textOfBlock(state, block, [name])).join("") : "";
    return [
      facts([
        ["sequence", this.button(name)],
        ["request", lane?.requestId ?? seq?.request_id],
        ["state", seq?.state ?? (lane?.end !== null && lane?.end <= store.step ? "ended" : "not there yet")],
        ["tokens", seq ? `${count(seq.num_tokens)}, ${count(seq.num_prompt)} of the prompt` : null],
        ["computed", seq ? `${count(seq.num_computed)} (${percent(seq.num_computed, seq.num_tokens)})` : null],
        ["most", seq?.max_tokens ? `${count(seq.max_tokens)} new tokens` : null],
        ["choices", (lane?.n ?? 1) > 1 ? chip(store.selected.all ? "show this one" : `show all ${lane.n}`, () => change({ selected: { kind: "seq", id: name, all: !store.selected.all } })) : null],
        ["blocks", seq?.blocks.length ? `${some(seq.blocks.length, "block")}, ${count(seq.blocks.length * size - seq.num_computed)} slots empty` : null],
        ["slot", state.slotOf().has(name) ? `${state.slotOf().get(name)}, its state after these tokens` : null],
        ["departs", fork ? [`at token ${count(fork.position)} from block `, this.toBlock(fork.nearest)] : null],
        ["cached", fork ? visible(run.textOfBlock(state, fork.nearest)) : null],
        ["got", (fork?.own ?? null) !== null ? visible(run.textOfBlock(state, fork.own)) : null],
        ["host", seq?.host.length ? some(seq.host.length, "block") : null],
      ]),
      seq && seq.state !== "running" ? this.reason(state, seq) : null,
      text && el("p", { className: "text" }, text),
      history.length ? el("div", { className: "scroll" }, el("table", {}, el("tbody", {}, history))) : null,
    ];
  }

  /** Say why a sequence waits: the server's answer for now, the state's numbers for the past. */
  reason(state, seq) {
    const isNow = this.isLive && store.follows;
    if (isNow) this.askWhy(seq.name);
    const { waits } = state.queues();
    const total = state.totals();
    const asked = isNow && this.why?.seq === seq.name ? this.why : null;
    const place = waits.indexOf(seq);
    const most = Math.ceil(seq.num_tokens / store.run.blockSize);
    const guess = place > 0
      ? `It is number ${place + 1} in the queue; ${nameOf(waits[0].name)} is first.`
      : `It is first in the queue. It needs at most ${some(most, "block")}; ${total.free} are free and ${total.cached} only cached.${most > total.free + total.cached ? "" : " So it waits for a seat, or for its turn in the budget."}`;
    return el("div", { className: "why" },
      el("strong", {}, `Why does ${nameOf(seq.name)} wait?`),
      el("p", {}, asked?.sentence ?? guess),
      asked?.blocks_needed === undefined ? null : facts([
        ["place in the queue", count(asked.position + 1)],
        ["blocks", `needs ${asked.blocks_needed}; ${asked.blocks_free} free, ${asked.blocks_evictable} evictable, ${asked.blocks_spare} spare`],
        ["seats", `${asked.seats_free} of ${asked.seats} free`],
        ["budget", `${asked.budget} tokens a step; ${asked.budget_decodes} decodes, ${asked.budget_prefills} prefill`],
        ["cached", `${asked.num_cached_tokens} of ${asked.num_tokens} tokens`],
      ]));
  }

  async askWhy(name) {
    const now = performance.now();
    if (this.asking || (this.why?.seq === name && now - this.askedAt < WHY_EVERY)) return;
    this.asking = true;
    this.askedAt = now;
    try {
      this.why = await (await askOf(store.run, "mie/why", { seq: name })).json();
      redraw("inspector");
    } catch {
      this.why = null; // it ended meanwhile
    } finally {
      this.asking = false;
    }
  }
}
