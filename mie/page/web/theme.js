// Dark or light: the system's choice until the reader makes one, which the browser keeps.

import { ink, readTheme } from "./paint.js";
import { redraw } from "./store.js";

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  readTheme();
  redraw();
}

export function switchTheme() {
  const theme = ink.dark ? "light" : "dark";
  setTheme(theme);
  stored((storage) => storage.setItem("mie-theme", theme));
}

/** Set the first theme, and let a button switch it. */
export function startTheme(button) {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const preferred = () => (dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => setTheme(preferred()));
  addEventListener("resize", readTheme);
  button.addEventListener("click", switchTheme);
  setTheme(stored((storage) => storage.getItem("mie-theme")) ?? preferred());
}

/** Use the browser's storage, which some browsers refuse to a file. */
export function stored(use) {
  try {
    return use(localStorage);
  } catch {
    return null;
  }
}
