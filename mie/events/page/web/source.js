// Where records come from: a server, a recorded run, a file, or the page itself.

import { Run } from "./run.js";

/** Fetch from this page's server. Every request says that the page sends it. */
export async function ask(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: { "x-mie-page": "1", ...options.headers } });
  if (answer.ok) return answer;
  const { error } = await answer.json().catch(() => ({ error: null }));
  const message = error?.message ?? `${path}: ${answer.status} ${answer.statusText}`;
  throw Object.assign(new Error(message), { status: answer.status });
}

export const askJson = async (path, options) => (await ask(path, options)).json();

export const post = (path, body, options = {}) => ask(path, {
  method: "POST",
  body: JSON.stringify(body),
  ...options,
  headers: { "content-type": "application/json", ...options.headers },
});

export function parse(text) {
  return text.split("\n").filter((line) => line).map((line, i) => {
    try {
      return JSON.parse(line);
    } catch {
      throw new Error(`line ${i + 1} is not JSON`);
    }
  });
}

export function recorded(records, title) {
  const [head, ...rest] = records;
  if (head?.record !== "head") {
    throw new Error(head?.event === "snapshot"
      ? "this is a raw event log, and this page has no server to replay it: open it on a page of mie serve, or write it with “mie trace run.jsonl --page run.page.jsonl”"
      : "this file has no page records");
  }
  const run = new Run(head);
  run.title = title;
  for (const record of rest) run.add(record);
  return run;
}

/** Return the run of a file that was dropped or chosen. A server replays event logs. */
export async function opened(file, hasServer) {
  const start = await file.slice(0, 65536).text();
  if (/^\s*\{[^\n]*"event":\s*"snapshot"/.test(start) && hasServer) {
    const answer = await ask("mie/trace", { method: "POST", body: file, headers: { "content-type": "application/x-ndjson" } });
    return recorded(parse(await answer.text()), file.name);
  }
  return recorded(parse(await file.text()), file.name);
}

/** Return the records that this page has inside, or null. */
export function embedded() {
  const node = document.getElementById("mie-runs");
  return node ? JSON.parse(node.textContent) : null;
}

export async function unpacked({ title, gzip }) {
  const bytes = Uint8Array.from(atob(gzip), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return recorded(parse(await new Response(stream).text()), title);
}

/** The live stream of the server. `on` hears of runs, records, truth and trouble. */
export class Live {
  constructor(on) {
    this.on = on;
    this.run = null;
    this.numFilling = 0; // requests for the past that are on their way
    this.events = new EventSource("mie/events");
    for (const kind of ["head", "key", "steps", "now", "truth", "end"]) {
      this.events.addEventListener(kind, (event) => this.take(JSON.parse(event.data)));
    }
    this.events.onopen = () => on.trouble("");
    this.events.onerror = () => on.trouble(this.events.readyState === EventSource.CLOSED ? "The server closed the stream. Reload to try again." : "The connection is lost. The page tries again.");
  }

  take(record) {
    if (record.record === "head") this.head = record;
    else if (record.record === "truth") this.on.truth(record);
    else if (record.record === "end") {
      this.on.trouble(`The live stream ended: ${record.reason}`);
      this.events.close();
    } else this.add(record);
  }

  add(record) {
    // A key of the past comes from a server that was started again.
    const isNew = !this.run || (record.record === "key" && record.step < this.run.last);
    if (isNew) {
      this.run = new Run(this.head);
      this.run.fetchExact = (step) => askJson(`mie/state?step=${step}`);
      this.run.onExact = () => this.on.change();
    }
    const { run } = this;
    const isGap = record.record === "key" && record.step !== run.last;
    run.add(record);
    if (isNew) this.on.run(run);
    if ((isGap || isNew) && record.step > 0) this.fill(run, record.step);
    this.on.change();
  }

  async fill(run, step) {
    this.numFilling += 1;
    try {
      const answer = await ask(`mie/history?until=${step}`);
      run.prepend(parse(await answer.text()));
      this.on.change();
    } catch (error) {
      if (error.status !== 404) this.on.trouble(`The past cannot be read: ${error.message}`);
    } finally {
      this.numFilling -= 1;
    }
  }
}
