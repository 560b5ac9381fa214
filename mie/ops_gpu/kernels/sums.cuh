// Sums over a warp and over a block, of integers or of doubles. Each order of additions is fixed,
// so equal inputs give equal bits. Included after mie_cuda.cuh.
#pragma once

// The sum over the warp, which every lane gets.
template <typename Number>
__device__ __forceinline__ Number warp_total(Number x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(MIE_FULL_WARP, x, offset);
  return x;
}

// The sum over the block, which every thread gets. `shared` has a place for each warp.
template <typename Number>
__device__ __forceinline__ Number block_sum(Number x, Number* shared) {
  x = warp_total(x);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  Number sum = 0;
  for (int warp = 0; warp < (int)blockDim.x / 32; ++warp) sum += shared[warp];
  __syncthreads();
  return sum;
}
