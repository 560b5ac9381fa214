// Writes a bias to every row of a matrix product's output, before the product is added to it.
//
//   bias  [N]     T
//   out   [T, N]  T    the bias, or the previous contents plus the bias
//
// grid (T, ceil(N / block)), block (any).
#include "mie_cuda.cuh"

template <typename T>
__global__ void add_bias(const T* __restrict__ bias, T* __restrict__ out, int width, int is_added) {
  const int i = blockIdx.y * blockDim.x + threadIdx.x;
  if (i >= width) return;
  T* to = out + (size_t)blockIdx.x * width + i;
  *to = is_added ? from_float<T>(to_float(*to) + to_float(bias[i])) : bias[i];
}
