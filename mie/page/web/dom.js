// Small helpers for elements and words.

/** @type {(id: string) => any} */
export const $ = (id) => document.getElementById(id);

/** Return an element with properties and children. Text is always text, never markup. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "vars") for (const [key, each] of Object.entries(value)) node.style.setProperty(key, each);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node && !name.includes("-")) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

export const chip = (content, onclick, props = {}) => el("button", { type: "button", className: "chip", onclick, ...props }, content);

export function facts(pairs) {
  const shown = pairs.filter(([, value]) => value !== undefined && value !== null && value !== "");
  return el("dl", { className: "facts" }, shown.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

const whole = new Intl.NumberFormat("en");
export const count = (number) => whole.format(Math.round(number));
export const some = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;
export const percent = (part, all) => (all ? `${((100 * part) / all).toFixed(part && part < all && part / all < 0.1 ? 1 : 0)} %` : "–");

export function duration(seconds) {
  if (!(seconds >= 0)) return "–";
  if (seconds < 0.001) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${(seconds * 1e3).toFixed(seconds < 0.01 ? 2 : 1)} ms`;
  return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
}

/** Show line breaks and other characters that would be invisible. */
export const visible = (text) => text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/\r/g, "␍");

/** Write text into an element, if it is not there yet. */
export function say(id, text) {
  const node = $(id);
  if (node.textContent !== text) node.textContent = text;
}

export const announce = (text) => say("announce", text);

const MARGIN = 14;

/** Show nodes or lines of text near the place of an event, or nothing. */
export function tip(content, { clientX: x, clientY: y } = { clientX: 0, clientY: 0 }) {
  const node = $("tip");
  node.hidden = !content?.length;
  if (node.hidden) return;
  node.replaceChildren(...content.map((each) => (typeof each === "string" ? el("div", {}, each) : each)));
  const { offsetWidth: width, offsetHeight: height } = node;
  const top = y + MARGIN + height > innerHeight - 50 ? y - height - MARGIN : y + MARGIN;
  node.style.left = `${Math.max(6, Math.min(x + MARGIN, innerWidth - width - 6))}px`;
  node.style.top = `${Math.max(6, top)}px`;
}
