// Computes silu(gate) * up, with silu(z) = z / (1 + exp(-z)) (SwiGLU: Shazeer, 2020).
//
//   gate_up  [T, 2 F] T      gate, then up
//   out      [T, F]   T
//
// grid (T, ceil(F / block)), block (any). It uses expf, not __expf: the kernel is memory-bound, so
// the exact function costs nothing. Below -88 expf gives infinity and the quotient its limit, -0.
#include "mie_cuda.cuh"

template <typename T>
__global__ void silu_mul(const T* __restrict__ gate_up, T* __restrict__ out, int dim) {
  const int i = blockIdx.y * blockDim.x + threadIdx.x;
  if (i >= dim) return;
  const T* row = gate_up + (size_t)blockIdx.x * 2 * dim;
  const float gate = to_float(row[i]), up = to_float(row[dim + i]);
  out[(size_t)blockIdx.x * dim + i] = from_float<T>(gate / (1.0f + expf(-gate)) * up);
}
