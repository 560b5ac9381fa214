"""Step 8: guess tokens, and check the guesses in one step."""

from step_1 import attention, decode, encode, load
from step_3 import Pool, Sequence


def guess(tokens, most, longest=4):
    """Return at most ``most`` tokens: those that followed the last tokens when they came before."""
    for size in range(min(longest, len(tokens) - 1), 0, -1):
        last = tokens[-size:]
        for begin in range(len(tokens) - size - 1, -1, -1):
            if tokens[begin : begin + size] == last:
                return tokens[begin + size : begin + size + most]
    return []


def verify(model, pool, seq, drafts):
    """Compute the missing tokens and the drafts in one step; return the number of right drafts.

    The sequence gets the right drafts and one more token.
    """
    start, known = seq.num_computed, len(seq.tokens)
    text = seq.tokens + drafts
    if not pool.grow(seq, len(text)):
        raise MemoryError(f"{len(text)} tokens do not fit")

    def attend(layer, q, k, v):
        pool.write(layer, seq, k, v)
        return attention(q, *pool.read(layer, seq, len(text)))

    logits = model.forward(text[start:], range(start, len(text)), attend)
    drawn = [int(token) for token in logits[known - 1 - start :].argmax(-1)]
    right = 0
    while right < len(drafts) and drafts[right] == drawn[right]:
        right += 1
    seq.tokens += drawn[: right + 1]
    seq.num_computed = known + right
    return right


def trim(pool, seq):
    """Give back the blocks that hold no computed token of the sequence."""
    needed = -(-seq.num_computed // pool.block_size)
    for block in seq.table[needed:]:
        pool.drop(block)
    del seq.table[needed:]


def generate(model, pool, seq, most=4):
    """Complete the sequence; return the (number of drafts, number of right ones) of each step."""
    steps = []
    while len(seq.tokens) < seq.max_tokens:
        room = seq.max_tokens - len(seq.tokens) - 1
        drafts = guess(seq.tokens, min(most, room))
        steps.append((len(drafts), verify(model, pool, seq, drafts)))
        trim(pool, seq)
    return steps


if __name__ == "__main__":
    model = load()
    prompt = encode("Once there was a fox named Ruby")
    story = Sequence("A", prompt, 60)
    generate(model, Pool(model, num_blocks=20, block_size=4), story, most=0)
    for most in (0, 4):
        again = Sequence("B", story.tokens + prompt, 40)  # the story, and its beginning again
        steps = generate(model, Pool(model, num_blocks=40, block_size=4), again, most)
        drafts, right = map(sum, zip(*steps, strict=True))
        print(f"{len(steps)} steps, {right} of {drafts} drafts were right")
        print(decode(again.tokens[len(story.tokens) :]))
