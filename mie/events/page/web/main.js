// The page: it chooses a source, joins the views and listens to keys.

import { differences, drawControl, drawLegend, drawStats, drawTruth, ownNumbers } from "./bars.js";
import { $, el } from "./dom.js";
import { fillAbout } from "./about.js";
import { Inspector } from "./inspector.js";
import { describe } from "./lanes.js";
import { MemoryMap } from "./map.js";
import { ink, readTheme } from "./paint.js";
import { Playground } from "./play.js";
import { Player } from "./player.js";
import { ask, askJson, embedded, Live, opened, post, recorded, parse, unpacked } from "./source.js";
import { change, frames, redraw, seek, select, shown, store, view } from "./store.js";
import { Tables } from "./tables.js";
import { Texts } from "./texts.js";
import { Timeline } from "./timeline.js";
import { PrefixTree } from "./tree.js";

const LIVE_STEPS = 160; // steps that the timeline of a live run shows at first

const page = { config: null, runs: [], live: null, texts: null, truth: null };

function notice(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

/** Show a run at its last step. */
function show(run) {
  const { isLive, last } = run;
  change({ run, step: last, follows: isLive, plays: false, selected: null, window: isLive ? { size: LIVE_STEPS, end: last } : null });
  document.title = `mie: ${isLive ? "the pages of the KV cache" : run.title}`;
  notice("");
  document.documentElement.dataset.mode = isLive ? "live" : "file";
  $("play").hidden = !isLive;
  drawTruth(isLive ? page.truth : null);
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
      if (store.follows) change({ step: store.run.last });
      else redraw("control", "timeline");
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
    entry.run ??= entry.gzip ? await unpacked(entry) : recorded(parse(await (await ask(`mie/runs/${entry.name}`)).text()), entry.title);
    show(entry.run);
  } catch (error) {
    notice(error.message);
  }
}

async function openFile(file) {
  if (!file) return;
  try {
    const run = await opened(file, Boolean(page.config));
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
  page.runs = inside ? inside.map((entry, i) => ({ ...entry, name: `${i}` })) : [];
  if (!inside) {
    try {
      page.config = await askJson("mie/config");
    } catch (error) {
      if (error.status === 401) return logIn();
      return notice(error.message);
    }
    page.runs = [...page.config.runs];
    $("source").append(el("option", { value: "live" }, `live: ${page.config.model}`));
    $("logout").hidden = !page.config.has_keys;
  }
  $("source").append(...page.runs.map((run) => el("option", { value: run.name }, run.title)));
  watch("inspector", new Inspector({ isLive: Boolean(page.config) }));
  if (inside) return inside.length ? choose("0") : notice("This file has no run. Drop one on it.");
  page.playground = new Playground(page.config);
  watch("play", page.playground);
  return openLive();
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

// Controls and keys.

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  readTheme();
  redraw();
}

function switchTheme() {
  const theme = ink.dark ? "light" : "dark";
  setTheme(theme);
  stored((storage) => storage.setItem("mie-theme", theme));
}

function firstTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const preferred = () => (dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => setTheme(preferred()));
  setTheme(stored((storage) => storage.getItem("mie-theme")) ?? preferred());
}

/** Use the browser's storage, which some browsers refuse to a file. */
function stored(use) {
  try {
    return use(localStorage);
  } catch {
    return null;
  }
}

function listen(timeline, player) {
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
    open, help, live, theme: switchTheme, back: () => move(-1), next: () => move(1), run: () => player.toggle(),
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

firstTheme();
const timeline = new Timeline($("timeline"));
const parts = { map: new MemoryMap($("map")), timeline, tree: new PrefixTree($("tree")), tables: new Tables() };
view("stats", drawStats);
view("legend", drawLegend);
for (const [name, part] of Object.entries(parts)) watch(name, part);
view("control", drawControl);
fillAbout();
listen(timeline, new Player());
addEventListener("resize", () => { readTheme(); redraw(); });

/** What tests look at. */
Object.assign(window, { mie: {
  store, frames, seek, select, parts,
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
