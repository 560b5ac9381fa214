// What happened to each sequence, as the timeline draws it: stretches of steps, and marks.

const num = (name) => name.split(".").map(Number);

class Lane {
  constructor(name, requestId, n, born) {
    [this.number, this.index] = num(name);
    Object.assign(this, { name, requestId, n, born, end: null, parts: [], marks: [], made: new Map(), computed: 0 });
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

  prefill(step, start, count, isLast) {
    this.stop(step);
    this.parts.push({ kind: "prefill", from: step, to: step, start, count });
    this.computed = start + count;
    if (isLast) this.make(this.computed, step);
  }

  /** Note the step that sampled the token at a position. */
  make(position, step) {
    if (!this.made.has(position)) this.made.set(position, step);
  }

  mark(kind, step, event) {
    this.marks.push({ kind, step, event });
  }
}

/** The kinds of events that change nothing but leave a mark. */
const MARKS = new Set(["export", "import", "drop", "copy"]);

export class Lanes {
  constructor() {
    this.all = new Map();
  }

  /** Begin with the sequences that a key has. */
  begin(key) {
    for (const [name, seq] of Object.entries(key.seqs)) {
      const known = this.all.get(name);
      const lane = known ?? this.open(name, seq.request_id, seq.n, key.step);
      lane.computed = seq.num_computed;
      if (known) continue;
      if (seq.state !== "running") lane.begin(seq.state === "swapped" ? "swapped" : "waiting", key.step);
    }
  }

  open(name, requestId, n, step) {
    const lane = new Lane(name, requestId, n, step);
    this.all.set(name, lane);
    return lane;
  }

  /** Remove lanes that ended before a step. */
  forget(first) {
    for (const [name, lane] of this.all) if (lane.end !== null && lane.end < first) this.all.delete(name);
  }

  add(step, events) {
    for (const event of events) {
      const lane = this.all.get(event.seq);
      if (MARKS.has(event.kind)) lane?.mark(event.kind, step, event);
      else this[`on_${event.kind}`]?.(step, event, lane);
    }
  }

  on_add(step, event) {
    const name = `${event.number}.0`;
    if (!this.all.has(name)) this.open(name, event.request_id, event.n, step).begin("waiting", step);
  }

  on_admit(step, event, lane) {
    if (!lane) return;
    lane.stop(step);
    lane.computed = event.num_computed;
    lane.mark("admit", step, event);
  }

  on_resume(step, event, lane) {
    if (!lane) return;
    lane.stop(step);
    lane.computed = event.num_computed;
    lane.mark("resume", step, event);
  }

  on_hit(step, event, lane) {
    if (event.num_full + event.num_partial) lane?.mark("hit", step, event);
  }

  on_prefill(step, event, lane) {
    if (!lane) return;
    lane.prefill(step, event.start, event.count, event.choices.length > 0);
  }

  on_decode(step, event) {
    for (const name of event.seqs) this.all.get(name)?.decode(step);
  }

  child(step, event, kind) {
    const parent = this.all.get(event.parent);
    const lane = this.all.get(event.seq) ?? this.open(event.seq, parent?.requestId ?? "", parent?.n ?? 1, step);
    lane.stop(step);
    lane.computed = parent?.computed ?? 0;
    lane.make(lane.computed, step);
    lane.mark(kind, step, event);
  }

  on_fork(step, event) {
    this.child(step, event, "fork");
  }

  on_branch(step, event) {
    this.child(step, event, "fork");
  }

  on_wait(step, event, lane) {
    const parent = this.all.get(event.parent);
    (lane ?? this.open(event.seq, parent?.requestId ?? "", parent?.n ?? 1, step)).begin("waiting", step);
  }

  on_preempt(step, event, lane) {
    if (!lane) return;
    lane.mark("preempt", step, event);
    lane.begin(event.mode === "swap" ? "swapped" : "preempted", step);
  }

  on_keep(step, event, lane) {
    lane?.begin("kept", step);
  }

  on_finish(step, event, lane) {
    if (!lane) return;
    lane.stop(step);
    lane.end = step;
    lane.mark("finish", step, event);
  }

  on_rebuild(step) {
    for (const lane of this.all.values()) if (lane.end === null) lane.begin("preempted", step);
  }
}

/** Say what a mark means, in a sentence. */
export function describe({ kind, event }, name) {
  switch (kind) {
    case "admit": return `admitted with ${event.num_tokens} tokens, ${event.num_computed} of them from the prefix cache`;
    case "resume": return event.mode === "swap" ? `resumed: ${event.num_computed} tokens came back from the host` : `resumed: recomputes ${event.num_tokens - event.num_computed} tokens`;
    case "hit": return `prefix hit: ${event.num_full + event.num_partial} of ${event.num_queried} tokens${event.num_partial ? ` (${event.num_partial} by a copy)` : ""}`;
    case "fork": return `forked from ${name(event.parent)} and shares its blocks`;
    case "copy": return `copy-on-write: block ${event.source} → ${event.target} (${event.cause})`;
    case "preempt": return `preempted ${event.by ? `because ${name(event.by)} needed a block` : "because a step was abandoned"}; victim: ${event.rule}; ${event.mode}${event.num_lost ? `, ${event.num_lost} tokens lost` : ""}`;
    case "export": return `swapped out: ${event.host.length} blocks to the host`;
    case "import": return `swapped in: ${event.blocks.length} blocks from the host`;
    case "drop": return "its host blocks were freed";
    case "finish": return `ended: ${event.reason}`;
    default: return kind;
  }
}
