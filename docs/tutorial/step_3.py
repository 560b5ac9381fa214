"""Step 3: blocks and tables."""

import numpy as np
from step_1 import attention, decode, encode, load


class Sequence:
    """A text that grows, and where its keys and values lie."""

    def __init__(self, name, prompt, count):
        self.name, self.tokens = name, list(prompt)
        self.max_tokens = len(prompt) + count
        self.num_computed = 0  # tokens whose keys and values are stored
        self.table = []  # the blocks that store them, in order


class Pool:
    """A fixed number of blocks, each with room for the keys and values of a few tokens."""

    def __init__(self, model, num_blocks, block_size):
        c = model.config
        heads = (c["num_key_value_heads"], c["head_dim"])
        shape = (c["num_hidden_layers"], num_blocks, block_size, *heads)
        self.k, self.v = np.zeros(shape), np.zeros(shape)
        self.num_blocks, self.block_size = num_blocks, block_size
        self.free = list(range(num_blocks))

    def take(self):
        return self.free.pop(0)

    def drop(self, block):
        self.free.append(block)

    def grow(self, seq, length):
        """Give the sequence blocks for ``length`` tokens; if too few are free, return False."""
        missing = -(-length // self.block_size) - len(seq.table)
        if missing > len(self.free):
            return False
        seq.table += [self.take() for _ in range(missing)]
        return True

    def release(self, seq):
        for block in seq.table:
            self.drop(block)
        seq.table, seq.num_computed = [], 0

    def write(self, layer, seq, k, v):
        """Store new keys and values behind those that are computed."""
        positions = np.arange(seq.num_computed, seq.num_computed + len(k))
        blocks = np.array(seq.table)[positions // self.block_size]
        self.k[layer, blocks, positions % self.block_size] = k
        self.v[layer, blocks, positions % self.block_size] = v

    def read(self, layer, seq, length):
        """Return the first ``length`` keys and values, gathered from the blocks in order."""
        k, v = self.k[layer, seq.table], self.v[layer, seq.table]
        return (x.reshape(-1, *x.shape[2:])[:length] for x in (k, v))


def generate(model, pool, seq):
    """Complete the sequence; take a block only when the last one is full."""
    while len(seq.tokens) < seq.max_tokens:
        start, end = seq.num_computed, len(seq.tokens)
        if not pool.grow(seq, end):
            raise MemoryError(f"{end} tokens do not fit")

        def attend(layer, q, k, v, end=end):
            pool.write(layer, seq, k, v)
            return attention(q, *pool.read(layer, seq, end))

        logits = model.forward(seq.tokens[start:], range(start, end), attend)
        seq.num_computed = end
        seq.tokens.append(int(logits[-1].argmax()))
    return seq.tokens


def draw(pool, *seqs):
    """Print who holds each block, and the tokens that it stores."""
    for block in range(pool.num_blocks):
        holders = [seq for seq in seqs if block in seq.table]
        words = ["·"] * pool.block_size
        for seq in holders:
            begin = seq.table.index(block) * pool.block_size
            for i, token in enumerate(seq.tokens[begin : seq.num_computed][: pool.block_size]):
                words[i] = decode([token]).strip() or "<bos>"
        names = "".join(seq.name for seq in holders) or "-"
        print(f"{block:2} {names:3} | " + " ".join(f"{word:8}" for word in words).rstrip())


if __name__ == "__main__":
    model = load()
    pool = Pool(model, num_blocks=8, block_size=4)
    pool.free = [5, 2, 6, 0, 7, 3, 1, 4]  # as after a busy day
    fox = Sequence("A", encode("Once there was a fox named Ruby"), 9)
    print(decode(generate(model, pool, fox)))
    print("table of A:", fox.table)
    draw(pool, fox)
