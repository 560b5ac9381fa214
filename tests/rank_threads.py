"""Run the other ranks of an engine as threads of this process, which start at once."""

import contextlib
import mmap
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from deadlines import join

from mie.errors import WorkerError
from mie.load import engine
from mie.load.ranks import Order, serve
from mie.ranks.backend import RankBackend
from mie.ranks.exchange import Exchange


class RankThreads:
    """The threads of all ranks but 0, in place of `mie.load.ranks.Ranks`."""

    made: ClassVar[list[Any]] = []

    def __init__(self, backend: RankBackend, order: Order) -> None:
        memory = mmap.mmap(-1, backend.exchange_bytes())
        self.exchange = Exchange(memory, backend.share, self.check)
        self.exchange.set_up()
        self.backend = backend
        backend.connect(self.exchange)
        self.error: BaseException | None = None
        self.threads = [
            threading.Thread(target=self._serve, args=(order, rank, memory), daemon=True)
            for rank in range(1, backend.num_ranks)
        ]
        for thread in self.threads:
            thread.start()
        self.made.append(self)

    def _serve(self, order: Order, rank: int, memory: mmap.mmap) -> None:
        try:
            serve(order, rank, memory, self.check)
        except BaseException as error:
            self.error = error
            if not isinstance(error, WorkerError):
                raise

    def check(self) -> None:
        if self.error is not None:
            raise WorkerError(f"a rank has ended: {self.error}")

    @contextlib.contextmanager
    def loading(self, backend: RankBackend) -> Iterator[None]:
        yield
        with self.backend.command("ready"):
            pass

    def end(self) -> None:
        with contextlib.suppress(WorkerError), self.backend.command("end"):
            pass
        join(*self.threads)


@contextlib.contextmanager
def ranks_as_threads() -> Iterator[list[RankThreads]]:
    """Load engines whose ranks are threads, and end these at the end of the block."""
    RankThreads.made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "Ranks", RankThreads)
        try:
            yield RankThreads.made
        finally:
            for ranks in RankThreads.made:
                ranks.end()
