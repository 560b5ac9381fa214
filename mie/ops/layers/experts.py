"""Choose experts for each token, and add their results: a sparse MLP, or mixture of experts.

A router gives each token a logit for each expert. The k experts with the largest logits compute
the token, and their results are added, each multiplied by its weight. Shazeer et al., 2017,
arXiv:1701.06538; in this form Jiang et al., 2024 (Mixtral), arXiv:2401.04088, section 2.1.
"""

from collections.abc import Callable, Iterator

import numpy as np

from mie.ops.arrays import Floats, Ints


def route(logits: Floats, num_chosen: int, is_normalised: bool) -> Floats:
    """Return the experts of each token and their weights, as a new array [T, 2, k].

    [:, 0] are the numbers of the ``num_chosen`` experts with the largest logits [T, E], by falling
    logit. Of equal logits the lowest number comes first. [:, 1] are their probabilities among all
    experts, or among the chosen ones if it ``is_normalised``.

    To renormalise the largest probabilities is the same as a softmax of the largest logits.
    """
    chosen = np.argsort(-logits, axis=-1, kind="stable")[:, :num_chosen]
    top = np.take_along_axis(logits, chosen, axis=-1)
    weights = np.exp(top - top[:, :1])
    others = weights if is_normalised else np.exp(logits - top[:, :1])
    weights /= others.sum(axis=-1, keepdims=True)
    routed: Floats = np.stack([chosen.astype(logits.dtype), weights], axis=1)
    return routed


def route_by_sigmoid(logits: Floats, bias: Floats, num_chosen: int) -> Floats:
    """Return the experts of each token and their weights, as `route` does, by sigmoids of logits.

    The ``num_chosen`` experts have the largest sigmoid of their logit [T, E] plus
    ``bias`` [E], by falling sum. Their weights are the sigmoids alone, divided by the sum of the
    chosen experts' sigmoids and 1e-6: DeepSeek-V3, arXiv:2412.19437, section 2.1.2, and
    ``Lfm2Moe``.
    """
    one = logits.dtype.type(1)
    with np.errstate(over="ignore"):  # of a large negative logit, because its sigmoid is 0
        scores = one / (one + np.exp(-logits))
    chosen = np.argsort(-(scores + bias), axis=-1, kind="stable")[:, :num_chosen]
    weights = np.take_along_axis(scores, chosen, axis=-1)
    weights /= weights.sum(axis=-1, keepdims=True) + logits.dtype.type(1e-6)
    routed: Floats = np.stack([chosen.astype(logits.dtype), weights], axis=1)
    return routed


def experts(
    x: Floats, routed: Floats, compute: Callable[[int, Floats], Floats], residual: Floats
) -> Floats:
    """Return the weighted sum of the results of each token's experts, as a new array [T, D].

    x [T, D], routed [T, 2, k] of `route`, residual [T, D] to which the sum is added. The function
    compute(expert, rows [n, D]) returns an expert's results [n, D] for the rows of its tokens. The
    terms of a sum are in the order of ``routed``, whatever the other tokens are.
    """
    num_tokens, _, num_chosen = routed.shape
    results = np.empty((num_tokens * num_chosen, x.shape[1]), x.dtype)
    for expert, pairs in by_expert(routed[:, 0].astype(np.int64)):
        results[pairs] = compute(expert, x[pairs // num_chosen])
    terms = results.reshape(num_tokens, num_chosen, -1)
    terms *= routed[:, 1, :, None]
    y: Floats = terms[:, 0].copy()
    for choice in range(1, num_chosen):
        y += terms[:, choice]
    y += residual
    return y


def by_expert(chosen: Ints) -> Iterator[tuple[int, Ints]]:
    """Yield each expert that is chosen, with its pairs of a token and a choice, in rising order.

    ``chosen`` [T, k]; the choice j of a token t is the pair t k + j.
    """
    order = np.argsort(chosen, axis=None, kind="stable")
    numbers, starts = np.unique(chosen.ravel()[order], return_index=True)
    yield from zip(numbers.tolist(), np.split(order, starts[1:]), strict=True)
