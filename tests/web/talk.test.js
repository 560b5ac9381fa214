// Conversations as trees, streamed answers, and the browser's storage.

import assert from "node:assert/strict";
import { test } from "node:test";

import { keep, kept, take, Talk } from "../../mie/page/web/talk.js";

const texts = (messages) => messages.map(({ content }) => content);

test("an edit and a regenerated answer begin branches that stay", () => {
  const talk = new Talk({ system: "Be kind." });
  const ask = talk.add(null, { role: "user", content: "one" });
  const first = talk.add(ask.id, { role: "assistant", content: "1a" });
  talk.add(first.id, { role: "user", content: "more" });
  const second = talk.add(ask.id, { role: "assistant", content: "1b" });
  assert.deepEqual(texts(talk.branch()), ["one", "1b"]);
  assert.deepEqual(texts(talk.siblings(second)), ["1a", "1b"]);
  talk.turn(second, -1);
  assert.deepEqual(texts(talk.branch()), ["one", "1a", "more"], "with what follows it");
  talk.turn(first, -1);
  assert.deepEqual(texts(talk.branch()), ["one", "1b"], "around the end");
  talk.add(null, { role: "user", content: "uno" });
  assert.deepEqual(texts(talk.branch()), ["uno"]);
  assert.deepEqual(talk.prompt(second.id), [
    { role: "system", content: "Be kind." }, { role: "user", content: "one" }, { role: "assistant", content: "1b" },
  ]);
  assert.equal(talk.title, "one");
});

test("a streamed answer has text, reasoning, calls of tools and the engine's numbers", () => {
  const message = /** @type {any} */ ({ content: "" });
  const usage = { prompt_tokens: 9, completion_tokens: 2, prompt_tokens_details: { cached_tokens: 8 } };
  const chunks = [
    { id: "chatcmpl-1", choices: [{ delta: { role: "assistant", content: "" } }] },
    { id: "chatcmpl-1", choices: [{ delta: { reasoning: "hm" } }] },
    { choices: [{ delta: { content: "a" } }] }, { choices: [{ delta: { content: "b" } }] },
    { choices: [{ delta: { tool_calls: [{ index: 0, id: "call-1", function: { name: "add", arguments: "" } }] } }] },
    { choices: [{ delta: { tool_calls: [{ index: 0, function: { arguments: '{"x":' } }] } }] },
    { choices: [{ delta: { tool_calls: [{ index: 0, function: { arguments: "1}" } }] }, finish_reason: "tool_calls" }] },
    { choices: [], usage, metrics: { time_to_first_token_ms: 12 } },
  ];
  for (const chunk of chunks) take(message, chunk);
  assert.deepEqual(message, {
    content: "ab", reasoning: "hm", request: "chatcmpl-1", usage, ttft: 12, reason: "tool_calls",
    calls: [{ id: "call-1", type: "function", function: { name: "add", arguments: '{"x":1}' } }],
  });
  assert.throws(() => take(message, { error: { message: "engine stopped" } }), /engine stopped/);
  const talk = new Talk();
  const answer = talk.add(null, { role: "assistant", ...message, content: "" });
  talk.add(answer.id, { role: "tool", content: "2", call: "call-1" });
  assert.deepEqual(talk.prompt(talk.leaf), [
    { role: "assistant", content: null, tool_calls: message.calls }, { role: "tool", content: "2", tool_call_id: "call-1" },
  ]);
});

test("the oldest conversations give way when the browser has no room", () => {
  const items = new Map();
  const storage = {
    getItem: (key) => items.get(key) ?? null,
    setItem: (key, value) => {
      if (value.length > 2000) throw new Error("full");
      items.set(key, value);
    },
  };
  const talks = Array.from({ length: 30 }, (_, i) => {
    const talk = new Talk();
    talk.add(null, { role: "user", content: `number ${i} ${"x".repeat(100)}` });
    return talk;
  });
  const numLost = keep(storage, talks);
  assert.ok(numLost > 10 && numLost < 30);
  assert.deepEqual(kept(storage).map(({ id }) => id), talks.slice(0, 30 - numLost).map(({ id }) => id));
  items.set("mie-chats", '[{"messages":[]},null,{"a":1}');
  assert.deepEqual(kept(storage), []);
  items.set("mie-chats", '[{"messages":[]},null,{"a":1}]');
  assert.equal(kept(storage).length, 1);
});
