"""Progress bars on standard error."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bar(what: str, unit: str, number: int) -> Iterator[Callable[[int], object]]:
    """Show a progress bar on a terminal, and nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda num_new: None
        return
    from tqdm import tqdm

    with tqdm(total=number, desc=what, unit=unit, leave=False) as shown:
        yield shown.update
