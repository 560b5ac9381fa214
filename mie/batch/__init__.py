"""Answer many requests, or the rows of a dataset, with one engine. A failure is a result.

This room knows requests and rows. It knows neither HTTP nor other machines.
"""

from mie.batch.requests import answers, seed_of
from mie.batch.rows import RESULTS, RowEngine

__all__ = ["RESULTS", "RowEngine", "answers", "seed_of"]
