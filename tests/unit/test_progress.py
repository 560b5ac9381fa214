"""Test the progress bar of `generate`: requests, and tokens per second."""

import io
from functools import partial

from tqdm import tqdm

from mie.frontend.outputs import CompletionOutput, RequestOutput
from mie.frontend.progress import ProgressBar


def output(num_prompt: int, *num_tokens: int) -> RequestOutput:
    choices = [CompletionOutput(index=i, token_ids=[1] * n) for i, n in enumerate(num_tokens)]
    return RequestOutput(
        request_id="0", prompt=None, prompt_token_ids=[1] * num_prompt, outputs=choices
    )


def test_tqdm_draws_it() -> None:
    shown = io.StringIO()
    with ProgressBar(1, partial(tqdm, file=shown, mininterval=0)) as bar:
        bar.update(output(3, 5))
    assert "generating: 100%" in shown.getvalue()
    assert "toks/s" in shown.getvalue()
