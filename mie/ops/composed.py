"""Define operators that follow one another as one call, which a backend may compute at once."""

from mie.ops.backend import Array, Backend, HeadWeights, StepBatch


class ComposedOperators:
    """Computes each of them by the single operators of the backend that inherits it."""

    def norm_linear(self: Backend, x: Array, norm: Array, eps: float, weight: Array) -> Array:
        return self.linear(self.rms_norm(x, norm, eps), weight)

    def norm_gate_up(self: Backend, x: Array, norm: Array, eps: float, weight: Array) -> Array:
        return self.silu_mul(self.norm_linear(x, norm, eps, weight))

    def norm_heads(
        self: Backend,
        x: Array,
        weights: HeadWeights,
        rope: Array,
        kv_cache: Array,
        layer: int,
        batch: StepBatch,
    ) -> Array:
        qkv = self.norm_linear(x, weights.norm, weights.eps, weights.qkv)
        return rotate_heads(self, qkv, weights, rope, kv_cache, layer, batch)


def rotate_heads(
    backend: Backend,
    qkv: Array,
    weights: HeadWeights,
    rope: Array,
    kv_cache: Array,
    layer: int,
    batch: StepBatch,
) -> Array:
    """Compute what follows the product in `norm_heads`. It may change ``qkv``."""
    w, num_keys_end = weights, weights.num_heads + weights.num_kv_heads
    qkv = qkv.reshape(len(qkv), num_keys_end + w.num_kv_heads, w.head_dim)
    if w.q_norm is not None:
        backend.head_norm(qkv, 0, w.num_heads, w.q_norm, w.eps)
        backend.head_norm(qkv, w.num_heads, num_keys_end, w.k_norm, w.eps)
    return backend.rope_write_kv(qkv, rope, kv_cache, layer, batch)
