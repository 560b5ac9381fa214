// The story's pool: the engine's invariants under random actions, and the promises that chapters make.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { gunzipSync } from "node:zlib";

import { CHAPTERS } from "../../mie/page/web/chapters.js";
import { link, parsed } from "../../mie/page/web/links.js";
import { Pool } from "../../mie/page/web/pool.js";
import { parse, recorded } from "../../mie/page/web/source.js";

const TEXTS = ["a b c d e f g h i", "a b c d x y", "k l m", "a b c d e f g h i j k l m n o p q r s t u v"];

/** Check that every block is accounted for, and that tables hold the text of their requests. */
function check(pool) {
  const refs = pool.blocks.map(() => 0);
  for (const request of pool.requests) {
    for (const block of request.table) refs[block] += 1;
    if (request.state === "running") assert.equal(request.table.length, Math.ceil(request.computed / pool.blockSize));
    else assert.deepEqual(request.table, []);
    const text = request.table.flatMap((block) => pool.blocks[block].tokens).slice(0, request.computed);
    if (request.state === "running") assert.deepEqual(text, request.tokens.slice(0, request.computed));
    assert.ok(!request.saved || request.state === "swapped");
  }
  pool.blocks.forEach((block, i) => {
    assert.equal(block.refs, refs[i], `block ${i}`);
    if (block.key) assert.equal(block.tokens.join(" "), block.key.split(" ").slice(-pool.blockSize).join(" "));
    else if (!block.refs) assert.deepEqual(block.tokens, []);
  });
  assert.equal(new Set(pool.blocks.map(({ key }) => key).filter(Boolean)).size, pool.blocks.filter(({ key }) => key).length);
  const saved = pool.requests.reduce((sum, { saved: blocks }) => sum + (blocks?.length ?? 0), 0);
  assert.equal(pool.hostFree + saved, pool.numHost);
}

test("no action loses a block or a text", () => {
  let state = 7;
  const roll = (limit) => (state = (Math.imul(state, 1664525) + 1013904223) >>> 0) % limit;
  const words = [];
  for (let round = 0; round < 300; round += 1) {
    const pool = new Pool({ numBlocks: 2 + roll(12), numHost: roll(2) * roll(8), budget: 1 + roll(10) });
    for (let i = 0; i < 60; i += 1) {
      const runs = pool.in("running");
      const action = roll(10);
      if (action === 0) pool.add(TEXTS[roll(TEXTS.length)]);
      else if (action === 1 && runs.length) pool.fork(runs[roll(runs.length)]);
      else if (action === 2 && pool.requests.length) pool.end(pool.requests[roll(pool.requests.length)]);
      else pool.step(roll(2) * roll(6));
      check(pool);
      words.push(...pool.said);
    }
  }
  for (const part of ["preempted", "swapped out", "comes back", "first copies", "in the prefix cache.", "leaves the prefix cache", "is refused", "and fails", "budget", "waits", "were right"]) {
    assert.ok(words.some((sentence) => sentence.includes(part)), part);
  }
});

test("a text is the same whatever is preempted", () => {
  const texts = [30, 9].map((numBlocks) => {
    const pool = new Pool({ numBlocks });
    const requests = TEXTS.slice(0, 3).map((text) => pool.add(text));
    const words = [];
    for (let i = 0; i < 400 && pool.requests.length; i += 1) {
      pool.step();
      words.push(...pool.said);
    }
    assert.equal(words.some((sentence) => sentence.includes("preempted")), numBlocks === 9);
    assert.deepEqual(pool.requests, []);
    return requests.map(({ tokens }) => tokens.join(" "));
  });
  assert.deepEqual(texts[0], texts[1]);
});

test("guesses save steps, and change no text", () => {
  const found = [0, 3].map((numGuesses) => {
    const pool = new Pool({ numBlocks: 20, budget: 20 });
    const requests = TEXTS.slice(0, 2).map((text) => pool.add(text));
    let numSteps = 0;
    for (; pool.requests.length; numSteps += 1) {
      pool.step(numGuesses);
      check(pool);
    }
    return { numSteps, texts: requests.map(({ tokens }) => tokens.join(" ")) };
  });
  assert.deepEqual(found[0].texts, found[1].texts);
  assert.ok(found[1].numSteps < 0.7 * found[0].numSteps, JSON.stringify(found));
});

test("a guess takes no block from anybody", () => {
  const pool = new Pool({ numBlocks: 3, budget: 20 });
  const [first, second] = [pool.add("a b c d e f"), pool.add("g h i")];
  pool.step(3); // all blocks are held, and three slots are left
  assert.deepEqual([first.state, second.state], ["running", "running"]);
  assert.ok(!pool.said.some((sentence) => sentence.includes("preempted")));
  check(pool);
});

const run = (name) => recorded(parse(gunzipSync(readFileSync(new URL(`../../mie/page/runs/${name}.page.jsonl.gz`, import.meta.url))).toString()), name);
const named = (id) => CHAPTERS.find((chapter) => chapter.id === id);
const events = (id, kind) => {
  const { run: name, to } = named(id);
  return run(name).between(to, to)[0].events.filter((event) => event.kind === kind);
};

test("eleven chapters pin steps that show what their sentences say", () => {
  assert.equal(CHAPTERS.length, 11);
  const [block] = [run("small-pool").at(1)];
  assert.deepEqual([...block.fill.slice(0, 3)], [8, 3, 0]);
  const { blocks: table } = run("small-pool").at(named("table").to).seqs.get("0.0");
  assert.ok(table.some((entry, i) => i && entry !== table[i - 1] + 1), "its blocks are no neighbours");
  assert.equal(events("sharing", "fork").length, 2);
  const shared = run("shared-prompt").at(named("sharing").to);
  const tables = ["3.0", "3.1", "3.2"].map((name) => shared.seqs.get(name).blocks);
  assert.deepEqual(tables[0], tables[1]);
  assert.deepEqual(tables[0], tables[2]);
  assert.equal(events("copy-on-write", "copy").length, 2);
  const [hit] = events("prefix-hit", "hit");
  assert.deepEqual([hit.num_queried, hit.num_full, hit.num_partial], [49, 40, 4]);
  const chunks = run("shared-prompt").steps.slice(0, 2).map((step) => step.events.find(({ kind }) => kind === "prefill").count);
  assert.deepEqual(chunks, [40, 10]);
  const [lost] = events("preemption", "preempt");
  assert.deepEqual([lost.seq, lost.by, lost.mode.split(":")[0]], ["2.0", "0.0", "recompute"]);
  const [out] = events("swap", "export");
  assert.deepEqual([out.seq, out.host.length], ["3.0", 4]);
  const [back] = run("small-pool").between(61, 61)[0].events.filter(({ kind }) => kind === "resume");
  assert.deepEqual([back.seq, back.mode], ["3.0", "swap"]);
  const [drafts] = events("drafts", "verify");
  assert.deepEqual([drafts.seq, drafts.count, drafts.num_accepted], ["1.0", 4, 3]);
});

test("a run opens at a step where much happens", () => {
  for (const name of ["small-pool", "shared-prompt"]) {
    const found = run(name);
    const [step] = found.between(found.telling(), found.telling());
    assert.ok(new Set(step.events.map(({ kind }) => kind)).size >= 5, `${name}: ${step.step}`);
    assert.ok(step.step < found.last);
  }
});

test("a link leads back to the moment that it names", () => {
  for (const selected of [null, { kind: "block", id: 7 }, { kind: "seq", id: "3.1" }, { kind: "seq", id: "3.0", all: true }, { kind: "request", id: "cmpl/a#b" }]) {
    assert.deepEqual(parsed(link("run 1/ü.jsonl", 39, selected)), { end: 0, name: "run 1/ü.jsonl", step: 39, selected });
  }
  assert.equal(parsed(""), null);
  assert.deepEqual(parsed("#run/x/script:alert"), { end: 0, name: "run", step: null, selected: null });
  assert.deepEqual(parsed("#live//request:cmpl-1"), { end: 0, name: "live", step: null, selected: { kind: "request", id: "cmpl-1" } });
  assert.deepEqual(parsed("#%E0%A4%A/1"), null);
});
