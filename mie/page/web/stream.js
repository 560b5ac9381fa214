// The live stream as one tab hears it: shared with the other tabs of the browser where workers can be shared.

export const KINDS = ["head", "key", "steps", "now", "truth", "alive", "end"];

/** A stream of the browser's hub (`hub.js`), with the parts of an EventSource that the page needs. */
class SharedStream {
  constructor(url) {
    this.readyState = /** @type {number} */ (EventSource.CONNECTING);
    this.listeners = new Map();
    this.onerror = () => {};
    const worker = new SharedWorker("mie/page/hub.js", { type: "module" });
    worker.onerror = () => this.fail(EventSource.CLOSED);
    this.port = worker.port;
    this.port.onmessage = ({ data: { kind, data, state } }) => {
      if (this.readyState === EventSource.CLOSED) return;
      if (!kind) return this.fail(state);
      this.readyState = EventSource.OPEN;
      this.listeners.get(kind)?.({ data });
    };
    this.port.postMessage({ url: new URL(url, document.baseURI).href });
  }

  addEventListener(kind, act) {
    this.listeners.set(kind, act);
  }

  fail(state) {
    this.readyState = state;
    this.onerror();
  }

  close() {
    if (this.readyState !== EventSource.CLOSED) this.port.postMessage({});
    this.readyState = EventSource.CLOSED;
  }
}

export function openStream(url) {
  return "SharedWorker" in globalThis ? new SharedStream(url) : new EventSource(url);
}
