// Experiments: each sends requests that provoke a mechanism, and says what happened.

import { count, some } from "./dom.js";
import { store } from "./store.js";

const NAMES = ["Mia the otter", "Tom the owl", "Nora the hedgehog", "Hugo the tiger", "Ida the mole", "Otto the heron", "Lena the fox", "Max the toad", "Rosa the wren", "Emil the badger", "Pia the hare", "Karl the bear"];
const PLACES = ["the mill", "the lake", "the lighthouse", "the orchard", "the bridge", "the harbour", "the forest", "the tower", "the meadow", "the river", "the market", "the hill"];
const story = (_, i) => `Tell me a long story about ${NAMES[i % 12]} and ${PLACES[(i * 5) % 12]}.`;
const stories = (length) => Array.from({ length }, story);
const NUM_LONG = 12;

/** `send(changes, prompts)` and `running` return Answers; `say` shows a sentence. */
export class Provoke {
  send; running; limits; say;

  constructor(tools) {
    Object.assign(this, tools);
  }

  /** Do an experiment, and say its result. */
  async run(name) {
    try {
      this.say(await this[name]());
    } catch (error) {
      this.say(error.message);
    }
  }

  /** Send a request and wait until it is answered. */
  async answered(...request) {
    const answer = await this.send(...request).ended;
    if (answer.state !== "done") throw new Error(answer.error ?? "The request was disconnected.");
    return answer;
  }

  async twice() {
    this.say("The first request is on its way.");
    const first = await this.answered({ max_tokens: 16, n: 1 });
    this.say("The same request again.");
    const second = await this.answered({ max_tokens: 16, n: 1 });
    const [before, after] = [first, second].map(cached);
    const size = this.limits.block_size;
    return `The second request found ${after} of its ${second.usage.prompt_tokens} prompt tokens in the cache (the first found ${before}).${after ? "" : ` The prompt is shorter than a block of ${size} tokens.`}`;
  }

  async fork() {
    this.say("Four choices start on one prompt. Each copies the last block when it writes.");
    const answer = await this.answered({ n: 4, max_tokens: 32, temperature: 1 });
    const lanes = () => [...store.run.lanes.all.values()].filter((lane) => lane.requestId === answer.id);
    await until(() => lanes().length === 4 && lanes().every((lane) => lane.end !== null));
    const copies = lanes().flatMap((lane) => lane.marks).filter((mark) => mark.event.cause === "fork").length;
    return `Four choices shared ${some(Math.ceil(answer.usage.prompt_tokens / this.limits.block_size), "block")} of the prompt and made ${some(copies, "copy", "copies")}.`;
  }

  async twelve() {
    const { num_blocks: numBlocks, block_size: size, max_model_len: longest } = this.limits;
    const length = Math.min(longest - 40, Math.max(64, Math.ceil((numBlocks * size * 1.6) / NUM_LONG)), 400);
    this.say(`${NUM_LONG} requests ask for ${length} tokens each. The pool holds ${count(numBlocks * size)}.`);
    const answer = await this.answered({ n: 1, max_tokens: length, ignore_eos: true }, stories(NUM_LONG));
    const total = answer.metrics?.num_preemptions ?? 0;
    const small = Math.ceil((NUM_LONG * length) / size / 3);
    return total
      ? `The engine preempted ${some(total, "time")}, and all ${NUM_LONG} answers are complete.`
      : `There was room for all: nothing was preempted. Start the server with --num-blocks ${small} to see preemption.`;
  }

  async long() {
    const { max_model_len: longest, max_num_batched_tokens: budget, num_blocks: numBlocks, block_size: block } = this.limits;
    const room = Math.floor(Math.min(longest - 64, numBlocks * block * 0.5, budget * 6));
    const text = Array.from({ length: room }, (_, i) => NAMES[(i * 7) % 12]).join(", ");
    this.say("Three answers are running; a long prompt joins them.");
    await this.answered({ n: 1, max_tokens: 60, ignore_eos: true, truncate_prompt_tokens: room }, [...stories(3), text]);
    return `A prompt of ${count(room)} tokens was computed beside three answers, at most ${count(budget)} tokens a step. See its chunks in the timeline.`;
  }

  async leave() {
    if (!this.running().length) {
      const answer = this.send({ n: 1, max_tokens: 300, ignore_eos: true }, stories(3));
      this.say("Three long answers start, only to be left.");
      await until(() => answer.numTokens > 40 || answer.state !== "running");
    }
    const running = this.running();
    await until(() => running.every((answer) => answer.numTokens || answer.state !== "running"));
    const num = running.reduce((sum, answer) => sum + answer.choices.length, 0);
    // The answers come faster than the state, which has to show the blocks of the requests before they leave.
    const ids = new Set(running.flatMap((answer) => answer.prompts.map((_, place) => answer.requestId(place))));
    const known = () => new Set([...store.run.newest.seqs.values()].filter((seq) => seq.blocks.length).map((seq) => seq.request_id));
    await until(() => [...ids].every((id) => known().has(id)) || !this.running().length);
    const before = store.run.newest.totals().used;
    for (const answer of running) answer.leave();
    await until(() => ![...store.run.newest.seqs.values()].some((seq) => ids.has(seq.request_id)));
    return `${some(num, "answer")} left. Blocks in use: ${before} before, ${store.run.newest.totals().used} now.`;
  }
}

const cached = (answer) => answer.usage.prompt_tokens_details.cached_tokens;

/** Wait until something is so, at most a minute: the stream may be lost. */
async function until(isSo) {
  const end = performance.now() + 60000;
  while (!isSo() && performance.now() < end) await new Promise((resolve) => { setTimeout(resolve, 30); });
}
