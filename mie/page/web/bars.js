// What stands around the views: numbers, the requests' legend, the truth strip and the step control.

import { $, announce, chip, count, el, percent } from "./dom.js";
import { colour } from "./paint.js";
import { nameOf, select, shown, store } from "./store.js";

const MAX_CHIPS = 40;
const RATE_STEPS = 50; // steps over which tokens a second are counted

export function drawStats() {
  const { run, step } = store;
  const state = shown();
  const total = state.totals();
  const known = (text) => (state.isKnown ? text : "–");
  const counters = run.counters(step);
  const [hit, asked] = run.prefix(step);
  const tiles = [
    ["step", count(step), ""],
    ["running", known(count(total.running)), ""],
    ["waiting", known(count(total.waiting)), ""],
    ["KV use", known(percent(total.used, run.numBlocks)), state.isKnown && run.numBlocks < 1000 ? `${total.used} / ${run.numBlocks}` : ""],
    ["saved by sharing", known(count(total.saved)), "blocks"],
    ["empty slots", known(percent(total.empty, total.used * run.blockSize)), ""],
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
  const total = (name) => rows.reduce((sum, each) => sum + run.value(each, name), 0);
  const seconds = total("seconds");
  return seconds ? count((total("num_prefill_tokens") + total("num_decode_tokens")) / seconds) : "–";
}

export function drawLegend() {
  const state = shown();
  const { selected, run } = store;
  const { runs, waits } = state.queues();
  const all = [...runs, ...waits];
  const key = `${run.title}|${selected?.id}|${all.map((seq) => seq.name + seq.state).join()}`;
  const place = $("map-legend");
  if (place.dataset.key === key) return;
  place.dataset.key = key;
  const { activeElement: active } = document;
  const focused = active instanceof HTMLElement ? active.dataset.seq : null;
  place.replaceChildren(...all.slice(0, MAX_CHIPS).map((seq) => {
    const isRunning = seq.state === "running";
    return chip([el("i"), nameOf(seq.name) + (isRunning ? "" : ` ${seq.state}`)], () => select({ kind: "seq", id: seq.name }), {
      "data-seq": seq.name, "data-is": isRunning ? "running" : "waiting", "aria-pressed": String(selected?.kind === "seq" && selected.id === seq.name),
      title: isRunning ? "Show its table" : "Why does it wait?", vars: { "--of": colour(seq.number) },
    });
  }));
  if (all.length > MAX_CHIPS) place.append(el("span", { className: "note" }, `and ${all.length - MAX_CHIPS} more`));
  place.hidden = !all.length;
  if (focused) place.querySelector(`[data-seq="${focused}"]`)?.focus();
}

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

/** Return the page's own numbers under the server's names. */
export function ownNumbers(run) {
  const total = run.newest.totals();
  return {
    ...run.counters(run.last),
    num_running: total.running, num_waiting: total.waiting,
    num_blocks_used: total.used, num_blocks_cached: total.cached, num_blocks_free: total.free,
  };
}

/** Return differences between the page, the server and /metrics. */
export function differences(run, { server, metrics }) {
  const own = ownNumbers(run);
  return Object.keys(server).flatMap((name) => {
    const numbers = [own[name], server[name], metrics[name]];
    const title = name.replace("num_", "").replace("_", " ");
    return numbers.every((number) => number === numbers[0]) ? [] : [`${title}: page ${numbers[0]}, server ${numbers[1]}, /metrics ${numbers[2]}`];
  });
}

export function drawTruth(truth) {
  const node = $("truth");
  const is = !truth ? "" : truth.wrong.length ? "bad" : "good";
  const isNews = is === "bad" && node.dataset.is !== is;
  node.dataset.is = is;
  node.textContent = !truth ? "" : truth.wrong.length
    ? `At step ${count(truth.step)} these differ: ${truth.wrong.join("; ")}`
    : `Page, server and /metrics agree: ${truth.size} numbers at step ${count(truth.step)}`;
  if (isNews) announce(node.textContent);
}
