// The list of keys and the legend.

import { $, el } from "./dom.js";

const KEYS = [
  ["← →", "one step back or forward; with Shift ten"],
  ["Home, End", "the first step; the newest, and follow it"],
  ["space", "play or pause"],
  ["+ − 0", "show fewer, more or all steps"],
  ["arrows", "in the map or the tree: move from block to block"],
  ["Escape", "select nothing"],
  ["p", "go to the prompt; Ctrl+Enter sends it"],
  ["o", "open a trace; you can also drop one on the page"],
  ["t", "dark or light"],
];

const LEGEND = [
  ["colour, letter", "a request; A2 is its second choice"],
  ["filled part", "slots that hold a token"],
  ["stripes of two colours", "requests that share the block"],
  ["hatched", "only the prefix tree holds it"],
  ["brown", "the prefix tree has it from a disk"],
  ["red line in the tree", "the token at which a prompt departs from a cached one, in both branches"],
  ["dots", "references beyond the first"],
  ["arrow", "a block copied because a shared one is written"],
  ["red corner", "evicted in this step"],
  ["◆", "tokens found in the prefix cache"],
  ["✕", "preempted, with the cause when you point at it"],
  ["▲ ▼", "swapped out, or back again"],
  ["● ▏", "ended: by a stop, or at its length"],
  ["bar at a block's end", "a snapshot of the state of recurrent layers after these tokens"],
  ["dotted line", "a token that a grammar determined"],
];

export function fillAbout() {
  const list = (title, pairs, tag) => el("section", {}, el("h2", {}, title), el("dl", {}, pairs.flatMap(([name, text]) => [el("dt", {}, el(tag, {}, name)), el("dd", {}, text)])));
  $("about-body").replaceChildren(el("div", { className: "about" }, list("Keys", KEYS, "kbd"), list("Signs", LEGEND, "b")));
}
