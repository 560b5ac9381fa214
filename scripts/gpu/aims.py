"""Compare the aims for the GPU path with what is reached, as tables of docs/gpu/aims.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from gpu import sass_ledger
from gpu.predict import (
    CHIPS,
    Attention,
    Chip,
    Work,
    decode_step,
    decode_work,
    floor_us,
    num_launches,
    step_us,
)
from mie.ops_gpu.dispatch import decode_kernel, prefill_kernel
from mie.sim.shapes import find_shape

VOCAB_SIZE = 152_000
DRAWN, WANTED = 45, 15
"""Instructions a logit of temperature and top-p: those of README.md, and the aim."""
VISITS_US = 60.0
"""Time in which one block visits the candidates of a row (README.md, assumed)."""
MODELS = ("Llama-3.2-1B", "TinyLlama-1.1B")
CONTEXT, FEW, MANY = 512, 1, 64
H200, _, ORIN, _ = CHIPS

Lines = Iterator[Sequence[str]]


def aims() -> Lines:
    """Yield what is aimed at, the most that it may be, and what it is. A miss is in bold."""
    yield ("aim", "at most", "reached")
    yield _row("instructions a logit, temperature and top-p", WANTED, DRAWN)
    yield _row("instructions of a 16-bit logit, greedy", 4, _greedy_instructions())
    yield _row("Orin: µs of a drawn row of 152,000 logits", 500, round(drawn_row_us(ORIN)))
    step = decode_step(H200, find_shape(MODELS[0]), FEW, CONTEXT)
    layers = find_shape(MODELS[0]).num_layers
    yield _row("launches a layer, up to 16 rows", 5, sum(work.count == layers for work in step))
    for chip in (H200, ORIN):
        for name in MODELS:
            step = decode_step(chip, find_shape(name), FEW, CONTEXT)
            ratio = step_us(chip, step) / floor_us(chip, step)
            yield _row(f"{chip.title}, {name}: step of one row / its bytes", 1.3, round(ratio, 2))
    for head_dim, most in ((128, 1000), (64, 750)):
        what = f"prefill: instructions of a warp's tile, head_dim {head_dim}"
        yield _row(what, most, max(_prefill_instructions(head_dim)))
    for head_dim in (128, 64):
        for cache in ("int8", "fp8"):
            what = f"H200, {cache} cache, head_dim {head_dim}: % of issue slots"
            whole, loop = (round(100 * share) for share in _issue_shares(head_dim, cache))
            aim, most, reached = _row(what, 60, whole)
            yield (aim, most, f"{reached}; {loop} in the loop over tiles")


def _row(aim: str, most: float, reached: float) -> Sequence[str]:
    cell = f"{reached:,g}"
    return (aim, f"{most:,}", cell if reached <= most else f"**{cell}**")


def _greedy_instructions() -> float:
    """Return those of a 16-bit logit in the unrolled loop, on the target with the most."""
    return max(
        each.instructions / each.requests
        for profile in _profiles("find_largest.cu find_largest<f16>")
        for each in profile.loops
        if (each.requests, each.bytes) == (8, 16)
    )


def _prefill_instructions(head_dim: int) -> list[int]:
    kernel = prefill_kernel("f16", head_dim, 16, stored="f16")
    name = f"{kernel.name}.cu {kernel.name}{kernel.parameters}"
    return [_inner(profile).instructions for profile in _profiles(name)]


def _profiles(kernel: str) -> list[sass_ledger.Profile]:
    """Return the kernel's machine code for every target of the ledger."""
    return [profiles[kernel] for profiles in sass_ledger.read().values()]


def _inner(profile: sass_ledger.Profile) -> sass_ledger.Part:
    return next(loop for loop in profile.loops if loop.mma)


def _issue_shares(head_dim: int, cache: str) -> tuple[float, float]:
    """Return the share of all instructions of a decode, and of those of the loop over tiles."""
    shape = Attention(num_heads=32, num_kv_heads=8, head_dim=head_dim, kv_cache_dtype=cache)
    kernel = decode_kernel("f16", head_dim, shape.group, 16, stored=shape.stored, may_stream=True)
    name = f"paged_decode_stream.cu paged_decode_stream{kernel.parameters}"
    inner = _inner(sass_ledger.read()[H200.target][name])
    tile = Work("tile", 2 * 16 * shape.vector_bytes, inner.instructions)
    return H200.issue_share(decode_work(H200, shape, [4096] * MANY)), H200.issue_share(tile)


def drawn_row_us(chip: Chip) -> float:
    """Return the predicted time of a row of 16-bit logits that temperature and top-p draw."""
    read_us = 3 * 2 * VOCAB_SIZE / chip.bytes_per_us
    # In each of three passes, a 16-bit logit takes one more instruction.
    return 4 * chip.launch_us + read_us + issue_us(chip, DRAWN + 3) + VISITS_US


def issue_us(chip: Chip, instructions: float) -> float:
    """Return the microseconds that a row's instructions take, given as many for each logit."""
    return VOCAB_SIZE * instructions / 32 / chip.slots_per_us


def sampler() -> Lines:
    """Yield what fewer instructions a logit would gain."""
    yield (
        *("chip", f"a row at {DRAWN}, µs", f"at {WANTED}, µs"),
        *(f"gain for {MANY} rows, µs", "share of the step"),
    )
    model = find_shape("Qwen2.5-0.5B")
    for chip in CHIPS:
        now, wanted = issue_us(chip, DRAWN), issue_us(chip, WANTED)
        gain = MANY * (now - wanted)
        step = step_us(chip, decode_step(chip, model, MANY, CONTEXT))
        cells = (f"{now:.2f}", f"{wanted:.2f}", f"{gain:.0f}", f"{gain / step:.1%}")
        yield (chip.title, *cells)


def launches() -> Lines:
    """Yield what launches add to a step of one row, and what 1.3 times its bytes would need."""
    yield (
        *("model", "chip", "launches", "step / bytes", "without launches"),
        *("1.3 needs launches of, µs", "or so many of them"),
    )
    for name in MODELS:
        for chip in (H200, ORIN):
            step = decode_step(chip, find_shape(name), FEW, CONTEXT)
            count, floor, total = num_launches(step), floor_us(chip, step), step_us(chip, step)
            rest = total - count * chip.launch_us
            room = 1.3 * floor - rest
            ratios = (f"{total / floor:.2f}", f"{rest / floor:.2f}")
            needs = (f"{room / count:.1f}", f"{room / chip.launch_us:,.0f}")
            yield (name, chip.title, str(count), *ratios, *needs)


TABLES: Mapping[str, Callable[[], Lines]] = {
    "aims": aims,
    "sampler": sampler,
    "launches": launches,
}
