"""Read the tensors of a checkpoint under the names and sizes with which a converter wrote them."""

from collections.abc import Mapping

from mie.checkpoint.entries import TensorEntry
from mie.checkpoint.tensors import Shape

SYNONYMS = (
    ("attention_layer_norm", "input_layernorm"),
    ("feedforward_layer_norm", "post_attention_layernorm"),
)
"""Names of norms of OLMo hybrid in published files, and in transformers.

transformers 5 writes the second pair's first name in every layer, or the second names with the
option to keep its own names.
"""
CONVOLUTIONS = tuple(f"linear_attn.{part}_conv1d.weight" for part in "qkv")
"""Kernels of one convolution, in order. transformers 5 writes them as thirds of all channels."""


def renamed(
    found: Mapping[str, TensorEntry], expected: Mapping[str, Shape]
) -> dict[str, TensorEntry]:
    """Return the tensors, those under a synonym of a name that is missing under the missing one."""
    names: dict[str, str] = {}
    for name in found.keys() - expected.keys():
        for pair in SYNONYMS:
            for own, other in (pair, pair[::-1]):
                wanted = name.replace(f".{own}.", f".{other}.")
                if wanted != name and wanted in expected and wanted not in found:
                    names[name] = wanted
    return {names.get(name, name): entry for name, entry in found.items()}


def divided_as(
    found: Mapping[str, TensorEntry], expected: Mapping[str, Shape]
) -> Mapping[str, Shape]:
    """Return the expected shapes, with kernels of convolutions divided as in the file.

    Their channels are joined when they are read, so only the sum matters.
    """
    shapes = dict(expected)
    for name in expected:
        if not name.endswith(CONVOLUTIONS[0]):
            continue
        names = [name.removesuffix(CONVOLUTIONS[0]) + each for each in CONVOLUTIONS]
        if not all(each in found for each in names):
            continue
        given = [found[each].shape for each in names]
        is_like = all(shape[1:] == expected[name][1:] for shape in given)
        if is_like and sum(shape[0] for shape in given) == sum(expected[n][0] for n in names):
            shapes |= dict(zip(names, given, strict=True))
    return shapes
