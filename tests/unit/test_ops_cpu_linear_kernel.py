"""Test which kernels of a BLAS are taken, and which groups of rows are invariant with them."""

from __future__ import annotations

import platform
import weakref
from collections.abc import Callable
from ctypes import c_float
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from linear_layouts import KERNEL, needs_kernel

from mie.ops_cpu.allocator import CachingAllocator
from mie.ops_cpu.linear.geometry import REFERENCE_GROUP
from mie.ops_cpu.linear.kernel import Kernel, find_kernel
from mie.ops_cpu.linear.layout import Buffers
from mie.ops_cpu.linear.packed import LEAST_CALLS, PACKED_WIDTHS, PackedLayout
from mie.ops_cpu.linear.tiled import TiledPlan
from mie.ops_cpu.threads.blas import Blas
from mie.ops_cpu.threads.workers import Workers

WIDTH = PACKED_WIDTHS[0]
AT_ONCE = 4
"""The rows, and the columns, that the fake kernel packs next to each other."""


def memory(begin: Any, *shape: int) -> np.ndarray:
    """Return the floats at an address."""
    array = np.ctypeslib.as_array((c_float * int(np.prod(shape))).from_address(begin))
    return array.reshape(shape)


def panels_of(rows: np.ndarray, at_once: int = AT_ONCE) -> list[np.ndarray]:
    return [rows[first : first + at_once].T for first in range(0, len(rows), at_once)]


def pack(num_inputs: int, num_rows: int, rows: int, stride: int, packed: int) -> None:
    """Pack as OpenBLAS does."""
    source = memory(rows, (num_rows - 1) * stride + num_inputs)
    x = np.lib.stride_tricks.as_strided(source, (num_rows, num_inputs), (4 * stride, 4))
    memory(packed, num_rows * num_inputs)[:] = np.concatenate([p.ravel() for p in panels_of(x)])


def unpack(packed: int, num_rows: int, num_inputs: int) -> np.ndarray:
    flat = memory(packed, num_rows * num_inputs)
    starts = range(0, num_rows, AT_ONCE)
    panels = [flat[s * num_inputs : (s + AT_ONCE) * num_inputs] for s in starts]
    return np.concatenate([panel.reshape(num_inputs, -1).T for panel in panels])


def multiply(
    columns: int,
    num_rows: int,
    num_inputs: int,
    factor: float,
    weights: int,
    rows: int,
    out: int,
    stride: int,
    spoil: Callable[[np.ndarray], None] = lambda product: None,
) -> None:
    """Multiply as OpenBLAS does. ``spoil`` may change the product."""
    w, x = unpack(weights, columns, num_inputs), unpack(rows, num_rows, num_inputs)
    product = (factor * (x.astype("float64") @ w.T.astype("float64"))).astype("float32")
    spoil(product)
    y = memory(out, (num_rows - 1) * stride + columns)
    np.lib.stride_tricks.as_strided(y, product.shape, (4 * stride, 4))[...] += product


def spoiled(spoil: Callable[[np.ndarray], None]) -> Callable[..., None]:
    return lambda *args: multiply(*args, spoil=spoil)


def converted(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function that also takes arguments of ctypes, as functions of a library do."""
    return lambda *args: function(*(getattr(each, "value", each) for each in args))


FAKE_KERNEL = Kernel(converted(multiply), converted(pack), AT_ONCE)


def pack_in_order(num_inputs: int, num_rows: int, rows: int, stride: int, packed: int) -> None:
    """Pack nothing next to each other."""
    memory(packed, num_rows, num_inputs)[...] = memory(rows, num_rows, num_inputs)


def pack_backwards(num_inputs: int, num_rows: int, rows: int, stride: int, packed: int) -> None:
    pack(num_inputs, num_rows, rows, stride, packed)
    memory(packed, num_rows * num_inputs)[:] = memory(packed, num_rows * num_inputs)[::-1].copy()


@dataclass
class FakeBlas:
    functions: dict[str, Any] = field(default_factory=dict)
    version: str = "OpenBLAS 0.3.31 DYNAMIC_ARCH Fakewell"
    core: str = "Fakewell"

    def symbol(self, name: str) -> Any:
        return self.functions.get(name)


def copied(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function that may get attributes of its own."""
    return lambda *args: function(*args)


def fake_blas(suffix: str = "_FAKEWELL", **changes: Any) -> Any:
    functions = {"sgemm_kernel": multiply, "sgemm_oncopy": pack, "sgemm_incopy": pack} | changes
    return FakeBlas({f"{k}{suffix}": copied(v) for k, v in functions.items() if v is not None})


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


@pytest.mark.parametrize(
    "blas",
    [
        fake_blas(),
        fake_blas(suffix=""),  # made for one type of CPU
        fake_blas(sgemm_incopy=None),  # rows and columns are packed alike
        fake_blas(sgemm_oncopy=lambda *args: pack(*args), sgemm_incopy=pack),
    ],
)
def test_a_kernel_is_found_and_its_panels_measured(blas: Any):
    kernel = find_kernel(blas)
    assert kernel is not None
    assert kernel.columns == AT_ONCE


def add_a_little(product: np.ndarray) -> None:
    product[-1, -1] += 0.01


def swap(product: np.ndarray) -> None:
    product[:, :2] = product[:, 1::-1].copy()


def overwrite(*args: Any) -> None:
    columns, num_rows, *_, out, stride = args
    memory(out, num_rows, stride)[:, :columns] = 0
    multiply(*args)


def write_beyond(*args: Any) -> None:
    columns, num_rows, *_, out, stride = args
    multiply(*args)
    memory(out, num_rows, stride)[:, columns] = 0


@pytest.mark.parametrize(
    "changes",
    [
        {"sgemm_kernel": None},
        {"sgemm_oncopy": None},
        {"sgemm_incopy": pack_in_order},
        {"sgemm_incopy": pack_backwards},
        {"sgemm_oncopy": pack_backwards},
        {"sgemm_kernel": spoiled(add_a_little)},
        {"sgemm_kernel": spoiled(swap)},
        {"sgemm_kernel": overwrite},
        {"sgemm_kernel": write_beyond},
        {"sgemm_kernel": lambda *args: None},
    ],
)
def test_a_kernel_that_does_anything_else_is_not_taken(changes: dict[str, Any]):
    assert find_kernel(fake_blas(**changes)) is None


@pytest.mark.parametrize("version", ["unknown", "OpenBLAS 0.4.0", "BLIS 0.3.31"])
def test_an_unknown_version_is_not_tried(version: str):
    blas = fake_blas()
    blas.version = version
    assert find_kernel(blas) is None


def test_an_unknown_machine_or_core_is_not_tried(monkeypatch: pytest.MonkeyPatch):
    blas = fake_blas()
    blas.core = "Katmai"
    assert find_kernel(blas) is None
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert find_kernel(fake_blas()) is None


def test_a_library_without_such_functions_has_no_kernel():
    assert find_kernel(Blas(object())) is None


def layout_with(kernel: Kernel) -> PackedLayout:
    return PackedLayout(kernel, Buffers(1, np.dtype("float32")), WIDTH, is_invariant=True)


def test_groups_with_other_bits_are_found():
    def spoil(product: np.ndarray) -> None:
        if len(product) in (8, 20):
            product[-1, -1] = np.nextafter(product[-1, -1], 9)

    odd = Kernel(spoiled(spoil), pack, AT_ONCE)
    for num_inputs in (9, 64):
        assert layout_with(FAKE_KERNEL).invariant_groups(num_inputs) == [4, 8, 12, 16, 20, 24]
        assert layout_with(odd).invariant_groups(num_inputs) == [4, 12, 16, 24]


@pytest.mark.parametrize("column", [0, WIDTH - 1, WIDTH, 3 * WIDTH - 1])
def test_bits_that_depend_on_the_other_tiles_of_a_call_are_found(column: int):
    def spoil(product: np.ndarray) -> None:
        if len(product) == 12 and product.shape[1] > WIDTH:
            product[0, column] = np.nextafter(product[0, column], 9)

    layout = layout_with(Kernel(spoiled(spoil), pack, AT_ONCE))
    assert layout.are_alike(30, 8)
    assert not layout.are_alike(30, 12)
    assert not layout.are_alike(30, 28), "more rows are not tried"


@pytest.mark.parametrize("num_tiles", [1, 7, 17, 40])
def test_calls_whose_ends_have_other_bits_are_the_same_for_any_number_of_threads(num_tiles: int):
    def spoil(product: np.ndarray) -> None:
        if len(product) > 8:
            product[:, [0, -1]] = np.nextafter(product[:, [0, -1]], 9)

    rng = np.random.default_rng(0)
    weight = rng.standard_normal((num_tiles * WIDTH, 9)).astype("float32")
    x = rng.standard_normal((16, 9)).astype("float32")
    products = []
    for num_threads in (1, 2, 3):
        workers = Workers(num_threads)
        kernel = Kernel(converted(spoiled(spoil)), converted(pack), AT_ONCE)
        plan = TiledPlan(np.dtype("float32"), workers, bytes_per_thread=1, kernel=kernel)
        layout = plan.packed(9, len(weight), is_invariant=False)
        at_once = layout.tiles_at_once(np.zeros((num_tiles, 9, WIDTH), "float32"), 16)
        assert at_once == max(1, num_tiles // LEAST_CALLS)
        matrix = plan.load(weight.shape, [weight], None, layout)
        products.append(matrix.apply(x, None))
        np.testing.assert_allclose(products[-1], x @ weight.T, rtol=0, atol=1e-4)
        np.testing.assert_array_equal(products[-1], products[0])
        workers.close()


def test_each_part_of_the_inputs_is_tried():
    def spoil(num_inputs: int) -> Callable[..., None]:
        def apply(*args: Any) -> None:
            odd = args[2] == num_inputs and args[1] == 8
            multiply(*args, spoil=swap if odd else lambda product: None)

        return apply

    # 2049 = 1025 + 1024
    for size in (1025, 1024):
        layout = layout_with(Kernel(spoil(size), pack, AT_ONCE))
        assert layout.invariant_groups(2049) == [4, 12, 16, 20, 24]


@pytest.mark.parametrize("is_invariant", [False, True])
def test_rows_are_cut_into_the_groups_that_give_equal_bits(is_invariant: bool):
    workers = Workers(1)
    plan = TiledPlan(np.dtype("float32"), workers, kernel=FAKE_KERNEL)
    layout = plan.packed(30, 48, is_invariant=is_invariant)
    for num_rows in (0, 1, 3, 4, 5, 25, 128, 129, 512, 513, 1100):
        calls, num_padded = layout.cut(num_rows, 30)
        assert [row for rows, _, _ in calls for row in range(num_rows)[rows]] == [*range(num_rows)]
        for rows, group, number in calls:
            count = len(range(num_rows)[rows])
            assert count <= group * number < max(1, count) + group
            assert rows.start + group * number <= num_padded
            assert not is_invariant or group in layout.invariant_groups(30)
    workers.close()


@pytest.mark.parametrize("num_rows", [1, 6, 70])
@pytest.mark.parametrize("shape", [(9, 70), (2049, 70)])
def test_packed_tiles_fit_any_kernel(shape: tuple[int, int], num_rows: int):
    """The fake one has other panels than those of most CPUs."""
    num_inputs, num_outputs = shape
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((num_outputs, num_inputs)).astype("float32")
    x = rng.standard_normal((num_rows, num_inputs)).astype("float32")
    workers = Workers(1)
    plan = TiledPlan(np.dtype("float32"), workers, kernel=FAKE_KERNEL)
    for is_invariant in (False, True):
        layout = plan.packed(num_inputs, num_outputs, is_invariant=is_invariant)
        matrix = plan.load(weight.shape, [weight], None, layout)
        np.testing.assert_allclose(matrix.apply(x, None), x @ weight.T, rtol=0, atol=1e-3)
    workers.close()


@needs_kernel
@pytest.mark.parametrize("num_inputs", [1, 9, 64, 576, 2049])
def test_one_row_and_many_are_packed_alike(num_inputs: int):
    """Products of rows that a placer writes have the bits of those that are packed in groups.

    The memory that they are written to may hold anything before.
    """
    workers, rng = Workers(2), np.random.default_rng(0)
    plan = TiledPlan(np.dtype("float32"), workers, kernel=KERNEL)
    layout = plan.packed(num_inputs, 48, is_invariant=True)
    tiles = rng.standard_normal((2, num_inputs, layout.width)).astype("float32")
    for num_rows in (1, 3, 4, 7, 30):
        x = rng.standard_normal((num_rows, num_inputs)).astype("float32")
        [(_, group, number)], _ = layout.cut(num_rows, num_inputs)
        assert group % REFERENCE_GROUP == 0
        groups = layout.groups(x, (number, group), CachingAllocator())
        placed = np.empty_like(groups)
        place = layout.placer(placed, num_rows)
        placed.fill(np.nan)
        place(x)
        products = np.empty((2, number * group, 2 * layout.width), "float32")
        for each, y in zip((placed, groups), products, strict=True):
            layout.product(each, tiles, y, 0, 1)
        np.testing.assert_array_equal(*products[:, :num_rows])
        assert np.isfinite(products[:, :num_rows]).all()
    workers.close()


@needs_kernel
def test_prepared_calls_keep_the_memory_that_they_use():
    assert KERNEL is not None
    layout = layout_with(KERNEL)
    groups, tiles = np.zeros((1, 4, 30), "float32"), np.zeros((2, 30, WIDTH), "float32")
    kept = [weakref.ref(each) for each in (groups, tiles)]
    place = layout.placer(groups, 4)
    multiply = layout.prepared(groups, tiles, np.zeros((4, 2 * WIDTH), "float32"), 1)
    del groups, tiles
    assert [each() is None for each in kept] == [False, False]
    del multiply
    assert [each() is None for each in kept] == [False, True]
    del place
    assert kept[0]() is None
