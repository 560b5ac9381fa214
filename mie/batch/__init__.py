"""Answer many requests, from a file or a dataset, with one engine. A failure is a result.

This room knows requests, rows and the lines of files. It knows neither HTTP nor other machines.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mie.batch.requests import RESULTS as RESULTS
    from mie.batch.requests import RowEngine as RowEngine
    from mie.batch.requests import answers as answers
    from mie.batch.requests import seed_of as seed_of

__all__ = ["RESULTS", "RowEngine", "answers", "seed_of"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'mie.batch' has no attribute {name!r}")
    from mie.batch import requests  # it imports the engine, which reading a file does not

    return getattr(requests, name)
