"""Run one engine for many callers: execute their commands and file their outputs.

One thread at a time turns an `EngineLoop`: a waiting caller (`mie.frontend.driver`), or a dedicated
thread (`mie.async_llm`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from mie.engine.engine import Engine
from mie.errors import EngineDeadError, MieError
from mie.frontend.processor import OutputProcessor
from mie.system.interrupts import raised_by_signal_handler
from mie.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOST_FAULTS = 2
"""Number of consecutive turns that may fail before the engine is dead.

A failed turn is tried again, because memory may have been short for a moment.
"""


class Command(Generic[T]):
    """A function that a caller wants to run between two steps.

    After an interrupt it is called again, so it must be repeatable.
    """

    def __init__(
        self, function: Callable[[], T], when_done: Callable[[], object] | None = None
    ) -> None:
        self.is_done = False
        self._function = function
        self._when_done = when_done
        self._result: T | None = None
        self._error: Exception | None = None

    def run(self) -> None:
        """Call the function, and keep what it returns or raises.

        A function that is done is not called again, because its caller may already have the result.
        """
        if not self.is_done:
            try:
                self._result = self._function()
            except Exception as error:
                if raised_by_signal_handler(error):
                    raise
                self._error = error
            self.is_done = True
        if self._when_done is not None:
            self._when_done()

    @property
    def has_broken_off(self) -> bool:
        """Whether the function raised something other than a refusal."""
        return self._error is not None and not isinstance(self._error, MieError)

    def refuse(self, error: Exception) -> None:
        """Make `result` raise ``error``."""
        self._function = _refusal(error)
        self.run()

    def result(self) -> T:
        """Return the function's result or raise its exception."""
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # the command is done


def _refusal(error: Exception) -> Callable[[], Any]:
    def refuse() -> None:
        raise error

    return refuse


class EngineLoop:
    """An engine, its callers' commands and their outputs."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
        self.engine = engine
        self.processor = OutputProcessor(engine, tokenizer)
        self.inbox: deque[Command[Any]] = deque()
        """Commands to run between two steps. Any thread may append."""
        self.num_turns = 0
        self.dead_error: EngineDeadError | None = None
        """The reason why the engine is dead, or None."""
        self._is_behind = False  # a turn was interrupted, so some outputs may not be filed
        self._num_faults = 0

    @property
    def has_work(self) -> bool:
        """Whether a turn has anything to do."""
        return self.engine.has_work or self.has_chores

    @property
    def has_chores(self) -> bool:
        """Whether a turn has something to do apart from a step."""
        return bool(self.inbox) or self.processor.has_gone or self._is_behind

    def turn(self, *, may_step: bool = True) -> None:
        """Run commands, run a step if there is work, and file its outputs.

        If a signal handler raises an exception, it reaches the caller, and the next turn does the
        rest of this one.

        Raises:
            EngineDeadError: the engine is dead.
        """
        self.check_alive()
        try:
            if self._is_behind:
                self.processor.catch_up()
            self._is_behind = True
            self.processor.drop_orphans()
            while self.inbox:
                self.inbox[0].run()
                if self.inbox.popleft().has_broken_off:
                    self.processor.catch_up()
            if may_step and self.engine.has_work:
                self.processor.process(self.engine.step())
            self._is_behind = False
            self._num_faults = 0
            self.num_turns += 1
        except Exception as error:
            if raised_by_signal_handler(error):
                raise
            self._count_fault(error)

    def check_alive(self) -> None:
        """Raise `EngineDeadError` if the engine is dead."""
        if self.dead_error is not None:
            raise EngineDeadError(str(self.dead_error)) from self.dead_error.__cause__

    def _count_fault(self, error: Exception) -> None:
        """Count a failed turn for which no request is to blame."""
        self._num_faults += 1
        if self._num_faults < MOST_FAULTS:
            logger.error("a step failed and will be retried: %r", error, exc_info=error)
            return
        logger.critical("the engine is dead: %r", error, exc_info=error)
        self.die(
            f"the engine is dead and its requests are lost: {type(error).__name__}: {error} (load "
            "the model again)",
            error,
        )
        self.check_alive()

    def die(self, message: str, cause: Exception | None = None) -> None:
        """Refuse all requests and commands from now on."""
        self.dead_error = EngineDeadError(message)
        self.dead_error.__cause__ = cause

    def forget(self) -> None:
        """Start over in a forked child: the requests belong to the parent."""
        self.inbox.clear()
        self.processor.drop_all()
        self._is_behind = False
