// Lists the ids of a drawn row that can be among its first tokens: those whose t is in the bin in
// which top-k or top-p ends, or in one before it. If they end after the histogram, it lists all.
//
//   logits  [R, V] T
//   rows    [R]
//   edited  [., V] float
//   bests   [R, parts] Best
//   masses  [., parts]
//   bins    [., NUM_BINS]
//   counts  [., segments] int32   how many ids each segment has
//   lists   [., V] int32          from the first id of each segment on: its ids, rising
//
// grid (parts, R), block PART_THREADS.
#include "sampling.cuh"

// Lists the ids of a segment with t up to last_t.
template <typename T>
__device__ __forceinline__ int keep(const T* __restrict__ x, float largest, float scale,
                                    float last_t, int begin, int end, int* __restrict__ list) {
  constexpr int AT_ONCE = 4;
  const int lane = threadIdx.x % 32;
  int count = 0;
  const auto keep_tile = [&](float t, int first) {
    const unsigned kept = __ballot_sync(MIE_FULL_WARP, t <= last_t);
    const int place = begin + count + __popc(kept & ((1u << lane) - 1));
    if (t <= last_t) list[place] = first + lane;
    count += __popc(kept);
  };
  int first = begin;
  for (; first + 32 * AT_ONCE <= end; first += 32 * AT_ONCE) {
    float t[AT_ONCE];
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k)
      t[k] = exponent_of(to_float(x[first + 32 * k + lane]), largest, scale);
    // Few tokens of a peaked row are kept.
    const float least = fminf(fminf(t[0], t[1]), fminf(t[2], t[3]));
    if (!__any_sync(MIE_FULL_WARP, least <= last_t)) continue;
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k) keep_tile(t[k], first + 32 * k);
  }
#pragma unroll 1
  for (; first < end; first += 32) {
    const int i = first + lane;
    keep_tile(i < end ? exponent_of(to_float(x[i]), largest, scale) : MIE_INF, first);
  }
  return count;
}

template <typename T>
__global__ void __launch_bounds__(PART_THREADS)
    keep_candidates(const T* __restrict__ logits, const Row* __restrict__ rows,
                    const float* __restrict__ edited, const Best* __restrict__ bests,
                    const unsigned long long* __restrict__ masses,
                    const unsigned long long* __restrict__ bins, int* __restrict__ counts,
                    int* __restrict__ lists, int vocab_size) {
  __shared__ Reached last;
  const Row row = rows[blockIdx.y];
  if (row.drawn_row < 0 || !has_cut(row, vocab_size)) return;
  const Best best = warp_best(bests + blockIdx.y * gridDim.x, gridDim.x);
  if (!is_finite(best)) return;
  bins += static_cast<size_t>(row.drawn_row) * NUM_BINS;
  masses += row.drawn_row * gridDim.x;
  const Mass top_k = row.top_k;
  const Mass wanted = has_top_k(row, vocab_size)
                          ? top_k
                          : nucleus_mass(row.top_p, warp_total_of(masses, gridDim.x));
  find_bin<PART_THREADS>([=](int bin) { return bins[bin]; }, wanted, last);
  float last_t = last_exponent(row, num_weight_bits(vocab_size));
  if (last.bin < NUM_BINS)  // the largest float in the bin; t is not negative
    last_t = fminf(last_t, __int_as_float(((FIRST_BIN + last.bin + 1) << BIN_SHIFT) - 1));
  const float largest = logit_of(best.key);
  const int segment = blockIdx.x * (PART / SEGMENT) + threadIdx.x / 32;
  const int begin = segment * SEGMENT, end = min(vocab_size, begin + SEGMENT);
  if (begin >= vocab_size) return;
  int* list = lists + static_cast<size_t>(row.drawn_row) * vocab_size;
  int count;
  if (row.edited_row < 0) {
    logits += static_cast<size_t>(blockIdx.y) * vocab_size;
    count = keep(logits, largest, row.scale, last_t, begin, end, list);
  } else {
    edited += static_cast<size_t>(row.edited_row) * vocab_size;
    count = keep(edited, largest, row.scale, last_t, begin, end, list);
  }
  const int num_segments = (vocab_size + SEGMENT - 1) / SEGMENT;
  if (threadIdx.x % 32 == 0) counts[row.drawn_row * num_segments + segment] = count;
}
