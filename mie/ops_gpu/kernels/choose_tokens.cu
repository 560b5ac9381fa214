// Chooses each row's token.
//
//   logits     [R, V] T
//   rows       [R]               null: every row takes its largest logit
//   edited     [., V] float
//   bests      [R, parts] Best
//   masses     [., parts]
//   counts     [., segments] int32
//   lists      [., V] int32
//   token_ids  [R] int32
//
// grid (R), block CHOOSING_THREADS. The last token that top-k or top-p keeps is found among the
// candidates, digit by digit, first of its logit, then of its id. The draw goes by segments.
#include "sampling.cuh"

constexpr int CHOOSING_THREADS = 512;
constexpr int NUM_WARPS = CHOOSING_THREADS / 32;
constexpr int DIGIT_BITS = 11;
static_assert(NUM_BINS == 1 << DIGIT_BITS, "a digit has a bin for each value");

struct Shared {
  Bins bins;
  Mass sums[NUM_WARPS];
  Reached reached;
};

// The effective logits of a row, and how they are weighed.
template <typename T>
struct Logits {
  const T* plain;
  const float* edited;  // null: no edits
  int size, num_bits;
  int best_key;
  float scale;

  __device__ __forceinline__ float at(int id) const {
    return edited == nullptr ? to_float(plain[id]) : edited[id];
  }
  // 0 for the largest logit, and more for smaller ones.
  __device__ __forceinline__ unsigned order_of(int id) const {
    return static_cast<unsigned>(best_key) - static_cast<unsigned>(key_of(at(id)));
  }
  __device__ __forceinline__ Mass weight(int id) const { return weight(at(id)); }
  __device__ __forceinline__ Mass weight_of_order(unsigned order) const {
    return weight(logit_of(static_cast<int>(static_cast<unsigned>(best_key) - order)));
  }
  __device__ __forceinline__ float exponent(int id) const {
    return exponent_of(at(id), logit_of(best_key), scale);
  }
  __device__ __forceinline__ Mass weight(float logit) const {
    const float t = exponent_of(logit, logit_of(best_key), scale);
    return weight_of(fminf(t, weightless(num_bits)), num_bits);
  }
};

// Ids of a row by segment, rising: those that were listed, or all.
struct Candidates {
  const int *counts, *list;  // null: all ids
  int size;

  __device__ __forceinline__ int num_segments() const { return (size + SEGMENT - 1) / SEGMENT; }
  __device__ __forceinline__ int count(int segment) const {
    return counts == nullptr ? min(SEGMENT, size - segment * SEGMENT) : counts[segment];
  }
  __device__ __forceinline__ int id(int segment, int i) const {
    return list == nullptr ? segment * SEGMENT + i : list[segment * SEGMENT + i];
  }
  // Calls visit(id), with a segment for each warp in turn.
  template <typename Visit>
  __device__ __forceinline__ void each(Visit visit) const {
#pragma unroll 1
    for (int segment = threadIdx.x / 32; segment < num_segments(); segment += NUM_WARPS) {
#pragma unroll 1
      for (int i = threadIdx.x % 32; i < count(segment); i += 32) visit(id(segment, i));
    }
  }
};

// The last of the first tokens, in the order "logit falling, id rising".
struct Last {
  unsigned order;
  unsigned id;
  __device__ __forceinline__ bool keeps(unsigned other, int other_id) const {
    return other < order || (other == order && static_cast<unsigned>(other_id) <= id);
  }
};

// Finds the last of the first tokens up to which the candidates that `before` keeps sum to
// `wanted`, at least 1 and at most their total. What is summed is 1 for each or their weights. It
// is a radix select, the most significant digit first, of the order and then of the id.
template <typename T>
__device__ __forceinline__ Last find_last(const Candidates& candidates, const Logits<T>& logits,
                                          Last before, bool is_count, Mass wanted,
                                          Shared& shared) {
  constexpr int NUM_DIGITS = (32 + DIGIT_BITS - 1) / DIGIT_BITS;
  unsigned order = 0, found = 0;  // the digits found so far
#pragma unroll 1
  for (int round = 0; round < 2 * NUM_DIGITS; ++round) {
    const bool is_by_id = round >= NUM_DIGITS;
    const int high = 32 - DIGIT_BITS * (round % NUM_DIGITS), low = max(high - DIGIT_BITS, 0);
    const unsigned digit = (1u << (high - low)) - 1;
    if (round == NUM_DIGITS) {
      order = found;
      found = 0;
    }
    shared.bins.clear();
    __syncthreads();
    candidates.each([&](int id) {
      const unsigned own_order = logits.order_of(id);
      if (!before.keeps(own_order, id) || (is_by_id && own_order != order)) return;
      const unsigned key = is_by_id ? id : own_order;
      if (high < 32 && key >> high != found) return;
      const Mass mass = is_count ? 1 : logits.weight(id);
      if (mass > 0) shared.bins.add(key >> low & digit, mass);
    });
    __syncthreads();
    find_bin<CHOOSING_THREADS>([&](int bin) { return shared.bins.sum(bin); }, wanted,
                               shared.reached);
    const int value = shared.reached.bin;
    found = found << (high - low) | value;
    wanted = shared.reached.missing;
    const Mass sum = shared.bins.sum(value);
    __syncthreads();
    // Without too many ids of the last order, none of them needs to be dropped.
    if (round == NUM_DIGITS - 1 && sum - wanted < (is_count ? 1 : logits.weight_of_order(found)))
      return Last{found, found == before.order ? before.id : ~0u};
  }
  return Last{order, found};
}

// The first id whose cumulative mass exceeds `target`, among the segments from `first` up to `end`,
// whose masses sum to more. Each warp sums a stretch of the segments. The warp whose stretch has
// the token walks through it, 32 candidates at a time.
template <typename MassOf>
__device__ __forceinline__ void draw(const Candidates& candidates, MassOf mass_of, int first,
                                     int end, Mass target, Shared& shared, int* token_id) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int stretch = (end - first + NUM_WARPS - 1) / NUM_WARPS;
  const int own_first = min(end, first + warp * stretch), own_end = min(end, own_first + stretch);
  Mass own = 0;
#pragma unroll 1
  for (int segment = own_first; segment < own_end; ++segment)
#pragma unroll 1
    for (int i = lane; i < candidates.count(segment); i += 32)
      own += mass_of(candidates.id(segment, i));
  own = warp_total(own);
  if (lane == 0) shared.sums[warp] = own;
  __syncthreads();
  Mass before = 0;
  for (int other = 0; other < warp; ++other) before += shared.sums[other];
  if (before > target || before + own <= target) return;
#pragma unroll 1
  for (int segment = own_first; segment < own_end; ++segment) {
    const int count = candidates.count(segment);
#pragma unroll 1
    for (int tile = 0; tile < count; tile += 32) {
      const int i = tile + lane, id = i < count ? candidates.id(segment, i) : 0;
      const Mass mass = i < count ? mass_of(id) : 0;
      const Mass up_to = warp_scan(mass);
      const bool is_chosen = before + up_to > target && before + up_to - mass <= target;
      if (is_chosen) *token_id = id;
      before += __shfl_sync(MIE_FULL_WARP, up_to, 31);
      if (before > target) return;
    }
  }
}

__device__ __forceinline__ Mass target_of(double uniform, Mass total) {
  const Mass target = static_cast<Mass>(uniform * static_cast<double>(total));
  return min(target, total - 1);
}

// A draw from all tokens: the part comes from the parts' masses.
template <typename T>
__device__ __forceinline__ void draw_from_all(const Row& row, const Logits<T>& logits,
                                              const Mass* masses, int num_parts, Shared& shared,
                                              int* token_id) {
  const Mass target = target_of(row.uniform, warp_total_of(masses, num_parts));
  Mass before = 0;
  int part = 0;
#pragma unroll 1
  while (before + masses[part] <= target) before += masses[part++];
  const Candidates all = {nullptr, nullptr, logits.size};
  const int first = part * (PART / SEGMENT);
  const float last_t = last_exponent(row, logits.num_bits);
  const auto mass_of = [&](int id) {
    const float t = logits.exponent(id);
    return weight_of(t > last_t ? weightless(logits.num_bits) : t, logits.num_bits);
  };
  draw(all, mass_of, first, min(first + PART / SEGMENT, all.num_segments()), target - before,
       shared, token_id);
}

// A draw from the first tokens.
template <typename T>
__device__ __forceinline__ void draw_from_first(const Row& row, const Logits<T>& logits,
                                                const Candidates& candidates, const Mass* masses,
                                                int num_parts, Shared& shared, int* token_id) {
  Last last = {~0u, ~0u};
  Mass total = warp_total_of(masses, num_parts);
  const auto mass_of = [&](int id) {
    return last.keeps(logits.order_of(id), id) ? logits.weight(id) : 0;
  };
#pragma unroll 1
  for (int round = 0; round < 2; ++round) {
    const bool is_top_k = round == 0;
    if (is_top_k ? !has_top_k(row, logits.size) : row.top_p >= 1) continue;
    Mass wanted = row.top_k, num_candidates = 0;
    if (is_top_k) {
      candidates.each([&](int) { ++num_candidates; });
      wanted = min(wanted, block_sum(num_candidates, shared.sums));
    } else {
      wanted = nucleus_mass(row.top_p, total);
    }
    last = find_last(candidates, logits, last, is_top_k, wanted, shared);
    total = 0;
    candidates.each([&](int id) { total += mass_of(id); });
    total = block_sum(total, shared.sums);
  }
  draw(candidates, mass_of, 0, candidates.num_segments(), target_of(row.uniform, total), shared,
       token_id);
}

template <typename T>
__global__ void __launch_bounds__(CHOOSING_THREADS)
    choose_tokens(const T* __restrict__ logits, const Row* __restrict__ rows,
                  const float* __restrict__ edited, const Best* __restrict__ bests,
                  const unsigned long long* __restrict__ masses, const int* __restrict__ counts,
                  const int* __restrict__ lists, int* __restrict__ token_ids, int vocab_size) {
  __shared__ Shared shared;
  int* token_id = token_ids + blockIdx.x;
  const int num_parts = (vocab_size + PART - 1) / PART;
  const Best best = warp_best(bests + blockIdx.x * num_parts, num_parts);
  if (rows == nullptr || rows[blockIdx.x].drawn_row < 0) {
    const bool is_forced = rows != nullptr && rows[blockIdx.x].kind == FORCED;
    if (threadIdx.x == 0) *token_id = is_forced ? rows[blockIdx.x].forced_id : best.id;
    return;
  }
  if (!is_finite(best)) {  // every weight would be NaN, so there is nothing to draw from
    if (threadIdx.x == 0) *token_id = 0;
    return;
  }
  const Row row = rows[blockIdx.x];
  const int num_segments = (vocab_size + SEGMENT - 1) / SEGMENT;
  const bool is_edited = row.edited_row >= 0;
  const Logits<T> effective = {
      logits + static_cast<size_t>(blockIdx.x) * vocab_size,
      is_edited ? edited + static_cast<size_t>(row.edited_row) * vocab_size : nullptr,
      vocab_size,
      num_weight_bits(vocab_size),
      best.key,
      row.scale};
  masses += row.drawn_row * num_parts;
  if (!has_cut(row, vocab_size)) {
    draw_from_all(row, effective, masses, num_parts, shared, token_id);
    return;
  }
  const Candidates candidates = {counts + row.drawn_row * num_segments,
                                 lists + static_cast<size_t>(row.drawn_row) * vocab_size,
                                 vocab_size};
  draw_from_first(row, effective, candidates, masses, num_parts, shared, token_id);
}
