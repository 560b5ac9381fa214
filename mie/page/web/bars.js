// What stands around the views: numbers, the requests' legend, the truth strip and the step control.

import { $, count, el, percent } from "./dom.js";
import { colour, label } from "./paint.js";
import { select, shown, store } from "./store.js";

const MAX_CHIPS = 40;
const RATE_STEPS = 50; // steps over which tokens a second are counted

/** Draw the numbers of the step that is shown. */
export function drawStats() {
  const { run, step } = store;
  const state = shown();
  const total = state.totals();
  const counters = run.counters(step);
  const [hit, asked] = run.prefix(step);
  const tiles = [
    ["step", count(step), ""],
    ["running", count(total.running), ""],
    ["waiting", count(total.waiting), ""],
    ["KV use", percent(total.used, run.numBlocks), run.numBlocks < 1000 ? `${total.used} / ${run.numBlocks}` : ""],
    ["saved by sharing", count(total.saved), "blocks"],
    ["empty slots", percent(total.empty, total.used * run.blockSize), ""],
    ["prefix hits", percent(hit, asked), asked ? `of ${count(asked)}` : ""],
    ["preemptions", count(counters.num_preemptions), ""],
    ["copies", count(counters.num_copies), ""],
    ["tokens/s", speed(run, step), ""],
  ];
  const place = $("stats");
  tiles.forEach(([name, value, more], i) => {
    const tile = place.children[i] ?? place.appendChild(el("div", { className: "stat" }, el("b"), el("span", {}, name)));
    const text = value + more;
    if (tile.dataset.text === text) return;
    tile.dataset.text = text;
    tile.firstChild.replaceChildren(value, more ? el("small", {}, more) : "");
  });
}

function speed(run, step) {
  const rows = run.between(step - RATE_STEPS, step);
  if (rows.length < 2) return "–";
  const of = (each, name) => each.row[run.column[name]];
  const tokens = rows.reduce((sum, each) => sum + of(each, "num_prefill_tokens") + of(each, "num_decode_tokens"), 0);
  const seconds = rows.reduce((sum, each) => sum + of(each, "seconds"), 0);
  return seconds ? count(tokens / seconds) : "–";
}

/** Draw a chip for each sequence that runs or waits. */
export function drawLegend() {
  const state = shown();
  const { selected, run } = store;
  const { runs, waits, kept } = state.queues();
  const all = [...runs, ...kept, ...waits];
  const key = `${run.title ?? ""}|${selected?.id}|${all.map((seq) => seq.name + seq.state).join()}`;
  const place = $("map-legend");
  if (place.dataset.key === key) return;
  place.dataset.key = key;
  const focused = document.activeElement?.dataset?.seq;
  place.replaceChildren(...all.slice(0, MAX_CHIPS).map((seq) => el("button", {
    type: "button", className: "chip", "data-seq": seq.name, "data-is": seq.state === "running" ? "running" : "waiting",
    "aria-pressed": String(selected?.kind === "seq" && selected.id === seq.name),
    title: seq.state === "running" ? "Show its table" : "Why does it wait?", vars: { "--of": colour(seq.number) },
    onclick: () => select({ kind: "seq", id: seq.name }),
  }, el("i"), `${label(seq.name, seq.n)}${seq.state === "running" ? "" : ` ${seq.state}`}`)));
  if (all.length > MAX_CHIPS) place.append(el("span", { className: "note" }, `and ${all.length - MAX_CHIPS} more`));
  place.hidden = !all.length;
  if (focused) place.querySelector(`[data-seq="${focused}"]`)?.focus();
}

/** Draw the step control. */
export function drawControl() {
  const { run, step, follows, plays } = store;
  const slider = $("slider");
  slider.min = run.first;
  slider.max = run.last;
  slider.value = step;
  slider.setAttribute("aria-valuetext", `step ${step} of ${run.last}`);
  const isExact = follows || run.isExact(step);
  $("where").value = `step ${count(step)} of ${count(run.last)}${isExact ? "" : " …"}`;
  const live = $("live");
  live.hidden = !run.isLive;
  live.setAttribute("aria-pressed", String(follows));
  const play = $("run");
  const moves = run.isLive ? follows || plays : plays;
  play.textContent = moves ? "❚❚" : "▶";
  play.setAttribute("aria-label", moves ? "Pause" : "Play");
  $("back").disabled = step <= run.first;
  $("next").disabled = step >= run.last;
}

const NAMES = {
  num_running: "running", num_waiting: "waiting", num_blocks_used: "blocks used", num_blocks_cached: "blocks cached",
  num_blocks_free: "blocks free", num_preemptions: "preemptions", num_hit_tokens: "tokens hit",
  num_copies: "copies", num_evicted: "evictions", num_exported: "blocks swapped out", num_imported: "blocks swapped in",
};

/** Return the page's own numbers under the server's names. */
export function ownNumbers(run) {
  const total = run.newest.totals();
  return {
    ...run.counters(run.last),
    num_running: total.running, num_waiting: total.waiting,
    num_blocks_used: total.used, num_blocks_cached: total.cached, num_blocks_free: total.free,
  };
}

/** Return what differs between the page, the server and /metrics. */
export function differences(run, { server, metrics }) {
  const own = ownNumbers(run);
  return Object.keys(NAMES).filter((name) => name in server).flatMap((name) => {
    const numbers = [own[name] ?? 0, server[name], metrics[name] ?? server[name]];
    return numbers.every((number) => number === numbers[0]) ? [] : [`${NAMES[name]}: page ${numbers[0]}, server ${numbers[1]}, /metrics ${numbers[2]}`];
  });
}

/** Say whether page, server and /metrics agree. */
export function drawTruth(truth) {
  const node = $("truth");
  if (!truth) {
    node.textContent = "";
    return;
  }
  node.dataset.is = truth.wrong.length ? "bad" : "good";
  node.textContent = truth.wrong.length
    ? `At step ${count(truth.step)} these differ: ${truth.wrong.join("; ")}`
    : `Page, server and /metrics agree: ${truth.size} numbers at step ${count(truth.step)}`;
}
