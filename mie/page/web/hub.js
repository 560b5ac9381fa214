// A shared worker: one live stream for all tabs of a browser, which opens six connections to a server.
//
// The server numbers its events, the same on each stream, and a state has the number of the last event before it. A tab
// that joins late gets its state from a second stream, which ends with it. After that it gets the events with larger
// numbers.

import { KINDS } from "./stream.js";

/** Hear all events of a stream, as {kind, data, number}. Some have no number. */
function listen(stream, act) {
  for (const kind of KINDS) {
    stream.addEventListener(kind, ({ data, lastEventId }) => act({ kind, data, number: Number(lastEventId.split(".")[1]) }));
  }
  return stream;
}

export class Hub {
  /** `open` returns a new stream. */
  constructor(open) {
    this.open = open;
    this.seen = new Map(); // port of a tab → the number of the last event that it knows, or −1 before its first state
    this.main = null;
    this.second = null;
    this.server = null; // whose events the main stream brings
  }

  join(port) {
    this.seen.set(port, -1);
    if (!this.main) {
      this.hasKey = false;
      this.main = listen(this.open(), (event) => this.take(event));
      this.main.onerror = () => this.trouble(this.main.readyState);
    } else if (this.hasKey) this.greet();
  }

  leave(port) {
    this.seen.delete(port);
    if (!this.seen.size) this.end();
  }

  end() {
    this.main?.close();
    this.main = null;
    this.endSecond();
  }

  endSecond() {
    this.second?.close();
    this.second = null;
  }

  /** Tell all tabs that the connection is lost. If the browser does not try again, each tab does, by joining. */
  trouble(state) {
    for (const port of this.seen.keys()) port.postMessage({ state });
    if (state !== EventSource.CLOSED) return;
    this.seen.clear();
    this.end();
  }

  take(event) {
    if (event.kind === "head") {
      const { server } = JSON.parse(event.data);
      if (server !== this.server) { // its numbers say nothing about those of the last one
        this.endSecond();
        for (const port of this.seen.keys()) this.seen.set(port, -1);
      }
      this.server = server;
      this.head = event;
    }
    if (event.kind === "key") this.hasKey = true;
    if (this.second) this.queue.push(event);
    for (const port of this.seen.keys()) this.tell(port, event);
  }

  tell(port, event) {
    const { kind, data, number } = event;
    if (!["head", "alive", "end"].includes(kind)) {
      const seen = this.seen.get(port);
      if (seen < 0 ? kind !== "key" : number <= seen) return;
      this.seen.set(port, number);
      if (seen < 0) port.postMessage({ kind: "head", data: this.head.data });
    }
    port.postMessage({ kind, data });
  }

  /** Get the state for tabs that have none. They get what the main stream brings meanwhile after it. */
  greet() {
    if (this.second) return;
    this.queue = [];
    const stream = listen(this.open(), (event) => {
      if (event.kind === "head") {
        this.head = event;
        if (JSON.parse(event.data).server !== this.server) this.endSecond(); // the main stream will say so, too
      } else if (event.kind === "key" && stream === this.second) {
        const fresh = [...this.seen].flatMap(([port, seen]) => (seen < 0 ? [port] : []));
        for (const port of fresh) for (const each of [event, ...this.queue]) this.tell(port, each);
        this.endSecond();
      }
    });
    stream.onerror = () => {
      if (stream !== this.second) return;
      this.endSecond();
      for (const [port, seen] of this.seen) {
        if (seen >= 0) continue;
        port.postMessage({ state: EventSource.CLOSED });
        this.seen.delete(port);
      }
    };
    this.second = stream;
  }
}

const hubs = new Map(); // address of a stream → Hub

globalThis.addEventListener?.("connect", (/** @type {any} */ { ports: [port] }) => {
  let hub;
  port.onmessage = ({ data: { url } }) => {
    if (!url) return hub.leave(port);
    if (!hubs.has(url)) hubs.set(url, new Hub(() => new EventSource(url)));
    hub = hubs.get(url);
    hub.join(port);
  };
});
