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
    const rate = Math.max(6, run.steps.length / SECONDS) / 1000;
    let time = performance.now();
    const tick = async () => {
      if (!store.plays || store.run !== run) return;
      const num = Math.floor((performance.now() - time) * rate);
      const found = run.steps[Math.min(run.steps.length - 1, run.indexOf(store.step) + num)];
      if (num && found) {
        time += num / rate;
        if (!run.isExact(found.step)) {
          await run.exactly(found.step);
          time = performance.now(); // the clock stands still while the state is on its way
          if (!store.plays || store.run !== run) return;
        }
        seek(found.step);
        if (found.step >= run.last) this.stop();
      }
      requestAnimationFrame(tick);
    };
    requestAnimationFrame(tick);
  }

  stop() {
    if (store.plays) change({ plays: false });
  }
}
