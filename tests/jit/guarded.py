"""Run the compiled kernels with a forbidden page before and after every array that they address.

A child of `test_jit_guard_pages.py` runs this. A kernel that reads or writes past an array's end
(layout "end") or before its begin (layout "start") ends the process with SIGSEGV.
"""

import faulthandler
import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import test_jit_bits as bits
import test_jit_operators as operators
import tiny_models
from compiled import CACHES, QUICK_CACHES, jit_backend
from guarded_memory import LAYOUT, GuardedNumpy, guarded
from numpy.typing import NDArray
from quantised_rows import quantised
from step_batches import step_batch

from mie.ops.backend import KVCacheShape
from mie.ops.weights.quantised import Form
from mie.ops_jit import jit_backend as backend_module
from mie.ops_jit import program, recorder, step
from mie.ops_jit.layout import REGION
from mie.ops_jit.memory import JitCache, JitMatrix
from mie.ops_jit.team import Team

program.ROOM = 1  # buffers have no rows to spare
step.np = GuardedNumpy()


class GuardedProgram(program.Program):
    """A program whose instructions are guarded too."""

    def finish(self, result: Any = None) -> None:
        super().finish(result)
        self.words = guarded(self.words)


recorder.Program = GuardedProgram
recorder.SCRATCH_BYTES = 0


def exact_team(self: Any, program: Any) -> Any:
    """Give each thread no more memory than the program announces, up to 63 bytes."""
    if not 0 <= self.team.scratch_bytes - program.scratch_bytes < 64:
        self.team = Team(self.kernels, self.team.num_threads, program.scratch_bytes)
    return self.team


recorder.Recorder.team_for = exact_team


def guarded_matrix(shape: tuple[int, int], segments: Any, bias: Any) -> JitMatrix:
    return JitMatrix(shape, segments, None if bias is None else guarded(bias))


backend_module.JitMatrix = guarded_matrix
for name in ("load_vector", "load_rope"):
    plain = getattr(backend_module.JitBackend, name)

    def load(self: Any, *arguments: Any, plain: Any = plain) -> NDArray[Any]:
        return guarded(plain(self, *arguments))

    setattr(backend_module.JitBackend, name, load)


def products(step: int) -> None:
    """Every shape of a tile, at the sizes that are no multiples of anything."""
    backend = jit_backend(1)
    kinds = [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)]
    if step == 1:
        kinds.append(np.dtype(np.float16))
    sizes = [(1, 1), (6, 20), (20, 6), (80, 96), (100, 130), (1, 65), (515, 64), (1024, 49)]
    for kind, (num_inputs, num_outputs) in [*itertools.product(kinds, sizes)][::step]:
        matrix = operators.normal(num_outputs, num_inputs).astype(kind)
        for bias in (None, operators.normal(num_outputs)):
            weight = backend.load_linear(matrix.shape, [matrix], bias)
            gates = backend.load_linear((2 * num_outputs, num_inputs), [matrix, matrix])
            table = backend.load_embedding(matrix.shape, [matrix])
            norm = backend.load_vector(operators.normal(num_inputs))
            for num_rows in (0, 1, 2, 3, 5, 6, 7, 11, 12, 13, 97):
                x = guarded(operators.normal(num_rows, num_inputs))
                y = guarded(operators.normal(num_rows, num_outputs))
                backend.linear(x, weight)
                backend.linear(x, weight, y)
                backend.norm_gate_up(x, norm, 1e-5, gates)
                backend.activate(guarded(operators.normal(num_rows, 2 * num_inputs)), "silu")
                backend.take_rows(x, np.arange(num_rows)[::-1])
                backend.embed(np.full(num_rows, num_outputs - 1), table)
                heads = guarded(operators.normal(num_rows, 3, num_inputs))
                backend.head_norm(heads, 0, 3, norm, 1e-5)


def quantised_products(step: int) -> None:
    """Formats of one and of two codes a byte, and of four codes in three. A short last group.

    Rows are exact, and then rounded.
    """
    forms = (
        Form(codes="int4", group=32, has_offsets=True),
        Form(codes="int4", group=16, has_offsets=False),
        Form(codes="int8", group=32, has_offsets=False),
        Form(codes="int8", group=32, has_offsets=False, scale_bits=16, has_six_bits=True),
    )
    sizes = [(1, 1), (6, 20), (80, 96), (131, 130), (515, 64), (1041, 49)]
    cases = itertools.product(forms, sizes, ("float32", "int8"))
    for form, (num_inputs, num_outputs), activations in [*cases][::step]:
        backend = jit_backend(1, False, activations)
        rows = quantised(form, num_outputs, num_inputs)
        weight = backend.load_linear(rows.shape, [rows], None, [(num_outputs, form)])
        twice = 2 * num_outputs
        gates = backend.load_linear((twice, num_inputs), [rows, rows], None, [(twice, form)])
        table = backend.load_embedding(rows.shape, [rows], form)
        norm = backend.load_vector(operators.normal(num_inputs))
        for num_rows in (1, 2, 3, 5, 8, 9, 97):
            x = guarded(operators.normal(num_rows, num_inputs))
            backend.linear(x, weight)
            backend.norm_gate_up(x, norm, 1e-5, gates)
            backend.embed(np.full(num_rows, num_outputs - 1), table)


def caches(step: int) -> None:
    """Writes and attention, where the sequences' blocks are the cache's first and last."""
    backend = jit_backend(1)
    sequences = [(1, 9), (5, 5), (1, 1), (7, 70), (1, 65), (50, 60), (1, 530)]
    kinds = CACHES if step == 1 else QUICK_CACHES
    settings = [*itertools.product((2, 6, 20, 64, 80), kinds, operators.BLOCK_SIZES)]
    for head_dim, stored, block_size in settings[::step]:
        num_blocks = sum(-(-length // block_size) for _, length in sequences)
        spare = -num_blocks % REGION
        whole = [*sequences, (1, spare * block_size)] if spare else sequences
        num_blocks += spare
        batch = step_batch(whole, block_size, num_blocks)
        shape = KVCacheShape(
            num_layers=1, num_blocks=num_blocks, block_size=block_size, num_kv_heads=2,
            head_dim=head_dim,
        )  # fmt: skip
        cache = JitCache.new(shape, CACHES[stored])
        table = backend.load_rope(1 / 10.0 ** np.arange(head_dim // 2), 1.0, 2000)
        qkv = guarded(operators.normal(len(batch.positions), 10, head_dim))
        q = backend.rope_write_kv(qkv, table, cache, 0, batch)
        for window in (None, 3, 65):
            backend.paged_attention(guarded(q), cache, 0, batch, window)


def steps(folder: Path) -> None:
    """Recorded steps of growing and shrinking size, of one token and of many."""
    for name, config in bits.CONFIGS.items():
        directory = tiny_models.write_model(
            folder / name, config, tiny_models.random_weights(config)
        )
        rounded_to = ml_dtypes.bfloat16 if name == "odd sizes" else None
        model = bits.Model(directory, rounded_to, {})
        for seed, stored in enumerate(("float32", "int8")):
            rng = np.random.default_rng(seed)
            lengths = [1, 3, 40, 97, 130]
            scenario = bits.Scenario(
                rng, [rng.integers(0, 39, length) for length in lengths], model, stored, 3, 60
            )
            bits.in_steps(scenario, 3, False)


def fault() -> None:
    """Read one row past the end, or before the begin, of an embedding table."""
    backend = jit_backend(1)
    table = backend.load_embedding((64, 8), [operators.normal(64, 8)])
    backend.embed(np.array([64 if LAYOUT == "end" else -1]), table)


if __name__ == "__main__":
    faulthandler.enable()
    if sys.argv[2:] == ["fault"]:
        fault()
    else:
        with tempfile.TemporaryDirectory() as folder:
            for part in (products, quantised_products, caches):
                part(int(sys.argv[2]))
                print(part.__name__, flush=True)
            steps(Path(folder))
            print("steps", flush=True)
