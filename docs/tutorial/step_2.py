"""Step 2: a cache of keys and values."""

import numpy as np
from step_1 import attention, decode, encode, load


class Cache:
    """The keys and values of one sequence, one after another."""

    def __init__(self, model, size):
        c = model.config
        shape = (c["num_hidden_layers"], size, c["num_key_value_heads"], c["head_dim"])
        self.k, self.v = np.zeros(shape), np.zeros(shape)
        self.length = 0

    def attend(self, layer, q, k, v):
        """Store the new keys and values, then let the new queries read all of them."""
        end = self.length + len(q)
        self.k[layer, self.length : end] = k
        self.v[layer, self.length : end] = v
        return attention(q, self.k[layer, :end], self.v[layer, :end])


def generate(model, prompt, count):
    """Return the prompt and ``count`` more tokens; compute each token once."""
    tokens = list(prompt)
    cache = Cache(model, size=len(prompt) + count)
    for _ in range(count):
        missing = tokens[cache.length :]
        positions = range(cache.length, len(tokens))
        logits = model.forward(missing, positions, cache.attend)
        cache.length = len(tokens)
        tokens.append(int(logits[-1].argmax()))
    return tokens


if __name__ == "__main__":
    print(decode(generate(load(), encode("Once there was a fox named Ruby"), 24)))
