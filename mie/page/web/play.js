// The playground: a form, its answers token by token, and the experiments.

import { Answer } from "./answers.js";
import { $, announce, duration, el, some, tip, visible } from "./dom.js";
import { colour, label } from "./paint.js";
import { Provoke } from "./provoke.js";
import { change, redraw, select, shown, store } from "./store.js";

const NUMBERS = ["max_tokens", "temperature", "n", "seed", "top_p", "top_k", "min_p"];
const MAX_ANSWERS = 24;

export class Playground {
  constructor(config) {
    this.config = config;
    this.answers = [];
    this.views = new Map();
    this.provoke = new Provoke({
      send: (changes) => this.send(changes),
      running: () => this.answers.filter((answer) => answer.state === "running"),
      limits: config.limits,
      newest: () => store.run.newest,
      say: (text) => { $("promise").textContent = text; },
    });
    $("play-note").textContent = `${config.model}, at most ${config.limits.max_model_len} tokens`;
    $("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask").requestSubmit();
    });
    for (const button of document.querySelectorAll("[data-do]")) {
      button.addEventListener("click", () => this.experiment(button));
    }
  }

  async experiment(button) {
    button.disabled = true;
    try {
      await this.provoke[button.dataset.do]();
    } finally {
      button.disabled = false;
    }
  }

  /** Return the body that the form describes. */
  body() {
    const form = $("ask");
    const body = { prompt: form.elements.prompt.value };
    for (const name of NUMBERS) {
      const { value } = form.elements[name];
      if (value !== "") body[name] = Number(value);
    }
    if (form.elements.stop.value) body.stop = [form.elements.stop.value];
    if (form.elements.regex.value) body.structured_outputs = { regex: form.elements.regex.value };
    return body;
  }

  /** Send the form with some fields changed, and return the answer. */
  send(changes = {}) {
    const mode = $("ask").elements.mode.value;
    const { prompt, ...rest } = { ...this.body(), ...changes };
    const body = mode === "chat" ? { messages: [{ role: "user", content: prompt }], ...rest } : { prompt, ...rest };
    const answer = new Answer(body, mode, () => redraw("play"));
    answer.prompt = prompt;
    this.answers.unshift(answer);
    for (const old of this.answers.splice(MAX_ANSWERS)) {
      this.views.get(old)?.node.remove();
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
        const view = new AnswerView(answer);
        this.views.set(answer, view);
        place.prepend(view.node);
      }
      this.views.get(answer).draw(lit);
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

class AnswerView {
  constructor(answer) {
    this.answer = answer;
    this.head = el("span");
    this.leave = el("button", { type: "button", title: "Close this connection", onclick: () => answer.leave() }, "leave");
    this.who = el("b");
    this.error = el("p", { hidden: true });
    this.choices = answer.choices.map((choice, index) => new ChoiceView(this, choice, index));
    this.node = el("article", { className: "answer" },
      el("header", {}, el("i", { className: "dot" }), this.who, this.head, this.leave),
      el("p", { className: "note" }, visible(answer.prompt).slice(0, 90) + (answer.prompt.length > 90 ? "…" : "")),
      this.choices.map((choice) => choice.node),
      this.error);
  }

  draw(lit) {
    const { answer } = this;
    if (!this.lanes?.length || this.lanes.length < answer.choices.length) this.find();
    const cached = answer.usage?.prompt_tokens_details?.cached_tokens;
    const words = [
      { running: answer.numTokens ? "answering" : "waiting", done: answer.choices.map((choice) => choice.reason).join(", "), left: "disconnected", failed: "failed" }[answer.state],
      answer.usage ? `${answer.usage.prompt_tokens} + ${answer.usage.completion_tokens} tokens` : some(answer.numTokens, "token"),
      cached === undefined ? "" : `${cached} cached`,
      answer.metrics?.num_preemptions ? `preempted ${some(answer.metrics.num_preemptions, "time")}` : "",
      answer.metrics?.time_to_first_token_ms ? `TTFT ${duration(answer.metrics.time_to_first_token_ms / 1000)}` : "",
    ];
    this.head.textContent = words.filter(Boolean).join(" · ");
    this.leave.hidden = answer.state !== "running";
    this.error.hidden = !answer.error;
    this.error.textContent = answer.error ?? "";
    for (const choice of this.choices) choice.draw(lit);
  }

  /** Find the lanes of this answer's sequences, for the steps and blocks of tokens. */
  find() {
    if (!this.answer.id || !store.run?.isLive) return;
    this.lanes = [...store.run.lanes.all.values()].filter((lane) => lane.requestId === this.answer.id);
    if (!this.lanes.length) return;
    const { number, n } = this.lanes[0];
    this.node.style.setProperty("--of", colour(number));
    this.who.textContent = label(`${number}.0`, 1);
    this.n = n;
  }

  lane(index) {
    return store.run.lanes.all.get(this.lanes?.length ? `${this.lanes[0].number}.${index}` : "");
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
    if (this.first === undefined && name) this.first = store.run.newest.seqs.get(name)?.num_prompt ?? this.view.answer.usage?.prompt_tokens;
    return this.first ?? null;
  }

  hover(event) {
    const index = this.spans.indexOf(event.target);
    if (index < 0) return tip(null);
    return tip(this.describe(index), event.clientX, event.clientY);
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
    tip(this.describe(this.at), left, bottom);
    const { text, logprob } = this.choice.tokens[this.at];
    announce(`${text}, ${(100 * Math.exp(logprob)).toFixed(0)} percent`);
    return undefined;
  }
}
