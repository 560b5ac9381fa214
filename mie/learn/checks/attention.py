"""Check attention without a cache, and with one: exercises 1 and 2."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mie.base.reprs import count
from mie.learn.probe import Broken, Probe, text_of, wrong_row


def check_1(step: Any, solutions: Mapping[int, Any]) -> None:
    """Check `attention` and `generate` of step 1."""
    _attention(step.attention)
    _generate(step.generate, 5, 4, whole=True)
    _calls(step.generate)


def check_2(step: Any, solutions: Mapping[int, Any]) -> None:
    """Check `Cache.attend` and `generate` of step 2."""
    _cache(step, solutions[1].attention)
    plain = step.Cache

    def cache(model: Any, size: int) -> Any:
        if size < 8:
            seen = f"For 5 tokens and 4 more, generate made a Cache with room for {size}."
            raise Broken("cache too small", seen)
        return plain(model, size)

    step.Cache = cache
    try:
        _generate(step.generate, 5, 4, whole=False)
    finally:
        step.Cache = plain
    _calls(step.generate)
    _generate(step.generate, 2, 7, whole=False)


def _weights(attention: Any, n: int, s: int) -> Any:
    """Return the weights [n, s] with equal scores, read from one-hot values."""
    v = np.eye(s)[:, None]
    with np.errstate(all="ignore"):
        out = attention(np.zeros((n, 1, s)), np.zeros((s, 1, s)), v)
    if np.shape(out) != (n, 1, s):
        seen = f"attention returned an array of shape {np.shape(out)} for {n} queries of 1 head "
        raise Broken("shape of attention", f"{seen}with {s} numbers.")
    return np.asarray(out)[:, 0]


def _attention(attention: Any) -> None:
    for n, s in [(3, 3), (2, 5)]:
        weights = _weights(attention, n, s)
        for i, row in enumerate(weights):
            position, case = s - n + i, f"{n} queries and {s} keys"
            seen = f"With {case}, query {i} (position {position})"
            if not np.isfinite(row).all() or row[position] == 0:
                seen = f"{seen} does not read its own key."
                raise Broken("own key missing" if s == n else "queries are the last", seen)
            if row[position + 1 :].any():
                seen = f"{seen} reads the key at position {position + 1}, which comes later."
                raise Broken("mask shows the future", seen)
            if not row[: position + 1].all():
                raise Broken("keys missing", f"{seen} does not read all keys before it.")
            if np.allclose(weights.sum(1), np.arange(s - n + 1, s + 1) / s):
                seen = f"{seen} has weights with the sum {row.sum():.3g}: hidden keys take a part."
                raise Broken("mask after the softmax", seen)
            if abs(row.sum() - 1) > 1e-6:
                raise Broken("softmax axis", f"{seen} has weights with the sum {row.sum():.3g}.")
    _heads(attention)
    dim = 16
    q, k, v = np.zeros((1, 4, dim)), np.zeros((2, 1, dim)), np.eye(dim)[:2, None]
    q[0, :, 0] = k[1, 0, 0] = 4.0
    low, high = np.asarray(attention(q, k, v))[0, 0, :2]
    factor = np.log(high / low) / 16 if low > 0 else np.inf
    if abs(factor - 0.25) > 1e-6:
        seen = f"With 4 heads of dim {dim}, the scores are q · k times {factor:.4g}; "
        seen += "q · k / 4 is right."
        raise Broken("scores not scaled" if abs(factor - 1) < 1e-6 else "scale of scores", seen)
    q[0, :, 0] = k[1, 0, 0] = 400.0
    with np.errstate(all="ignore"):
        out = np.asarray(attention(q, k, v))
    if not np.isfinite(out).all():
        raise Broken("exp overflows", "With a score of 40,000 the result is NaN.")


def _heads(attention: Any) -> None:
    """Check which head of values, and which head of keys, each query head reads."""
    q, k, v = np.full((1, 6, 2), 4.0), np.zeros((2, 2, 2)), np.zeros((2, 2, 2))
    v[:, 1] = 1  # head 1 has other values
    values = np.asarray(attention(q, k, v))[0, :, 0]
    v[:, :] = [[[0]], [[1]]]
    k[[0, 1], [0, 1]] = 4  # in head 1 the second key fits, and it has other values
    keys = np.asarray(attention(q, k, v))[0, :, 0]
    for name, read in (("heads", values), ("keys of the heads", keys)):
        heads = [round(float(x), 2) for x in read]
        if heads != [0, 0, 0, 1, 1, 1]:
            seen = f"With 6 query heads and 2 heads of keys, the query heads read the {name} "
            seen += f"{', '.join(f'{x:g}' for x in heads)}; 0, 0, 0, 1, 1, 1 is right."
            raise Broken("heads alternate" if heads == [0, 1] * 3 else "heads", seen)


def _generate(generate: Any, length: int, num_new: int, whole: bool) -> None:
    """Check `generate` with a prompt of ``length`` tokens; with ``whole``, it has no cache."""
    prompt, text = text_of("A", length), text_of("A", length + num_new)
    probe, given = Probe({"A": text_of("A", 30)}), list(prompt)
    probe.most_passes = num_new + 1
    tokens = generate(probe, given, num_new)
    check_result(tokens, text, prompt)
    if given != prompt:
        raise Broken("prompt changed", "generate has appended to the caller's list.")
    if probe.num_passes > num_new:
        seen = f"For {num_new} new tokens, generate called model.forward {probe.num_passes} times."
        raise Broken("number of passes", seen)
    least = len(text) - 1
    if not whole and len(probe.entries) > least:
        seen = f"For {len(text)} tokens the model computed {len(probe.entries)}; {least} are "
        raise Broken("computed again", f"{seen}enough.")


def _calls(generate: Any) -> None:
    """Check that nothing is kept between two calls, and that a special token is no end."""
    special = [0, 2, 1, 3, 4]
    texts = {"A": text_of("A", 16), "B": text_of("B", 20), "C": [*text_of("C", 4), *special]}
    used = Probe(texts)
    for name, length, model in (("A", 5, used), ("B", 14, Probe(texts)), ("B", 14, used)):
        prompt = texts[name][:length]
        try:
            check_result(generate(model, list(prompt), 4), texts[name][: length + 4], prompt)
        except Exception as error:
            if model is not used:
                raise
            seen = error.seen if isinstance(error, Broken) else f"{type(error).__name__}: {error}"
            seen = f"When the model has written a text before: {seen}"
            raise Broken("kept between calls", seen) from error
    if [*generate(Probe(texts), list(prompt := texts["C"][:3]), 0)] != prompt:
        raise Broken("number of tokens", "For a count of 0, generate did not return the prompt.")
    tokens = [*generate(Probe(texts), texts["C"][:4], 5)]
    if tokens != texts["C"]:
        seen = f"The model chose the tokens {special}, and generate returned {tokens[4:]}."
        raise Broken("stops at a special token", seen)


def check_result(tokens: Any, text: list[int], prompt: list[int]) -> None:
    """Compare a returned text with the right one."""
    if tokens is None:
        raise Broken("returns nothing", "generate returned None.")
    kind, tokens = type(tokens), [int(token) for token in tokens]
    if tokens == text[len(prompt) :]:
        raise Broken("prompt left out", "generate returned the new tokens without the prompt.")
    if len(tokens) != len(text) and tokens[: len(text)] == text[: len(tokens)]:
        seen = f"generate returned {count(len(tokens) - len(prompt), 'new token')} for a count of "
        seen += f"{len(text) - len(prompt)}."
        raise Broken("number of tokens", seen)
    at = next((i for i, (a, b) in enumerate(zip(tokens, text, strict=False)) if a != b), None)
    if at is not None:
        raise wrong_row("A", tokens[at], at, {"A": text})
    if kind is not list:
        raise Broken("not a list", f"generate returned the right tokens as {kind.__name__}.")


def _cache(step: Any, attention: Any) -> None:
    """Check `Cache.attend` with random keys, and the number of keys that it lets queries read."""
    probe = Probe({"A": text_of("A", 9)})
    cache = step.Cache(probe, 6)
    plain = getattr(step, "attention", None)
    rng = np.random.default_rng(0)
    dim = probe.config["head_dim"]
    for begin, n in [(0, 3), (3, 1)]:
        cache.length = begin
        for layer in range(2):
            q, k, v = rng.normal(size=(n, 2, dim)), *rng.normal(size=(2, n, 1, dim))
            before = cache.k.copy()
            if plain:
                step.attention = _counting(plain, begin, n)
            try:
                out = cache.attend(layer, q, k, v)
            finally:
                if plain:
                    step.attention = plain
            _stored(cache, before, layer, begin, k, v)
            if out is None:
                raise Broken("returns nothing", "attend returned None.")
            for i, j in ((layer, layer), (1 - layer, layer), (layer, 1 - layer)):
                end = begin + n
                if np.allclose(out, attention(q, cache.k[i, :end], cache.v[j, :end])):
                    break
            else:
                seen = f"In layer {layer}, attend did not return attention(q, keys, values)."
                raise Broken("result of attend", seen)
            if not i == j == layer:
                seen = f"attend of layer {layer} read keys of layer {i} and values of layer {j}."
                raise Broken("layers mixed", seen)


def _counting(attention: Any, begin: int, n: int) -> Any:
    """Return an attention that refuses a wrong number of keys."""

    def counted(q: Any, k: Any, v: Any) -> Any:
        case = f"With {count(begin, 'stored token')} and {n} new, attention got "
        case += f"{count(len(k), 'key')}."
        if len(k) > begin + n:
            raise Broken("empty slots", case)
        if len(k) == n < begin + n:
            raise Broken("only the new keys", case)
        if len(k) < begin + n:
            raise Broken("new keys not read", case)
        return attention(q, k, v)

    return counted


def _stored(cache: Any, before: Any, layer: int, begin: int, k: Any, v: Any) -> None:
    end = begin + len(k)
    if cache.length != begin:
        seen = f"After layer {layer}, cache.length is {cache.length}, and it was {begin}."
        raise Broken("length changed in a pass", seen)
    if cache.k.shape != before.shape:
        seen = f"self.k had the shape {before.shape}, and attend made it {cache.k.shape}."
        raise Broken("cache replaced", seen)
    if (cache.k[1 - layer] != before[1 - layer]).any():
        seen = f"attend of layer {layer} has changed keys of layer {1 - layer}."
        raise Broken("layers mixed", seen)
    if not (cache.k[layer, :begin] == before[layer, :begin]).all():
        seen = f"With length {begin}, the keys of earlier tokens have changed."
        raise Broken("stored at a wrong place", seen)
    for name, array, right in (("k", cache.k, k), ("v", cache.v, v)):
        error = np.abs(array[layer, begin:end] - right).max()
        if 0 < error < 0.01:
            seen = f"Numbers of self.{name} differ from the new ones by up to {error:.1e}."
            raise Broken("rounded", seen)
    if not (cache.k[layer, begin:end] == k).all():
        places = [i for i in range(len(cache.k[layer])) if (cache.k[layer, i] == k[0]).all()]
        where = f"at place {places[0]}" if places else "nowhere"
        seen = f"With length {begin}, the first new key of layer {layer} was stored {where}."
        raise Broken("stored at a wrong place", seen)
    if not (cache.v[layer, begin:end] == v).all():
        seen = f"self.v of layer {layer} does not hold the new values"
        if (cache.v[layer, begin:end] == k).all():
            raise Broken("keys as values", f"{seen}, but the keys.")
        raise Broken("values not stored", f"{seen}.")
