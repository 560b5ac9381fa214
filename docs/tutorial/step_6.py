"""Step 6: a shared prefix and copy-on-write."""

from step_1 import decode, encode, load
from step_3 import Pool, Sequence, draw
from step_5 import Engine


class SharingPool(Pool):
    """A pool whose blocks may have several holders."""

    def __init__(self, model, num_blocks, block_size):
        super().__init__(model, num_blocks, block_size)
        self.holders = [0] * num_blocks
        self.known = {}  # all tokens up to the end of a full block -> the block

    def take(self):
        block = super().take()
        self.holders[block] = 1
        return block

    def drop(self, block):
        """Remove one holder; the last one frees the block."""
        self.holders[block] -= 1
        if self.holders[block] == 0:
            self.known = {tokens: b for tokens, b in self.known.items() if b != block}
            super().drop(block)

    def share(self, seq):
        """Give the sequence the full blocks that another one has computed from the same tokens."""
        while (end := seq.num_computed + self.block_size) < len(seq.tokens):
            block = self.known.get(tuple(seq.tokens[:end]))
            if block is None:
                break
            self.holders[block] += 1
            seq.table.append(block)
            seq.num_computed = end

    def publish(self, seq):
        """Let others find the full blocks of a sequence."""
        for i in range(seq.num_computed // self.block_size):
            self.known.setdefault(tuple(seq.tokens[: (i + 1) * self.block_size]), seq.table[i])

    def grow(self, seq, length):
        """Grow, and copy the block that is written next if others hold it too."""
        index = seq.num_computed // self.block_size
        is_shared = index < len(seq.table) and self.holders[seq.table[index]] > 1
        if is_shared and not self.free:
            return False
        if is_shared:
            old, new = seq.table[index], self.take()
            self.k[:, new], self.v[:, new] = self.k[:, old], self.v[:, old]
            self.drop(old)
            seq.table[index] = new
        return super().grow(seq, length)


class SharingEngine(Engine):
    """An engine that looks for a known prefix when it admits a sequence."""

    def admit(self, seq):
        self.pool.share(seq)
        if super().admit(seq):
            return True
        self.pool.release(seq)
        return False

    def step(self):
        batch = super().step()
        for seq in self.running:
            self.pool.publish(seq)
        return batch

    def fork(self, seq, name, token):
        """Start a second continuation of a running sequence, which differs in the last token."""
        child = Sequence(name, [*seq.tokens[:-1], token], 0)
        child.max_tokens, child.num_computed = seq.max_tokens, seq.num_computed
        child.table = list(seq.table)
        for block in child.table:
            self.pool.holders[block] += 1
        self.running.append(child)
        return child


if __name__ == "__main__":
    model = load()
    engine = SharingEngine(model, SharingPool(model, num_blocks=8, block_size=4))
    ruby = Sequence("A", encode("Once there was a fox named Ruby"), 12)
    hugo = Sequence("B", encode("Once there was a fox named Hugo"), 12)
    engine.add(ruby)
    engine.step()
    engine.add(hugo)
    _, (_, count) = engine.step()
    print(f"B computes {count} of its 8 tokens")
    other = engine.fork(ruby, "C", encode(" was")[1])
    draw(engine.pool, *engine.running)
    engine.step()
    print("after one more step")
    draw(engine.pool, *engine.running)
    while engine.waiting or engine.running:
        engine.step()
    for seq in (ruby, hugo, other):
        print(f"{seq.name}: {decode(seq.tokens)}")
