"""Check with the bundled model's tokenizer whether a grammar accepts a text."""

from functools import cache
from typing import Any

from mie import LLM, StructuredOutputsParams
from mie.structured.grammars import Grammars

EOS, VOCAB_SIZE = 1, 2048
SQL = """
root ::= select_statement
select_statement ::= "SELECT " column " from " table " where " condition
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
condition ::= column "= " number
number ::= "1 " | "2 "
"""
"""The example of vLLM's documents."""


@cache
def tokenizer() -> Any:
    """Return the bundled model's tokenizer."""
    return LLM("bundled", backend="numpy", num_threads=1).tokenizer


@cache
def grammars() -> Grammars:
    """Return the grammars of the bundled model."""
    return Grammars(tokenizer(), VOCAB_SIZE, [EOS])


def tokens_of(text: str) -> list[int]:
    """Return the tokens of a whole output."""
    return [*tokenizer().encode(text, add_special_tokens=False), EOS]


def accepts(grammar: str, text: str) -> bool:
    """Return whether a grammar accepts a whole text."""
    ids = tokens_of(text)
    return grammars().start(StructuredOutputsParams(grammar=grammar)).validate(ids) == len(ids)
