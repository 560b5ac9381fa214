// The story: eleven chapters on three recorded runs. Each plays some steps, and ends in a small pool to try things on.

/** A chapter plays its run from one step to another, the pinned one. */
export const CHAPTERS = [
  {
    id: "block", title: "A block", run: "small-pool", from: 0, to: 1, selected: { kind: "block", id: 1 },
    text: "Attention needs the keys and values of every earlier token, so the engine keeps them in memory. It divides this memory into blocks of equal size, eight tokens each here: the prompt of request A, 11 tokens long, fills block 0 and three slots of block 1.",
    pool: { task: "Step, and watch the slots fill. The last word of a request has been chosen but not computed yet, so it has no slot.", tools: ["step", "add"], numBlocks: 8 },
  },
  {
    id: "table", title: "A table", run: "small-pool", from: 16, to: 22, selected: { kind: "seq", id: "0.0" },
    text: "Each request has a block table, which says where its tokens are: entry 0 names the block of tokens 0 to 7, entry 1 the next one, and so on. The blocks need not be neighbours, so any free block will do, and no room is reserved for an answer that may stay short.",
    pool: { task: "Step until both requests have grown. Their blocks alternate, but each table is in order.", tools: ["step", "add"], start: ["add", "add"], numBlocks: 12 },
  },
  {
    id: "growing", title: "Growing", run: "small-pool", from: 1, to: 16, selected: { kind: "seq", id: "0.0" },
    text: "Each step computes one more token of every running answer. Only when the last block of a request is full does it take another one, so a request never wastes more than one block less one slot.",
    pool: { task: "Let a request grow, end it, and see who gets its blocks.", tools: ["step", "add"], start: ["add", "add"], numBlocks: 10 },
  },
  {
    id: "sharing", title: "Sharing", run: "shared-prompt", from: 12, to: 13, selected: { kind: "seq", id: "3.0", all: true },
    text: "Request D asks for three answers to one prompt. Their tables name the same blocks, because equal tokens at equal places have equal keys and values: the prompt is computed and stored once, and each block counts its references.",
    pool: { task: "Step a few times, then fork a request again and again. The number of blocks in use does not change until a fork writes.", tools: ["step", "add", "fork"], numBlocks: 12 },
  },
  {
    id: "copy-on-write", title: "Copy-on-write", run: "shared-prompt", from: 13, to: 14, selected: { kind: "seq", id: "3.0", all: true },
    text: "Now the three answers differ, and each wants to write its own token into the shared last block. Two of them copy that block first, and the third may keep it because nobody else refers to it any more.",
    pool: { task: "Step until the last block is partly full, fork, and step once more. Then try it when the last block is exactly full: nothing is copied.", tools: ["step", "add", "fork"], numBlocks: 12 },
  },
  {
    id: "prefix-hit", title: "A prefix hit", run: "shared-prompt", from: 6, to: 7, selected: { kind: "seq", id: "1.0" },
    text: "Request B begins with the same instructions as A, and a tree of all computed prefixes finds them. B takes five full blocks by reference, copies four more tokens, and computes only the last 5 of its 49 tokens.",
    pool: { task: "Send the system prompt twice, end both, and send it again: its blocks were kept. Then fill the pool until the cache has to give them up.", tools: ["step", "add", "system"], start: ["system"], numBlocks: 14, budget: 12 },
  },
  {
    id: "chunked-prefill", title: "Chunked prefill", run: "shared-prompt", from: 0, to: 2, selected: { kind: "seq", id: "0.0" }, hasTimeline: true,
    text: "A step computes at most 40 tokens in this run, so the prompt of 50 tokens is computed in two chunks, 40 and 10. In this way a long prompt does not hold up the answers that are running: they get their tokens first, and the prompt gets the rest of the budget.",
    pool: { task: "Let a request run, then send the long prompt. The first request goes on while the prompt is computed in parts.", tools: ["step", "add", "long"], numBlocks: 18, budget: 6 },
  },
  {
    id: "preemption", title: "Preemption", run: "small-pool", from: 34, to: 39, selected: { kind: "seq", id: "2.0" }, hasTimeline: true,
    text: "Request A needs a block, none is free, and the cache has none to give. The request that arrived last, C, is preempted: it gives up its blocks but keeps its text, waits at its old place, and computes the lost tokens again later.",
    pool: { task: "Step until the blocks run out. Then break it: leave so few blocks that one request alone does not fit.", tools: ["step", "add"], start: ["add", "add", "add"], numBlocks: 9 },
  },
  {
    id: "swap", title: "Swapping", run: "small-pool", from: 24, to: 27, selected: { kind: "seq", id: "3.0" }, hasTimeline: true,
    text: "This engine may also copy the blocks of a preempted request to the host's memory, which is larger and slower. D leaves with its four blocks, and at step 61 it comes back without computing anything again.",
    pool: { task: "Step until a request is swapped out, and end another one to let it return. With too few blocks on the host, it is computed again instead.", tools: ["step", "add", "host"], start: ["add", "add", "add"], numBlocks: 9, numHost: 6 },
  },
  {
    id: "drafts", title: "Drafts", run: "guesses", from: 4, to: 8, selected: { kind: "seq", id: "1.0" }, hasTimeline: true,
    text: "A step of five tokens takes little longer than a step of one. So this engine guesses: the last words of request B occurred before, and B takes the four tokens that followed them there as drafts. It computes all of them in one step, and keeps three, because the model chooses the same three. The fourth is dropped, and the text is the same as without drafts.",
    pool: { task: "Step with guesses, and compare the number of steps with and without. A guess that is wrong gives back the slots and blocks after it, and the text never changes.", tools: ["step", "guess", "add"], numBlocks: 12 },
  },
  {
    id: "whole", title: "The whole at work", run: "shared-prompt", from: 1, to: 70, selected: null, hasTimeline: true,
    text: "Twelve requests arrive, share, copy, wait and leave, and the pool stays nearly full without losing an answer. Everything that you have seen is one rule: in each step, every request computes the tokens that it lacks, as far as budget and blocks allow.",
    pool: { task: "Everything together. Find a state in which a request waits, one is swapped out and two share a block.", tools: ["step", "add", "system", "long", "fork", "host"], start: ["system", "add"], numBlocks: 16, numHost: 6 },
  },
];
