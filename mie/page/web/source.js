// Where records come from: a server, a recorded run, a file, or the page itself.

import { Run } from "./run.js";
import { KINDS, openStream } from "./stream.js";

/** The model that the page's address names, of several behind one server. */
export const chosen = new URLSearchParams(globalThis.location?.search).get("model");

/** Return a path about a model. */
export const about = (path, model = chosen) => model ? `${path}${path.includes("?") ? "&" : "?"}${new URLSearchParams({ model })}` : path;

/** Fetch from this page's server. Every request says that the page sends it. */
export async function ask(path, options = {}) {
  const answer = await fetch(about(path), { ...options, headers: { "x-mie-page": "1", ...options.headers } });
  if (answer.ok) return answer;
  const { error } = await answer.json().catch(() => ({ error: null }));
  const message = error?.message ?? `${path}: ${answer.status} ${answer.statusText}`;
  throw Object.assign(new Error(message), { status: answer.status });
}

export const askJson = async (path, options) => (await ask(path, options)).json();

/** Ask about a run. Another server, which may have begun at this address meanwhile, refuses to answer. */
export const askOf = ({ head }, path, values) => ask(`${path}?${new URLSearchParams({ ...values, server: head.server })}`);

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

/** Return a recorded run that comes with the page. */
export async function fetched({ name, title }) {
  return recorded(parse(await (await ask(`mie/page/runs/${name}.page.jsonl`)).text()), title);
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

const SILENCE = 5000; // milliseconds without news, which come every two seconds at least
const HIDDEN = 2000; // milliseconds after which a page that nobody sees gives up its connection
const AGAIN = [1000, 10000]; // milliseconds until the first and the last further try

/**
 * The live stream of the server. `on` hears of runs, records, truth and trouble.
 *
 * Only a page that can be seen has a stream, and all pages of a browser share one (`hub.js`).
 */
export class Live {
  constructor(on) {
    this.on = on;
    this.run = null;
    this.numFilling = 0; // requests for the past that are on their way
    this.connect();
    setInterval(() => this.watch(), SILENCE / 5);
    document.addEventListener("visibilitychange", () => this.look());
    addEventListener("pagehide", () => this.events.close());
    addEventListener("pageshow", () => this.look());
  }

  connect() {
    clearTimeout(this.timer);
    this.events?.close();
    this.events = openStream("mie/events");
    this.heard = performance.now();
    for (const kind of KINDS) {
      this.events.addEventListener(kind, (event) => this.take(JSON.parse(event.data)));
    }
    this.events.onerror = () => {
      if (this.events.readyState === EventSource.CLOSED) this.again();
      else this.lose("The connection is lost. The page tries again.");
    };
  }

  /** Connect again after a while, which grows: the server may be starting, or gone. */
  async again(why = "The connection is lost.") {
    this.events.close();
    this.delay = Math.min(2 * (this.delay ?? AGAIN[0] / 2), AGAIN[1]);
    this.lose(`${why} The page tries again.`);
    this.timer = setTimeout(() => this.connect(), this.delay);
    await askJson("mie/config").catch((error) => error.status === 401 && location.reload());
  }

  /** Connect while the page can be seen. */
  look() {
    clearTimeout(this.timer);
    if (document.hidden) this.timer = setTimeout(() => this.events.close(), HIDDEN);
    else if (this.events.readyState === EventSource.CLOSED) this.connect();
  }

  /** Say so if the server is silent. */
  watch() {
    const silence = performance.now() - this.heard;
    if (silence > SILENCE && this.events.readyState === EventSource.OPEN) this.lose(`The server has been silent for ${Math.floor(silence / 1000)} s.`);
  }

  lose(why) {
    this.isLost = true;
    this.on.trouble(why);
  }

  take(record) {
    this.heard = performance.now();
    if (record.record === "end") {
      this.again(`The live stream ended: ${record.reason}.`);
      return;
    }
    if (this.isLost) this.on.trouble("");
    this.isLost = false;
    this.delay = null;
    if (record.record === "head") {
      // The steps of another server are another run, whatever their numbers are.
      if (this.head && this.head.server !== record.server) {
        this.run = null;
        this.on.server();
      }
      this.head = record;
    } else if (record.record === "truth") this.on.truth(record);
    else if (record.record !== "alive") this.add(record);
  }

  add(record) {
    const isNew = !this.run;
    if (isNew) {
      this.run = new Run(this.head);
      const { run } = this;
      run.fetchExact = async (step) => (await askOf(run, "mie/state", { step })).json();
      run.onExact = () => this.on.change();
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
      const answer = await askOf(run, "mie/history", { until: step });
      run.prepend(parse(await answer.text()));
      this.on.change();
    } catch (error) {
      if (error.status !== 404) this.on.trouble(`The past cannot be read: ${error.message}`);
    } finally {
      this.numFilling -= 1;
    }
  }
}
