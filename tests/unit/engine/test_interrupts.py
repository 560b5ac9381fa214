"""Test who is to blame for an exception: a signal's handler, or the code that it interrupted."""

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mie.base.threads import is_of_the_request, raised_by_signal_handler


class Alarm(Exception):
    """The exception of the handlers."""


def handle(number: int, frame: Any) -> None:
    raise Alarm


class Server:
    """Its handler is a method."""

    def handle(self, number: int, frame: Any) -> None:
        self.stop()

    def stop(self) -> None:
        raise Alarm


@pytest.fixture
def install() -> Iterator[Callable[[Any], None]]:
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda handler: signal.signal(signal.SIGUSR1, handler)
    signal.signal(signal.SIGUSR1, before)


def caught(function: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException, match=r"^") as info:
        function()
    return info.value


def interrupted() -> None:
    signal.raise_signal(signal.SIGUSR1)


@pytest.mark.parametrize("handler", [handle, Server().handle], ids=["function", "method"])
def test_an_exception_of_a_handler_blames_no_request(handler, install) -> None:
    install(handler)
    error = caught(interrupted)
    assert isinstance(error, Alarm)
    assert raised_by_signal_handler(error)
    assert not is_of_the_request(error)


def test_the_same_exception_without_a_signal_blames_the_request(install) -> None:
    install(handle)
    error = caught(Server().stop)
    assert not raised_by_signal_handler(error)
    assert is_of_the_request(error)


def test_a_lack_of_memory_blames_no_request() -> None:
    assert not is_of_the_request(MemoryError())
    assert is_of_the_request(ValueError())
