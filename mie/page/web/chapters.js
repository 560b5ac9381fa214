// The story: eleven chapters on three recorded runs. Each plays some steps, and ends in a small pool to try things on.

/** A chapter plays its run from one step to another, the pinned one. */
export const CHAPTERS = [
  {
    id: "block", title: "A block", run: "small-pool", from: 0, to: 1, selected: { kind: "block", id: 1 },
    text: "Each layer of the model computes a key and a value for every token, and each later token needs them again. So the engine keeps them, in the KV cache. It divides this memory into blocks of equal size. A block has a slot for each of eight tokens here: the prompt of request A, 11 tokens long, fills block 0 and three slots of block 1.",
    pool: { task: "Step, and watch the slots fill. The last word of a request has been chosen but not computed yet, so it has no slot.", tools: ["step", "add"], numBlocks: 8 },
  },
  {
    id: "table", title: "A table", run: "small-pool", from: 16, to: 22, selected: { kind: "seq", id: "0.0" },
    text: "Each request has a block table: entry 0 names the block with tokens 0 to 7, entry 1 the block with tokens 8 to 15, and so on. The blocks need not be neighbours, so a request can take any free block. No memory is reserved for an answer that may stay short.",
    pool: { task: "Step until both requests have grown. Their blocks alternate, but each table is in order.", tools: ["step", "add"], start: ["add", "add"], numBlocks: 12 },
  },
  {
    id: "growing", title: "Growing", run: "small-pool", from: 1, to: 16, selected: { kind: "seq", id: "0.0" },
    text: "Each step computes one more token of every running answer. A request takes another block only when its last block is full, so at most seven of its slots are empty.",
    pool: { task: "Let a request grow, end it, and see which request gets its blocks.", tools: ["step", "add"], start: ["add", "add"], numBlocks: 10 },
  },
  {
    id: "sharing", title: "Sharing", run: "shared-prompt", from: 12, to: 13, selected: { kind: "seq", id: "3.0", all: true },
    text: "Request D asks for three answers to one prompt. The prompt is computed and stored once, and the tables of all three answers name the same blocks. This works because the keys and values of a token depend only on the text up to this token. Each block counts its references, such as the tables that name it.",
    pool: { task: "Step a few times, then fork a request again and again. The number of blocks in use does not change until a fork writes.", tools: ["step", "add", "fork"], numBlocks: 12 },
  },
  {
    id: "copy-on-write", title: "Copy-on-write", run: "shared-prompt", from: 13, to: 14, selected: { kind: "seq", id: "3.0", all: true },
    text: "Now the three answers differ, and each writes its own token into the last block, which they share. Two of them copy the block first. The third writes into the block itself, because no other table refers to it any more.",
    pool: { task: "Step until the last block is partly full, fork, and step once more. Then try it when the last block is exactly full: nothing is copied.", tools: ["step", "add", "fork"], numBlocks: 12 },
  },
  {
    id: "prefix-hit", title: "A prefix hit", run: "shared-prompt", from: 6, to: 7, selected: { kind: "seq", id: "1.0" },
    text: "Request B begins with the same instructions as A. The engine keeps full blocks for later requests in a prefix tree, and finds them there by their tokens. B takes five full blocks by reference, copies four more tokens, and computes only the last 5 of its 49 tokens.",
    pool: { task: "Send the system prompt twice, end both requests, and send it again: its blocks were kept. Then fill the pool until the blocks are evicted from the cache.", tools: ["step", "add", "system"], start: ["system"], numBlocks: 14, budget: 12 },
  },
  {
    id: "chunked-prefill", title: "Chunked prefill", run: "shared-prompt", from: 0, to: 2, selected: { kind: "seq", id: "0.0" }, hasTimeline: true,
    text: "To compute a prompt is called prefill. A step has a budget of 40 tokens in this run, so the prompt of 50 tokens is computed in two chunks, of 40 and 10. A long prompt does not hold up running answers: they get their tokens first, and the prompt gets the rest of the budget.",
    pool: { task: "Let a request run, then send the long prompt. The first request goes on while the prompt is computed in parts.", tools: ["step", "add", "long"], numBlocks: 18, budget: 6 },
  },
  {
    id: "preemption", title: "Preemption", run: "small-pool", from: 34, to: 39, selected: { kind: "seq", id: "2.0" }, hasTimeline: true,
    text: "Request A needs a block, none is free, and none can be evicted from the prefix cache. The engine preempts C, the request that arrived last: C releases its blocks but keeps its text. It waits at its old place in the queue, and computes the lost tokens again later.",
    pool: { task: "Step until the blocks run out. Then break it: leave so few blocks that one request alone does not fit.", tools: ["step", "add"], start: ["add", "add", "add"], numBlocks: 9 },
  },
  {
    id: "swap", title: "Swapping", run: "small-pool", from: 24, to: 27, selected: { kind: "seq", id: "3.0" }, hasTimeline: true,
    text: "This engine may also copy the blocks of a preempted request to the memory of the host, which is larger and slower. D is swapped out with its four blocks, and at step 61 it comes back without computing anything again.",
    pool: { task: "Step until a request is swapped out, and end another one to let it return. With too few blocks on the host, it is computed again instead.", tools: ["step", "add", "host"], start: ["add", "add", "add"], numBlocks: 9, numHost: 6 },
  },
  {
    id: "drafts", title: "Drafts", run: "guesses", from: 4, to: 8, selected: { kind: "seq", id: "1.0" }, hasTimeline: true,
    text: "A step of five tokens takes little longer than a step of one. So this engine guesses. The last words of request B occurred before in its text, and the four tokens that followed them become drafts. One step computes all four, and keeps three, because the model chooses the same three. The fourth is dropped, and the text is the same as without drafts.",
    pool: { task: "Step with guesses, and compare the number of steps with and without. After a wrong guess, the slots and blocks behind it are freed, and the text never changes.", tools: ["step", "guess", "add"], numBlocks: 12 },
  },
  {
    id: "whole", title: "All together", run: "shared-prompt", from: 1, to: 70, selected: null, hasTimeline: true,
    text: "Twelve requests arrive, share, copy, wait and leave. The pool stays nearly full, and no answer is lost. One rule covers all chapters: in each step, every request computes the tokens that are not computed yet, as far as budget and blocks allow.",
    pool: { task: "Find a state in which a request waits, one is swapped out and two share a block.", tools: ["step", "add", "system", "long", "fork", "host"], start: ["system", "add"], numBlocks: 16, numHost: 6 },
  },
];
