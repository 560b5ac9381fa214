// The playground: a form, its answers token by token, and the experiments.

import { Answer } from "./answers.js";
import { $, announce, duration, el, some, tip, visible } from "./dom.js";
import { colour, letters } from "./paint.js";
import { Provoke } from "./provoke.js";
import { change, redraw, select, shown, store } from "./store.js";

const NUMBERS = ["max_tokens", "temperature", "n", "seed", "top_p", "top_k", "min_p"];
const MAX_ANSWERS = 8;
const MAX_RUNNING = 3; // streams beside the page's own; a browser opens six connections to a server

export class Playground {
  constructor(config) {
    this.config = config;
    this.answers = [];
    this.views = new Map();
    this.provoke = new Provoke({
      send: (changes, prompts) => this.send(changes, prompts),
      running: () => this.running(),
      limits: config.limits,
      newest: () => store.run.newest,
      lanes: () => [...store.run.lanes.all.values()],
      say: (text) => { $("promise").textContent = text; },
    });
    $("play-note").textContent = `${config.model}, at most ${config.limits.max_model_len} tokens`;
    $("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running().length < MAX_RUNNING) this.send();
      else $("promise").textContent = `${MAX_RUNNING} requests are running. Wait for one of them, or disconnect.`;
    });
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask").requestSubmit();
    });
    for (const button of document.querySelectorAll("[data-do]")) {
      button.addEventListener("click", () => this.experiment(button));
    }
  }

  running() {
    return this.answers.filter((answer) => answer.state === "running");
  }

  async experiment(button) {
    button.disabled = true;
    try {
      await this.provoke[button.dataset.do]();
    } finally {
      button.disabled = false;
    }
  }

  /** Return the sampling fields of the form. */
  fields() {
    const { elements } = $("ask");
    const fields = {};
    for (const name of NUMBERS) if (elements[name].value !== "") fields[name] = Number(elements[name].value);
    if (elements.stop.value) fields.stop = [elements.stop.value];
    if (elements.regex.value) fields.structured_outputs = { regex: elements.regex.value };
    return fields;
  }

  /** Send the form with some fields changed, or other prompts, and return the answer. */
  send(changes = {}, prompts = null) {
    const { elements } = $("ask");
    const mode = prompts ? "text" : elements.mode.value;
    const answer = new Answer(prompts ?? [elements.prompt.value], { ...this.fields(), ...changes }, mode, () => redraw("play"));
    this.answers.unshift(answer);
    for (const old of this.answers.splice(MAX_ANSWERS)) {
      for (const each of this.views.get(old) ?? []) each.node.remove();
      this.views.delete(old);
    }
    change({ follows: store.run?.isLive ?? false });
    return answer;
  }

  draw() {
    const lit = this.lit();
    const place = $("answers");
    for (const answer of [...this.answers].reverse()) {
      if (!this.views.has(answer)) {
        const views = answer.prompts.map((prompt, i) => new AnswerView(answer, prompt, i));
        this.views.set(answer, views);
        place.prepend(...views.map((each) => each.node));
      }
      for (const each of this.views.get(answer)) each.draw(lit);
    }
  }

  /** Return which positions of which sequences the selected block has. */
  lit() {
    const { selected } = store;
    const found = new Map();
    if (selected?.kind !== "block") return found;
    const state = shown();
    const size = store.run.blockSize;
    for (const name of state.holders().get(selected.id) ?? []) {
      const index = state.seqs.get(name).blocks.indexOf(selected.id);
      found.set(name, [index * size, (index + 1) * size]);
    }
    return found;
  }
}

/** The choices of one prompt. */
class AnswerView {
  constructor(answer, prompt, place) {
    Object.assign(this, { answer, place });
    this.head = el("span");
    this.leave = el("button", { type: "button", title: "Close this connection", onclick: () => answer.leave() }, "leave");
    this.who = el("b");
    this.error = el("p", { hidden: true });
    this.choices = answer.choices.slice(place * answer.n, (place + 1) * answer.n).map((choice, index) => new ChoiceView(this, choice, index));
    this.node = el("article", { className: "answer" },
      el("header", {}, el("i", { className: "dot" }), this.who, this.head, this.leave),
      el("p", { className: "note" }, visible(prompt).slice(0, 90) + (prompt.length > 90 ? "…" : "")),
      this.choices.map((choice) => choice.node),
      this.error);
  }

  draw(lit) {
    const { answer } = this;
    if (this.number === undefined) this.find();
    const isAlone = answer.prompts.length === 1;
    const reasons = this.choices.map(({ choice }) => choice.reason);
    const size = this.choices.reduce((sum, { choice }) => sum + choice.tokens.length, 0);
    const state = answer.state === "running" && reasons.every(Boolean) ? "done" : answer.state;
    const words = [
      { running: size ? "answering" : "waiting", done: reasons.join(", "), left: "disconnected", failed: "failed" }[state],
      isAlone && answer.usage ? `${answer.usage.prompt_tokens} + ${answer.usage.completion_tokens} tokens` : some(size, "token"),
      isAlone && answer.usage ? `${answer.usage.prompt_tokens_details.cached_tokens} cached` : "",
      isAlone && answer.metrics?.num_preemptions ? `preempted ${some(answer.metrics.num_preemptions, "time")}` : "",
      isAlone && answer.metrics?.time_to_first_token_ms ? `TTFT ${duration(answer.metrics.time_to_first_token_ms / 1000)}` : "",
    ];
    this.head.textContent = words.filter(Boolean).join(" · ");
    this.leave.hidden = state !== "running";
    this.error.hidden = !answer.error;
    this.error.textContent = answer.error ?? "";
    for (const choice of this.choices) choice.draw(lit);
  }

  /** Find the number of this prompt's request, for the steps and blocks of tokens. */
  find() {
    const id = this.answer.requestId(this.place);
    const lane = this.answer.id && store.run?.isLive && [...store.run.lanes.all.values()].find((each) => each.requestId === id);
    if (!lane) return;
    this.number = lane.number;
    this.node.style.setProperty("--of", colour(lane.number));
    this.who.textContent = letters(lane.number);
  }

  lane(index) {
    return store.run.lanes.all.get(`${this.number}.${index}`);
  }
}

class ChoiceView {
  constructor(view, choice, index) {
    this.view = view;
    this.choice = choice;
    this.index = index;
    this.num = 0;
    this.at = -1;
    this.spans = [];
    this.node = el("div", {
      className: "tokens", tabIndex: 0, role: "group",
      "aria-label": `Answer ${index + 1}: tokens. Arrow keys move, Enter shows the block.`,
      onkeydown: (event) => this.key(event),
      onmouseover: (event) => this.hover(event),
      onmouseleave: () => tip(null),
      onclick: (event) => this.pick(this.spans.indexOf(event.target)),
    });
  }

  draw(lit) {
    const { tokens } = this.choice;
    for (; this.num < tokens.length; this.num += 1) {
      const token = tokens[this.num];
      const surprise = Math.max(0, Math.min(1, -token.logprob / 5));
      const span = el("span", { vars: { "--p": surprise.toFixed(3) } }, token.text);
      this.spans.push(span);
      this.node.append(span);
    }
    const start = this.start();
    const range = start === null ? undefined : lit.get(this.view.lane(this.index)?.name);
    if (!range && !this.wasLit) return;
    this.wasLit = Boolean(range);
    this.spans.forEach((span, i) => span.classList.toggle("lit", Boolean(range) && start + i >= range[0] && start + i < range[1]));
  }

  /** Return the position of the first token of the answer in its sequence. */
  start() {
    const name = this.view.lane(this.index)?.name;
    if (this.first === undefined && name) this.first = store.run.newest.seqs.get(name)?.num_prompt ?? (this.view.answer.prompts.length === 1 ? this.view.answer.usage?.prompt_tokens : undefined);
    return this.first ?? null;
  }

  hover(event) {
    const index = this.spans.indexOf(event.target);
    if (index < 0) return tip(null);
    return tip(this.describe(index), event);
  }

  describe(index) {
    const { text, logprob, top } = this.choice.tokens[index];
    const place = this.place(index);
    return [
      el("strong", {}, `“${visible(text)}” ${(100 * Math.exp(logprob)).toFixed(1)} %`),
      el("div", {}, [`log-probability ${logprob.toFixed(3)}`, place.step && `step ${place.step}`, place.block !== undefined && `block ${place.block}`].filter(Boolean).join(" · ")),
      ...top.slice(0, 5).map(([other, each]) => el("div", { className: "row" },
        el("b", {}, visible(other)), el("span", {}, el("i", { vars: { "--p": Math.exp(each).toFixed(4) } })), `${(100 * Math.exp(each)).toFixed(1)} %`)),
    ];
  }

  /** Return the step that sampled a token, and the block that has it in the state that is shown. */
  place(index) {
    const lane = this.view.lane(this.index);
    const start = this.start();
    if (!lane || start === null) return {};
    const position = start + index;
    const table = shown().seqs.get(lane.name)?.blocks ?? [];
    return { step: lane.made.get(position), block: table[Math.floor(position / store.run.blockSize)], lane, position };
  }

  /** Show the step of a token, and its block. */
  async pick(index) {
    const { step, lane, position } = index < 0 ? {} : this.place(index);
    if (!step) return;
    const slot = Math.floor(position / store.run.blockSize);
    const written = lane.made.get(position + 1) ?? step;
    const at = lane.end !== null && lane.end <= written ? Math.max(step, written - 1) : written;
    change({ step: at, follows: false });
    const state = await store.run.exactly(at);
    const table = state.seqs.get(lane.name)?.blocks ?? [];
    const block = table[slot] ?? table[table.length - 1];
    if (block !== undefined) select({ kind: "block", id: block }, true);
    announce(`Token “${this.choice.tokens[index].text}”: step ${step}, block ${block ?? "already free"}`);
  }

  key(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10 };
    if (event.key === "Enter") return this.pick(this.at);
    if (!(event.key in moves) || !this.spans.length) return undefined;
    event.preventDefault();
    event.stopPropagation();
    this.spans[this.at]?.classList.remove("at");
    this.at = Math.max(0, Math.min(this.spans.length - 1, this.at + moves[event.key]));
    const span = this.spans[this.at];
    span.classList.add("at");
    const { left, bottom } = span.getBoundingClientRect();
    tip(this.describe(this.at), { clientX: left, clientY: bottom });
    const { text, logprob } = this.choice.tokens[this.at];
    announce(`${text}, ${(100 * Math.exp(logprob)).toFixed(0)} percent`);
    return undefined;
  }
}
