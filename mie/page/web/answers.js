// One request to the server: its prompts, the stream of tokens and their log-probabilities.

import { post } from "./source.js";

const NUM_TOP = 5;

export class Answer {
  prompts; onChange; n; id = null; usage = null; metrics = null; error = null;

  constructor(prompts, fields, mode, onChange) {
    const text = prompts.length > 1 ? prompts : prompts[0];
    const isChat = mode === "chat";
    const body = isChat
      ? { messages: [{ role: "user", content: text }], ...fields, logprobs: true, top_logprobs: NUM_TOP }
      : { prompt: text, ...fields, logprobs: NUM_TOP };
    Object.assign(this, { prompts, onChange, n: fields.n ?? 1 });
    this.stop = new AbortController();
    this.choices = Array.from({ length: this.n * prompts.length }, () => ({ tokens: [], reason: null }));
    this.state = "running"; // then done, left or failed
    this.ended = this.send(isChat ? "v1/chat/completions" : "v1/completions", body);
  }

  /** Return the id that the engine gives to the request of a prompt. */
  requestId(place) {
    return this.prompts.length > 1 ? `${this.id}-${place}` : this.id;
  }

  get numTokens() {
    return this.choices.reduce((sum, choice) => sum + choice.tokens.length, 0);
  }

  leave() {
    if (this.state !== "running") return;
    this.state = "left";
    this.stop.abort();
    this.onChange(this);
  }

  async send(path, body) {
    try {
      const answer = await post(path, { ...body, stream: true, stream_options: { include_usage: true } }, { signal: this.stop.signal });
      for await (const chunk of chunks(answer.body)) this.take(chunk);
      if (this.state === "running") this.state = "done";
    } catch (error) {
      if (this.state === "running") {
        this.state = "failed";
        this.error = error.message;
      }
    }
    this.onChange(this);
    return this;
  }

  take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    this.id ??= chunk.id;
    this.usage = chunk.usage ?? this.usage;
    this.metrics = chunk.metrics ?? this.metrics;
    for (const piece of chunk.choices ?? []) {
      const choice = this.choices[piece.index];
      choice.tokens.push(...tokens(piece));
      choice.reason = piece.finish_reason ?? choice.reason;
    }
    this.onChange(this);
  }
}

/** Return the tokens of a piece in one shape, for both interfaces. */
function tokens({ logprobs }) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map(({ token, logprob, top_logprobs: top }) => ({ text: token, logprob, top: top.map((each) => [each.token, each.logprob]) }));
  }
  return logprobs.tokens.map((text, i) => ({
    text,
    logprob: logprobs.token_logprobs[i],
    top: Object.entries(logprobs.top_logprobs?.[i] ?? {}).sort((a, b) => b[1] - a[1]),
  }));
}

export async function* chunks(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (event.startsWith("data: {")) yield JSON.parse(event.slice(6));
    }
  }
}
