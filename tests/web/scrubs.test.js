// A live page of a server that drops its log, fails, and restarts twice: no step is ever shown with other cells.
//
// The server is a model of the real one. The cells after a step follow from the server, the step and the block, so
// that each state of the page can be checked by itself.

import assert from "node:assert/strict";
import { test } from "node:test";

import { Live } from "../../mie/page/web/source.js";

const NUM_STEPS = 50000; // over the life of all servers
const NUM_SCRUBS = 500;
const LOG_STEPS = 4000; // that a server can still tell
const HISTORY_STEPS = 1000;

/** A generator of numbers below a limit, equal in every run. */
function dice(seed) {
  let state = seed;
  return (limit) => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return Math.floor((state / 2 ** 32) * limit);
  };
}

const mixed = (...numbers) => numbers.reduce((hash, number) => {
  const next = Math.imul(hash ^ number, 0x9e3779b1);
  return (next ^ (next >>> 15)) >>> 0;
}, 1);

class Server {
  number; numBlocks; id; step = 0; spare = 0;

  constructor(number, numBlocks) {
    Object.assign(this, { number, numBlocks, id: `server${number}` });
  }

  /** Return a block's cell after a step. It changes every few steps. */
  cell(step, block) {
    const value = mixed(this.number, block, Math.floor((step + block) / (2 + (block % 7))));
    return value % 4 === 0 ? [block, 0, 0, 0] : [block, 1 + (value % 3), 1 + ((value >>> 3) % 5), 1 + ((value >>> 7) % 8)];
  }

  cells(step) {
    return Array.from({ length: this.numBlocks }, (_, block) => this.cell(step, block));
  }

  head(source = "live") {
    return {
      record: "head", version: 1, source, server: this.id, block_size: 8, num_blocks: this.numBlocks,
      num_host_blocks: 0, columns: ["step"], fields: {}, first: 0,
    };
  }

  /** Return the key after a step, or of now: then a block has changed since. */
  key(step, isNow = false) {
    const blocks = this.cells(step);
    if (isNow) blocks[this.spare] = [this.spare, 1, 9, 8];
    return { record: "key", step, blocks, seqs: {}, tables: {}, host: {}, tree: {}, heat: {}, is_now: isNow };
  }

  /** Return the record that leads over some steps. */
  steps(from, to) {
    const old = this.cells(from);
    const blocks = this.cells(to).filter((cell, block) => block === this.spare || String(cell) !== String(old[block]));
    const steps = Array.from({ length: to - from }, (_, i) => ({ row: [from + 1 + i], events: [] }));
    return { record: "steps", steps, set: { blocks } };
  }

  get first() {
    return Math.max(0, this.step - LOG_STEPS);
  }

  history(until) {
    if (until < this.first) return [];
    const from = Math.max(this.first, until - HISTORY_STEPS);
    /** @type {any[]} */
    const records = [this.head("file"), this.key(from)];
    for (let step = from; step < until; step += 5) records.push(this.steps(step, Math.min(until, step + 5)));
    return records;
  }

  answer(url) {
    const { pathname, searchParams: query } = new URL(url, "http://page/");
    if (query.has("server") && query.get("server") !== this.id) return [404, { error: { message: "another server" } }];
    const [step, until] = ["step", "until"].map((name) => Number(query.get(name)));
    if (pathname === "/mie/history") return [200, this.history(until).map((each) => JSON.stringify(each)).join("\n")];
    if (pathname === "/mie/state") return step > this.step || step < this.first ? [404, { error: { message: "no step" } }] : [200, this.key(step)];
    return [200, { model: "test", limits: {} }];
  }
}

/** What a browser gives a page. */
class World {
  server; stream; timers = [];

  constructor(seed) {
    this.roll = dice(seed);
    this.numFailing = 0; // answers that get lost
    globalThis.document = /** @type {any} */ ({ hidden: false, addEventListener() {} });
    globalThis.addEventListener = () => {};
    globalThis.setInterval = /** @type {any} */ (() => 0);
    globalThis.setTimeout = /** @type {any} */ ((act) => { this.timers.push(act); return 0; });
    globalThis.fetch = /** @type {any} */ (async (url) => {
      if (this.numFailing > 0) {
        this.numFailing -= 1;
        throw new TypeError("the network is gone");
      }
      const [status, body] = this.server.answer(url);
      return new Response(typeof body === "string" ? body : JSON.stringify(body), { status });
    });
    const world = this;
    globalThis.EventSource = /** @type {any} */ (class {
      static OPEN = 1;
      static CLOSED = 2;
      listeners = new Map();
      readyState = 1;

      constructor() {
        world.stream = this;
      }

      addEventListener(kind, act) {
        this.listeners.set(kind, act);
      }

      close() {
        this.readyState = 2;
      }
    });
  }

  send(...records) {
    for (const record of records) this.stream.listeners.get(record.record)({ data: JSON.stringify(record) });
  }

  /** Let the server work for some steps, and tell the page in merged records if it is connected. */
  work(numSteps, isTold = true) {
    const { server, roll } = this;
    const end = server.step + numSteps;
    while (server.step < end) {
      const from = server.step;
      server.step = Math.min(end, from + 1 + roll(30));
      if (!isTold) continue;
      this.send(server.steps(from, server.step));
      if (roll(9) === 0) this.send(server.key(server.step));
      else if (roll(5) === 0) this.send({ record: "now", events: [], set: { blocks: [[server.spare, 1, 9, 8]] } });
    }
  }

  /** Open the stream as the server does: a head, and the state of now. */
  greet() {
    this.send(this.server.head(), this.server.key(this.server.step, this.roll(2) === 0));
  }

  /** Let answers and their consequences arrive. */
  async settle() {
    for (let i = 0; i < 20; i += 1) await new Promise((resolve) => { setImmediate(resolve); });
    for (const act of this.timers.splice(0)) act();
  }
}

/** Look at random steps at once, and again when answers have come. Count what is known. */
async function scrub(world, run, server, numScrubs, counts) {
  const look = (step) => {
    const state = run.at(step);
    if (!state.isKnown) return "unknown";
    assert.equal(state.step, step);
    assert.equal(state.kind.length, server.numBlocks);
    for (let block = 0; block < server.numBlocks; block += 1) {
      assert.deepEqual([block, state.kind[block], state.refs[block], state.fill[block]], server.cell(step, block), `${server.id}, step ${step}, block ${block}`);
    }
    return "known";
  };
  for (let i = 0; i < numScrubs; i += 1) {
    const step = run.nearest(run.first + world.roll(run.last - run.first + 1));
    if (world.roll(4) === 0) world.numFailing = 1;
    counts[look(step)] += 1;
    await world.settle();
    counts.told += Number(look(step) === "known");
    world.numFailing = 0;
  }
}

for (const seed of [1, 2, 3]) {
  test(`500 scrubs over ${NUM_STEPS} steps of three servers show no false cell (${seed})`, async () => {
    const { setInterval, setTimeout } = globalThis;
    const world = new World(seed);
    try {
      const runs = [];
      world.server = new Server(0, 12);
      world.work(3000 + world.roll(5000), false); // the page opens late
      const ignored = () => {};
      const live = new Live({ run: (run) => runs.push(run), change: ignored, truth: ignored, server: ignored, trouble: ignored });
      const counts = { known: 0, unknown: 0, told: 0 };
      const phases = 10;
      for (let life = 0; life < 3; life += 1) {
        if (life) {
          // The old run stays on the page until the new server's head comes. Its questions reach the new server.
          const [old, before] = [live.run, world.server];
          world.server = new Server(life, 12 + 7 * life);
          world.work(before.step + 100, false);
          await scrub(world, old, before, 20, counts);
        }
        world.numFailing = world.roll(2);
        world.greet();
        await world.settle();
        for (let phase = 0; phase < phases; phase += 1) {
          world.work(Math.ceil(NUM_STEPS / 3 / phases));
          if (world.roll(3) === 0) { // the connection breaks, and the log may drop what the page misses
            world.work(200 + world.roll(6000), false);
            world.numFailing = world.roll(2);
            world.greet();
          }
          await scrub(world, live.run, world.server, Math.ceil(NUM_SCRUBS / 3 / phases), counts);
        }
      }
      assert.equal(runs.length, 3, "each server has a run of its own");
      assert.ok(counts.known + counts.unknown >= NUM_SCRUBS, JSON.stringify(counts));
      assert.ok(counts.unknown > NUM_SCRUBS / 4, "many steps are inside merged records");
      assert.ok(counts.told > counts.known, "the server tells some of them");
    } finally {
      Object.assign(globalThis, { setInterval, setTimeout });
    }
  });
}
