"""Train the bundled model from scratch and write `mie/assets/tiny` and its held-out prompts.

    OMP_WAIT_POLICY=passive python scripts/tiny_model/train.py --minutes 60 --compile

It needs the `train` extra and downloads nothing: `stories.py` writes the text during
training. It runs on a GPU if there is one, and else on the CPU with bf16 autocast. The run ends
after `--minutes` or after `--steps`, whichever comes first. Only a run that ends by `--steps` is
reproducible, because a slower machine takes fewer steps per minute. The environment variable
matters only if other programs use the same cores. Threads that wait then sleep.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from stories import (
    BOS,
    EOS,
    SPECIAL_TOKENS,
    G,
    Segment,
    Writer,
    heldout_prompts,
    slot_lists,
    usual_words,
    word_list,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = Path(__file__).with_name("chat_template.jinja")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The model's shape, with the names of the Hugging Face configuration."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 688
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5


# -- the model ------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    """Scales rows to unit mean square, in float32 (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


def rope_table(config: Config) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [positions, head_dim] for `rotate` (Su et al., 2021)."""
    half = torch.arange(0, config.head_dim, 2) / config.head_dim
    positions = torch.arange(config.max_position_embeddings)
    angles = torch.outer(positions, config.rope_theta**-half).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the rotary embedding of x [B, heads, T, head_dim], with the halves as the pairs."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal attention. Each key and value head serves a group of query heads."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.groups = config.num_attention_heads // config.num_key_value_heads
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (self._heads(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        k, v = (t.repeat_interleave(self.groups, dim=1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    """The SwiGLU feed-forward layer (Shazeer, 2020)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """A Llama decoder whose output weights are its embeddings."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        cos, sin = rope_table(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._init_weights(config)

    def _init_weights(self, config: Config) -> None:
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = math.sqrt(2 * config.num_hidden_layers) if into_residual else 1.0
                nn.init.normal_(weight, std=0.02 / scale)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the last hidden states [B, T, hidden] of tokens [B, T]."""
        length = tokens.shape[1]
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, self.cos[:length], self.sin[:length])
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., vocab] of hidden states [..., hidden]."""
        return F.linear(hidden, self.embed_tokens.weight)


# -- tokenizer and batches ------------------------------------------------------------------------


def train_tokenizer(vocab_size: int, seed: int, documents: int = 20_000) -> Tokenizer:
    """Train a byte-level BPE tokenizer of exactly `vocab_size` tokens on sample documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    writer = Writer(f"tokenizer-{seed}", odd=0.12)
    texts = (text for _ in range(documents) for text, _ in writer.document())
    tokenizer.train_from_iterator(texts, trainer)
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bos)]
            ),
        ]
    )
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"got {tokenizer.get_vocab_size()} tokens; the text is too small")
    return tokenizer


def slot_ids(tokenizer: Tokenizer) -> set[int]:
    """Return the token ids of the slot words.

    Raises:
        ValueError: a word is not a single token after a space.
    """
    ids = set()
    for word in usual_words():
        tokens = tokenizer.encode(" " + word, add_special_tokens=False).ids
        if len(tokens) != 1:
            raise ValueError(f"the slot word {word!r} takes {len(tokens)} tokens")
        ids.update(tokens)
        alone = tokenizer.token_to_id(word)
        ids.update([] if alone is None else [alone])
    return ids


Encoded = tuple[list[int], list[bool]]


def encode(tokenizer: Tokenizer, document: list[Segment]) -> Encoded:
    """Return the tokens of a document and whether each is to be learned."""
    tokens: list[int] = []
    learn: list[bool] = []
    for text, wanted in document:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        tokens += ids
        learn += [wanted] * len(ids)
    return tokens, learn


class Batches:
    """Batches of about `size` tokens.

    A row is one document, and rows of similar length go together.
    """

    def __init__(self, tokenizer: Tokenizer, writer: Writer, *, size: int, limit: int) -> None:
        self.tokenizer, self.writer = tokenizer, writer
        self.size, self.limit = size, limit
        self.progress = 0.0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield tokens and learn masks, both [B, T]. Padding is masked."""
        while True:
            rows = sorted(self._rows(512), key=lambda row: len(row[0]))
            groups = list(self._grouped(rows))
            self.writer.rng.shuffle(groups)
            yield from map(_pad, groups)

    def _rows(self, count: int) -> list[Encoded]:
        rows = (encode(self.tokenizer, self.writer.document(self.progress)) for _ in range(count))
        return [row for row in rows if len(row[0]) <= self.limit]

    def _grouped(self, rows: list[Encoded]) -> Iterator[list[Encoded]]:
        group: list[Encoded] = []
        for row in rows:
            if group and (len(group) + 1) * len(row[0]) > self.size:
                yield group
                group = []
            group.append(row)
        if group:
            yield group


def _pad(rows: list[Encoded]) -> tuple[Tensor, Tensor]:
    length = max(len(tokens) for tokens, _ in rows)
    tokens = torch.zeros(len(rows), length, dtype=torch.long)
    learn = torch.zeros(len(rows), length, dtype=torch.bool)
    for index, (ids, wanted) in enumerate(rows):
        tokens[index, : len(ids)] = torch.tensor(ids)
        learn[index, : len(ids)] = torch.tensor(wanted)
    return tokens, learn


# -- training -------------------------------------------------------------------------------------


def token_losses(model: Llama, tokens: Tensor, learn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss, target and hit, each [N], of the N tokens to be learned."""
    wanted = learn[:, 1:]
    targets = tokens[:, 1:][wanted]
    hidden = model(tokens[:, :-1])
    logits = model.logits(hidden[wanted]).float()
    return F.cross_entropy(logits, targets, reduction="none"), targets, logits.argmax(-1) == targets


def learning_rate(progress: float, step: int, *, warmup: int = 60, decay: float = 0.4) -> float:
    """Return the factor on the peak rate: a linear warm-up, a plateau, a linear fall to zero."""
    return min(1.0, (step + 1) / warmup, (1.0 - progress) / decay)


def make_optimizers(model: Llama, rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers, and AdamW for the embeddings and norms."""
    matrices = [p for p in model.layers.parameters() if p.ndim == 2]
    norms = [p for p in model.parameters() if p.ndim == 1]
    embeddings = [model.embed_tokens.weight]
    muon = torch.optim.Muon(
        matrices, lr=rate, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    adam = torch.optim.AdamW(embeddings + norms, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    for optimizer in (muon, adam):
        for group in optimizer.param_groups:
            group["peak"] = rate
    return [muon, adam]


class Trainer:
    """Everything that one run changes."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.args = args
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.config = Config()
        self.tokenizer = train_tokenizer(self.config.vocab_size, args.seed)
        self.is_slot = torch.zeros(self.config.vocab_size, device=self.device)
        self.is_slot[list(slot_ids(self.tokenizer))] = 1.0
        self.model = Llama(self.config).to(self.device)
        if args.compile:
            self.model.compile(dynamic=True)
        self.optimizers = make_optimizers(self.model, args.rate)
        self.step, self.tokens_seen, self.seconds = 0, 0, 0.0
        self.heldout = list(heldout_prompts(200, args.seed))

    @property
    def progress(self) -> float:
        """The part of the run that is done, from 0 to 1."""
        by_time = self.seconds / (60 * self.args.minutes)
        by_steps = self.step / self.args.steps if self.args.steps else 0.0
        return min(1.0, max(by_time, by_steps))

    def autocast(self) -> torch.autocast:
        """Use bf16 for the matrix products."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def train_step(self, tokens: Tensor, learn: Tensor) -> float:
        """Run one update and return the mean loss of the learned tokens."""
        factor = learning_rate(self.progress, self.step)
        with self.autocast():
            losses, targets, _ = token_losses(
                self.model, tokens.to(self.device), learn.to(self.device)
            )
        # Slot words count four times at first, so that copying them is learned early.
        weights = 1 + 3 * max(0.0, 1 - 2 * self.progress) * self.is_slot[targets]
        ((losses * weights).sum() / weights.sum()).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens_seen += tokens.numel()
        return losses.detach().mean().item()

    @torch.no_grad()
    def evaluate(self, count: int) -> tuple[float, float]:
        """Return the perplexity of held-out stories, and the share of slot words guessed right."""
        rows = [encode(self.tokenizer, heldout_document(p)) for p in self.heldout[:count]]
        total, tokens, hits, slots = 0.0, 0, 0.0, 0.0
        for start in range(0, count, 20):
            batch = [t.to(self.device) for t in _pad(rows[start : start + 20])]
            with self.autocast():
                losses, targets, hit = token_losses(self.model, *batch)
            slot = self.is_slot[targets]
            total, tokens = total + losses.sum().item(), tokens + len(losses)
            hits, slots = hits + (slot * hit).sum().item(), slots + slot.sum().item()
        return math.exp(total / tokens), hits / slots

    def run(self) -> None:
        """Train until the budget is spent, and report every minute."""
        writer = Writer(f"train-{self.args.seed}-0", odd=0.1)
        batches = Batches(
            self.tokenizer,
            writer,
            size=self.args.batch_tokens,
            limit=self.config.max_position_embeddings,
        )
        begin = time.monotonic()
        reported, losses = 0.0, []
        for tokens, learn in batches:
            if self.progress >= 1.0:
                break
            losses.append(self.train_step(tokens, learn))
            self.seconds = time.monotonic() - begin
            batches.progress = self.progress
            if self.seconds - reported >= 60:
                self.report(sum(losses) / len(losses))
                reported, losses = self.seconds, []

    def report(self, loss: float) -> None:
        """Print the progress and the mean loss since the last report."""
        perplexity, copied = self.evaluate(40)
        print(
            f"{self.seconds / 60:5.1f} min  step {self.step}  "
            f"{self.tokens_seen / 1e6:.2f} M tokens  loss {loss:.4f}  "
            f"held-out ppl {perplexity:.3f}  slot words right {copied:.2%}",
            flush=True,
        )


def heldout_document(prompt: dict[str, object]) -> list[Segment]:
    """Return a held-out prompt and its reference story, in the form that the model is asked in."""
    writer = Writer(0)
    pair = str(prompt["prompt"]), str(prompt["reference"])
    if not prompt["chat"]:
        return writer.raw(*pair)
    return writer.chat([pair], system=False)


# -- export ---------------------------------------------------------------------------------------


def write_json(path: Path, value: object) -> None:
    """Write indented JSON with a newline at its end."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def export(trainer: Trainer, folder: Path) -> None:
    """Write the model, its configuration, its tokenizer and its chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"model.{name}": tensor.to(device="cpu", dtype=torch.bfloat16).contiguous()
        for name, tensor in trainer.model.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    bos, eos = (trainer.tokenizer.token_to_id(token) for token in (BOS, EOS))
    shape = {name: getattr(trainer.config, name) for name in Config.__dataclass_fields__}
    write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **shape,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "rope_scaling": None,
            "initializer_range": 0.02,
            "pretraining_tp": 1,
            "tie_word_embeddings": True,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "pad_token_id": None,
            "use_cache": True,
            "torch_dtype": "bfloat16",
        },
    )
    write_json(
        folder / "generation_config.json",
        {"bos_token_id": bos, "eos_token_id": eos, "do_sample": True, "temperature": 0.7},
    )
    trainer.tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "add_bos_token": True,
            "add_eos_token": False,
            "additional_special_tokens": list(SPECIAL_TOKENS[2:]),
            "clean_up_tokenization_spaces": False,
            "model_max_length": trainer.config.max_position_embeddings,
        },
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE.read_text(encoding="utf-8"))


def export_heldout(trainer: Trainer, folder: Path) -> None:
    """Write the held-out prompts and the word lists that `evaluate.py` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(prompt, ensure_ascii=False) for prompt in trainer.heldout)
    (folder / "tiny_heldout.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    lists = {**slot_lists(), "words": word_list(trainer.args.seed)}
    write_json(folder / "tiny_words.json", {k: " ".join(v) for k, v in lists.items()})


def main() -> None:
    """Parse the options, train, and export."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="time budget of the training")
    parser.add_argument("--steps", type=int, default=0, help="end after so many updates")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--compile", action="store_true", help="a faster step; needs a C compiler")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves it to torch")
    parser.add_argument("--out", type=Path, default=ROOT / "mie" / "assets" / "tiny")
    parser.add_argument("--heldout", type=Path, default=ROOT / "tests" / "data")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    G.check()
    trainer = Trainer(args)
    parameters = sum(p.numel() for p in trainer.model.parameters())
    print(f"{parameters:,} parameters on {trainer.device}, {torch.get_num_threads()} threads")
    trainer.run()
    export(trainer, args.out)
    export_heldout(trainer, args.heldout)
    perplexity, copied = trainer.evaluate(len(trainer.heldout))
    print(
        f"done: {trainer.step} steps, {trainer.tokens_seen:,} tokens, "
        f"{trainer.seconds / 60:.1f} minutes, held-out perplexity {perplexity:.3f}, "
        f"slot words right {copied:.2%}"
    )


if __name__ == "__main__":
    main()
