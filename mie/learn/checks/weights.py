"""Check rounded weights and their products: exercise 7."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mie.learn.probe import Broken

_GROUP = 16


def check_7(step: Any, solutions: Mapping[int, Any]) -> None:
    """Check `quantise` and `product` of step 7."""
    for bits in (8, 4):
        _quantise(step.quantise, bits)
    _product(step.product)


def _weights() -> Any:
    weight = np.random.default_rng(0).normal(size=(6, 3 * _GROUP))
    weight[:, _GROUP:] *= 4
    weight[1, :_GROUP] = -np.abs(weight[1, :_GROUP])
    return weight


def _quantise(quantise: Any, bits: int) -> None:
    weight, most = _weights(), 2 ** (bits - 1) - 1
    given = weight.copy()
    codes, scales = (np.asarray(each) for each in quantise(given, bits))
    if (given != weight).any():
        raise Broken("input changed", "quantise has changed the caller's weights.")
    if codes.shape != weight.shape or scales.shape != (6, 3) or codes.dtype != np.int8:
        seen = f"For weights {weight.shape}, codes are {codes.shape} as {codes.dtype}, and scales "
        seen += f"{scales.shape}."
        raise Broken("shapes of the codes", seen)
    groups = weight.reshape(6, 3, _GROUP)
    right = np.abs(groups).max(-1) / most
    ratio = scales / right
    if not np.allclose(ratio, 1):
        raise _wrong_scale(weight, scales, right, bits)
    errors = np.abs(codes.reshape(groups.shape) * scales[..., None] - groups) / scales[..., None]
    if errors.max() > 0.5 + 1e-9:
        is_cut = errors.max() < 1
        seen = f"With {bits} bits, a weight differs from code * scale by {errors.max():.2f} of a "
        seen += "scale."
        raise Broken("not rounded to the nearest" if is_cut else "wrong codes", seen)
    weight[2, _GROUP : 2 * _GROUP] = 0
    with np.errstate(all="raise"):
        try:
            codes, scales = quantise(weight, bits)
        except FloatingPointError as error:
            seen = f"A group of zeros divides by zero: {error}."
            raise Broken("group of zeros", seen) from error
    zeros = np.asarray(codes)[2, _GROUP : 2 * _GROUP]
    if zeros.any() or scales[2, 1] != 0:
        seen = f"A group of zeros got the scale {scales[2, 1]} and codes such as {zeros[0]}."
        raise Broken("group of zeros", seen)


def _wrong_scale(weight: Any, scales: Any, right: Any, bits: int) -> Broken:
    most = 2 ** (bits - 1) - 1
    groups = weight.reshape(6, 3, _GROUP)
    strided = weight.reshape(6, _GROUP, 3).transpose(0, 2, 1)
    if np.allclose(scales, right, rtol=2e-3):
        error = np.abs(scales / right - 1).max()
        raise Broken("rounded", f"Scales differ from the right ones by {error:.1e} of their size.")
    if np.allclose(scales / right, most / (most + 1)):
        seen = f"With {bits} bits, scale is largest / {most + 1}, so the largest weight has the "
        return Broken("code overflows", f"{seen}code {most + 1}.")
    if np.allclose(scales, groups.max(-1) / most):
        seen = "A group of negative weights got a scale from its largest weight, not its largest "
        seen += "absolute weight."
        return Broken("sign of the largest", seen)
    if np.allclose(scales, scales[:, :1]):
        return Broken("one scale for a row", "All groups of a row have one scale.")
    if np.allclose(scales, np.abs(strided).max(-1) / most):
        return Broken("inputs of a group", "A group takes every third input.")
    return Broken("wrong scale", f"scales[0] is {scales[0]}; {right[0]} is right.")


def _product(product: Any) -> None:
    rng = np.random.default_rng(1)
    codes = rng.integers(-127, 128, (5, 3 * _GROUP)).astype(np.int8)
    scales = rng.uniform(0.5, 2, (5, 3))
    weight = codes * scales.repeat(_GROUP, 1)
    x = rng.normal(size=(2, 3 * _GROUP))
    for case in (np.eye(3 * _GROUP), x):
        given = [case.copy(), codes.copy(), scales.copy()]
        out = np.array(product(*given))
        right = case @ weight.T
        for name, array, was in zip(
            ("x", "codes", "scales"), given, (case, codes, scales), strict=True
        ):
            if (array != was).any():
                raise Broken("input changed", f"product has changed the caller's {name}.")
        if out.shape != right.shape:
            seen = f"x {case.shape} times codes {codes.shape} gave {out.shape}."
            raise Broken("shape of the product", seen)
        error = np.abs(out - right).max() / np.abs(right).max()
        if np.allclose(out, right):
            again = np.asarray(product(given[0] * 3, *given[1:]))
            if np.allclose(again, out):
                seen = "A second x with the same codes got the product of the first x."
                raise Broken("kept between calls", seen)
            continue
        if error < 0.02:
            seen = f"Outputs differ from x times the weights by {error:.1e} of the largest."
            raise Broken("rounded", seen)
        for g in range(3) if len(case) > 2 else ():
            part = slice(g * _GROUP, (g + 1) * _GROUP)
            if not out[part].any():
                seen = f"The inputs {part.start} to {part.stop - 1} of group {g} add nothing."
                raise Broken("groups not added", seen)
        if np.allclose(out, case @ codes.T.astype(float)):
            raise Broken("scales left out", "The product is x @ codes.T, without the scales.")
        if any(np.allclose(out, (case @ codes.T.astype(float)) * s) for s in _single(scales)):
            seen = "The product has one scale for all groups of a row."
            raise Broken("one scale for a row", seen)
        for g in range(3):
            part = slice(g * _GROUP, (g + 1) * _GROUP)
            if np.allclose(out, case[:, part] @ weight[:, part].T):
                raise Broken("groups not added", f"The product has the sum of group {g} only.")
        if np.allclose(out, np.trunc(case) @ weight.T) or not np.allclose(
            product(case * 0.5, codes, scales) * 2, out
        ):
            raise Broken("x became integers", "x times 0.5 does not give half of the product.")
        raise _wrong_product(np.asarray(product(np.eye(3 * _GROUP), codes, scales)), codes, scales)


def _wrong_product(out: Any, codes: Any, scales: Any) -> Broken:
    """Return the broken rule of wrong products of single inputs."""
    weight = (codes * scales.repeat(_GROUP, 1)).T
    i, j = np.unravel_index(np.abs(out - weight).argmax(), out.shape)
    seen = f"With 1 for input {i} alone, output {j} is {out[i, j]:.4g}; the code {codes[j, i]} "
    seen += f"times the scale {scales[j, i // _GROUP]:.4g} is {weight[i, j]:.4g}."
    rule = "wrong product"
    if all(
        (np.isclose(out[:, [n]], codes[n][:, None] * scales.ravel())).any(1).all() for n in range(5)
    ):
        rule = "scale of another group"
    elif all(np.isclose(row, weight).all(1).any() for row in out):
        rule = "inputs mixed"
    return Broken(rule, seen)


def _single(scales: Any) -> list[Any]:
    """Return the rows of scales that a product without groups may use."""
    return [scales[:, 0], scales[:, -1], scales.mean(1), scales.sum(1), scales.max(1)]
