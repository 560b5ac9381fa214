"""Train the bundled model from scratch and write `mie/assets/tiny` and its held-out prompts.

    python scripts/tiny_model/train.py --minutes 60

It needs the `train` extra and downloads nothing: worker processes write the text with `stories.py`
during training. It runs on a GPU if there is one, and else on the CPU. One worker is enough for a
CPU; for a GPU, `mie/assets/tiny/README.md` has the command that trained the bundled weights.

A run ends after `--minutes`, or after `--steps` if they are given. A run by `--steps` with the same
`--processes` reads the same documents in the same order on every machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from batches import Batches, encode, pad
from model import Config, Llama, make_optimizers
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
from unseen import with_word
from words import UNSEEN

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "mie" / "assets" / "tiny"


# -- tokenizer ------------------------------------------------------------------------------------


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


def check_usual_words(tokenizer: Tokenizer) -> None:
    """Raise `ValueError` if a usual word is not a single token after a space."""
    for word in usual_words():
        tokens = tokenizer.encode(" " + word, add_special_tokens=False).ids
        if len(tokens) != 1:
            raise ValueError(f"the slot word {word!r} takes {len(tokens)} tokens")


# -- training -------------------------------------------------------------------------------------


def token_losses(model: Llama, batch: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return losses, the learn mask, the slot mask and whether the best guess is right.

    Each is [B, T - 1], for a batch [3, B, T]. The loss of a token that is only read is 0.
    """
    tokens, learn, slot = batch[0].long(), batch[1, :, 1:].float(), batch[2, :, 1:].float()
    targets = tokens[:, 1:]
    logits = model.logits(model(tokens[:, :-1])).float()
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    right = (logits.argmax(-1) == targets).float()
    return losses.view_as(targets) * learn, learn, slot * learn, right


def learning_rate(progress: float, step: int, *, warmup: int, decay: float = 0.4) -> float:
    """Return the factor on the peak rate: a linear warm-up, a plateau, a linear fall to zero."""
    return min(1.0, (step + 1) / warmup, (1.0 - progress) / decay)


class Trainer:
    """Everything that one run changes."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.args = args
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.backends.cuda.enable_cudnn_sdp(False)  # It compiles a kernel for each new shape.
        self.config = Config()
        self.model = Llama(self.config).to(self.device)
        if args.tokenizer:
            self.tokenizer = Tokenizer.from_file(str(args.tokenizer))
        else:
            self.tokenizer = train_tokenizer(self.config.vocab_size, args.seed)
        check_usual_words(self.tokenizer)
        self.optimizers = make_optimizers(self.model, args.rate)
        self.step, self.tokens_seen = 0, 0
        self.begin = time.monotonic()
        self.heldout = list(heldout_prompts(200, args.seed))

    @property
    def seconds(self) -> float:
        """The time since the training began."""
        return time.monotonic() - self.begin

    @property
    def progress(self) -> float:
        """The part of the run that is done, from 0 to 1."""
        if self.args.steps:
            return self.step / self.args.steps
        return min(1.0, self.seconds / (60 * self.args.minutes))

    def autocast(self) -> torch.autocast:
        """Use bf16 for the matrix products, if the options say so."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.args.bf16)

    def train_step(self, batches: Iterator[np.ndarray]) -> Tensor:
        """Run one update and return the mean loss of the learned tokens."""
        progress = self.progress
        # Slot words count more at first, so that copying them is learned early.
        extra = 0.5 + 2.5 * max(0.0, 1 - progress / 0.6)
        batch = self._on_device(next(batches))
        with self.autocast():
            losses, learn, slot, _ = token_losses(self.model, batch)
        weights = learn + extra * slot
        ((losses * weights).sum() / weights.sum()).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        factor = learning_rate(progress, self.step, warmup=self.args.warmup)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens_seen += batch[0].numel()
        return losses.detach().sum() / learn.sum()

    def _on_device(self, batch: np.ndarray) -> Tensor:
        return torch.from_numpy(batch).to(self.device)

    @torch.no_grad()
    def evaluate(self, count: int, *, unseen: bool = False) -> tuple[float, float]:
        """Return the perplexity of held-out stories, and the share of slot tokens guessed right.

        With `unseen`, each story has a word that occurs in no training document.
        """
        prompts = list(unseen_prompts(self.heldout)) if unseen else self.heldout
        rows = [
            encode(self.tokenizer, heldout_document(p), heldout_words(p)) for p in prompts[:count]
        ]
        total = torch.zeros(4, device=self.device)  # losses, tokens, right slots, slots
        for start in range(0, len(rows), 20):
            batch = self._on_device(pad(rows[start : start + 20]))
            with self.autocast():
                losses, learn, slot, right = token_losses(self.model, batch)
            total += torch.stack((losses.sum(), learn.sum(), (slot * right).sum(), slot.sum()))
        loss, tokens, hits, slots = total.tolist()
        return math.exp(loss / tokens), hits / slots

    def run(self) -> None:
        """Train until the budget is spent, and report from time to time."""
        options = self.args
        size, processes = options.batch_tokens, options.processes
        batches = Batches(self.tokenizer, seed=options.seed, size=size, processes=processes)
        self.begin = time.monotonic()
        reported, losses = 0.0, []
        with contextlib.closing(iter(batches)) as stream:
            while self.progress < 1.0:
                losses.append(self.train_step(stream))
                batches.progress = self.progress
                if self.seconds - reported >= 60 * options.report_every:
                    self.report(torch.stack(losses).mean().item())
                    export(self, options.out)
                    reported, losses = self.seconds, []

    def report(self, loss: float) -> None:
        """Print the progress and the mean loss since the last report."""
        perplexity, copied = self.evaluate(40)
        _, unseen = self.evaluate(40, unseen=True)
        print(
            f"{self.seconds / 60:5.1f} min  step {self.step}  "
            f"{self.tokens_seen / 1e6:.2f} M tokens  loss {loss:.4f}  "
            f"held-out ppl {perplexity:.3f}  slot tokens right {copied:.2%}, "
            f"with an unseen word {unseen:.2%}",
            flush=True,
        )


def heldout_words(prompt: dict[str, object]) -> set[str]:
    """Return the words that the prompt's story uses."""
    keys = ("name", "animal", "place", "object", "friend", "friend_animal")
    return {str(prompt[key]) for key in keys if prompt[key]}


def unseen_prompts(prompts: list[dict[str, object]]) -> Iterator[dict[str, object]]:
    """Return the prompts with one word each exchanged for one that training never sees."""
    for index, prompt in enumerate(prompts):
        kind = list(UNSEEN)[index % 4]
        yield with_word(prompt, kind, UNSEEN[kind][index // 4 % 30])


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
    template = (TINY / "chat_template.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


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
    parser.add_argument("--steps", type=int, default=0, help="number of updates, instead of a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--warmup", type=int, default=60, help="updates until the peak rate")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--processes", type=int, default=1, help="workers that write the text")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FILE", help="use this one instead of training one"
    )
    parser.add_argument("--bf16", action="store_true", help="matrix products in bfloat16")
    parser.add_argument("--report-every", type=float, default=1.0, help="minutes between exports")
    parser.add_argument("--out", type=Path, default=TINY)
    parser.add_argument("--heldout", type=Path, default=ROOT / "tests" / "data")
    args = parser.parse_args()
    for name in ("minutes", "warmup", "batch_tokens", "processes"):
        if (value := getattr(args, name)) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive; got {value}")
    if args.steps < 0:
        parser.error(f"--steps must be at least 0; got {args.steps}")
    if args.tokenizer and not args.tokenizer.is_file():
        parser.error(f"--tokenizer names no file: {args.tokenizer}")
    G.check()
    trainer = Trainer(args)
    parameters = sum(p.numel() for p in trainer.model.parameters())
    print(f"{parameters:,} parameters on {trainer.device}", flush=True)
    trainer.run()
    export(trainer, args.out)
    export_heldout(trainer, args.heldout)
    perplexity, copied = trainer.evaluate(len(trainer.heldout))
    print(
        f"done: {trainer.step} steps, {trainer.tokens_seen:,} tokens, "
        f"{trainer.seconds / 60:.1f} minutes, held-out perplexity {perplexity:.3f}, "
        f"slot tokens right {copied:.2%}"
    )


if __name__ == "__main__":
    main()
