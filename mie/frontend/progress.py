"""Show the progress of `LLM.generate` and of a beam search."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from mie.frontend.outputs import RequestOutput


class ProgressBar:
    """A progress bar for the requests of one call.

    Its speeds are estimates that count only finished requests. ``use_tqdm`` is True for a bar,
    False for none, or a function with tqdm's keywords that makes a bar. In a notebook the bar is a
    widget.
    """

    def __init__(self, total: int, use_tqdm: bool | Callable[..., Any] = True) -> None:
        self._num_input = self._num_output = 0
        self._bar: Any = None
        if use_tqdm:
            options = {"desc": "generating", "unit": "request", "postfix": _speeds(0, 0)}
            self._bar = _new_bar(use_tqdm, total=total, **options)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, output: RequestOutput) -> None:
        """Count a finished request and its tokens."""
        if self._bar is not None:
            self._num_input += len(output.prompt_token_ids)
            self._num_output += sum(len(choice.token_ids) for choice in output.outputs)
            elapsed = self._bar.format_dict["elapsed"] or 1e-9
            self._bar.postfix = _speeds(self._num_input / elapsed, self._num_output / elapsed)
            self._bar.update()


def steps(count: int, use_tqdm: bool | Callable[..., Any]) -> Iterable[int]:
    """Count the tokens of a beam search with a bar. The search may end before ``count``."""
    if not use_tqdm:
        return range(count)
    bar: Iterable[int] = _new_bar(use_tqdm, range(count), desc="beam search", unit="token")
    return bar


def _new_bar(use_tqdm: bool | Callable[..., Any], *args: Any, **options: Any) -> Any:
    from tqdm.auto import tqdm

    make = use_tqdm if callable(use_tqdm) else tqdm
    return make(*args, dynamic_ncols=True, **options)


def _speeds(num_input: float, num_output: float) -> str:
    return f"est. speed input: {num_input:.2f} toks/s, output: {num_output:.2f} toks/s"
