// The chat's page.

import { chunks } from "./answers.js";
import { $, announce, count, duration, el, say } from "./dom.js";
import { markdown } from "./markdown.js";
import { about, ask, chosen } from "./source.js";
import { keep, kept, take, Talk } from "./talk.js";
import { startTheme, stored } from "./theme.js";

const MOST_BYTES = 200000; // of a file that is added to a message
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];

const page = { talks: stored((storage) => kept(storage)) ?? [], talk: null, stop: null, editing: null, hasSeveral: false, key: sessionStorage.getItem("mie-key") ?? "" };

/** Ask the server, with the key of this tab if it has one. */
const asked = (path, options = {}) => ask(path, { ...options, headers: { ...(page.key ? { authorization: `Bearer ${page.key}` } : {}), ...options.headers } });

// Conversations.

function save() {
  const talks = page.talks.filter(({ messages }) => messages.length);
  const numLost = stored((storage) => keep(storage, talks));
  say("status", numLost === null ? "This browser keeps no conversations." : numLost ? `The browser has no room: the oldest conversations (${numLost}) are not kept.` : "");
}

function show(talk) {
  page.stop?.abort();
  page.talk = talk;
  page.editing = null;
  const { elements } = $("settings");
  elements.system.value = talk.system;
  for (const name of [...NUMBERS, "schema", "tools"]) elements[name].value = talk.settings[name] ?? "";
  draw();
}

function begin() {
  const talk = new Talk({ system: page.talk?.system, settings: { ...page.talk?.settings } });
  page.talks.unshift(talk);
  page.talks = page.talks.filter(({ messages }) => messages.length || messages === talk.messages);
  show(talk);
  $("message").focus();
}

function forget(talk) {
  page.talks.splice(page.talks.indexOf(talk), 1);
  save();
  if (talk === page.talk) page.talks.length ? show(page.talks[0]) : begin();
  else draw();
}

// Answers.

/** Return the fields of a request, or throw what is wrong with them. */
function fields() {
  const { elements } = $("settings");
  const found = {};
  for (const name of NUMBERS) if (elements[name].value !== "") found[name] = Number(elements[name].value);
  if (elements.schema.value.trim()) found.response_format = { type: "json_schema", json_schema: { name: "answer", schema: json("The JSON schema", elements.schema.value) } };
  if (elements.tools.value.trim()) found.tools = json("The list of tools", elements.tools.value);
  return found;
}

function json(what, text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${what} is not JSON: ${error.message}`, { cause: error });
  }
}

/** Let the model continue after a message. */
async function answer(parent) {
  const { talk } = page;
  if (page.stop) return;
  const stop = new AbortController();
  let body;
  try {
    body = { model: page.model, messages: talk.prompt(parent), ...fields(), stream: true, stream_options: { include_usage: true } };
  } catch (error) {
    return say("status", error.message);
  }
  page.stop = stop;
  const message = talk.add(parent, { role: "assistant", content: "" });
  draw();
  try {
    const answered = await asked("v1/chat/completions", { method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json" }, signal: stop.signal });
    for await (const chunk of chunks(answered.body)) {
      take(message, chunk);
      refresh(message);
    }
    announce("The answer is complete.");
  } catch (error) {
    if (stop.signal.aborted) message.reason = "stopped";
    else message.error = error.message;
    if (error.status === 401) logIn();
  }
  page.stop = null;
  save();
  draw();
}

function send() {
  const { talk } = page;
  const box = $("message");
  const content = [...page.files ?? [], box.value].filter((each) => each.trim()).join("\n\n");
  if (!content || page.stop) return;
  const parent = page.editing ? page.editing.parent : talk.leaf;
  box.value = "";
  page.editing = page.files = null;
  say("files-note", "");
  answer(talk.add(parent, { role: "user", content }).id);
}

function edit(message) {
  page.editing = message;
  $("message").value = message.content;
  $("message").focus();
  say("status", "You change a sent message. Sending it begins another branch; Escape leaves it as it is.");
}

async function attach(files) {
  for (const file of files) {
    if (file.size > MOST_BYTES) say("status", `${file.name} has ${count(file.size)} bytes; at most ${count(MOST_BYTES)} fit a message.`);
    else {
      const text = await file.text();
      const fence = "`".repeat(1 + Math.max(2, ...[...text.matchAll(/`+/g)].map(([each]) => each.length)));
      (page.files ??= []).push(`${file.name}:\n\n${fence}\n${text}\n${fence}`);
    }
  }
  say("files-note", page.files ? `${page.files.length} added` : "");
}

// What is seen.

const views = new Map(); // message → its element

function draw() {
  const { talk } = page;
  document.title = `${talk.title}: mie`;
  $("talks").replaceChildren(...page.talks.map((each) => el("li", {},
    el("button", { type: "button", className: "talk", "aria-current": each === talk ? "true" : null, onclick: () => show(each) }, each.title),
    el("button", { type: "button", title: `Delete “${each.title}”`, "aria-label": `Delete “${each.title}”`, onclick: () => forget(each) }, "×"))));
  views.clear();
  const branch = talk.branch();
  $("messages").replaceChildren(...(branch.length ? branch.map(view) : [el("p", { className: "note" }, "Conversations stay in this browser. Under each answer you see how much of its prompt was in the cache.")]));
  $("stop").hidden = !page.stop;
  $("send").disabled = Boolean(page.stop);
  $("messages").lastElementChild?.scrollIntoView({ block: "end" });
}

/** Draw a message again, at most once a frame. */
function refresh(message) {
  if (message.isDue) return;
  Object.defineProperty(message, "isDue", { value: true, configurable: true }); // not kept
  requestAnimationFrame(() => {
    delete message.isDue;
    const old = views.get(message.id);
    if (!old?.isConnected) return;
    const isAtEnd = innerHeight + scrollY >= document.body.scrollHeight - 80;
    old.replaceWith(view(message));
    if (isAtEnd) scrollTo(0, document.body.scrollHeight);
  });
}

const action = (text, title, onclick) => el("button", { type: "button", title, onclick }, text);

function view(message) {
  const { talk } = page;
  const all = talk.siblings(message);
  const isAnswer = message.role === "assistant";
  const isRunning = isAnswer && page.stop && message.id === talk.leaf;
  const node = el("article", { className: "message", "data-role": message.role, "aria-busy": isRunning ? "true" : null },
    el("h2", {}, { user: "You", assistant: page.model, tool: "Result of the tool" }[message.role]),
    message.reasoning ? el("details", { open: !message.content }, el("summary", {}, "Reasoning"), el("div", { className: "plain" }, message.reasoning)) : null,
    isAnswer ? el("div", { className: "text-of" }, markdown(message.content)) : el("div", { className: "plain" }, message.content),
    (message.calls ?? []).map((call) => toolCall(message, call)),
    message.error ? el("p", { className: "wrong" }, message.error) : null,
    el("footer", {},
      all.length > 1 ? el("span", { className: "branches" }, action("‹", "The branch before", () => branchOf(message, -1)), `${all.indexOf(message) + 1} / ${all.length}`, action("›", "The next branch", () => branchOf(message, 1))) : null,
      action("copy", "Copy the text", () => navigator.clipboard.writeText(message.content)),
      isAnswer ? (isRunning ? null : action("regenerate", "Answer again, in another branch", () => answer(message.parent))) : message.role === "user" ? action("edit", "Change it, in another branch", () => edit(message)) : null,
      isAnswer ? facts(message) : null));
  views.set(message.id, node);
  return node;
}

function branchOf(message, by) {
  page.talk.turn(message, by);
  save();
  draw();
}

/** What the engine did for an answer, and a way to the step at which it began. */
function facts({ usage, ttft, request, reason }) {
  const cached = usage?.prompt_tokens_details?.cached_tokens ?? 0;
  const words = [
    usage && `${count(cached)} of ${count(usage.prompt_tokens)} prompt tokens cached, ${count(usage.prompt_tokens - cached)} computed`,
    usage && `${count(usage.completion_tokens)} generated`, ttft && `first after ${duration(ttft / 1000)}`, reason && reason !== "stop" ? reason : null,
  ].filter(Boolean);
  return el("span", { className: "facts-of" }, words.join(" · "), " ", request ? el("a", { href: `./${page.hasSeveral ? about("", page.model) : ""}#live//request:${encodeURIComponent(request)}`, target: "mie-engine" }, "see it in the engine") : null);
}

function toolCall(message, call) {
  const result = el("textarea", { rows: 2, "aria-label": `Result of ${call.function.name}` });
  const isOpen = message.id === page.talk.leaf && !page.stop;
  return el("div", { className: "code" }, el("header", {}, `calls ${call.function.name}`), el("pre", { tabIndex: 0 }, el("code", {}, pretty(call.function.arguments))),
    isOpen ? el("form", { onsubmit: (event) => {
      event.preventDefault();
      page.talk.add(message.id, { role: "tool", content: result.value, call: call.id });
      answer(page.talk.leaf);
    } }, result, el("button", {}, "Send the result")) : null);
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

// The start, and what the reader does.

function logIn() {
  $("login").hidden = false;
  $("key").focus();
}

/** Offer the models of a server that has several. */
function offer(models) {
  const options = models.map(({ id }) => el("option", { value: id, selected: id === page.model }, id));
  const onchange = (event) => { page.model = event.target.value; };
  $("model").replaceChildren(el("select", { "aria-label": "Model", onchange }, options));
}

async function start() {
  try {
    const { data } = await (await asked("v1/models")).json();
    page.model = chosen ?? (data.find(({ status }) => status?.value === "loaded") ?? data[0]).id;
    $("login").hidden = true;
    page.hasSeveral = data.some(({ status }) => status);
    if (page.hasSeveral) offer(data);
    else say("model", page.model);
    say("status", "");
    if (page.talk) draw();
  } catch (error) {
    if (error.status === 401) logIn();
    say("status", error.message);
  }
}

function listen() {
  const box = $("message");
  $("compose").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    } else if (event.key === "ArrowUp" && !box.value) {
      const last = page.talk.branch().findLast(({ role }) => role === "user");
      if (last) edit(last);
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    page.stop?.abort();
    if (page.editing) box.value = "";
    page.editing = null;
    say("status", "");
  });
  $("stop").addEventListener("click", () => page.stop?.abort());
  $("new").addEventListener("click", begin);
  $("add").addEventListener("click", () => $("files").click());
  $("files").addEventListener("change", (event) => attach(event.target.files));
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => { event.preventDefault(); attach(event.dataTransfer.files); });
  $("settings").addEventListener("input", (event) => {
    const { name, value } = event.target;
    if (name === "system") page.talk.system = value;
    else page.talk.settings[name] = value;
    save();
  });
  $("login").addEventListener("submit", (event) => {
    event.preventDefault();
    page.key = $("key").value;
    sessionStorage.setItem("mie-key", page.key);
    start();
  });
}

startTheme($("theme"));
$("list").open = innerWidth >= 900;
listen();
if (page.talks.length) show(page.talks[0]);
else begin();
start();
Object.assign(window, { mie: { page, markdown } });
