// Links to a moment: #run/step/selection, such as #small-pool/39/seq:2.0 or #live-1a2b3c4d//request:cmpl-5e6f.

const KINDS = new Set(["block", "tile", "seq", "request"]);

/** Return the parts of a link, or null if it is none. */
export function parsed(hash) {
  const [name, step = "", selection = ""] = hash.replace(/^#/, "").split("/").map(decoded);
  if (!name) return null;
  const [, kind, id, all] = /^(\w+):(.+?)(\*?)$/.exec(selection) ?? [];
  const isNumber = kind === "block" || kind === "tile";
  const selected = !KINDS.has(kind) || (isNumber && !/^\d{1,9}$/.test(id)) ? null : { kind, id: isNumber ? Number(id) : id, ...(all ? { all: true } : {}) };
  return { name, end: 0, step: /^\d{1,15}$/.test(step) ? Number(step) : null, selected };
}

export function link(name, step, selected) {
  const selection = selected && KINDS.has(selected.kind) ? `/${selected.kind}:${encodeURIComponent(selected.id)}${selected.all ? "*" : ""}` : "";
  return `#${encodeURIComponent(name)}/${step}${selection}`;
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return "";
  }
}
