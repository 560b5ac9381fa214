"""Test the progress bar of `generate`: requests, and tokens per second."""

import io
from functools import partial
from types import SimpleNamespace
from typing import Any

from tqdm import tqdm

from mie.frontend.outputs import CompletionOutput, RequestOutput
from mie.frontend.progress import ProgressBar


def output(num_prompt: int, *num_tokens: int) -> RequestOutput:
    choices = [CompletionOutput(index=i, token_ids=[1] * n) for i, n in enumerate(num_tokens)]
    return RequestOutput(
        request_id="0", prompt=None, prompt_token_ids=[1] * num_prompt, outputs=choices
    )


class FakeBar(SimpleNamespace):
    """A bar that has run for four seconds."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords, format_dict={"elapsed": 4.0}, num_done=0, is_closed=False)

    def update(self) -> None:
        self.num_done += 1

    def close(self) -> None:
        self.is_closed = True


def test_the_bar_shows_tokens_per_second_of_all_choices() -> None:
    bars: list[FakeBar] = []

    def make(**keywords: Any) -> FakeBar:
        bars.append(FakeBar(**keywords))
        return bars[-1]

    with ProgressBar(2, make) as bar:
        bar.update(output(10, 6, 2))
        assert bars[0].postfix == "est. speed input: 2.50 toks/s, output: 2.00 toks/s"
        bar.update(output(2, 4))
        assert bars[0].postfix == "est. speed input: 3.00 toks/s, output: 3.00 toks/s"
    assert (bars[0].total, bars[0].num_done, bars[0].is_closed) == (2, 2, True)


def test_tqdm_draws_it() -> None:
    shown = io.StringIO()
    with ProgressBar(1, partial(tqdm, file=shown, mininterval=0)) as bar:
        bar.update(output(3, 5))
    assert "generating: 100%" in shown.getvalue()
    assert "toks/s" in shown.getvalue()
