// Conversations: trees of messages, of which one branch is shown. The browser keeps them.

const KEY = "mie-chats";
const MOST = 200; // conversations that are kept

export class Talk {
  constructor(given = {}) {
    this.id = given.id ?? crypto.randomUUID();
    this.system = given.system ?? "";
    this.settings = given.settings ?? {};
    this.messages = given.messages ?? []; // {id, parent, role, content, …}, parents first
    this.leaf = given.leaf ?? null;
  }

  get title() {
    const first = this.messages.find(({ role }) => role === "user");
    return first ? first.content.trim().slice(0, 60) || "A file" : "New conversation";
  }

  find(id) {
    return this.messages.find((message) => message.id === id);
  }

  /** Return the messages of the branch that is shown, the first one first. */
  branch(leaf = this.leaf) {
    const found = [];
    for (let message = this.find(leaf); message; message = this.find(message.parent)) found.unshift(message);
    return found;
  }

  /** Add a message after another one, or as the first, and show its branch. */
  add(parent, message) {
    const added = { id: crypto.randomUUID(), parent, ...message };
    this.messages.push(added);
    this.leaf = added.id;
    return added;
  }

  /** Return a message and its alternatives: those after the same one. */
  siblings({ parent }) {
    return this.messages.filter((message) => message.parent === parent);
  }

  /** Show another alternative of a message, with the newest messages below it. */
  turn(message, by) {
    const all = this.siblings(message);
    let at = all[(all.indexOf(message) + by + all.length) % all.length];
    for (let next = at; next; next = this.messages.findLast(({ parent }) => parent === at.id)) at = next;
    this.leaf = at.id;
  }

  /** Return the messages of a request that continues a branch. */
  prompt(leaf) {
    const system = this.system.trim() ? [{ role: "system", content: this.system }] : [];
    return [...system, ...this.branch(leaf).map(({ role, content, calls, call }) => ({
      role,
      content: content || (calls?.length ? null : ""),
      ...(calls?.length ? { tool_calls: calls } : {}),
      ...(call ? { tool_call_id: call } : {}),
    }))];
  }
}

/** Add a piece of a streamed answer to a message. */
export function take(message, chunk) {
  if (chunk.error) throw new Error(chunk.error.message);
  message.request ??= chunk.id;
  if (chunk.usage) message.usage = chunk.usage;
  if (chunk.metrics) message.ttft = chunk.metrics.time_to_first_token_ms;
  for (const { delta = {}, finish_reason: reason } of chunk.choices ?? []) {
    message.content += delta.content ?? "";
    if (delta.reasoning) message.reasoning = (message.reasoning ?? "") + delta.reasoning;
    for (const piece of delta.tool_calls ?? []) {
      message.calls ??= [];
      const call = (message.calls[piece.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
      call.id ||= piece.id ?? "";
      call.function.name += piece.function?.name ?? "";
      call.function.arguments += piece.function?.arguments ?? "";
    }
    message.reason = reason ?? message.reason;
  }
}

/** Return the kept conversations, the newest first. What is damaged is left out. */
export function kept(storage) {
  try {
    const found = JSON.parse(storage.getItem(KEY) ?? "[]");
    return found.filter((each) => Array.isArray(each?.messages)).map((each) => new Talk(each));
  } catch {
    return [];
  }
}

/** Keep conversations. If the browser has no room for all, the oldest are forgotten; return how many. */
export function keep(storage, talks) {
  for (let size = Math.min(MOST, talks.length); size >= 0; size -= Math.max(1, size >> 3)) {
    try {
      storage.setItem(KEY, JSON.stringify(talks.slice(0, size)));
      return talks.length - size;
    } catch {
      // It is full.
    }
  }
  return talks.length;
}
