"""Step 4: two sequences and a ragged batch."""

import numpy as np
from step_1 import attention, decode, encode, load
from step_3 import Pool, Sequence


def run(model, pool, batch):
    """Compute one step: the next ``count`` tokens of each (sequence, count).

    A sequence whose tokens are then all computed gets one more.
    """
    tokens, positions, ends = [], [], [0]
    for seq, count in batch:
        span = range(seq.num_computed, seq.num_computed + count)
        tokens += [seq.tokens[i] for i in span]
        positions += span
        ends.append(len(tokens))

    def attend(layer, q, k, v):
        out = np.empty_like(q)
        for (seq, count), begin, end in zip(batch, ends[:-1], ends[1:], strict=True):
            pool.write(layer, seq, k[begin:end], v[begin:end])
            keys, values = pool.read(layer, seq, seq.num_computed + count)
            out[begin:end] = attention(q[begin:end], keys, values)
        return out

    logits = model.forward(tokens, positions, attend)
    for (seq, count), end in zip(batch, ends[1:], strict=True):
        seq.num_computed += count
        if seq.num_computed == len(seq.tokens):
            seq.tokens.append(int(logits[end - 1].argmax()))


def show(model, pool, batch):
    """Run a step, and print the tokens that it computed."""
    words = [
        f"{seq.name}{i}:{decode([seq.tokens[i]]).strip() or '<bos>'}"
        for seq, count in batch
        for i in range(seq.num_computed, seq.num_computed + count)
    ]
    run(model, pool, batch)
    print(" ".join(words))


if __name__ == "__main__":
    model = load()
    pool = Pool(model, num_blocks=8, block_size=4)
    fox = Sequence("A", encode("Once there was a fox named Ruby"), 9)
    owl = Sequence("B", encode("One day a small owl"), 9)
    running = [fox]
    for step in range(20):
        if step == 2:
            running.append(owl)  # arrives while A is being written
        batch = [(seq, len(seq.tokens) - seq.num_computed) for seq in running]
        assert all(pool.grow(seq, len(seq.tokens)) for seq in running)
        show(model, pool, batch)
        for seq in [seq for seq in running if len(seq.tokens) == seq.max_tokens]:
            running.remove(seq)
            pool.release(seq)
        if not running:
            break
    print(decode(fox.tokens), decode(owl.tokens), sep="\n")
