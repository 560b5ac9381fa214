// What the kernels of the sampler share. They compute what mie/ops/sampling.py computes, bit for
// bit: every operation on floats is rounded once, and sums are integers.
//
// A row of logits is cut into parts of PART ids, one for each block, and these into segments of
// SEGMENT ids, one for each warp. The kernels run in this order, and each reads what those before
// it wrote for the row:
//
//   edit_logits      edited          the effective logits of rows that have edits
//   find_largest     bests           each part's largest logit
//   weigh_tokens     masses, bins    the sum of each part's weights; a histogram of likely tokens
//   keep_candidates  counts, lists   the ids that can be among the first tokens, by segment
//   choose_tokens    token_ids
//
// Rows that are not drawn skip the third kernel. Only rows with top-k or top-p use bins, counts and
// lists.
#pragma once
#include "mie_cuda.cuh"
#include "sums.cuh"

using Mass = unsigned long long;

constexpr int PART = 8192;
constexpr int SEGMENT = 1024;
constexpr int PART_THREADS = 256;
static_assert(PART == SEGMENT * (PART_THREADS / 32), "a warp has one segment of its block's part");

// The histogram has tokens with t below LIKELY. All others together have at most V * 2^-24 of the
// largest weight, so top-p rarely ends among them.
constexpr float LIKELY = 24;
constexpr int NUM_BINS = 2048;
constexpr int BIN_SHIFT = 17;  // a bin has the floats t that agree in sign, exponent and 6 bits
constexpr int FIRST_BIN = (127 - 27) << (23 - BIN_SHIFT);  // bin 0 has those below 2^-27, too
static_assert(FIRST_BIN + NUM_BINS == (127 + 5) << (23 - BIN_SHIFT), "the last bin ends at 32");

enum Kind { GREEDY = 0, DRAWN = 1, FORCED = 2 };
enum Allowed { ALL = 0, IDS = 1, WORDS = 2 };

// One row's controls. The lists are concatenated in `ids`: bias, allowed, banned, seen, output,
// each up to where the next begins. In the form WORDS, allowed has a bit for each token. From
// value_begin on, `values` has those of bias and of output. edited_row and drawn_row are the row's
// places in the scratch memory, or -1.
struct Row {
  double top_p, uniform, repetition_penalty;
  float scale, largest_t;
  int kind, top_k, forced_id, edited_row, drawn_row;
  int bias, allowed, banned, seen, output, end;
  int value_begin, allowed_form;
};
static_assert(sizeof(Row) == 88, "sampling.py packs 88 bytes a row");

struct Best {
  int key, id;
};

// ---- the order of logits

// An integer that grows with the logit. As in numpy.argmax, a NaN counts as the largest number, and
// the two zeros are equal.
__device__ __forceinline__ int key_of(float x) {
  const int bits = __float_as_int(x);
  if (x != x) return 0x7fffffff;
  return bits >= 0 ? bits : static_cast<int>(0x80000000u - static_cast<unsigned>(bits));
}
__device__ __forceinline__ float logit_of(int key) {
  return __int_as_float(key >= 0 ? key
                                 : static_cast<int>(0x80000000u - static_cast<unsigned>(key)));
}
__device__ __forceinline__ bool is_finite(Best best) {
  return best.key > key_of(-MIE_INF) && best.key < key_of(MIE_INF);
}

// The lowest id wins among equals.
__device__ __forceinline__ Best better(Best a, Best b) {
  if (a.key == b.key) return a.id < b.id ? a : b;
  return a.key > b.key ? a : b;
}

// The best of the row's parts. Every lane of the warp gets it.
__device__ __forceinline__ Best warp_best(const Best* parts, int num_parts) {
  Best best = parts[0];
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < num_parts; i += 32) best = better(best, parts[i]);
  for (int offset = 16; offset > 0; offset /= 2) {
    const int key = __shfl_xor_sync(MIE_FULL_WARP, best.key, offset);
    const int id = __shfl_xor_sync(MIE_FULL_WARP, best.id, offset);
    best = better(best, Best{key, id});
  }
  return best;
}

// ---- weights, as mie/ops/token_weights.py defines them, with t = -z

__device__ __forceinline__ int num_weight_bits(int vocab_size) {
  return 30 + __clz(vocab_size);  // 62 less the length of vocab_size in bits
}

__device__ __forceinline__ float exponent_of(float x, float largest, float scale) {
  return __fmul_rn(__fadd_rn(largest, -x), scale);
}

// A t that makes the weight floor(2^-0.25) = 0. Larger ones do as well.
__device__ __forceinline__ float weightless(int num_bits) { return num_bits + 0.25f; }

// The largest t of a token that has a weight and that min-p does not drop.
__device__ __forceinline__ float last_exponent(const Row& row, int num_bits) {
  return fminf(row.largest_t, weightless(num_bits));
}

// floor(2^(num_bits - t)) for 0 <= t <= weightless(num_bits). The coefficients are weights.py's.
__device__ __forceinline__ Mass weight_of(float t, int num_bits) {
  const float shifted = __fadd_rn(t, 8388608.0f);  // 2^23: the sum is an integer
  const float whole = __fadd_rn(shifted, -8388608.0f);
  const float f = __fadd_rn(whole, -t);
  float power = __fmul_rn(f, 0x1.41fbbap-13f);
  power = __fmul_rn(__fadd_rn(power, 0x1.5f3e54p-10f), f);
  power = __fmul_rn(__fadd_rn(power, 0x1.3b2d4cp-7f), f);
  power = __fmul_rn(__fadd_rn(power, 0x1.c6aee8p-5f), f);
  power = __fmul_rn(__fadd_rn(power, 0x1.ebfbdcp-3f), f);
  power = __fmul_rn(__fadd_rn(power, 0x1.62e430p-1f), f);
  power = __fadd_rn(power, 1.0f);
  const unsigned bits = __float_as_uint(power);
  const unsigned n = __float_as_uint(shifted) & 0xff;  // t rounded, which is below 64
  const unsigned mantissa = (bits & 0x7fffff) | 0x800000;
  return (static_cast<Mass>(mantissa) << 39) >> (189 - num_bits + n - (bits >> 23));
}

// ---- sums

// The sum of masses [size], which every lane of the warp gets.
__device__ __forceinline__ Mass warp_total_of(const Mass* masses, int size) {
  Mass sum = 0;
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < size; i += 32) sum += masses[i];
  return warp_total(sum);
}

// 64-bit sums in shared memory, where a GPU adds 32 bits in one instruction and 64 in a loop. Each
// addition that wraps `low` carries once, so the sums are exact in any order.
struct Bins {
  unsigned low[NUM_BINS], high[NUM_BINS];
  __device__ __forceinline__ void clear() {
    for (int i = threadIdx.x; i < NUM_BINS; i += blockDim.x) low[i] = high[i] = 0;
  }
  __device__ __forceinline__ void add(int bin, Mass mass) {
    const unsigned lower = static_cast<unsigned>(mass);
    unsigned upper = static_cast<unsigned>(mass >> 32);
    if (atomicAdd(&low[bin], lower) > ~lower) ++upper;
    if (upper > 0) atomicAdd(&high[bin], upper);
  }
  __device__ __forceinline__ Mass sum(int bin) const {
    return static_cast<Mass>(high[bin]) << 32 | low[bin];
  }
};

// The sum over the lanes up to the own one.
__device__ __forceinline__ Mass warp_scan(Mass x) {
  const int lane = threadIdx.x % 32;
  for (int offset = 1; offset < 32; offset *= 2) {
    const Mass other = __shfl_up_sync(MIE_FULL_WARP, x, offset);
    if (lane >= offset) x += other;
  }
  return x;
}

// Where the sums of bins, from bin 0 on, reach a mass.
struct Reached {
  int bin;       // NUM_BINS if all bins do not reach it
  Mass missing;  // what the bins before it lack to the mass
  Mass warps[32];
};

// Finds it for `wanted`, at least 1. It begins without a barrier and ends with one.
template <int THREADS, typename SumOf>
__device__ __forceinline__ void find_bin(SumOf sum_of, Mass wanted, Reached& shared) {
  constexpr int OWN = NUM_BINS / THREADS;
  const int warp = threadIdx.x / 32;
  Mass sums[OWN], own = 0;
#pragma unroll
  for (int k = 0; k < OWN; ++k) own += sums[k] = sum_of(OWN * threadIdx.x + k);
  Mass before = warp_scan(own);
  if (threadIdx.x % 32 == 31) shared.warps[warp] = before;
  if (threadIdx.x == 0) shared.bin = NUM_BINS;
  __syncthreads();
  before -= own;
#pragma unroll 1
  for (int other = 0; other < warp; ++other) before += shared.warps[other];
  if (before < wanted && before + own >= wanted) {  // one thread
#pragma unroll
    for (int k = 0; k < OWN; ++k) {
      if (before < wanted && before + sums[k] >= wanted) {
        shared.bin = OWN * threadIdx.x + k;
        shared.missing = wanted - before;
      }
      before += sums[k];
    }
  }
  __syncthreads();
}

// ---- what cuts a row

__device__ __forceinline__ bool has_top_k(const Row& row, int size) {
  return row.top_k > 0 && row.top_k < size;
}
__device__ __forceinline__ bool has_cut(const Row& row, int size) {
  return has_top_k(row, size) || row.top_p < 1;
}

// The mass that the nucleus reaches.
__device__ __forceinline__ Mass nucleus_mass(double top_p, Mass total) {
  const Mass wanted = static_cast<Mass>(ceil(top_p * static_cast<double>(total))), at_least = 1;
  return min(max(wanted, at_least), total);
}
