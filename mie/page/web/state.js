// The state after a step. Records assign cells; nothing here knows why they changed.

export const KINDS = ["free", "in use", "only cached", "held for a copy"];

export class State {
  constructor(head) {
    this.blockSize = head.block_size;
    this.kind = new Uint8Array(head.num_blocks); // indices in KINDS
    this.refs = new Uint32Array(head.num_blocks);
    this.fill = new Uint32Array(head.num_blocks);
    this.step = 0;
    this.isKnown = true;
    this.version = 0;
    this.treeVersion = 0;
    this.keeps = new Map();
    this.clear();
  }

  clear() {
    for (const cells of [this.kind, this.refs, this.fill]) cells.fill(0);
    this.seqs = new Map();
    this.tree = new Map();
    this.heat = new Map();
    this.slots = new Map(); // of states: the name of a sequence, or the block of a snapshot
    this.version += 1;
    this.treeVersion += 1;
  }

  /** Assign a record: a key, steps or later events. `step` is the step that it leads to. */
  apply(record, step) {
    if (record.record === "key") this.clear();
    this.assign(record.record === "key" ? record : record.set);
    this.step = step;
  }

  assign(set) {
    this.version += 1;
    if (set.tree || set.cut || set.heat) this.treeVersion += 1;
    for (const name of set.gone ?? []) this.seqs.delete(name);
    for (const block of set.cut ?? []) {
      this.tree.delete(block);
      this.heat.delete(block);
    }
    for (const [block, kind, refs, fill] of set.blocks ?? []) {
      this.kind[block] = kind;
      this.refs[block] = refs;
      this.fill[block] = fill;
    }
    for (const [name, fields] of Object.entries(set.seqs ?? {})) {
      const seq = this.seqs.get(name) ?? { name, number: parseInt(name, 10), blocks: [], host: [] };
      this.seqs.set(name, { ...seq, ...fields });
    }
    for (const [name, [start, blocks]] of Object.entries(set.tables ?? {})) {
      const seq = this.seqs.get(name);
      seq.blocks.length = Math.min(seq.blocks.length, start);
      for (const block of blocks) seq.blocks.push(block);
    }
    for (const [name, blocks] of Object.entries(set.host ?? {})) if (this.seqs.has(name)) this.seqs.get(name).host = blocks;
    for (const [block, node] of Object.entries(set.tree ?? {})) this.tree.set(Number(block), node);
    for (const [block, [uses, idle, disk = 0]] of Object.entries(set.heat ?? {})) this.heat.set(Number(block), { uses, idle, disk });
    for (const [slot, owner] of Object.entries(set.slots ?? {})) {
      if (owner === null) this.slots.delete(Number(slot));
      else this.slots.set(Number(slot), owner);
    }
  }

  // Queries. What costs more than a look is kept until the state changes.

  kept(name, make, version = this.version) {
    if (this.keeps.get(name)?.version !== version) this.keeps.set(name, { version, value: make() });
    return this.keeps.get(name).value;
  }

  /** The sequences in queue order: those that run, then those that wait. */
  queues() {
    return this.kept("queues", () => {
      const order = [...this.seqs.values()].sort((a, b) => a.rank - b.rank || a.number - b.number || choice(a) - choice(b));
      const those = (...states) => order.filter((seq) => states.includes(seq.state));
      return { runs: those("running"), waits: those("waiting", "swapped") };
    });
  }

  holders() {
    return this.kept("holders", () => {
      const found = new Map();
      for (const seq of this.seqs.values()) {
        for (const block of seq.blocks) {
          const names = found.get(block);
          if (names) names.push(seq.name);
          else found.set(block, [seq.name]);
        }
      }
      return found;
    });
  }

  /** The number of one request that holds each block, or −1. */
  owner() {
    return this.kept("owner", () => {
      const found = new Int32Array(this.kind.length).fill(-1);
      for (const seq of this.seqs.values()) for (const block of seq.blocks) if (found[block] < 0) found[block] = seq.number;
      return found;
    });
  }

  hostOwner() {
    return this.kept("host", () => {
      const found = new Map();
      for (const seq of this.seqs.values()) for (const block of seq.host) found.set(block, seq.name);
      return found;
    });
  }

  /** The slot of the state of each sequence and of each block with a snapshot. */
  slotOf() {
    return this.kept("slotOf", () => new Map([...this.slots].map(([slot, owner]) => [owner, slot])));
  }

  /** The number of tokens on the path to a node of the tree. */
  depth(block) {
    let depth = 0;
    for (let at = block; at !== null && this.tree.has(at) && depth < this.tree.size; at = this.tree.get(at).parent) depth += 1;
    return depth * this.blockSize;
  }

  /** Numbers under the names that the server gives them. */
  totals() {
    return this.kept("totals", () => {
      const kinds = [0, 0, 0, 0];
      let slots = 0;
      for (let block = 0; block < this.kind.length; block += 1) {
        kinds[this.kind[block]] += 1;
        if (this.kind[block] & 1) slots += this.fill[block];
      }
      let entries = 0;
      for (const seq of this.seqs.values()) entries += seq.blocks.length;
      const { runs, waits } = this.queues();
      const used = kinds[1] + kinds[3];
      return {
        used, cached: kinds[2], free: kinds[0], saved: entries - kinds[1],
        empty: used * this.blockSize - slots, running: runs.length, waiting: waits.length,
      };
    });
  }

  /** The state in the form of a key, for tests and for the truth strip. */
  plain() {
    const blocks = [];
    for (let block = 0; block < this.kind.length; block += 1) {
      if (this.kind[block]) blocks.push([block, this.kind[block], this.refs[block], this.fill[block]]);
    }
    const [seqs, tables, host] = [{}, {}, {}];
    for (const { name, number, blocks: table, host: swapped, ...fields } of this.seqs.values()) {
      seqs[name] = fields;
      if (table.length) tables[name] = [0, [...table]];
      if (swapped.length) host[name] = [...swapped];
    }
    const tree = Object.fromEntries([...this.tree].map(([block, { parent, salt }]) => [block, { parent, salt }]));
    return { step: this.step, blocks, seqs, tables, host, tree, slots: Object.fromEntries(this.slots) };
  }
}

const choice = (seq) => Number(seq.name.split(".")[1]);
