// Sums the weights of each part of a drawn row, or counts its tokens by their t.
//
//   logits  [R, V] T
//   rows    [R]
//   edited  [., V] float
//   bests   [R, parts] Best
//   masses  [., parts]      the sum of the part's weights; 0 with top-k
//   bins    [., NUM_BINS]   with top-k: how many likely tokens have their t in the bin; otherwise
//                           with top-p: the sum of their weights
//
// grid (parts, R), block PART_THREADS.
#include "sampling.cuh"

enum Count { SUM, SUM_BINS, COUNT_BINS };

template <Count COUNT>
__device__ __forceinline__ void weigh_one(float t, float last_t, int num_bits, Mass& sum,
                                          Bins& shared) {
  const bool is_dropped = t > last_t;
  Mass mass = 1;
  if (COUNT != COUNT_BINS) {
    mass = weight_of(is_dropped ? weightless(num_bits) : t, num_bits);
    sum += mass;
  }
  if (COUNT == SUM || is_dropped || t >= LIKELY) return;
  shared.add(max((__float_as_int(t) >> BIN_SHIFT) - FIRST_BIN, 0), mass);
}

template <Count COUNT, typename T>
__device__ __forceinline__ Mass weigh_as(const T* __restrict__ x, float largest, float scale,
                                         float last_t, int num_bits, int begin, int end,
                                         Bins& shared) {
  constexpr int AT_ONCE = 4;
  Mass sum = 0;
  int i = begin + threadIdx.x;
  for (; i + (AT_ONCE - 1) * PART_THREADS < end; i += AT_ONCE * PART_THREADS) {
    float t[AT_ONCE];
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k)
      t[k] = exponent_of(to_float(x[i + k * PART_THREADS]), largest, scale);
    // Most tokens of a peaked row have no weight, or cannot be in the histogram.
    const float least = fminf(fminf(t[0], t[1]), fminf(t[2], t[3]));
    if (least > last_t || (COUNT == COUNT_BINS && least >= LIKELY)) continue;
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k) weigh_one<COUNT>(t[k], last_t, num_bits, sum, shared);
  }
#pragma unroll 1
  for (; i < end; i += PART_THREADS) {
    const float t = exponent_of(to_float(x[i]), largest, scale);
    weigh_one<COUNT>(t, last_t, num_bits, sum, shared);
  }
  return sum;
}

template <typename T>
__device__ __forceinline__ Mass weigh(const T* __restrict__ x, const Row& row, Best best, int size,
                                      Bins& shared) {
  const int begin = blockIdx.x * PART, end = min(size, begin + PART);
  const int num_bits = num_weight_bits(size);
  const float last_t = last_exponent(row, num_bits), top = logit_of(best.key), scale = row.scale;
  if (has_top_k(row, size))
    return weigh_as<COUNT_BINS>(x, top, scale, last_t, num_bits, begin, end, shared);
  if (row.top_p < 1)
    return weigh_as<SUM_BINS>(x, top, scale, last_t, num_bits, begin, end, shared);
  return weigh_as<SUM>(x, top, scale, last_t, num_bits, begin, end, shared);
}

template <typename T>
__global__ void __launch_bounds__(PART_THREADS)
    weigh_tokens(const T* __restrict__ logits, const Row* __restrict__ rows,
                 const float* __restrict__ edited, const Best* __restrict__ bests,
                 unsigned long long* __restrict__ masses, unsigned long long* __restrict__ bins,
                 int vocab_size) {
  __shared__ Bins shared;
  __shared__ Mass sums[PART_THREADS / 32];
  const Row row = rows[blockIdx.y];
  if (row.drawn_row < 0) return;
  const Best best = warp_best(bests + blockIdx.y * gridDim.x, gridDim.x);
  if (!is_finite(best)) return;
  if (has_cut(row, vocab_size)) shared.clear();
  __syncthreads();
  Mass sum;
  if (row.edited_row < 0) {
    logits += static_cast<size_t>(blockIdx.y) * vocab_size;
    sum = weigh(logits, row, best, vocab_size, shared);
  } else {
    edited += static_cast<size_t>(row.edited_row) * vocab_size;
    sum = weigh(edited, row, best, vocab_size, shared);
  }
  sum = block_sum(sum, sums);
  if (threadIdx.x == 0) masses[row.drawn_row * gridDim.x + blockIdx.x] = sum;
  if (!has_cut(row, vocab_size)) return;
  Mass* own = bins + static_cast<size_t>(row.drawn_row) * NUM_BINS;
  for (int i = threadIdx.x; i < NUM_BINS; i += PART_THREADS)
    if (shared.sum(i) > 0) atomicAdd(&own[i], shared.sum(i));
}
