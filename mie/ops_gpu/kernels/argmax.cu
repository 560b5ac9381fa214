// The largest logit of every row, the lowest id among equals: a greedy row's token.
//
//   logits  [R, V] T
//   ids     [R]    int32
//
// grid (R), block (a multiple of 32, at most 1024). No sort: one pass over the row. As in
// numpy.argmax a NaN counts as the largest.
#include "mie_cuda.cuh"

struct Best {
  float value;
  int id;
};

__device__ __forceinline__ Best better(Best a, Best b) {
  const bool a_is_nan = a.value != a.value, b_is_nan = b.value != b.value;
  const bool equal = a.value == b.value || (a_is_nan && b_is_nan);
  if (equal) return a.id < b.id ? a : b;
  if (a_is_nan || b_is_nan) return a_is_nan ? a : b;
  return a.value > b.value ? a : b;
}

__device__ __forceinline__ Best warp_best(Best best) {
  for (int offset = 16; offset > 0; offset /= 2) {
    const float value = __shfl_xor_sync(MIE_FULL_WARP, best.value, offset);
    const int id = __shfl_xor_sync(MIE_FULL_WARP, best.id, offset);
    best = better(best, Best{value, id});
  }
  return best;
}

template <typename T>
__global__ void argmax(const T* __restrict__ logits, int* __restrict__ ids, int vocab_size) {
  __shared__ float values[32];
  __shared__ int candidates[32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const T* row = logits + (size_t)blockIdx.x * vocab_size;
  Best best = {-MIE_INF, vocab_size - 1};  // loses to everything but itself
  for (int i = threadIdx.x; i < vocab_size; i += blockDim.x)
    best = better(best, Best{to_float(row[i]), i});
  best = warp_best(best);
  if (lane == 0) {
    values[warp] = best.value;
    candidates[warp] = best.id;
  }
  __syncthreads();
  if (warp > 0) return;
  best = Best{-MIE_INF, vocab_size - 1};
  if (lane < (int)blockDim.x / 32) best = Best{values[lane], candidates[lane]};
  best = warp_best(best);
  if (lane == 0) ids[blockIdx.x] = best.id;
}
