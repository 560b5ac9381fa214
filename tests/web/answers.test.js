// The stream of an answer: chunks that are cut anywhere, errors inside, and a client that leaves.

import assert from "node:assert/strict";
import { afterEach, test } from "node:test";

import { Answer } from "../../mie/page/web/answers.js";

const { fetch } = globalThis;
afterEach(() => { globalThis.fetch = fetch; });

const encoder = new TextEncoder();

/** Answer the next requests with bytes in pieces of a size, and return the bodies that were sent. */
function serve(text, size, status = 200) {
  const bodies = [];
  globalThis.fetch = async (_, { body, headers }) => {
    assert.equal(headers["x-mie-page"], "1");
    bodies.push(JSON.parse(String(body)));
    const bytes = encoder.encode(text);
    const stream = new ReadableStream({
      start(pieces) {
        for (let i = 0; i < bytes.length; i += size) pieces.enqueue(bytes.slice(i, i + size));
        pieces.close();
      },
    });
    return new Response(stream, { status });
  };
  return bodies;
}

const piece = (index, text, reason = null) => ({
  index, finish_reason: reason,
  logprobs: { tokens: [text], token_logprobs: [-0.5], top_logprobs: [{ b: -2, [text]: -0.5 }] },
});
const events = (...chunks) => `${chunks.map((chunk) => `data: ${JSON.stringify(chunk)}\n\n`).join("")}data: [DONE]\n\n`;

for (const size of [1, 7, 10000]) {
  test(`tokens arrive whole from pieces of ${size} bytes`, async () => {
    const bodies = serve(events(
      { id: "c-1", choices: [piece(0, "né"), piece(1, "x")] },
      { id: "c-1", choices: [piece(0, "🦊", "stop")], usage: { total_tokens: 5 } },
    ), size);
    const answer = new Answer(["one", "two"], { temperature: 0 }, "text", () => {});
    await answer.ended;
    assert.equal(answer.state, "done");
    assert.deepEqual(answer.choices.map(({ tokens }) => tokens.map(({ text }) => text)), [["né", "🦊"], ["x"]]);
    assert.deepEqual(answer.choices[0].tokens[0].top, [["né", -0.5], ["b", -2]]);
    assert.equal(answer.choices[0].reason, "stop");
    assert.equal(answer.requestId(1), "c-1-1");
    assert.deepEqual(answer.usage, { total_tokens: 5 });
    assert.deepEqual(bodies[0].prompt, ["one", "two"]);
    assert.equal(bodies[0].stream, true);
  });
}

test("an error inside a stream ends the answer, and keeps its tokens", async () => {
  serve(events({ id: "c", choices: [piece(0, "a")] }, { error: { message: "engine stopped" } }), 50);
  const answer = new Answer(["one"], {}, "text", () => {});
  await answer.ended;
  assert.equal(answer.state, "failed");
  assert.equal(answer.error, "engine stopped");
  assert.equal(answer.numTokens, 1);
});

test("a refusal shows the server's message", async () => {
  serve(JSON.stringify({ error: { message: "max_tokens is too large" } }), 50, 400);
  const answer = new Answer(["one"], {}, "chat", () => {});
  await answer.ended;
  assert.equal(answer.state, "failed");
  assert.equal(answer.error, "max_tokens is too large");
});

test("a client that leaves stops its request", async () => {
  let signal;
  globalThis.fetch = (_, options) => new Promise((_resolve, reject) => {
    signal = options.signal;
    signal.addEventListener("abort", () => reject(signal.reason));
  });
  const answer = new Answer(["one"], {}, "text", () => {});
  answer.leave();
  await answer.ended;
  assert.equal(answer.state, "left");
  assert.ok(signal.aborted);
});
