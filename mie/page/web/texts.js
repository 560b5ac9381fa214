// Fetches the text of blocks from a live server, a few times a second at most.

import { askJson } from "./source.js";
import { look } from "./run.js";
import { redraw, shown, store } from "./store.js";

const EVERY = 500; // milliseconds
const MOST = 512; // blocks that the server tells at once

export class Texts {
  constructor(run) {
    this.run = run;
    this.timer = setInterval(() => this.fetch(), EVERY);
  }

  async fetch() {
    const { run } = this;
    if (store.run !== run || document.hidden || this.isBusy) return;
    const state = shown();
    const isPast = !store.follows && store.step < run.last;
    const wanted = this.wanted(state, isPast);
    if (!wanted.length) return;
    this.isBusy = true;
    try {
      const { blocks } = await askJson(`mie/text?blocks=${wanted.map(([block]) => block).join()}${isPast ? `&step=${state.step}` : ""}`);
      for (const [block, how] of wanted) {
        if (!run.texts.has(block)) run.texts.set(block, new Map());
        run.texts.get(block).set(how, blocks[block]?.text ?? "");
      }
      store.textVersion = (store.textVersion ?? 0) + 1;
      redraw("map", "tree", "inspector", "tables");
    } catch {
      clearInterval(this.timer); // the server does not tell texts
    } finally {
      this.isBusy = false;
    }
  }

  /** Return blocks whose text is not known, with how they look. */
  wanted(state) {
    const holders = state.holders();
    const found = [];
    for (let block = 0; block < state.kind.length && found.length < MOST; block += 1) {
      if (!state.kind[block] || state.tree.get(block)?.text) continue;
      const how = look(state, block, holders.get(block));
      if (!this.run.texts.get(block)?.has(how)) found.push([block, how]);
    }
    return found;
  }
}
