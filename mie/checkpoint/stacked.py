"""Take the matrices of experts from tensors of all experts of a layer."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from mie.checkpoint.entries import TensorEntry
from mie.checkpoint.tensors import Shape

ENDS = {".weight": "weight", "_bias": "bias", "_blocks": "blocks", "_scales": "scales"}
"""The ends of names of stacks, and the ends of the tensors of each expert."""
JOINED = {"experts.gate_up_proj": ("gate_proj", "up_proj"), "experts.down_proj": ("down_proj",)}
"""Stacks [E, N, K] without an end, and the matrices of an expert that provide their rows."""


def unstacked(
    found: Mapping[str, TensorEntry], expected: Mapping[str, Shape]
) -> Mapping[str, TensorEntry]:
    """Return the tensors with the matrix of each expert in place of a stack.

    A stack "x.weight" is [E, N, K], and "x" without an end is [E, K, N]. The matrix of expert 3 is
    called "x.3.weight". Biases, and the blocks and scales of MXFP4, have similar names. Where a
    family names each expert's matrices (Qwen), `JOINED` has its stacks.
    """
    entries: dict[str, TensorEntry] = {}
    for name, entry in found.items():
        end = next((end for end in ENDS if name.endswith(end)), "")
        module = name.removesuffix(end)
        if f"{module}.0.weight" in expected and entry.shape:
            for expert, own in enumerate(_parts(entry, is_turned=not end)):
                entries[f"{module}.{expert}.{ENDS.get(end, 'weight')}"] = own
        elif (joined := _joined(name, expected)) and len(entry.shape) == 3:
            for expert, own in enumerate(_parts(entry, is_turned=False)):
                halves = replace(
                    own, shape=(len(joined), own.shape[0] // len(joined), own.shape[1])
                )
                for part, half in zip(joined, _parts(halves, is_turned=False), strict=False):
                    entries[f"{name.rpartition('.')[0]}.{expert}.{part}.weight"] = half
        else:
            entries[name] = entry
    return entries


def _joined(name: str, expected: Mapping[str, Shape]) -> tuple[str, ...]:
    """Return the matrices that a stack holds for each expert, or none if it is no such stack."""
    prefix, _, part = name.rpartition(".experts.")
    joined = JOINED.get(f"experts.{part}", ())
    is_one = bool(joined) and f"{prefix}.experts.0.{joined[0]}.weight" in expected
    return joined if is_one else ()


def _parts(entry: TensorEntry, is_turned: bool) -> Iterator[TensorEntry]:
    """Yield the parts of a tensor along its first axis."""
    number, *shape = entry.shape
    own = tuple(shape[::-1] if is_turned else shape)
    size = entry.nbytes // max(1, number)
    for start in range(entry.start, entry.stop, max(1, size)):
        stop = start + size
        yield replace(entry, shape=own, start=start, stop=stop, is_turned=is_turned)
