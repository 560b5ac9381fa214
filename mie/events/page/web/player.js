// Plays the steps of a run, a few each second.

import { change, seek, store } from "./store.js";

const SECONDS = 20; // that a whole run takes at most

export class Player {
  toggle() {
    const { run, follows, plays } = store;
    if (!run) return;
    if (plays) this.stop();
    else if (run.isLive && follows) change({ follows: false });
    else if (run.isLive && store.step >= run.last) change({ follows: true });
    else this.start();
  }

  start() {
    const { run } = store;
    if (store.step >= run.last) seek(run.first);
    change({ plays: true });
    const rate = Math.max(6, run.steps.length / SECONDS);
    const from = { time: performance.now(), index: run.indexOf(store.step) };
    const tick = (now) => {
      if (!store.plays || store.run !== run) return;
      const index = Math.min(run.steps.length - 1, from.index + Math.floor(((now - from.time) * rate) / 1000));
      if (index >= 0) seek(run.steps[index].step);
      if (index >= run.steps.length - 1) this.stop();
      else requestAnimationFrame(tick);
    };
    requestAnimationFrame(tick);
  }

  stop() {
    if (store.plays) change({ plays: false });
  }
}
