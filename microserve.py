"""An LLM inference engine in one file: paged cache, prefix sharing, continuous batching.

    python microserve.py "Once upon a time" "One day"

It needs only NumPy, and a Llama: config.json, tokenizer.json and model.safetensors. The oracle at
the end checks all answers. Each part names the file of `mie` that is the same idea grown up.
"""

import itertools
import json
import re
import sys
from pathlib import Path

import numpy as np


def read_safetensors(path):  # mie/checkpoint/tensors.py
    """Return the tensors of a file by name, as float32: a header in JSON, then the numbers."""
    data, tensors = np.memmap(path, np.uint8, "r"), {}
    begin = 8 + int(data[:8].view(np.int64)[0])
    for name, entry in json.loads(bytes(data[8:begin])).items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            kind = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[entry["dtype"]]
            x = data[begin + first : begin + last].view(kind).reshape(entry["shape"])
            if entry["dtype"] == "BF16":  # the upper half of a float32
                x = (x.astype(np.uint32) << 16).view(np.float32)
            tensors[name] = x.astype(np.float32)
    return tensors


class Tokenizer:  # byte-level BPE, as in GPT-2; mie/text/tokenizer.py
    WORDS = re.compile(r"'(?:[sdmt]|ll|ve|re)| ?[^\W\d_]+| ?\d+| ?[^\s\w]+|_+|\s+(?!\S)|\s+")

    def __init__(self, path):
        model = json.loads(path.read_text(encoding="utf-8"))["model"]
        self.ids, self.words = model["vocab"], list(model["vocab"])
        self.ranks = {tuple(pair): rank for rank, pair in enumerate(model["merges"])}
        shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes with a visible sign
        order = [*shown, *sorted({*range(256)} - {*shown})]  # the others are signs from 256 on
        self.chars = dict(zip(order, map(chr, [*shown, *range(256, 324)]), strict=True))

    def encode(self, text):
        """Split a text into words, and join the pair of parts that ranks first, again and again."""
        ids = []
        for word in self.WORDS.findall(text):
            parts = [self.chars[byte] for byte in word.encode()]
            while pairs := [pair for pair in itertools.pairwise(parts) if pair in self.ranks]:
                i = list(itertools.pairwise(parts)).index(min(pairs, key=self.ranks.__getitem__))
                parts[i : i + 2] = [parts[i] + parts[i + 1]]
            ids += [self.ids[part] for part in parts]
        return ids

    def decode(self, ids):
        bytes_of = {char: byte for byte, char in self.chars.items()}
        return bytes(bytes_of[char] for token in ids for char in self.words[token]).decode()


class Model:  # a Llama: tokens and positions in, logits out; mie/model/decoder.py and mie/ops
    def __init__(self, folder):
        self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.weights = read_safetensors(folder / "model.safetensors")

    def norm(self, x, name):
        """Divide each row by its root mean square (RMSNorm, arXiv:1910.07467)."""
        mean = (x * x).mean(-1, keepdims=True)
        return x / np.sqrt(mean + self.config["rms_norm_eps"]) * self.weights[f"{name}.weight"]

    def linear(self, x, name):
        return x @ self.weights[f"{name}.weight"].T

    def rotate(self, x, positions):  # mie/ops/rope.py
        """Rotate pairs of numbers of a head by angles of the position (RoPE, arXiv:2104.09864)."""
        left, right = np.split(x, 2, axis=-1)
        speeds = self.config["rope_theta"] ** -np.linspace(0, 1, left.shape[-1], endpoint=False)
        angles = (positions[:, None, None] * speeds).astype(np.float32)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([left * cos - right * sin, right * cos + left * sin], -1)

    def forward(self, tokens, positions, attend, last):
        """Return the logits of the rows ``last``. attend(layer, q, k, v) reads other tokens."""
        x = self.weights["model.embed_tokens.weight"][tokens]
        for layer in range(self.config["num_hidden_layers"]):
            own = f"model.layers.{layer}."
            h = self.norm(x, own + "input_layernorm")
            q, k, v = (self.linear(h, f"{own}self_attn.{part}_proj") for part in "qkv")
            q, k, v = (y.reshape(len(x), -1, self.config["head_dim"]) for y in (q, k, v))
            q, k = self.rotate(q, positions), self.rotate(k, positions)
            x = x + self.linear(attend(layer, q, k, v), own + "self_attn.o_proj")
            h = self.norm(x, own + "post_attention_layernorm")
            gate, up = (self.linear(h, f"{own}mlp.{part}_proj") for part in ("gate", "up"))
            x = x + self.linear(gate / (1 + np.exp(-gate)) * up, own + "mlp.down_proj")
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        return self.norm(x[last], "model.norm") @ head.T


def attention(q, k, v):  # mie/ops/attention.py
    """Attend causally from the last n of s positions: q is [n, Hq, Dh], k and v [s, Hkv, Dh]."""
    (n, num_heads, dim), s = q.shape, len(k)
    k, v = (np.repeat(x, num_heads // x.shape[1], axis=1).swapaxes(0, 1) for x in (k, v))
    scores = q.swapaxes(0, 1) @ k.swapaxes(1, 2) / np.float32(dim**0.5)  # [Hq, n, s]
    scores[:, np.arange(s) > np.arange(s - n, s)[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True) @ v).swapaxes(0, 1).reshape(n, -1)


class Pool:  # mie/memory/pool.py
    """Blocks with keys and values. A block without a holder keeps them until it is taken again."""

    def __init__(self, config, num_blocks, block_size):
        heads = (config["num_key_value_heads"], config["head_dim"])
        shape = (config["num_hidden_layers"], num_blocks, block_size, *heads)
        self.k, self.v = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self.num_blocks, self.block_size, self.holders = num_blocks, block_size, [0] * num_blocks
        self.free = dict.fromkeys(range(num_blocks))  # in order: the least recently used first
        self.known, self.key_of = {}, {}  # all tokens up to a block's end -> the block, and back

    def grow(self, seq, length):  # mie/memory/manager.py
        """Give a sequence blocks for ``length`` tokens, or return False."""
        while len(seq.table) * self.block_size < length:
            if not self.free:
                return False
            self.free.pop(block := next(iter(self.free)))
            self.known.pop(self.key_of.pop(block, None), None)  # evict: other keys come here
            seq.table.append(block)
            self.holders[block] = 1
        return True

    def share(self, seq):  # mie/memory/prefix.py
        """Begin with known blocks. The last token is always computed, because it gives logits."""
        while (end := seq.num_computed + self.block_size) < len(seq.tokens):
            if (block := self.known.get(tuple(seq.tokens[:end]))) is None:
                return
            self.free.pop(block, None)
            self.holders[block] += 1
            seq.table.append(block)
            seq.num_computed = seq.num_cached = end

    def publish(self, seq):
        """Make full blocks known. A full block is never written again."""
        for i in range(seq.num_computed // self.block_size):
            key, block = tuple(seq.tokens[: (i + 1) * self.block_size]), seq.table[i]
            if self.known.setdefault(key, block) == block:
                self.key_of[block] = key

    def release(self, seq):
        """Take all blocks back. The last block is free first, so it is evicted first."""
        for block in reversed(seq.table):
            self.holders[block] -= 1
            if not self.holders[block]:
                self.free[block] = None
        seq.table, seq.num_computed = [], 0


class Sequence:  # mie/sched/sequence.py
    def __init__(self, prompt, max_tokens):
        self.prompt, self.tokens, self.max_length = prompt, [*prompt], len(prompt) + max_tokens
        self.table, self.num_computed, self.num_cached = [], 0, 0  # blocks of the first tokens


class Engine:  # mie/engine/engine.py
    """There is no prefill phase: each step computes some of the tokens that are not computed."""

    def __init__(self, model, num_blocks=20, block_size=4, budget=32):
        self.model, self.budget = model, budget
        self.pool = Pool(model.config, num_blocks, block_size)
        self.waiting, self.running, self.num_preempted = [], [], 0

    def add(self, prompt, max_tokens):
        if len(prompt) + max_tokens > (most := self.pool.num_blocks * self.pool.block_size):
            raise ValueError(f"{len(prompt)} + {max_tokens} tokens do not fit into room for {most}")
        self.waiting.append(Sequence(prompt, max_tokens))
        return self.waiting[-1]

    def schedule(self):  # mie/sched/scheduler.py
        """Return pairs of a sequence and the number of its tokens to compute."""
        plan, budget = [], self.budget
        for seq in list(self.running):  # the oldest first
            count = min(len(seq.tokens) - seq.num_computed, budget)
            while seq in self.running and not self.pool.grow(seq, seq.num_computed + count):
                self.pool.release(self.running[-1])  # preempt the youngest, perhaps seq itself
                self.waiting.insert(0, self.running.pop())
                self.num_preempted += 1
            if seq in self.running and count:
                plan.append((seq, count))
                budget -= count
        while self.waiting and budget:  # admit in the order of arrival, with blocks for all tokens
            self.pool.share(seq := self.waiting[0])
            if not self.pool.grow(seq, len(seq.tokens)):
                self.pool.release(seq)
                break
            self.running.append(self.waiting.pop(0))
            plan.append((seq, min(len(seq.tokens) - seq.num_computed, budget)))
            budget -= plan[-1][1]
        return plan

    def step(self):  # mie/engine/runner.py
        """Compute a batch. A sequence whose last token was computed gets the likeliest next one."""
        spans = [(seq, seq.num_computed, seq.num_computed + n) for seq, n in self.schedule()]
        ends = np.cumsum([last - first for _, first, last in spans])

        def attend(layer, q, k, v):
            """Write keys and values to blocks, and read the blocks (arXiv:2309.06180)."""
            out, keys, values = [], self.pool.k[layer], self.pool.v[layer]
            parts = (np.split(x, ends[:-1]) for x in (q, k, v))
            for (seq, first, last), q, k, v in zip(spans, *parts, strict=True):
                index, place = np.divmod(np.arange(first, last), self.pool.block_size)
                keys[np.array(seq.table)[index], place] = k
                values[np.array(seq.table)[index], place] = v
                # Join the blocks in the order of the table, and cut off the slots that are empty.
                read = (x[seq.table].reshape(-1, *x.shape[2:])[:last] for x in (keys, values))
                out.append(attention(q, *read))
            return np.concatenate(out)

        tokens = np.concatenate([seq.tokens[first:last] for seq, first, last in spans])
        positions = np.concatenate([np.arange(first, last) for _, first, last in spans])
        logits = self.model.forward(tokens, positions, attend, ends - 1)
        for (seq, _, last), row in zip(spans, logits, strict=True):
            seq.num_computed = last
            self.pool.publish(seq)
            if seq.num_computed == len(seq.tokens):
                seq.tokens.append(token := int(row.argmax()))
                if len(seq.tokens) == seq.max_length or token == self.model.config["eos_token_id"]:
                    self.running.remove(seq)
                    self.pool.release(seq)


def oracle(model, prompt, max_length):  # tests/naive.py
    """Answer without cache, blocks or batch: compute all tokens again for each new one."""
    tokens = list(prompt)
    while len(tokens) < max_length and tokens[-1] != model.config["eos_token_id"]:
        logits = model.forward(tokens, np.arange(len(tokens)), lambda _, *x: attention(*x), [-1])
        tokens.append(int(logits[0].argmax()))
    return tokens


if __name__ == "__main__":
    folder = Path(__file__).parent / "mie/assets/tiny"
    model, tokenizer = Model(folder), Tokenizer(folder / "tokenizer.json")
    engine, bos = Engine(model), model.config["bos_token_id"]
    texts = sys.argv[1:] or [f"Once upon a time there was a {x}" for x in ("fox", "bear", "otter")]
    seqs = [engine.add([bos, *tokenizer.encode(text)], max_tokens=24) for text in texts]
    while engine.waiting or engine.running:
        engine.step()
    for seq in seqs:
        assert seq.tokens == oracle(model, seq.prompt, seq.max_length), "the oracle differs"
        print(tokenizer.decode(seq.tokens[1:]), f"[{seq.num_cached} tokens cached]")
    print(f"All tokens equal the oracle's. Number of preemptions: {engine.num_preempted}.")
