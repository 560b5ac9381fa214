// The page's words: numbers, names of requests, and sentences about events.

import assert from "node:assert/strict";
import { test } from "node:test";

import { count, duration, percent, some, visible } from "../../mie/page/web/dom.js";
import { describe } from "../../mie/page/web/lanes.js";
import { label, letters, requests } from "../../mie/page/web/paint.js";

test("numbers are short", () => {
  assert.equal(count(1234567.4), "1,234,567");
  assert.equal(some(1, "token"), "1 token");
  assert.equal(some(2000, "token"), "2,000 tokens");
  assert.equal(some(0, "branch", "branches"), "0 branches");
});

test("shares below a tenth have a decimal, and nothing of nothing has none", () => {
  assert.equal(percent(1, 3), "33 %");
  assert.equal(percent(1, 40), "2.5 %");
  assert.equal(percent(0, 40), "0 %");
  assert.equal(percent(0, 0), "–");
});

test("durations have the unit that fits", () => {
  const shown = [2e-6, 0.0005, 0.002, 0.05, 1.234, 62].map(duration);
  assert.deepEqual(shown, ["2 µs", "500 µs", "2.00 ms", "50.0 ms", "1.23 s", "62.0 s"]);
  assert.equal(duration(Number.NaN), "–");
  assert.equal(duration(-1), "–");
});

test("line breaks are visible", () => assert.equal(visible("a\n\tb\r"), "a⏎⇥b␍"));

test("requests have letters, and choices a number if there are several", () => {
  assert.deepEqual([0, 25, 26, 27, 701, 702].map(letters), ["A", "Z", "AA", "AB", "ZZ", "AAA"]);
  assert.equal(label("2.0"), "C");
  assert.equal(label("2.0", 2), "C1");
  assert.equal(label("2.1"), "C2");
  assert.deepEqual(requests(["7.0", "7.1", "3.0"]), [7, 3]);
});

test("a preemption says who needed room and how many tokens are lost", () => {
  const event = { by: "1.0", rule: "newest", mode: "recompute", num_lost: 9 };
  assert.equal(describe({ kind: "preempt", event }, label), "preempted because B needed room; victim: newest; recompute, 9 tokens lost");
  assert.equal(
    describe({ kind: "preempt", event: { ...event, by: null, mode: "swap", num_lost: 0 } }, label),
    "preempted because a step was abandoned; victim: newest; swap",
  );
});
