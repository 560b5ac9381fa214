// What the map and the tree have in common: one points at things, selects them, and moves between them by keys.

import { announce, tip } from "./dom.js";
import { change } from "./store.js";

/** Return whether a box has a point inside. */
export const around = (x, y) => (box) => x >= box.x && x < box.x + box.w && y >= box.y && y < box.y + box.h;

/** A part has `at(x, y)`, `describe(thing)`, `click(thing)`, and `key(event)`, which returns a thing to select. */
export function listen(part) {
  const { surface } = part;
  const { canvas } = surface;
  const on = (type, act) => canvas.addEventListener(type, (event) => surface.height && act(event));
  on("pointermove", (event) => {
    const thing = part.at(...surface.point(event));
    canvas.style.cursor = thing ? "pointer" : "default";
    tip(thing && part.describe(thing), event);
  });
  on("pointerleave", () => tip(null));
  on("click", (event) => part.click(part.at(...surface.point(event))));
  on("keydown", (event) => {
    const thing = event.ctrlKey || event.metaKey || event.altKey ? null : part.key(event);
    if (!thing) return;
    event.preventDefault();
    event.stopPropagation();
    change({ selected: thing });
    announce(part.describe(thing).join(". "));
  });
}
