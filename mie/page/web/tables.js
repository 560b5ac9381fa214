// The same data as tables, for screen readers and in numbers. Only open ones are drawn.

import { $, chip, count, el, some, visible } from "./dom.js";
import { describeSlot } from "./map.js";
import { KINDS } from "./state.js";
import { nameOf, redraw, select, shown, store } from "./store.js";
import { shape } from "./tree.js";

const PAGE = 100; // rows of a table at once

const COLUMNS = ["step", "num_prefill_tokens", "num_decode_tokens", "num_running", "num_waiting", "num_preempted", "num_blocks_used", "num_blocks_cached"];

const TABLES = [
  {
    title: "Requests",
    head: ["sequence", "request", "state", "tokens", "computed", "blocks"],
    rows(state) {
      const { runs, waits } = state.queues();
      return [...runs, ...waits].map((seq) => ({
        pick: { kind: "seq", id: seq.name },
        cells: () => [nameOf(seq.name), seq.request_id, seq.state, seq.num_tokens, seq.num_computed, seq.blocks.join(" ")],
      }));
    },
  },
  {
    title: "Blocks",
    head: ["block", "state", "references", "slots filled", "tables of", "text"],
    rows(state) {
      const holders = state.holders();
      const rows = [];
      for (let block = 0; block < state.kind.length; block += 1) {
        if (!state.kind[block]) continue;
        rows.push({
          pick: { kind: "block", id: block },
          cells: () => {
            const names = holders.get(block) ?? [];
            return [block, KINDS[state.kind[block]], state.refs[block], state.fill[block], names.map(nameOf).join(" "), visible(store.run.textOfBlock(state, block, names))];
          },
        });
      }
      return rows;
    },
  },
  {
    title: "Prefix tree",
    head: ["block", "after block", "hits", "from", "evicted as number", "text"],
    rows(state) {
      const { ranks } = shape(state);
      return [...state.tree].map(([block, node]) => ({
        pick: { kind: "block", id: block },
        cells: () => [block, node.parent ?? "", state.heat.get(block)?.uses ?? "", state.heat.get(block)?.disk ? "a disk" : "", ranks.get(block) ?? "", visible(store.run.textOfBlock(state, block))],
      }));
    },
  },
  {
    title: "States",
    head: ["slot", "contents"],
    rows(state) {
      return [...state.slots.keys()].sort((a, b) => a - b).map((slot) => ({ cells: () => [slot, describeSlot(state, slot)] }));
    },
  },
  {
    title: "Steps",
    head: ["step", "prefill", "decode", "running", "waiting", "preempted", "blocks used", "cached", "what happened"],
    rows() {
      const { run, step } = store;
      return run.between(step - PAGE, step).reverse().map((each) => ({
        cells: () => [
          ...COLUMNS.map((name) => run.value(each, name)),
          each.events.filter((event) => event.kind !== "decode").map((event) => `${event.kind} ${event.seq ?? event.block ?? ""}`.trim()).join(", "),
        ],
      }));
    },
  },
];

export class Tables {
  constructor() {
    this.parts = TABLES.map((table) => {
      const body = el("tbody");
      const more = el("p", { className: "note" });
      const node = el("details", { ontoggle: () => redraw("tables") },
        el("summary", {}, table.title),
        el("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": table.title },
          el("table", {}, el("caption", { className: "sr" }, table.title), el("thead", {}, el("tr", {}, table.head.map((name) => el("th", { scope: "col" }, name)))), body)),
        more);
      $("tables").append(node);
      return { table, body, more, node };
    });
  }

  draw() {
    for (const { table, body, more } of this.parts.filter((part) => part.node.open)) {
      const rows = table.rows(shown());
      body.replaceChildren(...rows.slice(0, PAGE).map((row) => {
        const [first, ...cells] = row.cells();
        return el("tr", {}, el("th", { scope: "row" }, row.pick ? chip(String(first), () => select(row.pick, true)) : String(first)),
          cells.map((cell, i) => el("td", { className: i === cells.length - 1 ? "long" : "" }, typeof cell === "number" ? count(cell) : cell)));
      }));
      more.textContent = !rows.length && !shown().isKnown ? store.run.whyUnknown(store.step) : rows.length > PAGE ? `The first ${PAGE} of ${some(rows.length, "row")}.` : "";
    }
  }
}
