// Writes a bias to every row of a matrix product's output, before the product is added to it.
//
//   bias  [N]     T
//   out   [T, stride]  T    in its first N columns the bias, or what was there plus the bias
//
// grid (T, ceil(N / block)), block (any).
#include "mie_cuda.cuh"

template <typename T>
__global__ void add_bias(const T* __restrict__ bias, T* __restrict__ out, int width,
                         int stride, int is_added) {
  const int i = blockIdx.y * blockDim.x + threadIdx.x;
  if (i >= width) return;
  T* to = out + (size_t)blockIdx.x * stride + i;
  *to = is_added ? from_float<T>(to_float(*to) + to_float(bias[i])) : bias[i];
}
