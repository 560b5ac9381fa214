// Tabs that share one live stream: whatever arrives when, each tab gets a state, and then each event after it once.
//
// A state is told as the number of the last event before it, as the server does, so that a tab knows which event is next.

import assert from "node:assert/strict";
import { test } from "node:test";

globalThis.EventSource = /** @type {any} */ ({ CONNECTING: 0, OPEN: 1, CLOSED: 2 });
const { Hub } = await import("../../mie/page/web/hub.js");

/** A generator of numbers below a limit, equal in every run. */
function dice(seed) {
  let state = seed;
  return (limit) => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return Math.floor((state / 2 ** 32) * limit);
  };
}

/** A server that numbers its events, and its streams, whose events arrive late. */
class World {
  life = 0; number = 0; streams = []; numOpened = 0;

  constructor(seed) {
    this.roll = dice(seed);
  }

  open() {
    const listeners = new Map();
    const stream = {
      readyState: 0, wire: [], isNew: true, onerror: () => {},
      addEventListener: (kind, act) => listeners.set(kind, act),
      hear: ([kind, data, lastEventId]) => listeners.get(kind)({ data: JSON.stringify(data), lastEventId }),
      close() { stream.readyState = 2; },
    };
    this.streams.push(stream);
    this.numOpened += 1;
    return stream;
  }

  get alive() {
    return this.streams.filter((stream) => stream.readyState !== 2);
  }

  /** The server's tick: streams that are new get a state after the events of the others. */
  tick() {
    const events = Array.from({ length: this.roll(4) }, () => {
      this.number += 1;
      return this.event(["steps", "now", "truth"][this.roll(3)]);
    });
    if (this.roll(9) === 0) events.push(["alive", {}, ""]);
    for (const stream of this.alive) {
      if (!stream.isNew) stream.wire.push(...events);
      else if (this.roll(2)) stream.wire.push(["head", { server: `s${this.life}` }, ""], this.event("key"));
      else continue;
      stream.isNew = false;
    }
  }

  event(kind) {
    return [kind, { life: this.life, number: this.number }, `s${this.life}.${this.number}`];
  }

  /** Let some of what is on its way arrive. */
  arrive(share = 2) {
    for (const stream of this.alive) {
      while (stream.wire.length && stream.readyState !== 2 && this.roll(share + 1)) stream.hear(stream.wire.shift());
    }
  }

  /** Begin another server: streams break. The browser connects again, or gives up. */
  restart() {
    this.life += 1;
    this.number = this.roll(50);
    for (const stream of this.alive) {
      if (stream.readyState === 2) continue; // the hub has closed it for the error of another
      stream.wire = [];
      stream.isNew = true;
      stream.readyState = this.roll(3) ? 0 : 2;
      stream.onerror();
    }
  }
}

class Tab {
  server = null; number = null; isIn = true; numStates = 0;

  postMessage({ kind, data, state }) {
    if (!kind) {
      if (state === 2) this.isIn = false;
      return;
    }
    const record = JSON.parse(data);
    if (kind === "head") {
      if (record.server !== this.server) this.number = null;
      this.server = record.server;
    } else if (kind !== "alive") {
      assert.equal(`s${record.life}`, this.server, "no event of another server");
      if (kind === "key") {
        assert.ok(this.number === null || record.number > this.number);
        this.numStates += 1;
      } else assert.equal(record.number, this.number + 1, "each event once, in order, after a state");
      this.number = record.number;
    }
  }
}

for (const seed of [1, 2, 3, 4]) {
  test(`tabs that come and go hear everything once (${seed})`, () => {
    const world = new World(seed);
    const { roll } = world;
    const hub = new Hub(() => world.open());
    let tabs = [];
    let numJoins = 0;
    for (let i = 0; i < 3000; i += 1) {
      if (tabs.length < 8 && roll(6) === 0) {
        tabs.push(new Tab());
        hub.join(tabs.at(-1));
        numJoins += 1;
      } else if (tabs.length && roll(9) === 0) hub.leave(tabs.splice(roll(tabs.length), 1)[0]);
      else if (roll(200) === 0) world.restart();
      world.tick();
      world.arrive();
      tabs = tabs.filter((tab) => tab.isIn);
      assert.ok(world.alive.length <= 2, "at most two connections");
    }
    assert.ok(numJoins > 200);
    for (let i = 0; i < 50; i += 1) {
      world.tick();
      world.arrive(100);
    }
    for (const tab of tabs) assert.deepEqual([tab.isIn, tab.numStates > 0], [true, true]);
    while (world.alive.some((stream) => stream.wire.length)) world.arrive(100);
    assert.equal(world.alive.length, tabs.length ? 1 : 0, "one connection is left");
    for (const tab of tabs) assert.deepEqual([tab.server, tab.number], [`s${world.life}`, world.number]);
    for (const tab of tabs) hub.leave(tab);
    assert.equal(world.alive.length, 0, "and none without a tab");
  });
}
