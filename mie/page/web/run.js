// A run: its records, its steps and the state at each of them.

import { Lanes } from "./lanes.js";
import { State } from "./state.js";

const MAX_STEPS = 10000; // steps that a page keeps of a live run
const MAX_TEXTS = 20000; // texts of blocks that are kept
const MAX_EXACT = 16; // states inside merged records that are kept
const MAX_LOOKED = 64; // departures that are looked through for one that can be shown
const RETRY = 1000; // milliseconds until a state is asked for again

/** The counters, and the columns of a step that add to them. */
const COUNTERS = [
  ["num_hit_tokens", "num_hit_tokens"], ["num_admitted_tokens", "num_admitted_tokens"],
  ["num_preemptions", "num_preempted"], ["num_copies", "num_copies"], ["num_evicted", "num_evicted"],
  ["num_exported", "num_exported"], ["num_imported", "num_imported"],
];
const HITS = 0;

/** Kinds of events that are worth seeing. */
const TELLING = ["preempt", "resume", "hit", "copy", "fork", "evict", "export", "import"];

export class Run {
  constructor(head) {
    if (head.version !== 1) throw new Error(`these are page records of version ${head.version}; this page reads version 1`);
    this.head = head;
    this.title = "";
    this.numBlocks = head.num_blocks;
    this.numHostBlocks = head.num_host_blocks;
    this.numSlots = head.num_slots ?? 0; // of recurrent states
    this.blockSize = head.block_size;
    this.isLive = head.source === "live";
    this.column = Object.fromEntries(head.columns.map((name, i) => [name, i]));
    this.fetchExact = null; // set by a live source
    this.onExact = () => {};
    this.asked = new Map(); // step → the promise of its state
    this.reset([]);
  }

  reset(records) {
    this.records = [];
    this.numTouched = 0; // blocks up to the last one that was ever used
    this.steps = [];
    this.texts = new Map(); // identity of a block's contents → {fill, text}
    this.evictions = new Map(); // block → steps at which it left the tree
    this.departures = []; // the departures from a cached prompt, with their steps
    this.offsets = COUNTERS.map(() => 0); // counts from before the first step
    this.lanes = new Lanes();
    this.cursor = { state: new State(this.head), index: -1 };
    this.newest = new State(this.head);
    this.exact = new Map();
    this.lost = new Set(); // steps that the server no longer has
    this.unknown = new State(this.head);
    this.unknown.isKnown = false;
    for (const record of records) this.add(record);
  }

  add(record) {
    if (record.record === "key") {
      if (!this.records.length) this.firstStep = record.step;
      this.lanes.begin(record);
      const sums = this.sums(this.steps.length - 1);
      if (this.isLive && record.totals) this.offsets = COUNTERS.map(([name], i) => (record.totals[name] ?? sums[i]) - sums[i]);
      this.records.push({ ...record, last: record.step });
    } else {
      for (const step of record.steps ?? []) this.addStep(step);
      if (record.events) this.lanes.add(this.last + 1, (record.events = this.named(record.events)));
      this.records.push({ ...record, last: this.last });
    }
    for (const [block] of (record.set ?? record).blocks ?? []) this.numTouched = Math.max(this.numTouched, block + 1);
    this.newest.apply(record, this.records.at(-1).last);
    if (this.isLive && this.steps.length > MAX_STEPS * 1.2) this.trim();
  }

  addStep(step) {
    step.events = this.named(step.events);
    step.step = this.value(step, "step");
    const sums = this.sums(this.steps.length - 1);
    step.sums = COUNTERS.map(([, column], i) => sums[i] + this.value(step, column));
    this.steps.push(step);
    this.lanes.add(step.step, step.events);
    for (const event of step.events) {
      const { kind, block, nearest } = event;
      if (kind === "depart" && nearest !== null) this.departures.push({ ...event, step: step.step });
      if (kind !== "evict") continue;
      if (!this.evictions.has(block)) this.evictions.set(block, []);
      this.evictions.get(block).push(step.step);
    }
  }

  /** Return events as objects. Kinds that this page does not know stay arrays' first member. */
  named(events) {
    return events.map((event) => {
      if (!Array.isArray(event)) return event;
      const [kind, ...values] = event;
      return { kind, ...Object.fromEntries((this.head.fields[kind] ?? []).map((name, i) => [name, values[i]])) };
    });
  }

  value(step, name) {
    return step.row[this.column[name]];
  }

  /** Put the past before the records that are here already. */
  prepend(past) {
    const first = past.find((record) => record.record === "key");
    if (!first) return;
    const end = Math.max(...past.map((record) => record.steps ? this.value(record.steps.at(-1), "step") : (record.step ?? 0)));
    const earlier = this.records.filter((record) => record.last < first.step);
    const later = this.records.filter((record) => record.last > end || (record.last === end && record.record !== "steps"));
    this.reset([...earlier, ...past.filter((record) => record.record !== "head"), ...later]);
  }

  /** Forget the oldest steps. A key must come first. */
  trim() {
    const from = this.steps[this.steps.length - MAX_STEPS].step;
    const index = this.records.findIndex((record) => record.record === "key" && record.last >= from);
    if (index <= 0) return;
    this.records.splice(0, index);
    this.firstStep = this.records[0].step;
    this.steps.splice(0, this.steps.findIndex((each) => each.step > this.firstStep));
    this.lanes.forget(this.firstStep);
    for (const gone of this.evictions.values()) gone.splice(0, before(gone, this.firstStep, (step) => step));
    this.departures.splice(0, before(this.departures, this.firstStep, ({ step }) => step));
    if (this.texts.size > MAX_TEXTS) this.texts.clear();
    this.cursor.index = -1;
  }

  get first() {
    return this.firstStep ?? 0;
  }

  get last() {
    return this.steps.at(-1)?.step ?? this.first;
  }

  /** Return the index of the last step at or before a number, or −1. */
  indexOf(step) {
    return before(this.steps, step, (each) => each.step);
  }

  nearest(step) {
    const index = this.indexOf(step);
    return index < 0 ? this.first : this.steps[index].step;
  }

  between(from, to) {
    return this.steps.slice(this.indexOf(from - 1) + 1, this.indexOf(to) + 1);
  }

  /** Return the sums of the counters' columns up to a step, by its index. */
  sums(index) {
    return this.steps[index]?.sums ?? COUNTERS.map(() => 0);
  }

  /** Return the counters after a step: since the engine began, or the log of a recorded run. */
  counters(step) {
    const sums = this.sums(this.indexOf(step));
    return Object.fromEntries(COUNTERS.map(([name], i) => [name, this.offsets[i] + sums[i]]));
  }

  /** Return the hits and all prompt tokens in the last steps up to one. */
  prefix(step, size = Infinity) {
    const last = this.indexOf(step);
    const [a, b] = [this.sums(last - size), this.sums(last)];
    return [b[HITS] - a[HITS], b[HITS + 1] - a[HITS + 1]];
  }

  /** Return the state after a step, or an unknown one: of the newest moment if the run is followed. */
  at(step, isNewest = false) {
    if (isNewest && this.isLive) return this.newest;
    if (this.exact.has(step)) return this.exact.get(step);
    if (this.isExact(step)) return this.walk(this.boundary(step));
    this.ask(step);
    this.unknown.step = step;
    return this.unknown;
  }

  /** Return whether the state after a step is known. Then it is the replay's own. */
  isExact(step) {
    const found = this.records[this.boundary(step)];
    return this.exact.has(step) || (found.last === step && !isLater(found));
  }

  /** Say why a state is unknown. */
  whyUnknown(step) {
    return !this.fetchExact || this.lost.has(step) ? "No log has the state after this step any more." : "The state after this step is on its way.";
  }

  async exactly(step) {
    if (!this.isExact(step)) await this.ask(step);
    return this.at(step);
  }

  /** Return the index of the last record that leads to a step, or to one before it. */
  boundary(step) {
    let index = Math.max(0, before(this.records, step, (record) => record.last));
    while (index > 0 && isLater(this.records[index])) index -= 1;
    return index;
  }

  walk(index) {
    const { cursor } = this;
    let from = cursor.index + 1;
    const isBack = index < cursor.index || cursor.index < 0;
    for (let i = index; i >= (isBack ? 0 : from); i -= 1) {
      if (this.records[i].record === "key") {
        from = i;
        break;
      }
    }
    for (let i = from; i <= index; i += 1) cursor.state.apply(this.records[i], this.records[i].last);
    cursor.index = index;
    return cursor.state;
  }

  async ask(step) {
    if (!this.fetchExact || this.lost.has(step)) return;
    if (!this.asked.has(step)) this.asked.set(step, this.fetch(step));
    await this.asked.get(step);
  }

  async fetch(step) {
    try {
      const key = await this.fetchExact(step);
      const state = new State(this.head);
      state.apply(key, step);
      this.exact.set(step, state);
      if (this.exact.size > MAX_EXACT) this.exact.delete(this.exact.keys().next().value);
      this.asked.delete(step);
    } catch (error) {
      if (error.status === 404) this.lost.add(step);
      // A view that still shows the step asks again.
      setTimeout(() => { this.asked.delete(step); this.onExact(); }, RETRY);
    }
    this.onExact();
  }

  /** Return the step of a recorded run with most to see: what happens, and how many requests share the pool. */
  telling() {
    let [best, most] = [this.last, -1];
    for (const step of this.steps) {
      const kinds = new Set(step.events.map(({ kind }) => kind));
      const size = TELLING.filter((kind) => kinds.has(kind)).length + this.value(step, "num_running") / 2 + this.value(step, "num_blocks_used") / this.numBlocks;
      if (size > most) [best, most] = [step.step, size];
    }
    return best;
  }

  numChoices(name) {
    return this.lanes.all.get(name)?.n ?? 1;
  }

  /** Return the last departure from a branch that the tree still has, of any sequence or of one, and both blocks there. */
  departed(state, name) {
    const isThere = ({ step, nearest }) => !this.evictions.get(nearest)?.some((gone) => gone >= step && gone <= state.step);
    const last = before(this.departures, state.step, ({ step }) => step);
    for (let i = last; i >= 0; i -= 1) {
      const found = this.departures[i];
      if (name ? found.seq !== name : last - i > MAX_LOOKED) continue;
      if (!isThere(found) || !state.tree.has(found.nearest)) continue;
      const { parent, salt } = state.tree.get(found.nearest);
      const others = [...state.tree].filter(([block, node]) => block !== found.nearest && node.parent === parent && node.salt === salt);
      const own = state.seqs.get(found.seq)?.blocks[Math.floor(found.position / this.blockSize)];
      return { ...found, own: own ?? (others.length === 1 ? others[0][0] : null) };
    }
    return null;
  }

  /** Return the identity of a block's contents: a place in a sequence, or a node of the tree. */
  identity(state, block, names = state.holders().get(block)) {
    if (names?.length) return `${names[0]} ${state.seqs.get(names[0]).blocks.indexOf(block)}`;
    const gone = this.evictions.get(block) ?? [];
    return `${block} tree ${gone[before(gone, state.step, (step) => step)] ?? ""}`;
  }

  /** Return the known text of a block, which may lack the last tokens. */
  textOfBlock(state, block, names) {
    const node = state.tree.get(block);
    if (node?.text) return node.text;
    const known = this.texts.get(this.identity(state, block, names));
    return known && known.fill <= state.fill[block] ? known.text : "";
  }
}

/** Return whether a record's state includes events after its step. */
const isLater = ({ record, is_now: isNow }) => record === "now" || isNow;

/** Return the index of the last item whose number is at most the limit, or −1. */
function before(items, limit, number) {
  let [low, high] = [0, items.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (number(items[middle]) <= limit) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}
