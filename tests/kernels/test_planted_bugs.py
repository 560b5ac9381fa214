"""Break the kernels, one line at a time, and see that a check notices.

    python -m pytest tests/kernels/test_planted_bugs.py -v -n0

prints a line for each bug of planted/kernels.toml: PASSED if its check notices it.
"""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_adapter_kernels
import test_bfloat16_range as bfloat16_range
import test_counters
import test_cupy_integers as integer
import test_decode_pieces
import test_expert_kernels as expert_kernels
import test_far_places as far_places
import test_few_rows as few_rows
import test_gathers
import test_int4_kernels
import test_kernels as kernels
import test_narrow_weights as narrow
import test_nonfinite
import test_prefill
import test_prefill_wide
import test_quantised_products as quantised
import test_recurrent_kernels as recurrent_kernels
import test_sampling as sampling
import test_sinks
import test_wide_rows
from emulated import needs_compiler
from planted_bugs import bugs_of
from test_kernels import Shape
from test_prefill_splits import splits

from mie.ops_gpu.attention import SPLIT_TOKENS
from mie.ops_gpu.chip import EMULATED_CHIP, Chip
from mie.ops_gpu.dispatch import TILE_TOKENS
from mie.ops_gpu.host import emulator
from mie.ops_gpu.host.emulator import EmulatedLauncher
from mie.ops_gpu.sampling import PART
from mie.ops_gpu.signature import KernelFault
from mie.ops_gpu.source import KERNELS

pytestmark = [needs_compiler, pytest.mark.slow]

BUGS = bugs_of("kernels.toml")
FEW_BLOCKS = Chip(num_multiprocessors=3, shared_bytes=0)


def shape_of(stored: str, window: int | None = None) -> Shape:
    return Shape("float16", 64, 3, 1, 32, window, stored)


def decode(shape: Shape, *, is_deterministic: bool, query_scale: float) -> None:
    """Decode a sequence of two splits and several runs, beside short ones."""
    sequences = [(1, length) for length in (1, 17, 65, SPLIT_TOKENS + 69)]
    kernels.attend("any", shape, sequences, is_deterministic, FEW_BLOCKS, query_scale)


def streamed(stored: str, window: int | None = None, query_scale: float = 1.0) -> None:
    decode(shape_of(stored, window), is_deterministic=False, query_scale=query_scale)


def split(stored: str, window: int | None = None, query_scale: float = 1.0) -> None:
    """Decode with the plain kernel."""
    shape = replace(shape_of(stored, window), head_dim=72)
    decode(shape, is_deterministic=True, query_scale=query_scale)


def pieces() -> None:
    """Run decodes in pieces, whose bits depend on the sequence alone."""
    for stored in ("auto", "int8"):
        decode(shape_of(stored), is_deterministic=True, query_scale=1.0)
    test_decode_pieces.test_pieces_depend_on_the_sequence_alone(None)


def checked_pieces() -> None:
    sequences = [(1, length) for length in (65, 65, 17, 200, 65, 40)]
    kernels.attend(
        "checked", shape_of("auto"), sequences, True, Chip(num_multiprocessors=1, shared_bytes=0)
    )


def long_pieces() -> None:
    test = test_decode_pieces.test_a_sequence_of_more_pieces_than_allowed_has_longer_ones
    with pytest.MonkeyPatch.context() as patch:
        test(patch, "checked", None)


def many_sequences() -> None:
    for is_deterministic in (False, True):
        test_decode_pieces.test_more_sequences_than_a_warp_has_lanes("checked", is_deterministic)


def even_pieces() -> None:
    test_decode_pieces.test_pieces_are_dealt_evenly()


def wide(window: int | None = None) -> None:
    test_prefill_wide.test_rows_have_the_same_bits_in_wide_blocks("float16", 64, window)
    shape = Shape("float16", 64, 3, 1, 16, window)
    kernels.attend("any", shape, test_prefill_wide.SEQUENCES, chip=test_prefill_wide.SMALL)


def wide_reads() -> None:
    test_prefill_wide.test_a_wide_block_reads_a_fragment_for_twice_the_rows()


def overlap() -> None:
    test_decode_pieces.test_the_next_run_is_requested_before_a_merge()


def rounds() -> None:
    test_decode_pieces.test_a_merge_requests_sixteen_parts_at_once()


def many_tiles() -> None:
    chip = Chip(num_multiprocessors=1, shared_bytes=0)
    kernels.attend("any", shape_of("auto"), [(1, 33 * TILE_TOKENS)], chip=chip)


def prefill(stored: str, window: int | None = None, head_dim: int = 64) -> None:
    sequences = [(40, 80), (17, 150), (2, 66)]  # a warp's rows are on both sides of a tile's end
    shape = replace(shape_of(stored, window), head_dim=head_dim)
    test_prefill.prefill("any", shape, sequences, 1.0)


def split_prefill(stored: str, window: int | None = None, query_scale: float = 1.0) -> None:
    launcher = EmulatedLauncher(order="random")  # blocks of several sequences take turns
    with splits(6, 1):
        sequences = [(40, 215), (17, 150), (100, 130)]
        test_prefill.prefill(launcher, shape_of(stored, window), sequences, query_scale)


def growing_units() -> None:
    test_prefill.test_the_unit_grows_from_tile_to_tile("any", "int8")


def write(stored: str) -> None:
    kernels.test_rope_write_kv_quantises("any", "float32", stored, 8)


def int4_write(head_dim: int = 80) -> None:
    for mode in ("checked", "any"):
        test_int4_kernels.test_keys_and_values_are_rounded_exactly_as_defined(
            mode, "float32", head_dim
        )


def int4_read() -> None:
    test_int4_kernels.test_decodes_and_prompts_read_four_bits("any")


def adapters() -> None:
    for mode in ("checked", "any"):
        for count in (12, 30):
            test_adapter_kernels.check_products(mode, "float32", count, True)
    test_adapter_kernels.check_products("any", "float32", 30, False)


def rank_parts() -> None:
    for mode in ("checked", "any"):
        test_gathers.check_gathers(mode)


def widen(dtype: str, stored: str) -> None:
    kernels.test_tensor_cores_widen_every_element_exactly("any", dtype, stored, 1)


def heads(num_queries: int) -> None:
    bfloat16_range.test_each_head_has_its_own_magnitude("any", "int8", num_queries, 40)


def large_element(num_queries: int) -> None:
    test = bfloat16_range.test_an_element_is_far_larger_than_those_that_count
    test("any", "int8", num_queries)


def large_value(num_queries: int) -> None:
    test = bfloat16_range.test_a_value_is_far_larger_than_those_that_count
    test("any", "int8", num_queries)


def hides_no_nan() -> None:
    test_nonfinite.compare("any", test_nonfinite.PLAIN, 3, is_deterministic=False)


def bank_conflicts(head_dim: int = 64) -> None:
    launcher = EmulatedLauncher(check=True, count=True)
    test_counters.test_tiles_have_no_bank_conflicts_and_fill_whole_sectors(
        launcher, Shape("float16", head_dim, 2, 1, 16)
    )


def log_probabilities() -> None:
    sampling.test_log_probabilities("any", "float32", 40)


def sampler() -> None:
    """Run tests of the sampler in float32."""
    for vocab_size in (40, 1000, PART + 1):
        sampling.test_random_controls_give_the_tokens_of_numpy("any", "float32", vocab_size)
    for vocab_size in (700, PART + 300):
        sampling.test_rows_at_the_border_of_two_tokens_give_the_tokens_of_numpy(vocab_size)
    sampling.test_top_k_1_is_greedy_and_constant_rows_are_cut_alike("any", "float32", 40)
    sampling.test_edits_at_the_borders_of_parts("any")
    rng = np.random.default_rng(51)
    for vocab_size in (33, PART + 77):
        logits = np.stack([sampling.hostile_logits(rng, vocab_size) for _ in range(60)])
        rows = [sampling.random_controls(rng, vocab_size) for _ in range(60)]
        sampling.check_rows("any", logits, rows)


def products() -> None:
    """Run tests of the products in float16 and float32."""
    for mode in ("checked", "any"):  # the first build reports a bug that writes anywhere
        few_rows.test_sums_of_integers_are_exact(mode, "float16", 1100, 33, 35)
        few_rows.test_sums_of_integers_are_exact(mode, "float16", 1100, 200, 3)
        few_rows.test_sums_of_integers_are_exact(mode, "float16", 1100, 200, 35)
        few_rows.test_sums_of_integers_are_exact(mode, "float16", 33, 40, 9)
        few_rows.test_normalised_rows_are_multiplied(mode, "float16", 96, 24, 3)
        few_rows.test_gates(mode, "float16", 520, 17, 13)
        few_rows.test_heads_are_rotated_and_written(mode, "float16", 24, 21)
    few_rows.test_normalised_rows_are_multiplied("any", "float32", 1100, 33, 3)
    few_rows.test_a_rows_bits_do_not_depend_on_the_other_rows("any", "float32", 33)
    few_rows.test_an_infinite_value_spoils_no_other("float32")
    few_rows.test_heads_are_rotated_and_written("any", "float32", 24, 21)  # three blocks of rows
    small = few_rows.Norm(weight=np.ones(64, np.float32), eps=1.0)
    x, weight = np.ones((1, 64), np.float32), np.eye(64, dtype=np.float32)
    out = np.empty_like(x)
    few_rows.FewRows(kernels.launcher_of("any"), EMULATED_CHIP).linear(x, weight, out, norm=small)
    np.testing.assert_allclose(out, 0.5**0.5, rtol=1e-6)


def quantised_products() -> None:
    """Run tests of the products with codes of each size, in groups of each kind."""
    for dtype, number, *sizes in (
        ("float16", 0, 1150, 40, 3),
        ("float16", 1, 200, 33, 11),
        ("bfloat16", 2, 136, 16, 1),
    ):
        form = quantised.FORMS[number]
        quantised.test_products_with_quantised_matrices("any", dtype, form, *sizes)
    for chip in ((1, 0), (1, 228 << 10), (3, 0)):
        quantised.test_a_block_takes_several_slices_or_shares_them("any", *chip)
    quantised.test_a_bfloat16_row_of_any_magnitude_is_multiplied()
    form = quantised.FORMS[0]
    quantised.test_heads_of_quantised_matrices("any", "float16", form, 64, 4, True)
    with pytest.MonkeyPatch.context() as patch:
        test = quantised.test_prompts_are_multiplied_with_widened_weights
        test("any", "float16", quantised.FORMS[1], patch)
    quantised.test_every_code_is_widened_exactly("float16", form)


def wide_products() -> None:
    """Run tests of products of many rows with codes of each kind."""
    for mode in ("checked", "any"):
        for number in (0, 2, 3, 11, 12):
            test_wide_rows.test_products(mode, test_wide_rows.CASES[number])
    test_wide_rows.test_products("any", test_wide_rows.CASES[8])
    test = test_wide_rows.test_a_rows_bits_do_not_depend_on_the_other_rows
    test("float16", test_wide_rows.INT4, 520)


def wide_codes() -> None:
    of = test_wide_rows
    for form in (of.INT4, of.Q4_K, of.FORMS[3], of.FORMS[7], of.SIX[0], of.SIX[1]):
        of.test_every_weight_has_the_bits_of_the_definition("bfloat16", form)


def wide_work() -> None:
    """Compare the counts of a product of many rows with the ledger."""
    for load in test_wide_rows.WORK:
        test_wide_rows.test_launches_do_the_work_of_the_ledger(load)


def integer_products() -> None:
    """Run tests of integer products with few rows and many, and all kinds of groups."""
    forms = integer.INTEGER_FORMS
    for mode in ("checked", "any"):
        for number, num_rows in ((3, 3), (0, 65), (9, 9), (2, 100)):
            integer.test_products_have_the_bits_of_the_definition(
                mode, "float32", forms[number], num_rows
            )
        integer.test_experts(mode, "float32", forms[3], False)
    for number, num_rows in ((1, 65), (8, 3)):
        integer.test_products_have_the_bits_of_the_definition(
            "any", "float32", forms[number], num_rows
        )
    integer.test_rows_are_rounded_as_defined("any", "float32", 300)
    for depth in (31, 513):
        integer.test_an_end_inside_a_unit_adds_nothing("any", depth)


def narrow_weights() -> None:
    """Run tests of scales in 8, 16 and 32 bits, and of codes in 6."""
    for form in (*narrow.SIX, narrow.Q4_0, narrow.Q4_K, *narrow.FORMS[1:8:6]):
        narrow.test_every_weight_has_the_bits_of_the_definition("float16", form)


def narrow_integers() -> None:
    for form, num_rows in ((narrow.SIX[0], 3), (narrow.SIX[1], 65)):
        narrow.test_integer_products("any", "float32", form, num_rows)


def narrow_experts() -> None:
    narrow.test_experts("any", "float16", narrow.SIX[0], False)


def merges() -> None:
    """Run long decodes twice over the same counters, streamed and not."""
    shape = Shape("float16", 64, 2, 2, 16)
    sequences = [(1, length) for length in (3 * SPLIT_TOKENS + 5, 3, 2 * SPLIT_TOKENS, 65)]
    batch, num_blocks = kernels.make_batch([(1, 700), (1, 300)], shape.block_size)
    cache, _ = kernels.make_cache(shape, batch, num_blocks)
    q = kernels.normal(shape.dtype, 2, 4, 64)
    for mode in ("checked", "any"):
        for is_deterministic in (False, True):
            kernels.attend(mode, shape, sequences, is_deterministic)
            kernels.attend(mode, replace(shape, head_dim=72), sequences, is_deterministic)
            backend = kernels.make_backend(mode, shape.dtype, is_deterministic)
            first, second = (backend.paged_attention(q, cache, 0, batch, None) for _ in range(2))
            assert first.tobytes() == second.tobytes()


def sinks() -> None:
    """Run tests of sinks with every kernel of attention."""
    for shape in (Shape("float16", 64, 3, 2, 16), Shape("float32", 24, 3, 2, 5)):
        for is_deterministic in (False, True):
            test_sinks.test_decodes("any", shape, is_deterministic)
        test_sinks.test_prompts("any", shape)


def soft_caps(shape: list[Any]) -> None:
    for is_deterministic in (False, True):
        test_sinks.test_soft_caps("any", Shape(*shape), is_deterministic)


def logits_cap() -> None:
    kernels.test_soft_cap("any", "float32")


def routing() -> None:
    for sizes in ((3, 2, True), (40, 8, False), (130, 10, True)):
        expert_kernels.test_tokens_are_routed("any", "float32", *sizes)
    expert_kernels.test_tokens_are_routed_by_sigmoids("any", "float32", 40, 8)
    expert_kernels.test_nan_comes_last("any")
    for mode in ("checked", "any"):
        expert_kernels.test_rows_are_sorted(mode, 130, 40, 3, 8)


def experts() -> None:
    expert_kernels.test_experts("any", "float16", 7, (33, 17), "clamped_silu", True, 70)
    expert_kernels.Layer("any", "float16", 3, (40, 24), kind="clamped_silu").check(20, 20.0)
    for number, sizes in ((1, (64, 32)), (3, (90, 33))):
        form = quantised.FORMS[number]
        expert_kernels.test_quantised_experts("any", "float16", form, sizes, 20)


def recurrent() -> None:
    """Run tests of convolutions, recurrences and gated norms in float32."""
    of = recurrent_kernels
    for mode in ("checked", "any"):
        for sequences in (of.SEQUENCES, of.DECODES):
            for shape in (of.SHAPES[1], of.shape_of("conv", 3, 0, 1, 0, 140)):
                of.test_convolutions(mode, "float32", shape, sequences)
            for shape in of.SHAPES[:2]:
                of.test_recurrences(mode, "float32", shape, sequences)
    for sizes in ((33, 33), (40, 120)):
        for gates_first in (False, True):
            of.test_gated_norms("any", "float32", *sizes, gates_first)


def many_parts() -> None:
    kernels.test_more_parts_than_a_warp_has_lanes_are_merged("any")


def large_parts() -> None:
    """Merge 47 parts of eight heads whose largest scores are in any of them."""
    chip = Chip(num_multiprocessors=132, shared_bytes=228 << 10)
    shape = Shape("float16", 64, 8, 1, 16)
    kernels.attend("any", shape, [(1, 6000)], chip=chip, query_scale=20.0)


def far_rows() -> None:
    far_places.test_rows_of_an_embedding_are_gathered("any")


def far_attention(kind: str) -> None:
    far_places.test_attention_reads_far_blocks(kind)


def far_writes(how: str) -> None:
    far_places.test_tokens_are_written_to_far_blocks(how)


def far_copies() -> None:
    far_places.test_far_blocks_are_copied()


def order_of_blocks() -> None:
    """Run tests of each block's work, which needs the counters."""
    for test in (
        test_counters.test_a_prompts_longest_blocks_start_first,
        test_counters.test_streamed_blocks_have_equal_work,
    ):
        test(EmulatedLauncher(check=True, count=True))


def work(load: str) -> None:
    """Compare a load's counts of products, copies and barriers with the ledger."""
    test_counters.test_launches_do_the_work_of_the_ledger(
        EmulatedLauncher(check=True, count=True), load
    )


def rings(load: str) -> None:
    test_counters.test_few_rows_share_iterations_and_keep_their_rings_full(
        EmulatedLauncher(check=True, count=True), load
    )


CHECKS: dict[str, Callable[..., None]] = {
    check.__name__: check
    for check in (
        *(streamed, split, many_tiles, prefill, split_prefill, growing_units, write, widen, heads),
        *(pieces, checked_pieces, long_pieces, many_sequences, even_pieces, overlap, rounds),
        *(wide, wide_reads),
        *(int4_write, int4_read, adapters, rank_parts),
        *(wide_products, wide_codes, wide_work),
        *(large_element, large_value, hides_no_nan, bank_conflicts, work, rings),
        *(many_parts, large_parts, far_rows, far_attention, far_writes, far_copies),
        *(order_of_blocks, log_probabilities, sampler, products, quantised_products),
        *(integer_products, narrow_weights, narrow_integers, narrow_experts, merges),
        *(sinks, soft_caps, logits_cap, routing, experts, recurrent),
    )
}


def run_check(bug: dict[str, Any]) -> None:
    with np.errstate(all="ignore"):
        CHECKS[bug["check"]](**bug.get("with", {}))


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a copy of the kernels, which the emulator runs instead of them."""
    # The same path for every test, so that only changed files are compiled again.
    path = tmp_path_factory.getbasetemp() / "kernels"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(KERNELS, path)
    monkeypatch.setattr(emulator, "KERNELS", path)
    launchers = [EmulatedLauncher(check=checks, order="reverse") for checks in (False, True)]
    monkeypatch.setattr(kernels, "launcher", lambda checks=False, *_: launchers[checks])
    return path


@pytest.mark.parametrize("name", CHECKS)
def test_the_kernels_pass_unchanged(folder: Path, name: str):
    done: list[dict[str, Any]] = []
    for bug in BUGS.values():
        if bug["check"] == name and bug.get("with", {}) not in done:
            run_check(bug)
            done.append(bug.get("with", {}))
    assert done


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_noticed(folder: Path, name: str):
    bug = BUGS[name]
    source = (folder / bug["file"]).read_text()
    assert source.count(bug["old"]) == 1
    (folder / bug["file"]).write_text(source.replace(bug["old"], bug["new"]))
    with pytest.raises((AssertionError, KernelFault)):
        run_check(bug)
