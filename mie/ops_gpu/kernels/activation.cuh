// The gated activations of MLPs and experts (mie/ops/activation.py). Included after mie_cuda.cuh.
#pragma once

enum Activation { SILU, GELU_TANH, CLAMPED_SILU };  // ACTIVATIONS of mie/ops/activation.py

// All are gate / (1 + exp(-z)) times a factor. They use expf, not __expf: the kernels are
// memory-bound, so the exact function costs nothing. For a very negative z expf gives infinity, and
// the quotient is its limit, -0.
__device__ __forceinline__ float activated(float gate, float up, int activation) {
  float z = gate;
  if (activation == GELU_TANH) {
    z = 1.5957691216f * (gate + 0.044715f * gate * gate * gate);
  } else if (activation == CLAMPED_SILU) {  // a NaN stays one, as in NumPy
    gate = gate > 7.0f ? 7.0f : gate;
    up = (up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up) + 1.0f;
    z = 1.702f * gate;
  }
  return gate / (1.0f + expf(-z)) * up;
}
