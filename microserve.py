"""An LLM inference engine in one file: paged cache, prefix sharing, continuous batching.

Run `python microserve.py`, or add prompts. It needs NumPy, and the small Llama that comes with mie.
`oracle` defines the right answer. The engine answers many prompts at once, computes each token
once, and must write the same tokens. Each part names the file of mie that is this idea grown up.
"""

import json
import re
import sys
from pathlib import Path

import numpy as np


def read_safetensors(path):  # mie/checkpoint/safetensors_header.py
    """Return the tensors of a file by name: a length, a header in JSON, and the numbers."""
    file, tensors = np.fromfile(path, np.uint8), {}
    begin = 8 + int(file[:8].view(np.uint64)[0])
    header, data = json.loads(bytes(file[8:begin])), file[begin:]
    for name in header.keys() - {"__metadata__"}:
        start, end = header[name]["data_offsets"]
        assert header[name]["dtype"] == "BF16", header[name]
        bits = data[start:end].view(np.uint16).astype(np.uint32) << 16  # the high half of a float32
        tensors[name] = bits.view(np.float32).reshape(header[name]["shape"])
    return tensors


def encode(text, vocab):  # mie/text/tokenizer.py
    """Byte-level BPE, as in GPT-2: in each word, join the pair with the lowest id, and repeat."""
    assert text.isascii(), text
    word = r"'(?:[sdmt]|ll|ve|re)| ?[A-Za-z]+| ?\d+| ?[^\sA-Za-z\d]+|\s+(?!\S)|\s+"
    ids = [vocab["<|bos|>"]]
    for match in re.findall(word, text):
        parts = list(match.replace(" ", "Ġ").replace("\n", "Ċ"))  # as GPT-2 writes them
        while pairs := [i for i in range(len(parts) - 1) if parts[i] + parts[i + 1] in vocab]:
            i = min(pairs, key=lambda i: vocab[parts[i] + parts[i + 1]])
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids += [vocab[part] for part in parts]
    return ids


def decode(ids, vocab):
    return "".join(list(vocab)[i] for i in ids).replace("Ġ", " ").replace("Ċ", "\n")


def attention(q, k, v):  # mie/ops/attention.py
    """Attend from the last n of s positions: q is [n, Hq, Dh], and k and v are [s, Hkv, Dh]."""
    (n, num_heads, dim), s = q.shape, len(k)
    k, v = (np.repeat(x, num_heads // x.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("nhd,shd->hns", q, k) / dim**0.5
    scores[:, np.arange(s) > np.arange(s - n, s)[:, None]] = -np.inf  # no token reads later ones
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hns,shd->nhd", weights / weights.sum(-1, keepdims=True), v).reshape(n, -1)


class Model:  # a Llama: tokens and positions in, logits out; mie/model/decoder.py
    def __init__(self, folder):
        self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.weights = read_safetensors(folder / "model.safetensors")

    def linear(self, x, name):
        return x @ self.weights[name + ".weight"].T

    def norm(self, x, name):  # RMSNorm, arXiv:1910.07467; mie/ops/norm.py
        rms = np.sqrt((x * x).mean(-1, keepdims=True) + self.config["rms_norm_eps"])
        return x / rms * self.weights[name + ".weight"]

    def rotate(self, x, positions):  # RoPE with complex numbers, arXiv:2104.09864; mie/ops/rope.py
        half = x.shape[-1] // 2
        speeds = self.config["rope_theta"] ** -(np.arange(half) / half)
        pairs = x[..., :half] + 1j * x[..., half:]
        pairs = pairs * np.exp(1j * positions[:, None, None] * speeds)
        return np.concatenate([pairs.real, pairs.imag], -1).astype(np.float32)

    def forward(self, tokens, positions, attend):
        """Return logits. attend(layer, q, k, v) is the only place where tokens read each other."""
        x = self.weights["model.embed_tokens.weight"][tokens]
        for layer in range(self.config["num_hidden_layers"]):
            own, heads = f"model.layers.{layer}.", (len(x), -1, self.config["head_dim"])
            h = self.norm(x, own + "input_layernorm")
            q = self.rotate(self.linear(h, own + "self_attn.q_proj").reshape(heads), positions)
            k = self.rotate(self.linear(h, own + "self_attn.k_proj").reshape(heads), positions)
            v = self.linear(h, own + "self_attn.v_proj").reshape(heads)
            x = x + self.linear(attend(layer, q, k, v), own + "self_attn.o_proj")
            h = self.norm(x, own + "post_attention_layernorm")
            gate, up = self.linear(h, own + "mlp.gate_proj"), self.linear(h, own + "mlp.up_proj")
            x = x + self.linear(gate / (1 + np.exp(-gate)) * up, own + "mlp.down_proj")
        return self.linear(self.norm(x, "model.norm"), "model.embed_tokens")


def oracle(model, prompt, max_length):  # tests/naive.py
    """Define the right answer: for each new token, compute all tokens before it again."""
    tokens, rows = list(prompt), []
    while len(tokens) < max_length and tokens[-1] != model.config["eos_token_id"]:
        logits = model.forward(tokens, np.arange(len(tokens)), lambda _, *qkv: attention(*qkv))
        rows.append(logits[-1])
        tokens.append(int(rows[-1].argmax()))
    return tokens, rows


class Sequence:  # a prompt and its answer; mie/sched/sequence.py
    def __init__(self, name, prompt, max_tokens):
        self.name, self.prompt, self.tokens = name, prompt, list(prompt)
        self.rows, self.max_length = [], len(prompt) + max_tokens  # rows: the logits of its answer
        self.table, self.num_computed = [], 0  # its blocks, and how many tokens they hold


class BlockPool:  # a paged cache, arXiv:2309.06180; mie/memory/pool.py
    def __init__(self, config, num_blocks, block_size):
        heads = (config["num_key_value_heads"], config["head_dim"])
        slots = (config["num_hidden_layers"], num_blocks * block_size)
        self.k, self.v = np.zeros((2, *slots, *heads), np.float32)
        self.num_blocks, self.block_size = num_blocks, block_size
        self.ref_counts = [0] * num_blocks  # the number of sequences that hold each block
        self.free = list(range(num_blocks))  # the least recently used first
        self.block_of = {}  # the prefix cache: all tokens up to the end of a block, to the block

    def grow(self, seq):  # mie/memory/manager.py
        """Give a sequence blocks for all its tokens, or return False."""
        while len(seq.table) * self.block_size < len(seq.tokens):
            if not self.free:
                return False
            block = self.free.pop(0)  # and evict the prefix that the block still has
            self.block_of = {prefix: b for prefix, b in self.block_of.items() if b != block}
            self.ref_counts[block] = 1
            seq.table.append(block)
        return True

    def release(self, seq):
        """Take the blocks back. The prefix cache still finds them until other tokens need them."""
        while seq.table:  # the last block first, so that the end of a prefix is evicted first
            block = seq.table.pop()
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free.append(block)

    def publish(self, seq):  # mie/memory/prefix.py
        """Let other sequences find the full blocks. A full block is never written again."""
        for i, block in enumerate(seq.table[: seq.num_computed // self.block_size], start=1):
            self.block_of.setdefault(tuple(seq.tokens[: i * self.block_size]), block)

    def share(self, seq):
        """Begin with cached blocks. The last token is always computed, because it gives logits."""
        for end in range(self.block_size, len(seq.tokens), self.block_size):
            block = self.block_of.get(tuple(seq.tokens[:end]))
            if block is None:
                break
            if self.ref_counts[block] == 0:
                self.free.remove(block)
            self.ref_counts[block] += 1
            seq.table.append(block)
        seq.num_computed = len(seq.table) * self.block_size


class Engine:  # mie/engine/engine.py
    def __init__(self, model, num_blocks=14, block_size=4, budget=16):
        self.model, self.budget = model, budget  # budget: the most tokens that a step computes
        self.pool = BlockPool(model.config, num_blocks, block_size)
        self.queue = []  # in order of arrival; a sequence without blocks waits, the others run

    def add(self, seq):
        assert seq.max_length <= self.pool.num_blocks * self.pool.block_size, "it can never fit"
        self.queue.append(seq)

    def make_room(self, seq):  # mie/sched/admission.py
        """Find blocks for a sequence. It may take them from younger ones, never from older ones."""
        if not seq.table:
            self.pool.share(seq)
        while not self.pool.grow(seq):
            youngest = [other for other in self.queue if other.table or other is seq][-1]
            self.pool.release(youngest)  # preempt: the sequence keeps its tokens, and waits
            if youngest is seq:
                return False
        return True

    def schedule(self):  # mie/sched/scheduler.py
        """Share the budget out, the oldest sequence first: [(sequence, number of tokens)]."""
        plan, budget = [], self.budget
        for seq in self.queue:
            if budget == 0 or not self.make_room(seq):
                break
            count = min(len(seq.tokens) - seq.num_computed, budget)
            plan.append((seq, count))
            budget -= count
        return plan

    def step(self):  # mie/engine/runner.py
        """Compute a plan in one batch. A sequence without tokens left to compute gets a new one."""
        plan, tokens, positions = self.schedule(), [], []
        for seq, count in plan:
            tokens += seq.tokens[seq.num_computed :][:count]
            positions += range(seq.num_computed, seq.num_computed + count)

        def attend(layer, q, k, v):  # mie/ops/kv_cache.py
            out, keys, values = [], self.pool.k[layer], self.pool.v[layer]
            for seq, count in plan:  # its rows are the first ``count`` of q, k and v
                index, offset = np.divmod(np.arange(seq.num_computed + count), self.pool.block_size)
                slots = np.array(seq.table)[index] * self.pool.block_size + offset
                keys[slots[-count:]], values[slots[-count:]] = k[:count], v[:count]
                out.append(attention(q[:count], keys[slots], values[slots]))
                q, k, v = q[count:], k[count:], v[count:]
            return np.concatenate(out)

        logits = self.model.forward(tokens, np.array(positions), attend)
        for seq, count in plan:
            seq.num_computed += count
            self.pool.publish(seq)
            if seq.num_computed == len(seq.tokens):
                seq.rows.append(logits[count - 1])
                seq.tokens.append(token := int(seq.rows[-1].argmax()))
                if token == self.model.config["eos_token_id"] or len(seq.tokens) == seq.max_length:
                    self.queue.remove(seq)
                    self.pool.release(seq)
            logits = logits[count:]
        return plan


if __name__ == "__main__":
    folder = Path(__file__).parent / "mie/assets/tiny"
    vocab = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    engine = Engine(Model(folder))
    story = encode("Once upon a time there was a fox named Freya who lived in the library.", vocab)
    assert oracle(engine.model, story[:9], len(story))[0] == story, "the model writes another story"
    prompts = sys.argv[1:] or [
        "Once upon a time there was a fox",
        "High upon a hill there lived a bear",
        "Once upon a time there was a",
        "And so they lived happily ever after.",
        "Once upon a hill there lived a mouse",
    ]
    for name, prompt in enumerate(prompts, start=ord("A")):
        engine.add(Sequence(chr(name), encode(prompt, vocab), max_tokens=16))
    seqs, pool, plans = list(engine.queue), engine.pool, []
    print("step, blocks (A: held by A, *: by several, -: cached, .: empty), and computed tokens")
    while engine.queue:
        plans.append(engine.step())
        marks = ["-" if b in pool.block_of.values() else "." for b in range(pool.num_blocks)]
        for seq in seqs:
            for block in seq.table:
                marks[block] = seq.name if pool.ref_counts[block] == 1 else "*"
        print(f"{len(plans):4}", "".join(marks), *[f"{seq.name}+{n}" for seq, n in plans[-1]])
    for seq, prompt in zip(seqs, prompts, strict=True):
        print(f"{seq.name}: {prompt} |{decode(seq.tokens[len(seq.prompt) :], vocab)}")
        tokens, rows = oracle(engine.model, seq.prompt, seq.max_length)
        assert seq.tokens == tokens, f"the oracle writes: {decode(tokens[1:], vocab)}"
        assert np.allclose(seq.rows, rows, atol=1e-3), "the logits differ from the oracle's"
    assert sorted(pool.free) == list(range(pool.num_blocks)), "a block is lost"
    print("All tokens equal the oracle's.")
