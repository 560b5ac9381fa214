"""Define the oracle: a model and sampler in float64, without cache, batching or paging.

It imports nothing from mie. Weights are a dict from Hugging Face's names to arrays [N, K], and
``config`` is a config.json as a dict. Each token costs a forward pass over all tokens before it.
"""

import numpy as np


def logits(config, weights, ids):
    """Return the logits [len(ids), V] after each of the tokens."""
    n, num_heads, num_kv = len(ids), config["num_attention_heads"], config["num_key_value_heads"]
    dim, eps = config["head_dim"], config["rms_norm_eps"]
    freq = config["rope_theta"] ** -(np.arange(0, dim, 2) / dim)
    angle = np.arange(n)[:, None, None] * np.concatenate([freq, freq])
    distance = np.arange(n)[:, None] - np.arange(n)[None]
    visible = (distance >= 0) & (distance < (config.get("sliding_window") or n + 1))

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weights[name]

    def project(x, name):
        return x @ weights[name + ".weight"].T + weights.get(name + ".bias", 0)

    def turn(x):
        first, second = np.split(x, 2, axis=-1)
        return x * np.cos(angle) + np.concatenate([-second, first], -1) * np.sin(angle)

    x = weights["model.embed_tokens.weight"][np.array(ids)]
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        h = norm(x, p + "input_layernorm.weight")
        q = project(h, p + "self_attn.q_proj").reshape(n, num_heads, dim)
        k = project(h, p + "self_attn.k_proj").reshape(n, num_kv, dim)
        v = project(h, p + "self_attn.v_proj").reshape(n, num_kv, dim)
        if p + "self_attn.q_norm.weight" in weights:
            q = norm(q, p + "self_attn.q_norm.weight")
            k = norm(k, p + "self_attn.k_norm.weight")
        q, k = turn(q), turn(k)
        k, v = (np.repeat(a, num_heads // num_kv, axis=1) for a in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(dim)
        weight = np.exp(np.where(visible, scores, -np.inf))
        attended = np.einsum("hqk,khd->qhd", weight / weight.sum(-1, keepdims=True), v)
        x = x + project(attended.reshape(n, -1), p + "self_attn.o_proj")
        h = norm(x, p + "post_attention_layernorm.weight")
        gate, up = project(h, p + "mlp.gate_proj"), project(h, p + "mlp.up_proj")
        x = x + project(gate / (1 + np.exp(-gate)) * up, p + "mlp.down_proj")
    x = norm(x, "model.norm.weight")
    return x @ weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).T


def uniform(seed, stream, choice, position):
    """Return the random number of one draw."""
    key, counter = np.uint64([seed % 2**64, choice]), np.uint64([position, stream, 0, 0])
    return (int(np.random.Philox(key=key, counter=counter).random_raw()) >> 11) / 2**53


def forbidden(rule, output, eos):
    """Return the tokens that may not follow ``output`` under a rule (period, length, share).

    After a fifth of the tokens for each ``share`` only one token may follow.
    """
    period, length, share = rule
    last = output[-1] if output else 0
    allowed = {t for t in range(40) if (t + last) % period} - {*eos}
    if len(output) >= length:
        allowed = {*eos}
    elif last % 5 < share:
        allowed = {min(allowed, key=lambda t: (t - 7 * last - 11) % 40)}
    elif len(output) >= 2:
        allowed |= {*eos}
    return sorted({*range(40)} - allowed)


def choose(row, prompt, output, params, banned, u):
    """Return the next token, by sorting everything, or None if every token is banned."""
    x = row.copy()
    for token, bias in (params.get("logit_bias") or {}).items():
        x[token] += bias
    if params.get("allowed_token_ids"):
        x[[t for t in range(len(x)) if t not in params["allowed_token_ids"]]] = -np.inf
    if len(output) < params.get("min_tokens", 0):
        x[list(banned)] = -np.inf
    for *before, last in params.get("bad_words_token_ids") or ():
        if output[len(output) - len(before) :] == before and len(before) <= len(output):
            x[last] = -np.inf
    if params.get("rule"):
        x[forbidden(params["rule"], output, params["eos"])] = -np.inf
        if x.max() == -np.inf:
            return None
        without_eos = x.copy()
        without_eos[list(params["eos"])] = -np.inf
        if params.get("ignore_eos") and without_eos.max() > -np.inf:
            x = without_eos
    for token in {*prompt, *output}:
        repetition = params.get("repetition_penalty", 1.0)
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
    for token in output:
        x[token] -= params.get("frequency_penalty", 0.0)
    for token in set(output):
        x[token] -= params.get("presence_penalty", 0.0)
    if params["temperature"] == 0:
        return int(np.argmax(x))
    p = np.exp((x - x.max()) / params["temperature"])
    p[p < params.get("min_p", 0.0) * p.max()] = 0
    order = np.argsort(-x, kind="stable")  # by falling probability, then rising id
    if params.get("top_k", 0) > 0:
        p[order[params["top_k"] :]] = 0
    if params.get("top_p", 1.0) < 1:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= params["top_p"] * p.sum()]] = 0
    reached = np.cumsum(p)
    return int(np.argmax(reached > u * reached[-1]))


def generate(config, weights, prompt, params, *, choice=0, stream=0, eos=(), limit=10**9):
    """Return (output tokens, finish reason, log-probability of each) of one choice."""
    forced = params.get("trace_decode_token_ids") or ()
    stops = set() if params.get("ignore_eos") and not params.get("rule") else set(eos)
    params = {**params, "eos": eos}
    stops |= set(params.get("stop_token_ids") or ())
    output, logprobs = [], []
    while True:
        row = logits(config, weights, [*prompt, *output])[-1]
        u = uniform(params.get("seed") or 0, stream, choice, len(prompt) + len(output))
        token = choose(row, prompt, output, params, stops, u)
        if token is None:
            return output, "error", logprobs
        is_forced = len(output) < len(forced)
        token = forced[len(output)] if is_forced else token
        output.append(token)
        logprobs.append(row[token] - row.max() - np.log(np.exp(row - row.max()).sum()))
        if token in stops and not is_forced:
            return output, "stop", logprobs
        if len(output) == params["max_tokens"] or len(prompt) + len(output) >= limit:
            return output, "length", logprobs


def beam_search(config, weights, prompt, params, *, eos=(), limit=10**9):
    """Return [(tokens, cumulative log-probability, finish reason)], best ``beam_width`` first.

    As in vLLM, each step takes the 2 * beam_width most likely tokens of each beam. It sets aside
    those that end, and keeps the beam_width best of the others.
    """
    width, penalty = params["beam_width"], params.get("length_penalty", 1.0)

    def score(beam):
        return beam[1] / (len(beam[0]) - (beam[0][-1] in eos)) ** penalty

    beams, ended = [(list(prompt), 0.0)], []
    for _ in range(min(params["max_tokens"], limit - len(prompt))):
        longer = []
        for ids, total in beams:
            row = logits(config, weights, ids)[-1] / (params.get("temperature") or 1.0)
            row = row - row.max() - np.log(np.exp(row - row.max()).sum())
            for token in np.argsort(-row, kind="stable")[: 2 * width].tolist():
                beam = ([*ids, token], total + row[token])
                is_end = token in eos and not params.get("ignore_eos")
                (ended if is_end else longer).append(beam)
        beams = sorted(longer, key=score, reverse=True)[:width]
    found = [(*beam, "stop") for beam in ended] + [(*beam, "length") for beam in beams]
    return sorted(found, key=score, reverse=True)[:width]
