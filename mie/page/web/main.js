// The page: it chooses a source, joins the views and listens to keys.

import { differences, drawControl, drawLegend, drawStats, drawTruth, ownNumbers } from "./bars.js";
import { $, el } from "./dom.js";
import { fillAbout } from "./about.js";
import { Inspector } from "./inspector.js";
import { describe } from "./lanes.js";
import { MemoryMap } from "./map.js";
import { link, parsed } from "./links.js";
import { Playground } from "./play.js";
import { Player } from "./player.js";
import { about, askJson, embedded, fetched, Live, opened, parse, post, recorded, unpacked } from "./source.js";
import { change, isFrameComing, redraw, redrawRested, seek, select, shown, store, view } from "./store.js";
import { Tables } from "./tables.js";
import { Texts } from "./texts.js";
import { startTheme, switchTheme } from "./theme.js";
import { Timeline } from "./timeline.js";
import { PrefixTree } from "./tree.js";

const LIVE_STEPS = 160; // steps that the timeline of a live run shows at first

const PATIENCE = 8000; // milliseconds that a link waits for its moment, which may be on its way
const LINK_EVERY = 400; // milliseconds between two changes of the address

const page = { config: null, runs: [], live: null, texts: null, truth: null, wanted: null };

function notice(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

/** Show a live run at its last step, and a recorded one at the step with most to see. */
function show(run) {
  const { isLive, last } = run;
  change({ run, step: isLive ? last : run.telling(), follows: isLive, plays: false, selected: null, window: isLive ? { size: LIVE_STEPS, end: last } : null });
  document.title = `mie: ${isLive ? "the pages of the KV cache" : run.title}`;
  notice("");
  document.documentElement.dataset.mode = isLive ? "live" : "file";
  $("play").hidden = !isLive;
  drawTruth(isLive ? page.truth : null);
  reach();
}

// Links.

const nameOfLive = (run) => `live-${run.head.server}`;

/** Go to what the address names, as soon as that is there. */
async function follow() {
  page.wanted = parsed(location.hash);
  if (!page.wanted) return;
  page.wanted.end = performance.now() + PATIENCE;
  setTimeout(reach, PATIENCE);
  const { name } = page.wanted;
  const value = name.startsWith("live") && page.config ? "live" : name;
  if (![...$("source").options].some((option) => option.value === value)) return miss(`This page has no run ${name}.`);
  $("source").value = value;
  await choose(value);
}

function miss(text) {
  page.wanted = null;
  notice(text);
}

function reach() {
  const { wanted } = page;
  const { run } = store;
  if (!wanted || !run || $("source").value !== (run.isLive ? "live" : wanted.name)) return;
  if (run.isLive && !["live", nameOfLive(run)].includes(wanted.name)) return miss("The link leads to a server that has ended.");
  const { selected } = wanted;
  const lane = selected?.kind === "request" ? [...run.lanes.all.values()].find((each) => each.requestId === selected.id) : null;
  const step = lane ? Math.max(lane.born, run.first) : wanted.step;
  const isThere = step === null ? selected?.kind !== "request" : step >= run.first && step <= run.last;
  if (!isThere && run.isLive && performance.now() < wanted.end) return;
  page.wanted = null;
  if (!isThere) return notice("No log has the moment of this link any more.");
  if (step !== null) {
    seek(step);
    store.follows = false; // also at the newest step: it is this one that was meant
  }
  change({ selected: lane ? { kind: "seq", id: lane.name } : selected });
}

/** Let the address name what is shown, and nothing while the newest step is followed. */
function writeLink() {
  if (page.wanted || page.linkTimer) return;
  page.linkTimer = setTimeout(() => {
    page.linkTimer = 0;
    const { run, step, follows, selected } = store;
    const name = run.isLive ? nameOfLive(run) : $("source").value;
    const hash = follows ? "" : link(name, step, selected);
    if (location.hash !== hash) history.replaceState(null, "", hash || location.pathname + location.search);
  }, LINK_EVERY);
}

// Sources.

function openLive() {
  page.live = new Live({
    run: (run) => {
      run.title = page.config.model;
      if ($("source").value === "live") show(run);
      page.texts?.close();
      if (page.config.may_read_text) page.texts = new Texts(run);
    },
    change: () => {
      if (store.run !== page.live.run) return;
      reach();
      if (store.follows) store.step = store.run.last;
      redrawRested(...(store.follows ? [] : ["control", "timeline", "welcome"]));
    },
    truth: (record) => {
      page.truth = { step: record.step, wrong: differences(page.live.run, record), size: Object.keys(record.server).length };
      if (store.run === page.live.run) drawTruth(page.truth);
    },
    server: async () => {
      const { model, limits } = await askJson("mie/config");
      Object.assign(page.config.limits, limits);
      page.config.model = model;
    },
    trouble: (text) => {
      notice(text);
      if (!text) return;
      page.truth = null;
      drawTruth(null);
    },
  });
}

async function choose(value) {
  try {
    if (value === "live") {
      if (page.live?.run) show(page.live.run);
      return;
    }
    const entry = page.runs.find((run) => run.name === value);
    entry.run ??= await (entry.gzip ? unpacked : fetched)(entry);
    show(entry.run);
  } catch (error) {
    notice(error.message);
  }
}

async function openFile(file) {
  if (!file) return;
  try {
    const run = await opened(file, page.config?.mode === "live");
    const name = `file ${page.runs.length}`;
    page.runs.push({ name, title: file.name, run });
    $("source").append(el("option", { value: name }, file.name));
    $("source").value = name;
    show(run);
  } catch (error) {
    notice(`${file.name}: ${error.message}`);
  }
}

// The start: a page with runs inside, or a server that may want a key.

async function start() {
  const inside = embedded();
  page.runs = inside ?? [];
  if (!inside) {
    try {
      page.config = await askJson("mie/config");
    } catch (error) {
      if (error.status === 401) return logIn();
      return notice(error.message);
    }
    page.runs = [...page.config.runs];
    if (page.config.mode === "live") $("source").append(el("option", { value: "live" }, `live: ${page.config.model}`));
    $("logout").hidden = !page.config.has_keys;
    $("story").hidden = false;
    $("chat").hidden = !page.config.has_chat;
    for (const each of /** @type {NodeListOf<HTMLAnchorElement>} */ (document.querySelectorAll("[data-page]"))) each.href = about(each.dataset.page);
  }
  $("source").append(...page.runs.map((run) => el("option", { value: run.name }, run.title)));
  const isLive = page.config?.mode === "live";
  watch("inspector", new Inspector({ isLive }));
  addEventListener("hashchange", follow);
  view("link", writeLink);
  if (!isLive) {
    if (!page.runs.length) return notice("This file has no run. Drop one on it.");
    await follow();
    return store.run ? null : choose(page.runs[0].name);
  }
  page.playground = new Playground(page.config);
  watch("play", page.playground);
  openLive();
  return follow();
}

const watch = (name, part) => view(name, () => part.draw());

function logIn() {
  const key = el("input", { type: "password", id: "key", autocomplete: "current-password", required: true });
  const form = el("form", { className: "panel login" }, el("h2", {}, "This server needs a key"), el("label", { htmlFor: "key" }, "Key"), key, el("button", { className: "primary" }, "Log in"));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      await post("mie/login", { key: key.value });
      location.reload();
    } catch (error) {
      notice(error.message);
      key.select();
    }
  });
  document.querySelector("main").replaceChildren(form);
  for (const node of document.querySelectorAll("#stats, .source, #open, #help, .scrub")) node.toggleAttribute("hidden", true);
  key.focus();
}

// A first look.

/** Run the experiments one after another. */
async function showMe() {
  $("show-me").disabled = true;
  for (const name of ["twelve", "fork", "twice"]) await page.playground.provoke.run(name);
  $("show-me").disabled = false;
}

function drawWelcome({ run }) {
  const isFresh = run.isLive && !run.last;
  $("welcome").hidden = !isFresh;
  if (isFresh && page.config?.demo && !$("show-me").disabled) showMe();
}

// Controls and keys.

function listen(map, timeline, player) {
  const move = (by) => {
    const { run, step } = store;
    if (!run) return;
    player.stop();
    seek(run.steps[Math.min(run.steps.length - 1, run.indexOf(step) + by)]?.step ?? run.first);
    timeline.reveal();
    timeline.say();
  };
  const live = () => store.run && change({ follows: store.run.isLive, step: store.run.last });
  const open = () => $("file").click();
  const help = () => $("about").showModal();
  const all = () => change({ window: null });
  const clicks = {
    open, help, live, back: () => move(-1), next: () => move(1), run: () => player.toggle(),
    "map-whole": () => { map.isWhole = !map.isWhole; redraw("map"); }, "show-me": showMe,
    "zoom-in": () => timeline.zoom(0.5), "zoom-out": () => timeline.zoom(2), "zoom-all": all,
  };
  for (const [id, act] of Object.entries(clicks)) $(id).addEventListener("click", act);
  $("source").addEventListener("change", (event) => choose(event.target.value));
  $("file").addEventListener("change", (event) => openFile(event.target.files[0]));
  $("axis").addEventListener("change", (event) => change({ axis: event.target.value }));
  $("search").addEventListener("input", (event) => change({ search: event.target.value }));
  $("slider").addEventListener("input", (event) => { seek(Number(event.target.value)); timeline.reveal(); });
  $("logout").addEventListener("submit", async (event) => {
    event.preventDefault();
    await post("mie/logout", {});
    location.reload();
  });
  const keys = {
    ArrowLeft: (event) => move(event.shiftKey ? -10 : -1), ArrowRight: (event) => move(event.shiftKey ? 10 : 1),
    Home: () => move(-Infinity), End: () => (store.run.isLive ? live() : move(Infinity)), 0: all, o: open, "?": help,
    " ": clicks.run, "+": clicks["zoom-in"], "-": clicks["zoom-out"], t: switchTheme, Escape: () => change({ selected: null }), p: () => $("prompt").focus(),
  };
  document.addEventListener("keydown", (event) => {
    const target = /** @type {Element} */ (event.target);
    if (event.ctrlKey || event.metaKey || event.altKey || $("about").open || !store.run) return;
    if (target.matches("textarea, input, select") || (event.key === " " && target.matches("button, summary"))) return;
    const act = keys[event.key];
    if (!act) return;
    event.preventDefault();
    act(event);
  });
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    openFile(event.dataTransfer.files[0]);
  });
}

startTheme($("theme"));
const timeline = new Timeline($("timeline"));
const parts = { map: new MemoryMap($("map")), timeline, tree: new PrefixTree($("tree")), tables: new Tables() };
view("stats", drawStats);
view("legend", drawLegend);
for (const [name, part] of Object.entries(parts)) watch(name, part);
view("control", drawControl);
view("welcome", drawWelcome);
fillAbout();
listen(parts.map, timeline, new Player());
addEventListener("resize", () => redraw());

/** What tests look at. */
Object.assign(window, { mie: {
  store, isFrameComing, seek, select, parts,
  state: () => ({ ...shown().plain(), counters: store.run.counters(store.step) }),
  at: async (step) => (await store.run.exactly(step)).plain(),
  own: () => ownNumbers(store.run),
  truth: () => page.truth,
  isConnected: () => page.live.events.readyState === EventSource.OPEN,
  isWhole: () => page.live.numFilling === 0,
  compare: (record) => differences(page.live.run, record),
  read: (text) => recorded(parse(text), "a run"),
  answers: () => page.playground.answers,
  describe: (marks) => marks.map((mark) => describe(mark, (name) => name)).join("; "),
} });
start();
