// A small pool of blocks for the story. It follows the engine's rules, but computes nothing: its tokens are words.

const WORDS = "the otter lives by a mill and sings while old boats drift home under lamps that burn all night near her door".split(" ");
const MOST_NEW = 24; // tokens that a request generates
const SIZE = 4; // slots of a block

export class Pool {
  constructor({ numBlocks = 12, numHost = 0, budget = 8 } = {}) {
    this.blockSize = SIZE;
    this.blocks = Array.from({ length: numBlocks }, () => ({ tokens: [], refs: 0, key: null, used: 0 }));
    this.hostFree = this.numHost = numHost;
    this.budget = budget;
    this.requests = []; // in the order of arrival
    this.numNamed = 0;
    this.hasPreempted = false; // in this step, which then admits nobody
    this.clock = 0;
    this.said = [];
  }

  in(state) {
    return this.requests.filter((request) => request.state === state);
  }

  /** Blocks that may be taken: nothing refers to them, except perhaps the prefix cache. */
  get numAvailable() {
    return this.blocks.filter(({ refs }) => !refs).length;
  }

  add(text) {
    const tokens = text.split(" ");
    return this.enter({ tokens, numPrompt: tokens.length, table: [], computed: 0, state: "waiting", saved: null });
  }

  enter(request) {
    const number = this.numNamed;
    this.numNamed += 1;
    const entered = { ...request, number, name: String.fromCharCode(65 + (number % 26)) };
    this.requests.push(entered);
    return entered;
  }

  /** Start another answer at the same place. It shares all blocks. */
  fork(request) {
    for (const block of request.table) this.blocks[block].refs += 1;
    const copy = this.enter({ ...request, tokens: [...request.tokens], table: [...request.table] });
    this.said = [`${copy.name} continues the text of ${request.name}. Their tables name the same blocks, so nothing was copied.`];
  }

  end(request, why = "ended") {
    this.release(request);
    this.requests.splice(this.requests.indexOf(request), 1);
    if (request.saved) this.hostFree += request.saved.length;
    this.said.push(`${request.name} ${why}. Its full blocks stay in the prefix cache until another request needs a block.`);
  }

  release(request) {
    this.clock += 1;
    for (const block of request.table) {
      const own = this.blocks[block];
      own.refs -= 1;
      own.used = this.clock;
      if (!own.refs && !own.key) own.tokens = [];
    }
    request.table = [];
  }

  /** Compute a step. Each request that writes one token may write up to `numGuesses` guesses after it. */
  step(numGuesses = 0) {
    this.said = [];
    this.hasPreempted = false;
    let left = this.budget;
    for (const request of this.in("running")) if (request.state === "running") left -= this.compute(request, left);
    for (const request of this.in("running")) left -= this.guess(request, Math.min(numGuesses, left));
    for (const request of this.requests.filter(({ state }) => state !== "running")) {
      if (left < 1 || this.hasPreempted || !this.admit(request)) break;
      left -= this.compute(request, left);
    }
    for (const request of this.in("running")) if (request.tokens.length - request.numPrompt >= MOST_NEW) this.end(request);
    if (!this.said.length) this.said.push(this.requests.length ? "Each running request wrote its next token." : "There is nothing to do.");
  }

  /** Write tokens that are not computed yet, at most `most`, and then append a new one. Return how many were written. */
  compute(request, most) {
    const count = Math.min(most, request.tokens.length - request.computed);
    for (let i = 0; i < count; i += 1) {
      if (!this.write(request, request.computed)) return i;
      request.computed += 1;
    }
    if (count > 1 && request.computed < request.tokens.length) this.said.push(`The step's budget of ${this.budget} tokens is used up: ${request.name} has computed ${request.computed} of ${request.tokens.length}.`);
    if (count && request.computed === request.tokens.length) request.tokens.push(this.next(request));
    return count;
  }

  /** The word that follows the tokens of a request. */
  next({ tokens, number }) {
    return WORDS[(tokens.length * 7 + number * 5) % WORDS.length];
  }

  /** Guess the tokens after the new one, and keep those before the first wrong one. Return how many were guessed. */
  guess(request, most) {
    const numNew = request.tokens.length - request.numPrompt;
    if (request.computed !== request.tokens.length - 1 || !numNew) return 0;
    // Nothing is evicted or preempted for a guess.
    const slots = (request.table.length + this.blocks.filter(({ refs, key }) => !refs && !key).length) * SIZE;
    const count = Math.max(0, Math.min(most, slots - request.computed, MOST_NEW - numNew));
    let numRight = 0;
    while (numRight < count && request.tokens.length % 4) { // each fourth guess is wrong
      this.write(request, request.computed);
      request.computed += 1;
      request.tokens.push(this.next(request));
      numRight += 1;
    }
    if (count) this.said.push(`${request.name} guessed ${count} tokens. ${numRight} were right, so the step gave ${numRight + 1}.`);
    return count;
  }

  write(request, position) {
    const { table } = request;
    const [index, slot] = [Math.floor(position / SIZE), position % SIZE];
    if (index === table.length || this.blocks[table[index]].refs > 1) {
      const target = this.allocate(request);
      if (target === null) return false;
      const source = table[index];
      if (source !== undefined && this.blocks[source].refs > 1) {
        this.blocks[target].tokens = this.blocks[source].tokens.slice(0, slot);
        this.blocks[source].refs -= 1;
        this.said.push(`${request.name} writes to block ${source}, which is shared, so it first copies it to block ${target}.`);
      } else if (source !== undefined) {
        // Preemption has freed the other holders meanwhile, so there is nothing to copy.
        this.blocks[target].refs = 0;
        return this.fill(request, source, position);
      }
      table[index] = target;
    }
    return this.fill(request, table[index], position);
  }

  fill(request, block, position) {
    const own = this.blocks[block];
    own.tokens[position % SIZE] = request.tokens[position];
    const key = request.tokens.slice(0, position + 1).join(" ");
    if (own.tokens.length === SIZE && !this.blocks.some((each) => each.key === key)) own.key = key;
    return true;
  }

  /** Return a block for a request. If none is left, the request that arrived last makes room; null: it was this one. */
  allocate(request) {
    for (;;) {
      const block = this.take();
      if (block !== null) return block;
      const victim = this.in("running").at(-1);
      if (victim === request && this.in("running").length === 1) {
        this.end(request, `needs more than the ${this.blocks.length} blocks of the pool, and fails`);
        request.state = "failed";
        return null;
      }
      this.preempt(victim, request);
      if (victim === request) return null;
    }
  }

  take() {
    let block = this.blocks.findIndex(({ refs, key }) => !refs && !key);
    if (block < 0) {
      // The least recently used goes first, and of those the end of the text: its beginning helps more prompts.
      const idle = this.blocks.filter(({ refs }) => !refs);
      if (!idle.length) return null;
      block = this.blocks.indexOf(idle.sort((a, b) => a.used - b.used || b.key.length - a.key.length)[0]);
      this.said.push(`No block is free, so block ${block} leaves the prefix cache.`);
    }
    this.blocks[block] = { tokens: [], refs: 1, key: null, used: this.clock };
    return block;
  }

  preempt(victim, by) {
    this.hasPreempted = true;
    const size = victim.table.length;
    const why = victim === by ? "needs a block and there is none, and it arrived last" : `arrived last, and ${by.name} needs a block`;
    if (size <= this.hostFree) {
      this.hostFree -= size;
      victim.saved = victim.table.map((block) => [...this.blocks[block].tokens]);
      victim.state = "swapped";
      this.said.push(`${victim.name} ${why}: its ${size} blocks are swapped out to the host.`);
    } else {
      victim.state = "waiting";
      victim.computed = 0;
      this.said.push(`${victim.name} ${why}: it is preempted. It keeps its text, and computes it again later.`);
    }
    this.release(victim);
  }

  /** Let a request run if there are blocks for all its tokens. */
  admit(request) {
    const { tokens, saved } = request;
    const hits = saved ? [] : this.matching(tokens);
    const need = (saved?.length ?? Math.ceil(tokens.length / SIZE)) - hits.length;
    const numAvailable = this.numAvailable - hits.filter((block) => !this.blocks[block].refs).length;
    if (need > numAvailable) {
      if (need + hits.length > this.blocks.length) {
        this.end(request, `needs ${need + hits.length} blocks, more than the pool has, and is refused`);
        request.state = "failed";
      } else this.said.push(`${request.name} waits: it needs ${need} more blocks, and only ${numAvailable} are available.`);
      return false;
    }
    for (const block of hits) this.blocks[block].refs += 1;
    request.table = [...hits];
    if (hits.length) {
      request.computed = hits.length * SIZE;
      this.said.push(`${request.name} finds ${request.computed} of its ${tokens.length} tokens in the prefix cache.`);
    }
    if (saved) {
      for (const held of saved) {
        const block = this.take();
        this.blocks[block].tokens = held;
        request.table.push(block);
      }
      this.hostFree += saved.length;
      request.saved = null;
      this.said.push(`${request.name} comes back: its ${saved.length} blocks are copied from the host, and nothing is computed again.`);
    }
    request.state = "running";
    return true;
  }

  /** Return the blocks whose text is a beginning of the tokens. The last token is computed in any case. */
  matching(tokens) {
    const found = [];
    for (let end = SIZE; end < tokens.length; end += SIZE) {
      const key = tokens.slice(0, end).join(" ");
      const block = this.blocks.findIndex((each) => each.key === key);
      if (block < 0) break;
      found.push(block);
    }
    return found;
  }
}
