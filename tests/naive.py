"""Define the oracle: a model and sampler in float64, without cache, batching or paging.

It imports nothing from mie. Weights are a dict from Hugging Face's names to arrays [N, K], and
``config`` is a config.json as a dict. Each token costs a forward pass over all tokens before it.
"""

import numpy as np


def angles(rope, dim, n):
    """Return the angle of each pair of channels that turns [n, 1, P], and the scale of both."""
    turning = int(dim * rope.get("partial_rotary_factor", 1))
    theta = rope["rope_theta"]
    if "alpha" in rope:
        theta *= rope["alpha"] ** (dim / (dim - 2))
    freq = theta ** -(np.arange(0, turning, 2) / turning)
    scale = 1.0
    if rope.get("rope_type") == "longrope":  # here within the original context
        freq, scale = freq / rope["short_factor"], rope["attention_factor"]
    return np.arange(n)[:, None, None] * freq, scale


def rope_of(config, layer):
    """Return the parameters of RoPE in a layer, or None if it has none."""
    if not config.get("no_rope_layers", [1] * (layer + 1))[layer]:
        return None
    if config.get("position_embedding_type") == "nope":
        return None
    kind = config.get("layer_types") and config["layer_types"][layer]
    if config["model_type"] == "exaone4" and kind == "full_attention":
        return None
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta")}
    return rope.get(kind, rope)


def silu(z):
    return z / (1 + np.exp(-z))


def recur(config, weights, p, h):
    """Return the result [n, D] of a recurrent layer for the normalised hidden states h [n, D].

    The tensors after ``p`` are those of LFM2, of Qwen3.5 or of Granite 4. Each token's state
    follows from the one before.
    """
    n = len(h)

    def project(x, name):
        return x @ weights[p + name + ".weight"].T

    def convolve(x, name):
        kernel = weights[p + name + ".weight"][:, 0]  # [C, W]
        padded = np.concatenate([np.zeros((kernel.shape[1] - 1, x.shape[1])), x])
        y = [(padded[t : t + kernel.shape[1]] * kernel.T).sum(0) for t in range(n)]
        return np.array(y) + weights.get(p + name + ".bias", 0)

    def rms(x):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"])

    if p + "conv.in_proj.weight" in weights:
        b, c, x = np.split(project(h, "conv.in_proj"), 3, -1)
        return project(c * convolve(b * x, "conv.conv"), "conv.out_proj")
    if p + "mamba.in_proj.weight" in weights:
        heads, groups, size = (config[f"mamba_{key}"] for key in ("n_heads", "n_groups", "d_state"))
        inner, p = config["mamba_expand"] * config["hidden_size"], p + "mamba."
        z, xbc, dt = np.split(project(h, "in_proj"), [inner, -heads], -1)
        x, b, c = np.split(silu(convolve(xbc, "conv1d")), [inner, inner + groups * size], -1)
        x = x.reshape(n, heads, -1)
        b, c = (each.reshape(n, groups, size).repeat(heads // groups, 1) for each in (b, c))
        step = np.log1p(np.exp(dt + weights[p + "dt_bias"]))
        state, out = np.zeros((heads, x.shape[-1], size)), []
        for t in range(n):
            decay = np.exp(-np.exp(weights[p + "A_log"]) * step[t])
            change = np.einsum("h,hp,hs->hps", step[t], x[t], b[t])
            state = state * decay[:, None, None] + change
            out.append(np.einsum("hps,hs->hp", state, c[t]) + weights[p + "D"][:, None] * x[t])
        y = rms((np.array(out).reshape(n, -1) * silu(z)).reshape(n, groups, -1)).reshape(n, -1)
        return project(y * weights[p + "norm.weight"], "out_proj")
    heads, groups = config["linear_num_value_heads"], config["linear_num_key_heads"]
    size, p = groups * config["linear_key_head_dim"], p + "linear_attn."
    mixed = silu(convolve(project(h, "in_proj_qkv"), "conv1d"))
    q, k, v = np.split(mixed, [size, 2 * size], -1)
    q, k = (each.reshape(n, groups, -1).repeat(heads // groups, 1) for each in (q, k))
    q, k = (each / np.sqrt((each**2).sum(-1, keepdims=True) + 1e-6) for each in (q, k))
    v = v.reshape(n, heads, -1)
    beta = 1 / (1 + np.exp(-project(h, "in_proj_b")))
    step = np.log1p(np.exp(project(h, "in_proj_a") + weights[p + "dt_bias"]))
    state, out = np.zeros((heads, v.shape[-1], k.shape[-1])), []
    for t in range(n):
        state = state * np.exp(-np.exp(weights[p + "A_log"]) * step[t])[:, None, None]
        error = v[t] - np.einsum("hvk,hk->hv", state, k[t])
        state = state + np.einsum("h,hv,hk->hvk", beta[t], error, k[t])
        out.append(np.einsum("hvk,hk->hv", state, q[t]) / np.sqrt(k.shape[-1]))
    z = project(h, "in_proj_z").reshape(v.shape)
    y = rms(np.array(out)) * weights[p + "norm.weight"] * silu(z)
    return project(y.reshape(n, -1), "out_proj")


def logits(config, weights, ids):
    """Return the logits [len(ids), V] after each of the tokens."""
    n, num_heads, num_kv = len(ids), config["num_attention_heads"], config["num_key_value_heads"]
    dim, eps, family = config["head_dim"], config["rms_norm_eps"], config["model_type"]
    is_gemma, is_rotated_first = family.startswith("gemma"), family == "hunyuan_v1_dense"
    adds_one = is_gemma or family == "qwen3_5_text"
    is_interleaved = family in ("glm4", "ernie4_5")
    scale = config.get("attention_multiplier", config.get("query_pre_attn_scalar", dim) ** -0.5)
    residual = config.get("residual_multiplier", 1)
    distance = np.arange(n)[:, None] - np.arange(n)[None]

    def norm(x, name):
        weight = weights[name + ".weight"] + adds_one
        whole = x.reshape(n, -1, weight.size)
        mean = (whole**2).mean(-1, keepdims=True)
        return (whole / np.sqrt(mean + eps) * weight).reshape(x.shape)

    def norm_if(x, name):
        return norm(x, name) if name + ".weight" in weights else x

    def project(x, name):
        return x @ weights[name + ".weight"].T + weights.get(name + ".bias", 0)

    def turn(x, rope):
        if rope is None:
            return x
        angle, size = angles(rope, dim, n)
        turning, others = np.split(x, [2 * angle.shape[-1]], -1)
        if is_interleaved:
            first, second = turning[..., 0::2], turning[..., 1::2]
        else:
            first, second = np.split(turning, 2, axis=-1)
        cos, sin = np.cos(angle) * size, np.sin(angle) * size
        pair = first * cos - second * sin, second * cos + first * sin
        turned = np.stack(pair, -1).reshape(turning.shape)
        return np.concatenate([turned if is_interleaved else np.concatenate(pair, -1), others], -1)

    def cap(x, key):
        return config[key] * np.tanh(x / config[key]) if config.get(key) else x

    def activate(z):
        if is_gemma:
            return z / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
        return silu(z)

    def mlp(x, p):
        if p + "gate_up_proj.weight" in weights:
            gate, up = np.split(project(x, p + "gate_up_proj"), 2, -1)
        else:
            gate, up = project(x, p + "gate_proj"), project(x, p + "up_proj")
        return project(activate(gate) * up, p + "down_proj")

    def expert(x, p, e):
        if family != "gpt_oss":
            return mlp(x, f"{p}experts.{e}.")
        w = {name: weights[p + "experts." + name][e] for name in ("gate_up_proj", "down_proj")}
        b = {name: weights[p + f"experts.{name}_bias"][e] for name in w}
        both = x @ w["gate_up_proj"] + b["gate_up_proj"]
        gate, up = np.minimum(both[:, ::2], 7), np.clip(both[:, 1::2], -7, 7)
        h = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
        return h @ w["down_proj"] + b["down_proj"]

    def sparse(x, p):
        out = np.zeros_like(x)
        router = "router" if family == "gpt_oss" else "gate"
        for token, scores in enumerate(project(x, p + router)):
            share = np.exp(scores - scores.max())
            chosen = np.argsort(-scores, kind="stable")[: config["num_experts_per_tok"]]
            total = share[chosen].sum() if config.get("norm_topk_prob", True) else share.sum()
            for e in chosen:
                out[token] += share[e] / total * expert(x[token : token + 1], p, e)[0]
        return out

    def attend(h, p, layer):
        if p + "self_attn.qkv_proj.weight" in weights:
            cuts = np.cumsum([num_heads * dim, num_kv * dim])
            q, k, v = np.split(project(h, p + "self_attn.qkv_proj"), cuts, -1)
        else:
            q, k, v = (project(h, p + f"self_attn.{x}_proj") for x in "qkv")
        gate = 1
        if family == "qwen3_5_text":  # head by head, queries and gates
            q, gate = np.split(q.reshape(n, num_heads, -1), 2, -1)
            gate = 1 / (1 + np.exp(-gate))
        q, k, v = q.reshape(n, -1, dim), k.reshape(n, -1, dim), v.reshape(n, -1, dim)
        rope = rope_of(config, layer)
        if is_rotated_first:
            q = norm(turn(q, rope), p + "self_attn.query_layernorm")
            k = norm(turn(k, rope), p + "self_attn.key_layernorm")
        else:
            q = turn(norm_if(q, p + "self_attn.q_norm"), rope)
            k = turn(norm_if(k, p + "self_attn.k_norm"), rope)
        k, v = (np.repeat(a, num_heads // num_kv, axis=1) for a in (k, v))
        scores = cap(np.einsum("qhd,khd->hqk", q, k) * scale, "attn_logit_softcapping")
        is_full = "layer_types" in config and config["layer_types"][layer] == "full_attention"
        window = n + 1 if is_full else config.get("sliding_window") or n + 1
        weight = np.exp(np.where((distance >= 0) & (distance < window), scores, -np.inf))
        sinks = weights.get(p + "self_attn.sinks", np.full(num_heads, -np.inf))
        total = weight.sum(-1, keepdims=True) + np.exp(sinks)[:, None, None]
        attended = np.einsum("hqk,khd->qhd", weight / total, v)
        return project((attended * gate).reshape(n, -1), p + "self_attn.o_proj")

    x = weights["model.embed_tokens.weight"][np.array(ids)]
    x = x * (config["hidden_size"] ** 0.5 if is_gemma else config.get("embedding_multiplier", 1))
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        attention_out, before, after = {  # the norms after attention, before and after the MLP
            "gemma2": ("post_attention", "pre_feedforward", "post_feedforward"),
            "gemma3_text": ("post_attention", "pre_feedforward", "post_feedforward"),
            "olmo3": ("post_attention", "", "post_feedforward"),
            "exaone4": ("post_attention", "", "post_feedforward"),
            "glm4": ("post_self_attn", "post_attention", "post_mlp"),
        }.get(family, ("", "post_attention", ""))
        h = norm_if(x, p + "input_layernorm")
        if p + "self_attn.o_proj.weight" in weights:
            h = attend(h, p, layer)
        else:
            h = recur(config, weights, p, h)
        x = x + residual * norm_if(h, p + f"{attention_out}_layernorm")
        h = norm_if(x, p + f"{before}_layernorm")
        h = (sparse if "num_experts_per_tok" in config else mlp)(h, p + "mlp.")
        x = x + residual * norm_if(h, p + f"{after}_layernorm")
    x = norm(x, "model.norm") / config.get("logits_scaling", 1)
    x = x @ weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).T
    return cap(x, "final_logit_softcapping")


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
