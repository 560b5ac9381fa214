// The page: it chooses a source, joins the views and listens to keys.

import { differences, drawControl, drawLegend, drawStats, drawTruth, ownNumbers } from "./bars.js";
import { $, el } from "./dom.js";
import { fillAbout } from "./about.js";
import { Inspector } from "./inspector.js";
import { describe } from "./lanes.js";
import { MemoryMap } from "./map.js";
import { readTheme } from "./paint.js";
import { Playground } from "./play.js";
import { Player } from "./player.js";
import { ask, askJson, embedded, Live, opened, post, recorded, parse, unpacked } from "./source.js";
import { change, frames, redraw, seek, select, shown, store, view } from "./store.js";
import { Tables } from "./tables.js";
import { Texts } from "./texts.js";
import { Timeline } from "./timeline.js";
import { PrefixTree } from "./tree.js";

const LIVE_STEPS = 160; // steps that the timeline of a live run shows at first

const page = { config: null, runs: [], live: null, truth: null };

function notice(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

/** Show a run from its beginning, or live from its newest step. */
function show(run) {
  change({ run, step: run.last, follows: run.isLive, plays: false, selected: null, window: run.isLive ? { size: LIVE_STEPS, end: run.last } : null });
  document.title = `mie: ${run.isLive ? "the pages of the KV cache" : run.title}`;
  notice("");
  document.documentElement.dataset.mode = run.isLive ? "live" : "file";
  $("play").hidden = !run.isLive;
  drawTruth(run.isLive ? page.truth : null);
}

// Sources.

function openLive() {
  page.live?.close();
  page.live = new Live({
    run: (run) => {
      run.title = page.config.model;
      if ($("source").value === "live") show(run);
      if (page.config.may_read_text) new Texts(run);
    },
    change: () => {
      if (store.run !== page.live.run) return;
      if (store.follows) {
        store.step = store.run.last;
        redraw();
      } else {
        redraw("control", "timeline");
      }
    },
    truth: (record) => {
      page.truth = { step: record.step, wrong: differences(page.live.run, record), size: Object.keys(record.server).length };
      if (store.run === page.live.run) drawTruth(page.truth);
    },
    trouble: notice,
  });
}

async function choose(value) {
  try {
    if (value === "live") {
      if (page.live?.run) show(page.live.run);
      return;
    }
    const entry = page.runs.find((run) => run.name === value);
    if (entry.run === undefined) {
      entry.run = entry.gzip ? await unpacked(entry) : recorded(parse(await (await ask(`mie/runs/${entry.name}`)).text()), entry.title);
    }
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
  view("inspector", ((inspector) => () => inspector.draw())(new Inspector({ isLive: Boolean(page.config) })));
  if (inside) return inside.length ? choose("0") : notice("This file has no run. Drop one on it.");
  page.playground = new Playground(page.config);
  view("play", () => page.playground.draw());
  return openLive();
}

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
  for (const name of ["stats", "source", "open", "help"]) $(name).hidden = true;
  document.querySelector(".source").hidden = true;
  document.querySelector(".scrub").hidden = true;
  key.focus();
}

// Controls and keys.

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  readTheme();
  redraw();
}

function switchTheme() {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  setTheme(theme);
  try {
    localStorage.setItem("mie-theme", theme);
  } catch {
    // A file that may store nothing keeps the theme until it is closed.
  }
}

function firstTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let saved = null;
  try {
    saved = localStorage.getItem("mie-theme");
  } catch {
    saved = null;
  }
  dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
  setTheme(saved ?? (dark.matches ? "dark" : "light"));
}

function listen(timeline, player) {
  const go = (by) => seek(store.run?.indexOf(store.step + 0) >= 0 ? stepBy(by) : store.step + by);
  const stepBy = (by) => {
    const { run } = store;
    const index = Math.max(0, Math.min(run.steps.length - 1, run.indexOf(store.step) + by));
    return run.indexOf(store.step) + by < 0 ? run.first : run.steps[index].step;
  };
  const move = (by) => {
    player.stop();
    go(by);
    timeline.reveal();
    timeline.say();
  };
  const live = () => change({ follows: Boolean(store.run?.isLive), step: store.run?.last ?? 0, window: store.window });
  $("source").addEventListener("change", (event) => choose(event.target.value));
  $("open").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", (event) => openFile(event.target.files[0]));
  $("theme").addEventListener("click", switchTheme);
  $("help").addEventListener("click", () => $("about").showModal());
  $("axis").addEventListener("change", (event) => change({ axis: event.target.value }));
  $("zoom-in").addEventListener("click", () => timeline.zoom(0.5));
  $("zoom-out").addEventListener("click", () => timeline.zoom(2));
  $("zoom-all").addEventListener("click", () => change({ window: null }));
  $("back").addEventListener("click", () => move(-1));
  $("next").addEventListener("click", () => move(1));
  $("run").addEventListener("click", () => player.toggle());
  $("live").addEventListener("click", live);
  $("slider").addEventListener("input", (event) => { seek(Number(event.target.value)); timeline.reveal(); });
  $("logout").addEventListener("submit", async (event) => {
    event.preventDefault();
    await post("mie/logout", {});
    location.reload();
  });
  const keys = {
    ArrowLeft: (event) => move(event.shiftKey ? -10 : -1), ArrowRight: (event) => move(event.shiftKey ? 10 : 1),
    Home: () => move(-Infinity), End: () => (store.run.isLive ? live() : move(Infinity)),
    " ": () => player.toggle(), "+": () => timeline.zoom(0.5), "-": () => timeline.zoom(2), 0: () => change({ window: null }),
    t: switchTheme, o: () => $("file").click(), "?": () => $("about").showModal(), Escape: () => change({ selected: null }), p: () => $("prompt").focus(),
  };
  document.addEventListener("keydown", (event) => {
    const { target } = event;
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
for (const [name, part] of Object.entries(parts)) view(name, () => part.draw());
view("control", drawControl);
fillAbout();
listen(timeline, new Player());
addEventListener("resize", () => { readTheme(); redraw(); });

/** What tests look at. */
window.mie = {
  store, frames, seek, select, parts,
  state: () => ({ ...shown().plain(), counters: store.run.counters(store.step) }),
  at: async (step) => (await store.run.exactly(step)).plain(),
  own: () => ownNumbers(store.run),
  truth: () => page.truth,
  isWhole: () => page.live.numFilling === 0,
  compare: (record) => differences(page.live.run, record),
  read: (text) => recorded(parse(text), "a run"),
  answers: () => page.playground.answers,
  describe: (marks) => marks.map((mark) => describe(mark, (name) => name)).join("; "),
};
start();
