// The story's page: a chapter at a time, on the map and the timeline of a recorded run.

import { CHAPTERS } from "./chapters.js";
import { $, announce, el } from "./dom.js";
import { MemoryMap } from "./map.js";
import { prefersStill } from "./paint.js";
import { PoolView } from "./pool_view.js";
import { fetched } from "./source.js";
import { change, redraw, seek, store, view } from "./store.js";
import { startTheme } from "./theme.js";
import { Timeline } from "./timeline.js";

const PLAY_SECONDS = 6; // that a chapter takes at most
const MARGIN = 4; // steps that the timeline shows around a chapter

const runs = new Map(); // name → promise of the run
let chapter = null;
let timer = null;

function load(name) {
  if (!runs.has(name)) runs.set(name, fetched({ name, title: name }));
  return runs.get(name);
}

/** Open the chapter that the address names, or the first. */
async function open() {
  clearInterval(timer);
  const id = location.hash.slice(1);
  const found = CHAPTERS.find((each) => each.id === id) ?? CHAPTERS[0];
  const run = await load(found.run);
  if (location.hash.slice(1) !== id) return; // another one was chosen meanwhile
  chapter = found;
  const index = CHAPTERS.indexOf(chapter);
  $("title").textContent = `${index + 1}. ${chapter.title}`;
  $("text").textContent = chapter.text;
  document.title = `${chapter.title}: the story of a KV cache`;
  $("timeline-part").hidden = !chapter.hasTimeline;
  for (const link of $("chapters").querySelectorAll("a")) {
    if (link.hash === `#${chapter.id}`) {
      link.setAttribute("aria-current", "step");
      link.scrollIntoView({ block: "nearest", inline: "center" });
    } else link.removeAttribute("aria-current");
  }
  const { selected } = chapter;
  const detail = selected ? `/${selected.kind}:${selected.id}${selected.all ? "*" : ""}` : "";
  $("in-viewer").href = `./#${chapter.run}/${chapter.to}${detail}`;
  $("back").disabled = index === 0;
  $("next").disabled = index === CHAPTERS.length - 1;
  new PoolView($("pool"), chapter.pool);
  change({ run, follows: false, selected, step: prefersStill() ? chapter.to : chapter.from, window: { size: chapter.to - chapter.from + 2 * MARGIN, end: chapter.to + MARGIN } });
  announce(`${chapter.title}. ${chapter.text}`);
  if (!prefersStill()) play();
}

/** Play the chapter's steps, and stop at the pinned one. */
function play() {
  clearInterval(timer);
  if (store.step >= chapter.to) seek(chapter.from);
  const milliseconds = Math.min(900, (1000 * PLAY_SECONDS) / (chapter.to - chapter.from));
  timer = setInterval(() => {
    move(1);
    if (store.step >= chapter.to) clearInterval(timer);
  }, milliseconds);
}

const move = (by) => seek(store.run.nearest(store.step + by));

function turn(by) {
  const next = CHAPTERS[CHAPTERS.indexOf(chapter) + by];
  if (next) location.hash = next.id;
}

/** Move by a step inside the chapter, and from its ends to the next or the last one. */
function go(by) {
  clearInterval(timer);
  const isAtEnd = by > 0 ? store.step >= chapter.to : store.step <= chapter.from;
  if (isAtEnd) turn(by);
  else move(by);
}

function listen() {
  const clicks = { back: () => turn(-1), next: () => turn(1), play, "step-back": () => { clearInterval(timer); move(-1); }, "step-on": () => { clearInterval(timer); move(1); } };
  for (const [id, act] of Object.entries(clicks)) $(id).addEventListener("click", act);
  const keys = { ArrowLeft: () => go(-1), ArrowRight: () => go(1), PageUp: () => turn(-1), PageDown: () => turn(1), " ": play };
  document.addEventListener("keydown", (event) => {
    const target = /** @type {Element} */ (event.target);
    if (!chapter || event.ctrlKey || event.metaKey || event.altKey || target.matches("input, canvas")) return;
    if (!keys[event.key] || (event.key === " " && target.matches("button, a"))) return;
    event.preventDefault();
    keys[event.key]();
  });
  addEventListener("hashchange", open);
}

startTheme($("theme"));
$("chapters").append(...CHAPTERS.map(({ id, title }) => el("li", {}, el("a", { href: `#${id}` }, title))));
const map = new MemoryMap($("map"));
const timeline = new Timeline($("timeline"), []);
view("map", () => map.draw());
view("timeline", () => chapter.hasTimeline && timeline.draw());
view("where", () => { $("where").textContent = `step ${store.step}`; });
addEventListener("resize", () => redraw());
listen();
open().catch((error) => { $("text").textContent = `The recorded run cannot be read: ${error.message}`; });
Object.assign(window, { mie: { store, seek, chapters: CHAPTERS } });
