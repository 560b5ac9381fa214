"""Compare mie's NumPy operators with results that vLLM's kernels wrote.

The results are the goldens of vllm.cpp: inputs and outputs of single operators as ``.npy`` files,
each with a manifest that has its own tolerance.
"""

from __future__ import annotations

import json
import tarfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.checkpoint.config import model_config_from_hf
from mie.errors import MieError
from mie.model.rope import rope_channels, rope_inv_freq
from mie.ops.activation import sigmoid, silu, silu_mul
from mie.ops.attention import paged_attention
from mie.ops.layers.experts import experts, route
from mie.ops.layers.recurrent import causal_conv, delta_inputs, gated_delta, gated_norm, l2_norm
from mie.ops.layers.recurrent_shape import RecurrentShape
from mie.ops.linear import embed
from mie.ops.norm import rms_norm
from mie.ops.rope import rope, rope_table

from ..case import Case, Row, Run, Suite

ARCHIVE = "vllm_cpp_goldens.tar"
SOURCE = "https://github.com/mudler/vllm.cpp/tree/main/tests/parity/goldens"
Array = NDArray[Any]
Tensors = dict[str, Array]
Computed = Mapping[str, Array]


class Refused(MieError):
    """mie has no such operator. The message has the reason."""


def read(folder: Path) -> tuple[dict[str, Any], Tensors]:
    """Return the manifest of a golden, and its arrays. bfloat16 becomes float32."""
    manifest = json.loads((folder / "manifest.json").read_text())
    tensors = {}
    for name, about in manifest["tensors"].items():
        array = np.load(folder / about["file"])
        if about["dtype"] == "bf16":
            array = (array.astype(np.uint32) << 16).view(np.float32)
        tensors[name] = array
    return manifest, tensors


def _embedding(_: Any, t: Tensors) -> Computed:
    return {"out": embed(t["ids"], t["table"])}


def _matmul(_: Any, t: Tensors) -> Computed:
    return {"out": t["a"] @ t["b"]}


def _silu_and_mul(_: Any, t: Tensors) -> Computed:
    return {"out": silu_mul(t["x"])}


def _rms_norm(args: Any, t: Tensors) -> Computed:
    weight = t["weight"] + np.float32(args["gemma"])
    x = t["x"] + t["residual_in"] if args["fused_residual"] else t["x"]
    return {"out": rms_norm(x, weight, args["eps"]), "residual_out": x}


def _gated_norm(args: Any, t: Tensors) -> Computed:
    if args["activation"] != "silu":
        raise Refused(f"a gated norm with {args['activation']}; no family that mie reads has it")
    size = len(t["weight"])
    norm = gated_norm(t["x"], t["gate"], t["weight"], size, args["eps"], gates_first=False)
    return {"out": norm}


def _l2_norm(_: Any, t: Tensors) -> Computed:
    return {"out": l2_norm(t["x"])}


def _rotated(x: Array, table: Array, positions: Array, head_size: int, gptj: bool) -> Array:
    """Return x [T, H * Dh] rotated, with its channels in their own order."""
    pairs = table.shape[-1]
    order = rope_channels(head_size, pairs, gptj)
    rows = np.zeros((len(positions), 2, head_size // 2), table.dtype)
    rows[:, 0] = 1
    rows[:, :, :pairs] = table[positions]
    heads = x.reshape(len(x), -1, head_size)
    y = np.empty_like(heads)
    y[..., order] = rope(heads[..., order], rows)
    return y.reshape(x.shape)


def _plain_rope(args: Any, t: Tensors) -> Computed:
    size, turning = args["head_size"], args["rotary_dim"]
    inv_freq = args["base"] ** -(np.arange(0, turning, 2) / turning)
    table = rope_table(inv_freq, 1.0, int(t["positions"].max()) + 1, np.float32)
    return {f"{x}_out": _rotated(t[f"{x}_in"], table, t["positions"], size, False) for x in "qk"}


_ROPE_FAMILIES = {
    "longrope": ("Phi3ForCausalLM", "phi3"),
    "dynamic": ("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense"),
    "mrope": ("Qwen3_5ForCausalLM", "qwen3_5_text"),
}
"""The families with kinds of RoPE that Llama does not have."""


def _scaled_rope(args: Any, t: Tensors) -> Computed:
    if t["positions"].ndim > 1:
        raise Refused("several positions of a token, for images; mie reads the text part of models")
    given: dict[str, Any] = dict(args["rope_parameters"])
    turning = given.pop("rope_dim")
    kind = "mrope" if "mrope_section" in given else given["rope_type"]
    if kind == "mrope" and given["rope_type"] == "yarn":
        raise Refused(
            "YaRN with positions of images, for which vLLM takes four times the original context; "
            "transformers does not, and mie follows transformers"
        )
    architecture, model_type = _ROPE_FAMILIES.get(kind, ("LlamaForCausalLM", "llama"))
    context: int = given.pop("max_trained_positions", 32)
    context = given.get("original_max_position_embeddings") or context
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": 2**17,
        "hidden_size": turning,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": turning,
        "layer_types": ["full_attention"],
        "partial_rotary_factor": 1.0,
        "original_max_position_embeddings": context,
        "rope_parameters": given,
        "max_position_embeddings": args["max_position"],
    }
    model = model_config_from_hf(config, source="rope_parameters")
    [found] = model.layer_ropes
    assert found is not None
    length = args.get("max_model_len", args["max_position"])
    inv_freq, scaling = rope_inv_freq(found, turning, context, length)
    table = rope_table(inv_freq, scaling, length, np.float32)
    is_gptj = not args["is_neox_style"]
    size, positions = args["head_size"], t["positions"]
    return {f"{x}_out": _rotated(t[f"{x}_in"], table, positions, size, is_gptj) for x in "qk"}


def _attention(args: Any, t: Tensors) -> Computed:
    """Norms of heads, RoPE, attention, and its sigmoid gate, as in Qwen3-Next."""
    tokens, _, size = t["q"].shape
    inv_freq = args["base"] ** -(np.arange(0, args["rotary_dim"], 2) / args["rotary_dim"])
    table = rope_table(inv_freq, 1.0, int(t["positions"].max()) + 1, np.float32)

    def turned(x: Array, weight: Array) -> Array:
        normed = rms_norm(x, 1 + weight, args["eps"]).reshape(tokens, -1)
        return _rotated(normed, table, t["positions"], size, False).reshape(x.shape)

    q, k = turned(t["q"], t["q_norm_weight"]), turned(t["k"], t["k_norm_weight"])
    ends, lengths = np.array([0, tokens]), np.array([tokens])
    blocks = np.zeros((1, 1), np.int64)
    y = paged_attention(q, k[None], t["v"][None], blocks, ends, lengths, args["scale"])
    return {"attn": y, "out": (y * sigmoid(t["gate"])).reshape(tokens, -1)}


def _convolution(args: Any, t: Tensors) -> Computed:
    count = len(t["conv_state_in"])
    ends = t.get("query_start_loc", np.arange(count + 1))
    fresh = ~t.get("has_initial_state", np.ones(count)).astype(bool)
    columns = np.ascontiguousarray(t["conv_state_in"].swapaxes(1, 2))
    y = causal_conv(
        t["x"], np.ascontiguousarray(t["weight"].T), None, columns, (ends, np.arange(count), fresh)
    )
    return {"out": silu(y), "conv_state_out": columns.swapaxes(1, 2)}


def _delta(args: Any, t: Tensors) -> Computed:
    """The recurrence over q and k that are normalised, with one decay and beta a head."""
    scale = np.float32(args["scale"])
    ends, state = t["query_start_loc"], _state(t["state_in"])
    if not args["with_initial_state"]:
        state[:] = 0
    pieces = [
        gated_delta(
            t["q"][begin:end] * scale,
            t["k"][begin:end],
            t["v"][begin:end],
            t["beta"][begin:end],
            np.exp(t["g"][begin:end]),
            state[sequence],
        )
        for sequence, (begin, end) in enumerate(pairwise(ends))
    ]
    return {"out": np.concatenate(pieces), "state_out": state.swapaxes(2, 3)}


def _delta_decode(args: Any, t: Tensors) -> Computed:
    """Norms, decay and beta from the layer's own inputs, and one step of the recurrence."""
    sizes = {"num_groups": args["Hk"], "num_heads": args["Hv"]}
    shape = RecurrentShape(
        kind="delta", kernel_size=4, **sizes, key_dim=args["Dk"], value_dim=args["Dv"]
    )
    count = len(t["q"])
    qkv = np.concatenate([t[name].reshape(count, -1) for name in "qkv"], axis=1)
    gates = np.concatenate([t["b"], t["a"]], axis=1)
    q, k, v, beta, decay = delta_inputs(qkv, gates, shape, np.exp(t["A_log"]), t["dt_bias"], 1.0)
    state = _state(t["state_in"])
    slots = t.get("state_indices", np.arange(count))
    out = np.concatenate(
        [
            gated_delta(q[i : i + 1], k[i : i + 1], v[i : i + 1], beta[[i]], decay[[i]], state[s])
            for i, s in enumerate(slots)
        ]
    )
    return {"out": out, "state_out": state.swapaxes(2, 3)}


def _state(state: Array) -> Array:
    """Return states [N, H, Dv, Dk] as mie's [N, H, Dk, Dv], copied."""
    return np.ascontiguousarray(state.swapaxes(2, 3))


def _router(args: Any, t: Tensors) -> Computed:
    routed = route(t["logits"], args["top_k"], args["renormalize"])
    return {"topk_ids": routed[:, 0].astype(np.int32), "topk_weights": routed[:, 1]}


def _moe(args: Any, t: Tensors) -> Computed:
    """A router, its experts, and a gated shared expert, as in Qwen3-Next."""
    x = t["x"]
    gate = sigmoid(x @ t["w_shared_gate"].T)
    shared = gate * (silu_mul(x @ t["w_shared_gate_up"].T) @ t["w_shared_down"].T)
    routed = route(x @ t["gate_w"].T, args["top_k"], args["renormalize"])

    def compute(expert: int, rows: Array) -> Array:
        y: Array = silu_mul(rows @ t["w13"][expert].T) @ t["w2"][expert].T
        return y

    return {"out": experts(x, routed, compute, shared)}


OPERATORS: Mapping[str, Callable[[Any, Tensors], Computed]] = {
    "embedding": _embedding,
    "matmul": _matmul,
    "silu_and_mul": _silu_and_mul,
    "rmsnorm": _rms_norm,
    "rmsnorm_gated": _gated_norm,
    "l2norm": _l2_norm,
    "rope": _plain_rope,
    "long_context_rope": _scaled_rope,
    "dense_attention": _attention,
    "causal_conv1d_fwd": _convolution,
    "causal_conv1d_update": _convolution,
    "gdn_prefill": _delta,
    "gdn_decode": _delta_decode,
    "gdn_packed_decode_bf16": _delta_decode,
    "moe_router_topk": _router,
    "moe_block": _moe,
}


def within(manifest: Any, computed: Computed, tensors: Tensors) -> float:
    """Return the largest difference as a share of the tolerance of the golden."""
    shares = [0.0]
    for name, array in computed.items():
        if name not in tensors:
            continue
        given, tolerance = tensors[name], manifest.get("tol")
        if tolerance is None:  # then it is the difference between vLLM's own two kernels
            kernels = manifest["oracle"]["full_f32_beta_reference"]
            limit = kernels[name.partition("_")[0]]["max_abs"]
        else:
            limit = tolerance["atol"] + tolerance["rtol"] * np.abs(given)
        assert array.shape == given.shape, (name, array.shape, given.shape)
        difference = np.abs(np.asarray(array, np.float64) - given)
        shares.append(float((difference / np.maximum(limit, 1e-30)).max()))
    return max(shares)


def measure(run: Run) -> Iterator[Row]:
    """Compare each operator with its goldens."""
    with tarfile.open(run.path(ARCHIVE)) as archive:
        archive.extractall(run.folder, filter="data")
    shares: dict[str, list[float]] = defaultdict(list)
    others = 0
    for manifest_path in sorted(run.folder.rglob("manifest.json")):
        folder = manifest_path.parent
        manifest, tensors = read(folder)
        operator = OPERATORS.get(manifest["op"])
        if operator is None:
            others += 1
            continue
        try:
            computed = operator(manifest["args"], tensors)
        except MieError as error:
            reason = str(error).partition("; supported architectures")[0]
            yield Row.refused(folder.name, reason, source=SOURCE)
            continue
        shares[manifest["op"]].append(within(manifest, computed, tensors))
    for name, of in shares.items():
        right = sum(share <= 1 for share in of)
        yield Row.compared(
            name,
            f"{right} of {len(of)} goldens; at most {max(of):.1%} of the tolerance",
            "all within the golden's tolerance",
            right == len(of),
            source=SOURCE,
        )
    yield Row.stated(
        "goldens that need the weights of a model", f"{others}", reason="they are not computed"
    )


SUITE = Suite(
    title="Operators of vLLM",
    text="Inputs and outputs of vLLM's own operators, which vllm.cpp keeps as goldens, against the "
    "NumPy definitions in `mie.ops`. Each golden has a tolerance.",
    cases=[Case("goldens", measure, inputs=(ARCHIVE,))],
)
