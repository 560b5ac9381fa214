// Colours, patterns and canvases.

const NAMES = ["bg", "panel", "sunk", "line", "edge", "text", "soft", "accent", "good", "bad", "free", "hatch", "disk"];
const NUM_COLOURS = 8;

/** The colours of the theme, read from the style sheet. */
export const ink = { of: [], dark: false };

export function readTheme() {
  const style = getComputedStyle(document.documentElement);
  for (const name of NAMES) ink[name] = style.getPropertyValue(`--${name}`).trim();
  ink.of = Array.from({ length: NUM_COLOURS }, (_, i) => style.getPropertyValue(`--c${i}`).trim());
  ink.dark = document.documentElement.dataset.theme === "dark";
  ink.rem = parseFloat(style.fontSize);
  ink.hatching = null;
}

export const numberOf = (name) => parseInt(name, 10);

/** Return the colour of a request. Every eighth has the same, so a letter stands beside it. */
export const colour = (number) => ink.of[number % NUM_COLOURS];

/** Return the letters of a request: A … Z, AA … */
export function letters(number) {
  let text = "";
  for (let n = number + 1; n > 0; n = Math.floor((n - 1) / 26)) text = String.fromCharCode(65 + ((n - 1) % 26)) + text;
  return text;
}

/** Return the label of a sequence "7.1": its request's letters, and the choice if there are several. */
export function label(name, n = 1) {
  const [number, index] = name.split(".").map(Number);
  return letters(number) + (n > 1 || index ? `${index + 1}` : "");
}

export const requests = (names) => [...new Set(names.map(numberOf))];

export const prefersStill = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

export function hatch(pen) {
  if (ink.hatching) return ink.hatching;
  const size = 6;
  const tile = document.createElement("canvas");
  tile.width = tile.height = size;
  const draw = tile.getContext("2d");
  draw.strokeStyle = ink.hatch;
  draw.lineWidth = 1.3;
  draw.beginPath();
  for (const shift of [-size, 0, size]) {
    draw.moveTo(shift - 1, size + 1);
    draw.lineTo(shift + size + 1, -1);
  }
  draw.stroke();
  ink.hatching = pen.createPattern(tile, "repeat");
  return ink.hatching;
}

/** Mark the end of a block whose tokens a snapshot of the state stands for. */
export function flag(pen, x, y, width, height) {
  const size = Math.max(2, Math.min(0.22 * ink.rem, width / 4));
  rect(pen, ink.text, x + width - size, y, size, height);
}

/** Mark a block with contents from a disk. */
export function band(pen, x, y, width, height) {
  rect(pen, ink.disk, x, y, width, Math.max(2, Math.min(0.22 * ink.rem, height / 5)));
}

/** A canvas that is as wide as its place and as high as its view asks for. */
export class Surface {
  constructor(canvas, onResize) {
    this.canvas = canvas;
    this.pen = canvas.getContext("2d");
    this.width = canvas.clientWidth;
    new ResizeObserver(() => {
      if (canvas.clientWidth === this.width) return;
      this.width = canvas.clientWidth;
      onResize();
    }).observe(canvas);
  }

  /** Clear the canvas, and return its pen in CSS pixels. */
  begin(height) {
    const { canvas, pen } = this;
    const ratio = Math.min(devicePixelRatio || 1, 2);
    this.width = canvas.clientWidth || canvas.parentElement.clientWidth;
    const [w, h] = [Math.round(this.width * ratio), Math.round(height * ratio)];
    if (canvas.width !== w || canvas.height !== h) {
      canvas.width = w;
      canvas.height = h;
      canvas.style.height = `${height}px`;
    }
    this.height = height;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, this.width, height);
    pen.textBaseline = "middle";
    pen.textAlign = "left";
    pen.globalAlpha = 1;
    return pen;
  }

  point(event) {
    const { left, top } = this.canvas.getBoundingClientRect();
    return [event.clientX - left, event.clientY - top];
  }
}

export const font = (size, weight = 400) => `${weight} ${(size * ink.rem).toFixed(1)}px ui-sans-serif, system-ui, "Segoe UI", Roboto, Arial, sans-serif`;

/** Write text in a size, a weight and a tone, cut to a width. */
export function write(pen, text, x, y, { size = 0.66, weight = 400, tone = ink.soft, align = "left", width = Infinity } = {}) {
  if (width < 4) return;
  pen.font = font(size, weight);
  pen.fillStyle = tone;
  pen.textAlign = align;
  let cut = text;
  if (width !== Infinity && pen.measureText(cut).width > width) {
    cut = cut.slice(0, fitting(pen, cut, width));
    while (cut && pen.measureText(`${cut}…`).width > width) cut = cut.slice(0, -1);
    cut &&= `${cut}…`;
  }
  pen.fillText(cut, x, y);
  pen.textAlign = "left";
}

/** Return about how many letters of a text fit a width: not more than do. */
function fitting(pen, text, width) {
  const whole = pen.measureText(text).width;
  if (whole <= width) return text.length;
  let size = Math.max(1, Math.floor((text.length * width) / whole));
  while (size > 1 && pen.measureText(text.slice(0, size)).width > width) size -= 1;
  return size;
}

/** Write text in lines that break at spaces, the last of them cut. */
export function wrap(pen, text, x, y, numLines, pitch, style) {
  let rest = text;
  for (let line = 0; line < numLines && rest; line += 1) {
    pen.font = font(style.size);
    let size = fitting(pen, rest, style.width);
    const space = rest.lastIndexOf(" ", size);
    if (size < rest.length && space > size * 0.5) size = space + 1;
    write(pen, line === numLines - 1 ? rest : rest.slice(0, size), x, y + line * pitch, style);
    rest = rest.slice(size);
  }
}

export function fill(pen, tone) {
  pen.fillStyle = tone;
  pen.fill();
}

export function stroke(pen, tone, width, dash = []) {
  pen.strokeStyle = tone;
  pen.lineWidth = width;
  pen.setLineDash(dash);
  pen.stroke();
  pen.setLineDash([]);
}

export function rect(pen, tone, x, y, width, height) {
  pen.fillStyle = tone;
  pen.fillRect(x, y, width, height);
}

export function path(pen, ...points) {
  pen.beginPath();
  for (const point of points) pen.lineTo(...point);
}

export function disc(pen, x, y, radius) {
  pen.beginPath();
  pen.arc(x, y, radius, 0, 7);
}

export function box(pen, x, y, width, height, radius) {
  pen.beginPath();
  pen.roundRect(x, y, width, height, Math.max(0, Math.min(radius, width / 2, height / 2)));
}
