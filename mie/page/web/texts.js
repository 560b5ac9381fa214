// Fetches the text of blocks from a live server, a few times a second at most.

import { askOf } from "./source.js";
import { redraw, shown, store } from "./store.js";

const EVERY = 500; // milliseconds
const MOST = 512; // blocks that the server tells at once

export class Texts {
  constructor(run) {
    this.run = run;
    this.missed = new Set(); // texts that the server did not know at this step
    this.timer = setInterval(() => this.fetch(), EVERY);
  }

  close() {
    clearInterval(this.timer);
    this.isClosed = true;
  }

  async fetch() {
    const { run } = this;
    if (store.run !== run || document.hidden || this.isBusy) return;
    const state = shown();
    const step = !store.follows && store.step < run.last ? store.step : null;
    if (step !== null && !run.isExact(step)) return;
    if (step !== this.step) this.missed.clear();
    this.step = step;
    const wanted = this.wanted(state);
    if (!wanted.size) return;
    this.isBusy = true;
    try {
      const answer = await askOf(run, "mie/text", { blocks: [...wanted.keys()].join(), ...(step === null ? {} : { step }) });
      const { blocks, step: known } = await answer.json();
      while (run.last < known && !this.isClosed) await new Promise((resolve) => { setTimeout(resolve, 50); });
      for (const [block, identity] of wanted) {
        const found = blocks[block];
        // A block that another request got meanwhile waits for the next time.
        if (step === null && run.identity(run.newest, block) !== identity) continue;
        if (found) run.texts.set(identity, { fill: found.tokens.length, text: found.text ?? "" });
        else this.missed.add(identity);
      }
      store.textVersion += 1;
      redraw("map", "tree", "inspector", "tables");
    } catch (error) {
      if (error.status !== 404) this.close(); // 404: the log no longer has the step
    } finally {
      this.isBusy = false;
    }
  }

  /** Return the blocks whose text is not known, with the identities of their contents. */
  wanted(state) {
    const found = new Map();
    for (let block = 0; block < state.kind.length && found.size < MOST; block += 1) {
      if (!state.kind[block] || state.tree.get(block)?.text) continue;
      const identity = this.run.identity(state, block);
      if (this.run.texts.get(identity)?.fill !== state.fill[block] && !this.missed.has(identity)) found.set(block, identity);
    }
    return found;
  }
}
