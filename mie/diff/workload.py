"""Define the requests that both sides run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mie.base.arithmetic import ceil_div
from mie.checkpoint.config import ModelConfig
from mie.checkpoint.locate import locate_model
from mie.config.engine import EngineConfig
from mie.config.params.sampling import SamplingParams
from mie.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class DiffWorkload:
    """Greedy answers to prompts of token ids, all sent at once.

    A small budget cuts prompts into chunks, so a later prompt runs together with the earlier ones'
    decodes and can use their blocks.
    """

    directory: Path
    model: str
    """The model's name in the report."""
    prompts: Sequence[Sequence[int]]
    token_text: Callable[[int], str] = str
    """Returns the text of a token for the report."""
    max_tokens: int = 8
    block_size: int = 8
    max_num_batched_tokens: int = 8

    def config(self) -> EngineConfig:
        """Return the config, the same for both sides, so it does not depend on their memory."""
        lengths = [len(prompt) + self.max_tokens for prompt in self.prompts]
        num_blocks = sum(ceil_div(length, max(1, self.block_size)) for length in lengths)
        return EngineConfig(
            block_size=self.block_size,
            num_blocks=max(1, num_blocks + len(lengths) + 1),
            max_num_batched_tokens=self.max_num_batched_tokens,
        )

    def params(self, forced: Sequence[int] | None = None) -> SamplingParams:
        """Return the parameters of each request. With ``forced`` its tokens are those."""
        return SamplingParams(
            temperature=0,
            max_tokens=self.max_tokens,
            ignore_eos=True,
            trace_decode_token_ids=forced,
        )


def workload_of_texts(model: str, texts: Sequence[str], **settings: int) -> DiffWorkload:
    """Return the workload of text prompts for a model by its name.

    ``settings`` are ``max_tokens``, ``block_size`` and ``max_num_batched_tokens``.

    Raises:
        ModelError: the model or its tokenizer cannot be used.
        RequestError: a text is not valid Unicode.
    """
    directory = locate_model(model)
    tokenizer = Tokenizer.load(directory, ModelConfig.load(directory).vocab_size)
    return DiffWorkload(
        directory=directory,
        model=model,
        prompts=[tokenizer.encode(text) for text in texts],
        token_text=tokenizer.token_str,
        **settings,
    )
