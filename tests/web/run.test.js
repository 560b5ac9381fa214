// The page's replay of the recorded runs: every step, in any order, and the numbers of each step.

import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import { test } from "node:test";
import { gunzipSync } from "node:zlib";

import { describeSlot } from "../../mie/page/web/map.js";
import { parse, recorded } from "../../mie/page/web/source.js";
import { shape } from "../../mie/page/web/tree.js";

const RUNS = new URL("../../mie/page/runs/", import.meta.url);

/** Return a fresh run of a recorded file. */
function load(name) {
  return recorded(parse(gunzipSync(readFileSync(new URL(name, RUNS))).toString()), name);
}

for (const name of readdirSync(RUNS)) {
  test(`${name}: a jump to a step shows the state that playing reaches`, () => {
    const played = load(name);
    const states = new Map(played.steps.map(({ step }) => [step, played.at(step).plain()]));
    assert.ok(states.size > 20);
    const jumped = load(name);
    const steps = [...states.keys()];
    for (let i = 0; i < steps.length; i += 1) {
      const step = steps[(i * 7919) % steps.length];
      assert.deepEqual(jumped.at(step).plain(), states.get(step), `step ${step}`);
    }
  });

  test(`${name}: the cells give the numbers that the engine wrote for each step`, () => {
    const run = load(name);
    let numEqual = 0;
    for (const step of run.steps) {
      const { used, cached, free, running } = run.at(step.step).totals();
      assert.equal(used + cached + free, run.numBlocks);
      assert.ok(running <= run.value(step, "num_running"), `step ${step.step}`);
      // A row counts the blocks of sequences that end in the step. The cells show the state after it.
      assert.ok(used <= run.value(step, "num_blocks_used"), `step ${step.step}`);
      if (used === run.value(step, "num_blocks_used")) {
        assert.equal(cached, run.value(step, "num_blocks_cached"), `step ${step.step}`);
        numEqual += 1;
      }
    }
    assert.ok(numEqual > run.steps.length / 2);
  });

  test(`${name}: tables, holders and the tree agree`, () => {
    const run = load(name);
    for (const { step } of run.steps) {
      const state = run.at(step);
      for (const [block, names] of state.holders()) {
        assert.ok(state.kind[block] > 0, `step ${step}: block ${block} is free and held`);
        for (const each of names) assert.ok(state.seqs.get(each).blocks.includes(block));
      }
      const { children } = shape(state);
      const placed = [...children.values()].flat();
      assert.deepEqual(placed.sort((a, b) => a - b), [...state.tree.keys()].sort((a, b) => a - b));
    }
  });

  test(`${name}: counters are the sums of the steps before`, () => {
    const run = load(name);
    let preempted = 0;
    let evicted = 0;
    for (const step of run.steps) {
      preempted += run.value(step, "num_preempted");
      evicted += step.events.filter(({ kind }) => kind === "evict").length;
      const counters = run.counters(step.step);
      assert.equal(counters.num_preemptions, preempted);
      assert.equal(counters.num_evicted, evicted);
    }
  });
}

test("steps are found by number, also between two of them and outside", () => {
  const run = load("small-pool.page.jsonl.gz");
  const { first, last } = run;
  assert.equal(run.nearest(last + 100), last);
  assert.equal(run.nearest(first - 100), first);
  assert.equal(run.steps[run.indexOf(last)].step, last);
  assert.deepEqual(run.between(first + 1, first + 3).map(({ step }) => step), [first + 1, first + 2, first + 3]);
  assert.deepEqual(run.between(last + 1, last + 9), []);
});

test("files that are no records of the page are refused with the reason", () => {
  assert.throws(() => recorded([{ event: "snapshot" }], ""), /raw event log.*mie trace/);
  assert.throws(() => recorded([{ a: 1 }], ""), /no page records/);
  assert.throws(() => recorded([{ record: "head", version: 2 }], ""), /version 2; this page reads version 1/);
  assert.throws(() => parse('{"a": 1}\n{"a":'), /line 2 is not JSON/);
});

test("slots of states have their owners, and tokens", () => {
  const seqs = { "0.0": { n: 1, num_computed: 9 } };
  const tree = { 4: { parent: null, salt: 0 }, 6: { parent: 4, salt: 0 } };
  const head = { record: "head", version: 1, block_size: 4, num_blocks: 8, num_host_blocks: 0, num_slots: 3, columns: ["step"], fields: {}, first: 0 };
  const key = { record: "key", step: 0, blocks: [], seqs, tables: {}, host: {}, tree, heat: {}, slots: { 0: "0.0", 2: 6 } };
  const next = { record: "steps", steps: [{ row: [1], events: [] }], set: { slots: { 0: 4, 2: null } } };
  const run = recorded([head, key, next], "states");
  const before = run.at(0);
  assert.deepEqual([...before.slotOf()], [["0.0", 0], [6, 2]]);
  assert.equal(before.depth(6), 8);
  const after = run.at(1);
  assert.deepEqual([...after.slotOf()], [[4, 0]]);
  assert.equal(describeSlot(after, 0), "snapshot of the state after 4 tokens, which end in block 4");
  assert.equal(describeSlot(after, 2), "free");
});

test("the last departure from a branch that is still in the tree is shown, with both blocks", () => {
  const node = (parent, salt = 0) => ({ parent, salt });
  const seqs = { "3.0": { n: 1, num_computed: 9 }, "4.0": { n: 1, num_computed: 0 } };
  const fields = { depart: ["seq", "position", "reason", "nearest"], evict: ["block"] };
  const head = { record: "head", version: 1, block_size: 4, num_blocks: 9, num_host_blocks: 0, columns: ["step"], fields, first: 0 };
  const key = { record: "key", step: 0, blocks: [], seqs, tables: {}, host: {}, tree: { 1: node(null), 2: node(1), 5: node(1, 7) }, heat: { 2: [3, null, 1], 1: [0, null] } };
  const depart = (step, events, set = {}) => ({ record: "steps", steps: [{ row: [step], events }], set });
  const run = recorded([
    head, key,
    depart(1, [["depart", "3.0", 5, "other tokens", 2], ["depart", "4.0", 0, "new", null]], { tables: { "3.0": [0, [1, 3, 6]] }, tree: { 3: node(1) } }),
    depart(2, [["depart", "4.0", 6, "other tokens", 5]]),
    depart(3, [["evict", 5]], { cut: [5], gone: ["3.0"] }),
    depart(4, [["evict", 2]], { cut: [2] }),
  ], "departures");
  const found = (step, name) => {
    const each = run.departed(run.at(step), name);
    return each && [each.seq, each.position, each.nearest, each.own];
  };
  assert.equal(found(0), null);
  assert.deepEqual(found(1), ["3.0", 5, 2, 3]);
  assert.deepEqual(found(2), ["4.0", 6, 5, null]);
  assert.deepEqual(found(2, "3.0"), ["3.0", 5, 2, 3]);
  assert.deepEqual(found(3), ["3.0", 5, 2, 3]); // its table is gone, and one other branch is there
  assert.equal(found(3, "4.0"), null);
  assert.equal(found(4), null);
  assert.deepEqual([...run.at(0).heat], [[1, { uses: 0, idle: null, disk: 0 }], [2, { uses: 3, idle: null, disk: 1 }]]);
});
