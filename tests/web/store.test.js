// The pace of the page's drawing: at once for a person, and after a rest for what moves by itself.

import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";

import { change, isFrameComing, redraw, redrawRested, store, view } from "../../mie/page/web/store.js";

const DRAWING = 3; // milliseconds that the view takes
const REST = 20 * DRAWING;
const MAX_REST = 400;

const clock = { now: 0, drawing: DRAWING, callbacks: [], timers: [] };
const drawn = []; // the times at which the view was drawn
let moves = false;

Object.assign(globalThis, {
  requestAnimationFrame: (callback) => clock.callbacks.push(callback),
  setTimeout: (callback, delay) => clock.timers.push({ callback, at: clock.now + delay }),
});
performance.now = () => clock.now;

/** Let time go by in milliseconds, with a frame in each of them. */
async function pass(milliseconds) {
  for (let i = 0; i < milliseconds; i += 1) {
    clock.now += 1;
    const due = clock.timers.filter(({ at }) => at <= clock.now);
    clock.timers = clock.timers.filter(({ at }) => at > clock.now);
    for (const { callback } of due) callback();
    for (const callback of clock.callbacks.splice(0)) callback();
    await null; // microtasks
  }
}

view("map", () => {
  drawn.push(clock.now);
  clock.now += clock.drawing;
  if (moves) redrawRested("map");
});

beforeEach(async () => {
  moves = false;
  clock.drawing = DRAWING;
  store.run = {};
  await pass(2 * MAX_REST);
  drawn.length = 0;
});

const gaps = () => drawn.slice(1).map((each, i) => each - drawn[i]);

test("a movement rests after each frame, and a person's change does not wait", async () => {
  moves = true;
  change({ search: "a" });
  await pass(5 * REST);
  assert.ok(drawn.length >= 4);
  assert.ok(gaps().every((gap) => gap >= REST + DRAWING && gap <= REST + DRAWING + 2), String(gaps()));
  const before = drawn.length;
  change({ search: "b" });
  await pass(1);
  assert.equal(drawn.length, before + 1);
});

test("new steps that come all the time are drawn as often as the rest allows", async () => {
  for (let i = 0; i < 10 * REST; i += 1) {
    redrawRested();
    await pass(1);
  }
  assert.ok(drawn.length >= 8 && drawn.length <= 11, String(drawn.length));
  assert.ok(isFrameComing());
  await pass(2 * REST);
  assert.ok(!isFrameComing(), "the last step is drawn");
});

test("a frame that was slow once does not stop the page for long", async () => {
  clock.drawing = 1000;
  redraw("map");
  await pass(1);
  clock.drawing = DRAWING;
  redrawRested("map");
  await pass(MAX_REST + 1);
  assert.equal(drawn.length, 2);
});
