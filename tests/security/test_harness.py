"""Check that the harness notices excesses."""

import os
import signal
from pathlib import Path

import measured
import pytest
from measured import MAX_BYTES, Zygote

BUSY_SECONDS = 1.2


def busy() -> None:
    while sum(os.times()[:2]) < BUSY_SECONDS:
        pass


def large() -> None:
    held = bytearray(MAX_BYTES + (10 << 20))
    held[::4096] = b"x" * len(held[::4096])


def foreign() -> None:
    raise ValueError("not ours")


def panic() -> None:
    raise KeyboardInterrupt


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def quiet() -> str:
    return "done"


def too_large() -> None:
    bytearray(1 << 40)


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("busy", "s of CPU time"),
        ("large", "MB"),
        ("foreign", "ValueError: not ours"),
        ("panic", "KeyboardInterrupt"),
        ("killed", "killed: status 9"),
        ("too_large", "MemoryError"),
    ],
)
def test_a_bad_case_fails(zygote, monkeypatch, name, verdict) -> None:
    # The real limit would take seconds to reach.
    monkeypatch.setattr(measured, "MAX_CPU_SECONDS", BUSY_SECONDS - 0.2)
    result = zygote.run("call", f"{Path(__file__).stem}:{name}")
    with pytest.raises(AssertionError, match=verdict):
        result.check_cost()


def test_an_accepted_case_does_not_count_as_refused(zygote: Zygote) -> None:
    result = zygote.run("call", f"{Path(__file__).stem}:quiet")
    result.check_cost()
    assert result.stdout == "done"
    with pytest.raises(AssertionError, match="not refused: done"):
        result.check_refused()


def test_errors_of_mie_are_distinguished_from_others(zygote: Zygote, tmp_path: Path) -> None:
    zygote.run("config", tmp_path).check_refused("it has no config.json")
    zygote.run("cli", "inspect", tmp_path).check_refused("it has no config.json")
