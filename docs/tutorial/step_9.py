"""Step 9: a scheduling policy, the shortest job first."""

from step_1 import encode, load
from step_3 import Pool, Sequence
from step_5 import Engine


class ShortestFirst(Engine):
    """An engine that serves the shortest job first, and lets no job wait for ever."""

    def __init__(self, model, pool, budget=16, ageing=1):
        super().__init__(model, pool, budget)
        self.ageing = ageing  # tokens by which a waiting job becomes shorter with each step
        self.num_steps = 0
        self.ranks = {}  # the rank of each sequence, by its name

    def add(self, seq):
        """Queue a sequence, with a rank that never changes."""
        super().add(seq)
        self.ranks[seq.name] = self.rank(seq.max_tokens, self.num_steps)

    def rank(self, job, arrival):
        """Return the rank of a job of ``job`` tokens that arrived after ``arrival`` steps.

        The smallest rank is served first.
        """
        return job + self.ageing * arrival

    def schedule(self):
        """Choose the next batch: the smallest rank first, and the largest is preempted first."""
        for queue in (self.waiting, self.running):
            queue.sort(key=lambda seq: self.ranks[seq.name])
        return super().schedule()

    def step(self):
        """Compute one batch, and count it."""
        batch = super().step()
        self.num_steps += 1
        return batch


if __name__ == "__main__":
    model = load()
    for ageing in (0, 4):
        engine = ShortestFirst(model, Pool(model, num_blocks=6, block_size=4), 16, ageing)
        engine.add(Sequence("L", encode("Once there was a fox named Ruby"), 12))
        names, done = list("abcdefgh"), ""
        while names or engine.waiting or engine.running:
            if names and engine.num_steps % 2 == 0:
                engine.add(Sequence(names.pop(0), encode("One day a small owl"), 5))
            batch = engine.step()
            done += "".join(seq.name for seq, _ in batch if len(seq.tokens) == seq.max_tokens)
        print(f"ageing {ageing}: done in the order {done}")
