"""Let helper processes share all steps of a test, and count what they share."""

from collections import Counter
from typing import Any

import pytest
from tiny_models import LLAMA, QWEN2

from mie.ops_cpu import crew
from mie.ops_cpu.attention import attention
from mie.ops_cpu.linear import shared as shared_products
from mie.ops_cpu.processes import helpers
from mie.ops_cpu.processes.helpers import HelperProcesses
from mie.ops_cpu.threads.counts import Trials
from mie.ops_cpu.threads.gains import Gains

PATIENCE = 120.0
# Matrices of several tiles.
SHAPES = {
    "max_position_embeddings": 1024,
    "eos_token_id": 39,
    "hidden_size": 100,
    "intermediate_size": 130,
    "head_dim": 40,
}


def configs(window: int) -> dict[str, dict[str, Any]]:
    """Return a model, and one with biases in all layers and this window in some."""
    windows = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1}
    return {"llama": LLAMA | SHAPES, "qwen2": QWEN2 | SHAPES | windows}


def crew_of(engine: Any) -> crew.Crew:
    """Return what decides who shares an engine's steps."""
    found = engine._runner.backend._crew
    assert isinstance(found, crew.Crew)
    return found


def share_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share any work of any model, however long it takes."""
    monkeypatch.setattr(crew, "START_BYTES", 0)
    monkeypatch.setattr(crew, "_new_trials", lambda is_large: Trials((True,)))
    monkeypatch.setattr(crew, "available_cpus", lambda: 64)
    monkeypatch.setattr(attention, "WORTH_SHARING", 1)
    monkeypatch.setattr(shared_products, "LEAST_BYTES", 0)
    monkeypatch.setattr(shared_products, "LEAST_SILU", 0)
    monkeypatch.setattr(Gains, "are_paused", lambda self, now: False)
    monkeypatch.setattr(helpers, "PATIENCE", PATIENCE)


def count_shares(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return a counter of the calls that share work with usable helpers, and of the others."""
    calls: Counter[str] = Counter()
    share = HelperProcesses.share

    def counted(processes: HelperProcesses, tasks: Any) -> None:
        calls["shared" if processes._is_together else "alone"] += 1
        share(processes, tasks)

    monkeypatch.setattr(HelperProcesses, "share", counted)
    return calls
