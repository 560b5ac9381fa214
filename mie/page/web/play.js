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
      say: (text) => { $("promise").textContent = text; },
    });
    const { regex, mode } = $("ask").elements;
    regex.parentElement.hidden = !config.has_structured;
    mode[1].disabled = !config.has_chat;
    if (!config.has_chat) mode[1].parentElement.title = "The model has no chat template";
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
      await this.provoke.run(button.dataset.do);
    } finally {
      button.disabled = false;
    }
  }

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
    const views = answer.prompts.map((prompt, i) => new AnswerView(answer, prompt, i));
    this.answers.unshift(answer);
    this.views.set(answer, views);
    $("answers").prepend(...views.map((each) => each.node));
    for (const old of this.answers.splice(MAX_ANSWERS)) {
      for (const each of this.views.get(old)) each.node.remove();
      this.views.delete(old);
    }
    change({ follows: store.run?.isLive ?? false });
    return answer;
  }

  draw() {
    const lit = this.lit();
    for (const views of this.views.values()) for (const each of views) each.draw(lit);
  }

  /** Return the sequences of the selected block, and its position in each. */
  lit() {
    const { run, selected } = store;
    if (selected?.kind !== "block") return new Map();
    const state = shown();
    const names = state.holders().get(selected.id) ?? [];
    return new Map(names.map((name) => [name, state.seqs.get(name).blocks.indexOf(selected.id) * run.blockSize]));
  }
}

/** The choices of one prompt. */
class AnswerView {
  answer; place;

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
    this.find();
    const usage = answer.prompts.length === 1 && answer.usage;
    const metrics = usage && answer.metrics;
    const reasons = this.choices.map(({ choice }) => choice.reason);
    const size = this.choices.reduce((sum, { choice }) => sum + choice.tokens.length, 0);
    const state = answer.state === "running" && reasons.every(Boolean) ? "done" : answer.state;
    const words = [
      { running: size ? "answering" : "waiting", done: reasons.join(", "), left: "disconnected", failed: "failed" }[state],
      usage ? `${usage.prompt_tokens} + ${usage.completion_tokens} tokens` : some(size, "token"),
      usage && `${usage.prompt_tokens_details.cached_tokens} cached`,
      metrics?.num_preemptions && `preempted ${some(metrics.num_preemptions, "time")}`,
      metrics?.time_to_first_token_ms && `TTFT ${duration(metrics.time_to_first_token_ms / 1000)}`,
    ];
    this.head.textContent = words.filter(Boolean).join(" · ");
    this.leave.hidden = state !== "running";
    this.error.hidden = !answer.error;
    this.error.textContent = answer.error ?? "";
    for (const choice of this.choices) choice.draw(lit);
  }

  /** Find the number of this prompt's request. */
  find() {
    if (this.number !== undefined || !this.answer.id || !store.run.isLive) return;
    const id = this.answer.requestId(this.place);
    this.number = [...store.run.lanes.all.values()].find((each) => each.requestId === id)?.number;
    if (this.number === undefined) return;
    this.node.style.setProperty("--of", colour(this.number));
    this.who.textContent = letters(this.number);
  }

  lane(index) {
    this.find();
    return store.run.lanes.all.get(`${this.number}.${index}`);
  }
}

class ChoiceView {
  view; choice; index; spans = []; at = -1;

  constructor(view, choice, index) {
    Object.assign(this, { view, choice, index });
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
    for (const token of tokens.slice(this.spans.length)) {
      const surprise = Math.max(0, Math.min(1, -token.logprob / 5));
      const span = el("span", { vars: { "--p": surprise.toFixed(3) } }, token.text);
      this.spans.push(span);
      this.node.append(span);
    }
    const lane = this.view.lane(this.index);
    if (!lane) return;
    const from = lit.get(lane.name) ?? -Infinity;
    const key = `${from} ${this.spans.length} ${lane.forced.size} ${lane.drafted.size}`;
    if (key === this.drawn) return;
    this.drawn = key;
    this.spans.forEach((span, i) => {
      const position = lane.numPrompt + i;
      span.classList.toggle("forced", lane.forced.has(position));
      span.classList.toggle("drafted", lane.drafted.has(position));
      span.classList.toggle("lit", position >= from && position < from + store.run.blockSize);
    });
  }

  hover(event) {
    const index = this.spans.indexOf(event.target);
    tip(index < 0 ? null : this.describe(index), event);
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

  /** Return the step that sampled a token, and its block in the shown state. */
  place(index) {
    const lane = this.view.lane(this.index);
    if (!lane) return {};
    const position = lane.numPrompt + index;
    const table = shown().seqs.get(lane.name)?.blocks ?? [];
    return { step: lane.madeAt(position), block: table[Math.floor(position / store.run.blockSize)], lane, position };
  }

  async pick(index) {
    const { step, lane, position } = index < 0 ? {} : this.place(index);
    if (!step) return;
    const slot = Math.floor(position / store.run.blockSize);
    const written = lane.madeAt(position + 1) ?? step;
    const at = lane.end !== null && lane.end <= written ? Math.max(step, written - 1) : written;
    change({ step: at, follows: false });
    const state = await store.run.exactly(at);
    const table = state.seqs.get(lane.name)?.blocks ?? [];
    const block = table[slot] ?? table.at(-1);
    if (block !== undefined) select({ kind: "block", id: block }, true);
    announce(`Token “${this.choice.tokens[index].text}”: step ${step}, block ${block ?? "already free"}`);
  }

  key(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10 };
    if (event.key === "Enter") this.pick(this.at);
    if (!(event.key in moves) || !this.spans.length) return;
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
  }
}
