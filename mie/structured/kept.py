"""Remember what was compiled, and what was refused."""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING

from mie.params.structured import StructuredOutputsParams
from mie.structured.limits import MAX_KEPT, MAX_KEPT_BYTES, MAX_REFUSALS

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Grammar:
    """A compiled description. It stays compiled while a request holds it."""

    def __init__(self, matcher: LLMatcher, num_bytes: int) -> None:
        """``num_bytes`` is the memory that compiling it took."""
        self.matcher = matcher
        """A matcher at the beginning of an output, to be copied."""
        self.num_bytes = num_bytes


class Kept:
    """The grammars that requests hold, the ones used last, and the last refusals.

    A forked child begins without any, because another thread of its parent may have locked one.
    """

    def __init__(self) -> None:
        self._begin()
        this = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _begin_again(this()))

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._held: weakref.WeakValueDictionary[StructuredOutputsParams, Grammar] = (
            weakref.WeakValueDictionary()
        )
        self._last: OrderedDict[StructuredOutputsParams, Grammar] = OrderedDict()
        self._refusals: OrderedDict[StructuredOutputsParams, str] = OrderedDict()

    def grammar(self, params: StructuredOutputsParams) -> Grammar | None:
        """Return a grammar that is compiled, and note its use."""
        with self._lock:
            grammar = self._held.get(params)
            if grammar is not None:
                self._use(params, grammar)
            return grammar

    def keep(self, params: StructuredOutputsParams, grammar: Grammar) -> None:
        """Remember a grammar."""
        with self._lock:
            self._held[params] = grammar
            self._use(params, grammar)

    def refusal(self, params: StructuredOutputsParams) -> str | None:
        """Return why a description was refused, if it was."""
        with self._lock:
            return self._refusals.get(params)

    def refuse(self, params: StructuredOutputsParams, why: str) -> None:
        """Remember a refusal."""
        with self._lock:
            self._refusals[params] = why
            if len(self._refusals) > MAX_REFUSALS:
                self._refusals.popitem(last=False)

    def _use(self, params: StructuredOutputsParams, grammar: Grammar) -> None:
        self._last[params] = grammar
        self._last.move_to_end(params)
        while len(self._last) > MAX_KEPT or self._num_bytes() > MAX_KEPT_BYTES:
            self._last.popitem(last=False)

    def _num_bytes(self) -> int:
        return sum(grammar.num_bytes for grammar in self._last.values())


def _begin_again(kept: Kept | None) -> None:
    if kept is not None:
        kept._begin()
