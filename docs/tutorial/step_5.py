"""Step 5: a scheduler with preemption."""

from step_1 import decode, encode, load
from step_3 import Pool, Sequence
from step_4 import run


class Engine:
    """Sequences that wait and sequences that run, the oldest first."""

    def __init__(self, model, pool, budget=16):
        self.model, self.pool = model, pool
        self.budget = budget  # maximum number of tokens computed in one step
        self.waiting, self.running = [], []

    def add(self, seq):
        if seq.max_tokens - 1 > self.pool.num_blocks * self.pool.block_size:
            raise ValueError(f"{seq.name} needs more blocks than there are")
        self.waiting.append(seq)

    def step(self):
        """Compute one batch; return it as a list of (sequence, count)."""
        batch = self.schedule()
        run(self.model, self.pool, batch)
        for seq in [seq for seq in self.running if len(seq.tokens) == seq.max_tokens]:
            self.running.remove(seq)
            self.pool.release(seq)
        return batch

    def schedule(self):
        """Choose how many tokens of which sequences are computed next, and find room for them."""
        batch, budget, num_running = [], self.budget, len(self.running)
        for seq in list(self.running):
            count = min(len(seq.tokens) - seq.num_computed, budget)
            if seq in self.running and count and self.make_room(seq, count):
                batch.append((seq, count))
                budget -= count
        if len(self.running) < num_running:
            return batch  # admit none in a step that preempts
        while self.waiting and budget and self.admit(self.waiting[0]):
            seq = self.waiting.pop(0)
            self.running.append(seq)
            count = min(len(seq.tokens) - seq.num_computed, budget)
            batch.append((seq, count))
            budget -= count
        return batch

    def admit(self, seq):
        """Reserve blocks for all tokens that the sequence has; return False if too few are free."""
        return self.pool.grow(seq, len(seq.tokens))

    def make_room(self, seq, count):
        """Find a block for the next token; if need be, preempt the youngest of the running."""
        while not self.pool.grow(seq, seq.num_computed + count):
            victim = self.running.pop()
            self.pool.release(victim)
            self.waiting.insert(0, victim)
            if victim is seq:
                return False
        return True


def line(engine, batch, *seqs):
    """Return one line about a step: who computed how much, who holds which block, who waits."""
    holders = ("".join(s.name for s in seqs if b in s.table) for b in range(engine.pool.num_blocks))
    blocks = " ".join(names or "·" for names in holders)
    computed = " ".join(f"{seq.name}+{count}" for seq, count in batch)
    waiting = "".join(seq.name for seq in engine.waiting)
    return f"{computed:12} [{blocks}] {waiting}".rstrip()


if __name__ == "__main__":
    model = load()
    engine = Engine(model, Pool(model, num_blocks=8, block_size=4), budget=12)
    seqs = [
        Sequence("A", encode("Once there was a fox named Ruby"), 9),
        Sequence("B", encode("One day a small owl"), 9),
        Sequence("C", encode("High above the clouds the"), 9),
    ]
    for seq in seqs:
        engine.add(seq)
    while engine.waiting or engine.running:
        batch = engine.step()
        print(line(engine, batch, *seqs))
    for seq in seqs:
        print(f"{seq.name}: {decode(seq.tokens)}")
