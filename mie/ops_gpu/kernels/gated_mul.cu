// Computes the gated activation of an MLP (activation.cuh).
//
//   gate_up  [T, 2 F] T      gate, then up
//   out      [T, F]   T
//
// grid (T, ceil(F / block)), block (any)
#include "mie_cuda.cuh"
#include "activation.cuh"

template <typename T>
__global__ void gated_mul(const T* __restrict__ gate_up, T* __restrict__ out, int dim,
                          int activation) {
  const int i = blockIdx.y * blockDim.x + threadIdx.x;
  if (i >= dim) return;
  const T* row = gate_up + (size_t)blockIdx.x * 2 * dim;
  const float y = activated(to_float(row[i]), to_float(row[dim + i]), activation);
  out[(size_t)blockIdx.x * dim + i] = from_float<T>(y);
}

// Computes x * sigmoid(gate).
//
//   x, out  [T, F]          T
//   gate    [T, gate_dim]   T      gate_dim is F, or 1: a gate for the whole row
//
// grid (T, ceil(F / block)), block (any)
template <typename T>
__global__ void sigmoid_mul(const T* __restrict__ x, const T* __restrict__ gate,
                            T* __restrict__ out, int dim, int gate_dim) {
  const int i = blockIdx.y * blockDim.x + threadIdx.x;
  if (i >= dim) return;
  const size_t row = blockIdx.x, place = row * dim + i;
  const float z = to_float(gate[row * gate_dim + (gate_dim == 1 ? 0 : i)]);
  out[place] = from_float<T>(to_float(x[place]) / (1.0f + expf(-z)));
}

// Bounds logits x [R, V] in place: cap * tanh(x / cap) (Gemma 2).
//
// grid (R, ceil(V / block)), block (any)
template <typename T>
__global__ void soft_cap(T* __restrict__ x, int dim, float cap) {
  const int i = blockIdx.y * blockDim.x + threadIdx.x;
  if (i >= dim) return;
  T* to = x + (size_t)blockIdx.x * dim + i;
  *to = from_float<T>(cap * tanhf(to_float(*to) / cap));
}
