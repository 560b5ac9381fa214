// One store and one redraw per animation frame.

import { label, numberOf } from "./paint.js";

export const store = {
  run: null, // the Run that is shown
  step: 0, // the step that is shown
  follows: true, // whether the newest step is shown as it comes
  plays: false,
  selected: null, // {kind: "block" | "tile" | "seq", id, all?}
  search: "", // what the timeline is filtered by
  axis: "step",
  window: null, // [first, last] step of the timeline; null: all
  textVersion: 0, // counts the texts of blocks that came
};

const REST = 20; // times as long as a frame took: the rest before a frame that no person asks for
const MAX_REST = 400; // milliseconds

const views = new Map(); // name → draw(store)
let dirty = new Set();
let isAsked = false;
let restEnd = 0; // in milliseconds, as `performance.now()` tells
let timer = null; // that ends the rest
const resting = new Set(); // names of views to redraw then

/** Return whether a view is drawn again soon. */
export const isFrameComing = () => isAsked || resting.size > 0;

/** Register a view: `draw` runs in the next frame after a change. */
export function view(name, draw) {
  views.set(name, draw);
}

export function change(patch) {
  Object.assign(store, patch);
  redraw();
}

/** Redraw views by name, or all, in the next frame. */
export function redraw(...names) {
  for (const name of names.length ? names : views.keys()) dirty.add(name);
  if (isAsked) return;
  isAsked = true;
  requestAnimationFrame(frame);
}

/** Redraw views by name, or all, after a rest, which leaves the CPU to the engine: for movements and for new steps. */
export function redrawRested(...names) {
  for (const name of names.length ? names : views.keys()) resting.add(name);
  queueMicrotask(rest); // after the frame that is drawn just now, and knows the end of its rest
}

function rest() {
  if (timer || !resting.size) return;
  timer = setTimeout(() => {
    timer = null;
    if (resting.size) redraw(...resting);
  }, Math.max(0, restEnd - performance.now()));
}

function frame() {
  isAsked = false;
  const names = dirty;
  dirty = new Set();
  for (const name of names) resting.delete(name);
  const start = performance.now();
  if (store.run) for (const [name, draw] of views) if (names.has(name)) draw(store);
  const end = performance.now();
  restEnd = end + Math.min(MAX_REST, REST * (end - start));
}

export const shown = () => store.run.at(store.step, store.follows);

/** Show a step. The nearest one that exists is taken. */
export function seek(step) {
  if (!store.run) return;
  const { first, last } = store.run;
  const found = store.run.nearest(Math.max(first, Math.min(last, Math.round(step))));
  change({ step: found, follows: store.run.isLive && found >= last });
}

export const nameOf = (name) => label(name, store.run.numChoices(name));

export const isBlock = (block) => store.selected?.kind === "block" && store.selected.id === block;

/** Return whether a sequence is selected, by itself or with all choices of its request. */
export function isSelected(name) {
  const { selected } = store;
  return selected?.kind === "seq" && (selected.id === name || Boolean(selected.all && numberOf(selected.id) === numberOf(name)));
}

/** Select something, or nothing if it is selected already. */
export function select(thing, keep = false) {
  const same = thing && store.selected && thing.kind === store.selected.kind && thing.id === store.selected.id;
  change({ selected: same && !keep ? null : thing });
}
