// The stretches of steps and the marks of each sequence, for the timeline.

class Lane {
  number; index; name; requestId; n; numPrompt; born;
  end = null; parts = []; marks = []; forced = new Set(); drafted = new Set(); computed = 0;
  verified = new Map(); // by step: the drafts, and how many of them were kept
  start = 0; made = []; // the step that sampled each token, from the position `start` on

  constructor(name, born, { requestId = "", n = 1, numPrompt = null } = {}) {
    [this.number, this.index] = name.split(".").map(Number);
    Object.assign(this, { name, requestId, n, numPrompt, born });
  }

  get last() {
    return this.parts[this.parts.length - 1];
  }

  /** Begin a stretch, which ends the one before. */
  begin(kind, step) {
    this.stop(step);
    this.parts.push({ kind, from: step, to: null });
  }

  stop(step) {
    if (this.last && this.last.to === null) this.last.to = step;
  }

  decode(step) {
    this.computed += 1;
    this.make(this.computed, step);
    const last = this.last;
    if (last?.kind === "decode" && last.to >= step - 1) {
      last.to = step;
      return;
    }
    this.stop(step);
    this.parts.push({ kind: "decode", from: step, to: step });
  }

  /** Note the step that sampled the token at a position. */
  make(position, step) {
    if (!this.made.length) this.start = position;
    this.made[position - this.start] ??= step;
  }

  madeAt(position) {
    return this.made[position - this.start];
  }

  mark(kind, step, event) {
    this.marks.push({ kind, step, event });
  }
}

/** The kinds of events that leave a mark in the lane of their sequence. */
const MARKS = new Set(["admit", "resume", "preempt", "finish", "depart", "read", "export", "import", "drop", "copy"]);

/** The kinds that may name a sequence which has no lane yet. */
const OPENS = new Set(["fork", "wait"]);

export class Lanes {
  constructor() {
    this.all = new Map();
  }

  begin(key) {
    for (const [name, seq] of Object.entries(key.seqs)) {
      const known = this.all.has(name);
      const lane = this.open(name, key.step, { requestId: seq.request_id, n: seq.n, numPrompt: seq.num_prompt });
      lane.computed = seq.num_computed;
      if (!known && seq.state !== "running") lane.begin(seq.state === "swapped" ? "swapped" : "waiting", key.step);
    }
  }

  /** Return the lane of a sequence, which is a new one if there is none. */
  open(name, step, facts) {
    if (!this.all.has(name)) this.all.set(name, new Lane(name, step, facts));
    return this.all.get(name);
  }

  forget(first) {
    for (const [name, lane] of this.all) if (lane.end !== null && lane.end < first) this.all.delete(name);
  }

  add(step, events) {
    for (const event of events) {
      const lane = this.all.get(event.seq);
      if (!lane && event.seq && !OPENS.has(event.kind)) continue;
      if (MARKS.has(event.kind)) lane.mark(event.kind, step, event);
      this[`on_${event.kind}`]?.(step, event, lane);
    }
  }

  on_add(step, event) {
    const name = `${event.number}.0`;
    if (this.all.has(name)) return;
    this.open(name, step, { requestId: event.request_id, n: event.n, numPrompt: event.num_prompt }).begin("waiting", step);
  }

  on_admit(step, event, lane) {
    lane.stop(step);
    lane.computed = event.num_computed;
  }

  on_resume(step, event, lane) {
    this.on_admit(step, event, lane);
  }

  on_hit(step, event, lane) {
    if (event.num_full + event.num_partial) lane.mark("hit", step, event);
  }

  on_prefill(step, { start, count, choices }, lane) {
    lane.stop(step);
    lane.parts.push({ kind: "prefill", from: step, to: step, start, count });
    lane.computed = start + count;
    if (choices.length) lane.make(lane.computed, step);
  }

  on_decode(step, event) {
    for (const name of event.seqs) this.all.get(name)?.decode(step);
  }

  /** Drafts that were right are kept, with the token that the model drew after them. */
  on_verify(step, { count, num_accepted }, lane) {
    for (let i = 0; i <= num_accepted; i += 1) {
      lane.decode(step);
      if (i < num_accepted) lane.drafted.add(lane.computed);
    }
    lane.verified.set(step, { kept: num_accepted, count });
  }

  /** Tokens that a grammar determined follow the one that was sampled. */
  on_force(step, event, lane) {
    for (let i = 1; i <= event.count; i += 1) {
      lane.make(lane.computed + i, step);
      lane.forced.add(lane.computed + i);
    }
  }

  on_fork(step, event) {
    const parent = this.all.get(event.parent);
    const lane = this.open(event.seq, step, parent);
    lane.stop(step);
    lane.computed = parent?.computed ?? 0;
    lane.make(lane.computed, step);
    lane.mark("fork", step, event);
  }

  on_wait(step, event) {
    this.open(event.seq, step, this.all.get(event.parent)).begin("waiting", step);
  }

  on_preempt(step, event, lane) {
    lane.begin(event.mode === "swap" ? "swapped" : "preempted", step);
  }

  on_finish(step, event, lane) {
    lane.stop(step);
    lane.end = step;
  }

  on_rebuild(step) {
    for (const lane of this.all.values()) if (lane.end === null) lane.begin("preempted", step);
  }
}

export function describe({ kind, event }, name) {
  switch (kind) {
    case "admit": return `admitted with ${event.num_tokens} tokens, ${event.num_computed} of them from the prefix cache`;
    case "resume": return event.mode === "swap" ? `resumed: ${event.num_computed} tokens came back from the host` : `resumed: recomputes ${event.num_tokens - event.num_computed} tokens`;
    case "hit": return `prefix hit: ${event.num_full + event.num_partial} of ${event.num_queried} tokens${event.source === null ? "" : ` (${event.num_partial} by a copy)`}`;
    case "fork": return `forked from ${name(event.parent)} and shares its blocks`;
    case "copy": return `copy-on-write: block ${event.source} → ${event.target} (${event.cause})`;
    case "preempt": return `preempted ${event.by ? `because ${name(event.by)} needed room` : "because a step was abandoned"}; victim: ${event.rule}; ${event.mode}${event.num_lost ? `, ${event.num_lost} tokens lost` : ""}`;
    case "export": return `swapped out: ${event.host.length} blocks to the host`;
    case "import": return `${event.blocks.length} blocks came from the host`;
    case "depart": return `departs from the cache at token ${event.position}: ${event.reason}`;
    case "read": return `read from a disk: ${event.num_tokens} tokens, in ${event.host.length} host blocks`;
    case "drop": return "its host blocks were freed";
    case "finish": return `ended: ${event.reason}`;
    default: return kind;
  }
}
