"""Measure how much more a step of several rows costs than a step of one, on the jit backend.

    python scripts/benchmark.py rows [--models NAME ...] [--forms NAME ...] [--rows N ...]
                                     [--activations DTYPE ...] [--compare CHECKOUT]
                                     [--output PREFIX]

One thread, on one CPU, computes the products of a layer, the attention of a chunk of one sequence,
and the head for every row, as a step that verifies drafts does. A cell is the least of many short
runs, so it hardly depends on what else the machine computes. A run computes at most 2 million
weights of a product, and the time is scaled to the whole. It goes round copies of the weights and
of the KV cache, so that they come from memory. The last line adds up all layers and the head,
without norms and rotations.

With --compare, another checkout of mie is measured in turns, each in processes of its own. A figure
is then the least over the rounds, too. Several --activations are measured in turns like this.
MIE_CPU=haswell measures the AVX2 kernels on a wider CPU.
"""

import argparse
import copy
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench.harness import ROOT, in_turn, machine, parser_of, run_child, table, write_report


class Shape(NamedTuple):
    """The sizes of a model."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocab: int

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """The outputs and inputs of each product."""
        queries = self.heads * self.head_dim
        return {
            "qkv": (queries + 2 * self.kv_heads * self.head_dim, self.hidden),
            "o": (self.hidden, queries),
            "gate and up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
            "head": (self.vocab, self.hidden),
        }


SHAPES = {
    "SmolLM2-135M": Shape(576, 1536, 9, 3, 64, 30, 49152),
    "TinyLlama-1.1B": Shape(2048, 5632, 32, 4, 64, 22, 32000),
}
FORMS: dict[str, dict[str, Any] | None] = {
    "Q4_0": {"codes": "int4", "group": 32, "has_offsets": False, "scale_bits": 16},
    "Q4_1": {"codes": "int4", "group": 32, "has_offsets": True, "scale_bits": 16},
    "Q4_K": {"codes": "int4", "group": 32, "has_offsets": True, "scale_bits": 8},
    "Q8_0": {"codes": "int8", "group": 32, "has_offsets": False, "scale_bits": 16},
    "F8_E4M3": {"codes": "float8_e4m3fn", "group": 128, "has_offsets": False},
    "BF16": None,
}
"""The forms of GGUF types, and of float8 in blocks of 128. Q4_K needs inputs in multiples of 256,
which SmolLM2 lacks."""
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16)
ATTENTION, STEP = "attention", "all layers and head"
COPIES_BYTES = 96 << 20
"""More than most caches hold."""
MOST_WEIGHTS = 1 << 21
LEAST_RUNS = 20

Seconds = dict[str, dict[str, float]]
"""The least seconds by part of a step and number of rows."""


def random_rows(form: Any, num_outputs: int, num_inputs: int, rng: Any) -> Any:
    """Return a matrix in a form, or in bfloat16."""
    import ml_dtypes
    import numpy as np

    from mie.ops.weights.quantised import UNIT_INPUTS, QuantisedRows

    if form is None:
        return rng.standard_normal((num_outputs, num_inputs)).astype(ml_dtypes.bfloat16)
    low, high = (0, 16) if form.has_offsets else (-8, 8)
    low, high = (low, high) if form.codes == "int4" else (-128, 128)
    codes = rng.integers(low, high, (num_outputs, num_inputs)).astype(np.int8)
    if form.codes == "float8_e4m3fn":
        codes = rng.standard_normal(codes.shape).astype(ml_dtypes.float8_e4m3fn)
    planes = {"codes": codes}
    for kind in ("scale", "offset")[: 1 + form.has_offsets]:
        factors = rng.integers(1, 64, (num_outputs, -(-num_inputs // form.group)))
        planes[f"{kind}s"] = factors.astype(np.float32) / np.float32(2**14)
        if form.has_units:
            units = (num_outputs, num_inputs // UNIT_INPUTS)
            planes[f"{kind}_units"] = np.full(units, 2**-14, np.float32)
    return QuantisedRows(form=form, **planes)


def copy_of(matrix: Any) -> Any:
    """Return a matrix of one segment in memory of its own."""
    from mie.ops_jit.memory import JitMatrix, zeros

    (panels,) = matrix.segments
    own = copy.copy(panels)
    own.memory = zeros(panels.memory.shape, panels.memory.dtype, huge=True)
    own.memory[...] = panels.memory
    return JitMatrix(matrix.shape, [own], None)


class Parts:
    """The parts of a step, each as programs of one operator."""

    def __init__(self, shape: Shape, form_name: str, context: int, settings: Any) -> None:
        import numpy as np

        from mie.ops.weights.quantised import Form
        from mie.ops_jit.jit_backend import JitBackend

        fields = FORMS[form_name]
        self._form = None if fields is None else Form(**fields)
        self._shape, self._context = shape, context
        self._backend, self._rng = JitBackend(num_threads=1, **settings), np.random.default_rng(0)

    def product(
        self, outputs: int, inputs: int, counts: Sequence[int], seconds: float
    ) -> dict[str, float]:
        """Return the least seconds of a product with so many rows."""
        measured = min(outputs, MOST_WEIGHTS // inputs // 64 * 64)
        rows = random_rows(self._form, measured, inputs, self._rng)
        parts = [(measured, self._form)]
        matrix = self._backend.load_linear(rows.shape, [rows], None, parts)
        matrices = [copy_of(matrix) for _ in range(COPIES_BYTES // rows.nbytes)]

        def programs(count: int) -> list[Callable[[], float]]:
            x = self._rng.standard_normal((count, inputs)).astype("float32")
            return [
                self._recorded(x, partial(self._backend.linear, weight=each)) for each in matrices
            ]

        found = least_seconds({count: programs(count) for count in counts}, seconds)
        return {count: each * outputs / measured for count, each in found.items()}

    def attention(self, counts: Sequence[int], seconds: float) -> dict[str, float]:
        """Return the least seconds of attention for the last rows of one sequence."""
        import numpy as np

        from mie.ops.backend import KVCacheShape, StepBatch

        shape, size = self._shape, 16
        num_blocks = -(-(self._context + max(counts)) // size)
        layer_bytes = 2 * shape.kv_heads * num_blocks * size * shape.head_dim * 4
        num_layers = -(-COPIES_BYTES // layer_bytes)
        cache_shape = KVCacheShape(
            num_layers=num_layers,
            num_kv_heads=shape.kv_heads,
            num_blocks=num_blocks,
            block_size=size,
            head_dim=shape.head_dim,
        )
        cache = self._backend.new_kv_cache(cache_shape)
        for region in cache.elements:
            region[...] = self._rng.standard_normal(region.shape)

        def programs(count: int) -> list[Callable[[], float]]:
            length = self._context + count
            batch = StepBatch(
                token_ids=np.zeros(count, np.int64),
                positions=np.arange(self._context, length),
                slot_mapping=np.arange(self._context, length),
                cu_seqlens_q=np.array([0, count]),
                seq_lens=np.array([length]),
                block_tables=np.arange(num_blocks)[None],
                logits_rows=np.arange(count),
            )
            q = self._rng.standard_normal((count, shape.heads, shape.head_dim)).astype("float32")
            attend, others = self._backend.paged_attention, {"batch": batch, "window": None}
            return [
                self._recorded(q, partial(attend, cache=cache, layer=at, **others), batch)
                for at in range(num_layers)
            ]

        return least_seconds({count: programs(count) for count in counts}, seconds)

    def _recorded(self, x: Any, append: Callable[[Any], Any], batch: Any = None) -> Any:
        """Return a function that runs a recorded operator, and returns its seconds."""
        from mie.ops_jit.program import Program

        recorder = self._backend.recorder
        program = Program(recorder.kernels.__getitem__, len(x), len(x))
        recorder.recording = program
        result = append(program.given(x))
        recorder.recording = None
        program.finish(result)
        program.bind()
        team, header = recorder.team_for(program), recorder.header

        def run() -> float:
            if batch is not None:
                header.set_batch(batch, *program.heads)
            header.words[[*program.lengths]] = [*program.lengths.values()]
            begin = time.perf_counter()
            team.run(program.words, header.words, 0, len(program))
            return time.perf_counter() - begin

        return run


def least_seconds(
    runs: Mapping[int, Sequence[Callable[[], float]]], seconds: float
) -> dict[str, float]:
    """Return the least seconds by number of rows. Each run takes the copy after the last one's."""
    least, number = dict.fromkeys(runs, float("inf")), 0
    end = time.perf_counter() + seconds * len(runs)
    while number < LEAST_RUNS * len(runs) or time.perf_counter() < end:
        for count, own in runs.items():
            least[count] = min(least[count], own[number % len(own)]())
            number += 1
    return {str(count): found for count, found in least.items()}


def measure(request: Mapping[str, Any]) -> Seconds:
    """Return the seconds of each part of a model's step, as the checkout ``root`` computes it."""
    sys.path.insert(0, request["root"])
    shape, counts, seconds = SHAPES[request["model"]], request["rows"], request["seconds"]
    parts = Parts(shape, request["form"], request["context"], request["settings"])
    found = {name: parts.product(*sizes, counts, seconds) for name, sizes in shape.products.items()}
    found[ATTENTION] = parts.attention(counts, seconds)
    return found


def with_step(found: Seconds, layers: int) -> Seconds:
    """Add the sum over layers, and the head once."""
    step = {
        count: sum(each[count] * (1 if name == "head" else layers) for name, each in found.items())
        for count in found["head"]
    }
    return {**found, STEP: step}


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of("rows", __doc__)
    add = parser.add_argument
    add("--models", nargs="+", choices=SHAPES, default=["SmolLM2-135M"], metavar="NAME")
    add("--forms", nargs="+", choices=FORMS, default=["Q4_1", "Q8_0", "BF16"], metavar="NAME")
    add("--rows", nargs="+", type=int, default=ROWS, metavar="N", help="numbers of rows")
    add("--activations", nargs="+", choices=("float32", "int8"), default=["float32"], metavar="D")
    add("--context", type=int, default=2000, metavar="N", help="tokens before the rows")
    add("--seconds", type=float, default=0.3, help="time for each number of rows of a part")
    add("--rounds", type=int, default=1)
    add("--compare", metavar="CHECKOUT", type=Path, help="measure this checkout in turns, too")
    add("--output", metavar="PREFIX", help="write PREFIX.json and PREFIX.md")
    args = parser.parse_args(argv)
    if min(args.rows) < 1 or args.rounds < 1 or args.context < 0:
        parser.error("--rows and --rounds must be at least 1, and --context at least 0")
    if args.compare is not None and not (args.compare / "mie").is_dir():
        parser.error(f"--compare must be a checkout of mie; {args.compare} has no folder mie")
    args.rows = sorted({1, *args.rows})
    return args


def main(argv: Sequence[str]) -> int:
    """Measure, and print and write the tables."""
    args = parse_arguments(argv)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # children inherit it
    checkouts = {"this checkout": ROOT}
    if args.compare is not None:
        checkouts["the other checkout"] = args.compare.resolve()
    versions = {
        f"{name}, {activations} activations": (root, activations)
        for name, root in checkouts.items()
        for activations in args.activations
    }
    state = {**machine(), "MIE_CPU": os.environ.get("MIE_CPU", ""), "context": args.context}
    lines, results = [f"* {key}: {value}" for key, value in state.items()], []
    for model in args.models:
        for form in args.forms:
            if form == "Q4_K" and any(k % 256 for _, k in SHAPES[model].products.values()):
                lines += ["", f"{model} cannot have {form}: its inputs are no multiples of 256"]
                continue
            request = {"model": model, "form": form, "rows": args.rows}
            request |= {"context": args.context, "seconds": args.seconds}
            least: dict[str, Seconds] = {}
            for turn in range(args.rounds):
                for name, (root, activations) in in_turn(versions.items(), turn):
                    # An older checkout may not have the setting.
                    settings = {} if activations == "float32" else {"activations": activations}
                    own = {"root": str(root), "settings": settings}
                    found = run_child("bench.rows", request | own)
                    least[name] = _least(least.get(name, found), found)
            for name, found in least.items():
                least[name] = found = with_step(found, SHAPES[model].layers)
                lines += ["", f"### {model}, {form}, {name}", "", *_table(found)]
            results.append(request | {"seconds": least})
    write_report(args.output, {"state": state, "results": results}, lines)
    return 0


def _least(one: Seconds, other: Seconds) -> Seconds:
    return {
        name: {count: min(own, other[name][count]) for count, own in each.items()}
        for name, each in one.items()
    }


def _table(found: Seconds) -> list[str]:
    """Return the lines of a table: the microseconds of one row, and the ratios of more rows."""
    counts = [*found["head"]]
    heads = ("part", f"{counts[0]} row, µs", *(f"{count} rows" for count in counts[1:]))
    cells = (
        (name, f"{1e6 * each['1']:.0f}", *(f"{each[c] / each['1']:.2f}" for c in counts[1:]))
        for name, each in found.items()
    )
    return table(heads, cells)


if __name__ == "__main__":
    print(json.dumps(measure(json.load(sys.stdin))))
