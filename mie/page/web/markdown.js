// Markdown as elements. A library finds the tokens; nothing is ever parsed as HTML, so an answer cannot bring any.

import { el } from "./dom.js";
import { lexer } from "./vendor/marked.js";

const MOST = 100000; // characters that are formatted; a longer text stays plain
const SAFE = /^(https?|mailto):/i;
const NAMED = { amp: "&", lt: "<", gt: ">", quot: '"', nbsp: "\u00a0" };

/** Return the nodes of a text. */
export function markdown(text) {
  try {
    return text.length > MOST ? [plain(text)] : all(lexer(text));
  } catch {
    return [plain(text)]; // for instance nested too deeply
  }
}

const plain = (text) => el("p", { className: "plain" }, text);

const all = (tokens) => tokens.flatMap(one);

/** Return the contents of a token: its inner tokens, or its text. */
const inside = (token) => (token.tokens ? all(token.tokens) : [decoded(token.text ?? token.raw)]);

/** Return the nodes of a token. Kinds that are not known, HTML among them, stay the text that they are. */
function one(token) {
  switch (token.type) {
    case "space": case "def": return [];
    case "heading": return [el(`h${Math.min(6, token.depth + 2)}`, {}, inside(token))];
    case "paragraph": return [el("p", {}, inside(token))];
    case "blockquote": return [el("blockquote", {}, inside(token))];
    case "strong": case "em": case "del": return [el(token.type, {}, inside(token))];
    case "text": return inside(token);
    case "escape": case "html": return [token.text];
    case "codespan": return [el("code", {}, token.text)];
    case "code": return [code(token)];
    case "br": return [el("br")];
    case "hr": return [el("hr")];
    case "checkbox": return [el("input", { type: "checkbox", checked: token.checked, disabled: true }), " "];
    case "list": return [el(token.ordered ? "ol" : "ul", { start: token.ordered ? Number(token.start) : null }, token.items.map((item) => el("li", {}, all(item.tokens))))];
    case "table": return [table(token)];
    case "link": return [link(token)];
    case "image": return [link({ ...token, tokens: null, text: token.text || token.href })];
    default: return [token.raw];
  }
}

/** A link opens elsewhere. Other schemes than those of the web and of mail are left as text. */
function link(token) {
  if (!SAFE.test(token.href)) return el("span", {}, inside(token));
  return el("a", { href: token.href, target: "_blank", rel: "noopener noreferrer", title: token.title || token.href }, inside(token));
}

function code({ text, lang }) {
  const button = el("button", { type: "button", onclick: async () => {
    await navigator.clipboard.writeText(text);
    button.textContent = "copied";
  } }, "copy");
  return el("div", { className: "code" }, el("header", {}, (lang ?? "").split(" ")[0] || "code", button), el("pre", { tabIndex: 0 }, el("code", {}, text)));
}

function table({ header, rows }) {
  const row = (tag, cells) => el("tr", {}, cells.map((cell) => el(tag, { "data-align": cell.align }, all(cell.tokens))));
  return el("div", { className: "scroll", tabIndex: 0 }, el("table", {}, el("thead", {}, row("th", header)), el("tbody", {}, rows.map((cells) => row("td", cells)))));
}

const decoded = (text) => text.replace(/&(?:(amp|lt|gt|quot|nbsp)|#(\d{1,6}));/g, (_, name, number) => (name ? NAMED[name] : String.fromCodePoint(Math.min(Number(number), 0x10ffff))));
