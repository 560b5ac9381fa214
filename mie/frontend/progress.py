"""Show the progress of `LLM.generate` and of a beam search."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from mie.frontend.outputs import RequestOutput


@contextmanager
def progress_bar(
    total: int, use_tqdm: bool | Callable[..., Any]
) -> Iterator[Callable[[RequestOutput], object]]:
    """Show a progress bar for the requests of one call. The function counts a finished request.

    The speeds are estimates that count only finished requests. ``use_tqdm`` is True for a bar,
    False for none, or a function with tqdm's keywords that makes a bar. In a notebook the bar is a
    widget.
    """
    if not use_tqdm:
        yield lambda output: None
        return
    options = {"desc": "generating", "unit": "request", "postfix": _speeds(0, 0)}
    numbers = [0, 0]
    with closing(_new_bar(use_tqdm, total=total, **options)) as bar:

        def count(output: RequestOutput) -> None:
            numbers[0] += len(output.prompt_token_ids)
            numbers[1] += sum(len(choice.token_ids) for choice in output.outputs)
            elapsed = bar.format_dict["elapsed"] or 1e-9
            bar.postfix = _speeds(*(number / elapsed for number in numbers))
            bar.update()

        yield count


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
