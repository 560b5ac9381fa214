// Finds the largest effective logit of each part of a row, and its lowest id.
//
//   logits  [R, V] T
//   rows    [R]              null: no row has edits or is drawn
//   edited  [., V] float
//   bests   [R, parts] Best
//   bins    [., NUM_BINS]    cleared for the rows that weigh_tokens fills
//
// grid (parts, R), block PART_THREADS.
#include "sampling.cuh"

template <typename T>
__device__ __forceinline__ Best largest(const T* __restrict__ x, int begin, int end) {
  __shared__ float warps[PART_THREADS / 32];
  __shared__ int lowest_id;
  float own = -MIE_INF;
#pragma unroll 8
  for (int i = begin + threadIdx.x; i < end; i += PART_THREADS) own = max_nan(own, to_float(x[i]));
  float all = own;
  for (int offset = 16; offset > 0; offset /= 2)
    all = max_nan(all, __shfl_xor_sync(MIE_FULL_WARP, all, offset));
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = all;
  if (threadIdx.x == 0) lowest_id = end;
  __syncthreads();
  for (int warp = 0; warp < PART_THREADS / 32; ++warp) all = max_nan(all, warps[warp]);
  const int key = key_of(all);
  if (key_of(own) == key) {  // few threads: only they look for the id
    int i = begin + threadIdx.x;
    while (i < end && key_of(to_float(x[i])) != key) i += PART_THREADS;
    atomicMin(&lowest_id, i);
  }
  __syncthreads();
  return Best{key, lowest_id};
}

template <typename T>
__global__ void __launch_bounds__(PART_THREADS)
    find_largest(const T* __restrict__ logits, const Row* __restrict__ rows,
                 const float* __restrict__ edited, Best* __restrict__ bests,
                 unsigned long long* __restrict__ bins, int vocab_size) {
  const int begin = blockIdx.x * PART, end = min(vocab_size, begin + PART);
  const Row* row = rows == nullptr ? nullptr : rows + blockIdx.y;
  Best best;
  if (row == nullptr || row->edited_row < 0) {
    best = largest(logits + static_cast<size_t>(blockIdx.y) * vocab_size, begin, end);
  } else {
    best = largest(edited + static_cast<size_t>(row->edited_row) * vocab_size, begin, end);
  }
  if (threadIdx.x == 0) bests[blockIdx.y * gridDim.x + blockIdx.x] = best;
  if (row == nullptr || row->drawn_row < 0 || !has_cut(*row, vocab_size)) return;
  Mass* own = bins + static_cast<size_t>(row->drawn_row) * NUM_BINS;
  const int step = PART_THREADS * gridDim.x;
  for (int i = blockIdx.x * PART_THREADS + threadIdx.x; i < NUM_BINS; i += step) own[i] = 0;
}
