"""Break the Python that launches the kernels, one place at a time, and see that a test notices.

planted/launches.toml has the bugs.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any

import pytest
import test_attention_bounds as attention_bounds
import test_decode_pieces as decode_pieces
import test_expert_kernels as expert_kernels
import test_graphs as graphs
import test_kernels as kernels
import test_prefill_wide as prefill_wide
import test_quantised_products as quantised
import test_recording as recording
import test_wide_rows
from emulated import needs_compiler
from fake_cupy import FakeCupy, fake_cupy
from planted_bugs import bugs_of

from mie.ops_gpu.load import load_cupy_backend

__all__ = ["fake_cupy"]
pytestmark = [needs_compiler, pytest.mark.slow]

BUGS = bugs_of("launches.toml")


def captures(cupy: FakeCupy) -> None:
    for fails in (False, True):
        machine = recording.Model(load_cupy_backend("float32"))
        with recording.collecting_eagerly() as notes:
            recording.test_no_garbage_is_collected_during_a_capture(machine, notes, fails)
    recording.test_a_capture_leaves_collections_off_if_they_were(machine)


def experts(cupy: FakeCupy) -> None:
    test = expert_kernels.test_experts_with_many_tokens_read_their_weights_once_for_32
    test(2, 8)
    test(40, 32)


def copies(cupy: FakeCupy) -> None:
    kernels.test_blocks_are_staged_only_if_a_destination_is_a_source()


def scales(cupy: FakeCupy) -> None:
    for form in quantised.FORMS[:3]:
        quantised.test_scales_keep_all_their_bits(form)


def streams(cupy: FakeCupy) -> None:
    attention_bounds.test_streaming_launches_what_the_chip_holds(attention_bounds.LONG, None)


def padding(cupy: FakeCupy) -> None:
    graphs.test_padding_keeps_the_batch_and_writes_nowhere()


def chunks(cupy: FakeCupy) -> None:
    for batch_invariant in (False, True):
        graphs.test_steps_with_chunks_are_captured("float16", batch_invariant, None)


def graphs_of_chunks(cupy: FakeCupy) -> None:
    with pytest.MonkeyPatch.context() as patch:
        graphs.test_graphs_of_chunks_are_bounded(patch)


def wide(cupy: FakeCupy) -> None:
    prefill_wide.test_rows_have_the_same_bits_in_wide_blocks("float16", 64, 70)
    large = kernels.Shape("float16", 128, 3, 1, 16)
    prefill_wide.test_wide_blocks_are_for_shapes_that_have_registers(large, 164, False)


def pieces(cupy: FakeCupy) -> None:
    decode_pieces.test_pieces_depend_on_the_sequence_alone(None)


def wide_rows(cupy: FakeCupy) -> None:
    test_wide_rows.test_each_product_uses_the_kernels_it_may()
    test_wide_rows.test_splits_fill_the_chip(2560, 2048, 6, 3)


CHECKS: dict[str, Callable[[FakeCupy], None]] = {
    check.__name__: check
    for check in (
        *(captures, experts, copies, scales, streams),
        *(padding, chunks, graphs_of_chunks, wide, pieces, wide_rows),
    )
}


def functions_of(module: ModuleType, name: str) -> Iterator[tuple[str, FunctionType]]:
    """Yield the functions and methods that are written in a module, without their decorators."""
    for owner in (module, *(each for each in vars(module).values() if inspect.isclass(each))):
        for each in vars(owner).values():
            function = inspect.unwrap(each) if callable(each) else None
            if isinstance(function, FunctionType) and function.__module__ == name:
                yield function.__qualname__, function


def plant(bug: dict[str, Any], patch: pytest.MonkeyPatch) -> None:
    """Give the functions that the bug changes their new code."""
    name = f"mie.ops_gpu.{bug['file'].removesuffix('.py')}"
    real = import_module(name)
    source = inspect.getsource(real)
    assert source.count(bug["old"]) == 1, bug["name"]
    broken = ModuleType(name)
    patch.setitem(sys.modules, name, broken)  # dataclasses look their module up
    exec(compile(source.replace(bug["old"], bug["new"]), bug["file"], "exec"), vars(broken))
    new, changed = dict(functions_of(broken, name)), 0
    for qualified, function in functions_of(real, name):
        code, old = new[qualified].__code__, function.__code__
        if old.co_filename == real.__file__ and (code.co_code, code.co_names) != (
            old.co_code,
            old.co_names,
        ):
            patch.setattr(function, "__code__", code)
            changed += 1
    patch.setitem(sys.modules, name, real)
    assert changed == 1, bug["name"]


@pytest.mark.parametrize("name", CHECKS)
def test_the_launches_pass_unchanged(fake_cupy: FakeCupy, name: str):
    CHECKS[name](fake_cupy)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_noticed(fake_cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch, name: str):
    bug = BUGS[name]
    plant(bug, monkeypatch)
    with pytest.raises(AssertionError):
        CHECKS[bug["check"]](fake_cupy)
