// The pool of a chapter: its blocks, its requests, and what the reader can do to them.

import { el, some } from "./dom.js";
import { Pool } from "./pool.js";

const PROMPTS = ["tell me about an otter", "write a song for the miller", "why do boats float", "name ten birds of the river", "who lives in the old tower"];
const SYSTEM = "you are a kind storyteller who likes rivers";
const LONG = "read this long letter from the harbour and say in one line what the captain wants us to do";

const NUM_COLOURS = 8;
const vars = (request) => ({ "--of": `var(--c${request.number % NUM_COLOURS})` });

/** What buttons do, by the names that chapters use. */
const TOOLS = {
  step: ["Step", (pool) => pool.step()],
  guess: ["Step with three guesses", (pool) => pool.step(3)],
  add: ["New request", (pool) => pool.add(PROMPTS[pool.numNamed % PROMPTS.length])],
  system: ["Request with the system prompt", (pool) => pool.add(`${SYSTEM} ${PROMPTS[pool.numNamed % PROMPTS.length]}`)],
  long: ["Long prompt", (pool) => pool.add(LONG)],
};

export class PoolView {
  sizes; start; canFork; canSwap;

  constructor(place, { task, tools, start = ["add"], ...sizes }) {
    Object.assign(this, { sizes, start, canFork: tools.includes("fork"), canSwap: tools.includes("host") });
    const button = (name) => el("button", { type: "button", onclick: () => this.act(TOOLS[name][1]) }, TOOLS[name][0]);
    const size = (name, title, min, max) => el("label", {}, title, el("input", {
      type: "range", min, max, value: sizes[name], "aria-label": title,
      oninput: (event) => { this.sizes[name] = Number(event.target.value); this.reset(); },
    }));
    this.cells = el("ol", { className: "cells", "aria-label": "Blocks" });
    this.rows = el("ul", { className: "rows", "aria-label": "Requests" });
    this.said = el("p", { className: "said", role: "status" });
    this.note = el("p", { className: "note" });
    place.replaceChildren(
      el("h3", {}, "Your turn"), el("p", {}, task),
      el("div", { className: "pool-tools" }, Object.keys(TOOLS).filter((name) => tools.includes(name)).map(button),
        el("button", { type: "button", onclick: () => this.reset() }, "Begin again"),
        size("numBlocks", "Blocks", 2, 24), this.canSwap ? size("numHost", "Blocks on the host", 0, 16) : null),
      this.said, this.cells, this.rows, this.note);
    this.reset();
  }

  reset() {
    this.pool = new Pool(this.sizes);
    for (const name of this.start) TOOLS[name][1](this.pool);
    this.pool.step();
    this.draw();
  }

  act(action) {
    action(this.pool);
    this.draw();
  }

  draw() {
    const { pool } = this;
    const holders = pool.blocks.map((_, block) => pool.requests.filter(({ table }) => table.includes(block)));
    this.said.textContent = pool.said.join(" ");
    this.cells.replaceChildren(...pool.blocks.map((block, i) => {
      const [first] = holders[i];
      const state = block.refs ? "held" : block.key ? "cached" : "free";
      return el("li", { className: "cell", "data-is": state, vars: first ? vars(first) : {}, title: state === "cached" ? "Only the prefix cache holds it" : some(block.refs, "reference") },
        el("b", {}, `${i}`), el("span", { className: "who" }, holders[i].map(({ name }) => name).join(" ")),
        el("span", { className: "slots" }, Array.from({ length: pool.blockSize }, (_, slot) => el("span", {}, block.tokens[slot] ?? ""))));
    }));
    this.rows.replaceChildren(...pool.requests.map((request) => el("li", { vars: vars(request), "data-is": request.state },
      el("b", {}, request.name), el("span", { className: "state" }, request.state),
      el("span", { className: "table" }, request.table.map((block) => el("span", {}, `${block}`))),
      el("span", { className: "words" }, request.tokens.slice(0, request.computed).join(" "), el("i", {}, ` ${request.tokens.slice(request.computed).join(" ")}`)),
      this.canFork && request.state === "running" ? el("button", { type: "button", onclick: () => this.act(() => pool.fork(request)) }, `Fork ${request.name}`) : null,
      el("button", { type: "button", onclick: () => this.act(() => { pool.said = []; pool.end(request); }) }, `End ${request.name}`))));
    const cached = pool.blocks.filter(({ refs, key }) => !refs && key).length;
    this.note.textContent = `${some(pool.blocks.length, "block")} of ${pool.blockSize} tokens: ${pool.blocks.filter(({ refs }) => refs).length} held, ${cached} only cached, ${pool.numAvailable - cached} free${pool.numHost ? `; ${pool.numHost - pool.hostFree} of ${some(pool.numHost, "host block")} in use` : ""}. A step has a budget of ${pool.budget} tokens.`;
  }
}
