"""Answer many requests, from a file or a dataset, with one engine. A failure is a result.

This room handles requests, rows and the lines of files. It uses neither HTTP nor other machines.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mie.frontend.batch.requests import RESULTS as RESULTS
    from mie.frontend.batch.requests import RowEngine as RowEngine
    from mie.frontend.batch.requests import answers as answers
    from mie.frontend.batch.requests import seed_of as seed_of

__all__ = ["RESULTS", "RowEngine", "answers", "seed_of"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'mie.frontend.batch' has no attribute {name!r}")
    from mie.frontend.batch import requests  # it imports the engine, which reading a file does not

    return getattr(requests, name)
