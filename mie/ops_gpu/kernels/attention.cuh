// Shared code of the attention kernels: finding a token in the cache, reading eight elements, the
// online softmax, and merging warps. Included after mie_cuda.cuh.
#pragma once
#include "arrivals.cuh"
#include "quantized.cuh"

// Eight consecutive elements as floats. `from` is aligned to their size, at most 16 bytes.
__device__ __forceinline__ void load8(float (&to)[8], const float* from) {
  const float4 low = *reinterpret_cast<const float4*>(from);
  const float4 high = *reinterpret_cast<const float4*>(from + 4);
  to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
  to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
}

template <typename T>
__device__ __forceinline__ void load8(float (&to)[8], const T* from) {
  const uint4 raw = *reinterpret_cast<const uint4*>(from);
  const T* elements = reinterpret_cast<const T*>(&raw);
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i] = to_float(elements[i]);
}

__device__ __forceinline__ void load8(float (&to)[8], const int8* from) {
  const uint2 raw = *reinterpret_cast<const uint2*>(from);
  const int8* elements = reinterpret_cast<const int8*>(&raw);
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i] = to_float(elements[i]);
}
__device__ __forceinline__ void load8(float (&to)[8], const e4m3* from) {
  const uint2 raw = *reinterpret_cast<const uint2*>(from);
  const e4m3* elements = reinterpret_cast<const e4m3*>(&raw);
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i] = to_float(elements[i]);
}

// One layer of the paged cache, [N, 2, Hkv, B, Dh]. K and V of a block are neighbours, and the B
// rows of one (block, KV head) are contiguous, so a block id leads to whole DRAM bursts. A
// quantised cache has a scale for each row, [N, 2, Hkv, B]; otherwise `scales` is null. One of four
// bits is [N, 2, Hkv, B, Dh / 8], and has a scale and an offset for each group of channels.
template <typename T, typename C, int DH>
struct PagedKV {
  const C* base;
  const float* scales;
  int num_kv_heads, block_size;

  // The row of a token's keys (plane 0) or values (plane 1), for one KV head.
  __device__ __forceinline__ size_t row(int block_id, int offset, int head, int plane) const {
    const size_t tile = ((size_t)block_id * 2 + plane) * num_kv_heads + head;
    return tile * block_size + offset;
  }

  // Eight numbers of a row, starting at element `first`. They stay rotated in four bits.
  __device__ __forceinline__ void read8(float (&to)[8], size_t row, int first) const {
    if constexpr (IS_ROTATED<C>) {
      constexpr int GROUPS = (DH + CHANNELS - 1) / CHANNELS;
      const int4x8 codes = base[row * (DH / 8) + first / 8];
      const unsigned factors = __float_as_uint(scales[row * GROUPS + first / CHANNELS]);
#pragma unroll
      for (int i = 0; i < 8; ++i)
        to[i] = (codes >> 4 * i & 15u) * scale_of_group(factors) + offset_of_group(factors);
      return;
    } else {
      load8(to, base + row * DH + first);
    }
    if constexpr (IS_QUANTIZED<T, C>) {
      const float scale = scales[row];
#pragma unroll
      for (int i = 0; i < 8; ++i) to[i] *= scale;
    }
  }
};

// Attention over a rotated cache rotates the queries instead of the keys, and the weighted sums
// instead of the values. A short group at the end of a head is not rotated.

// Rotates the whole groups of rows in shared memory. Every thread of the block calls.
template <int DH>
__device__ __forceinline__ void rotate_rows(float* rows, int count) {
  constexpr int GROUPS = DH / CHANNELS;
  __syncthreads();
  for (int i = threadIdx.x / 32; i < count * GROUPS; i += blockDim.x / 32) {
    float& x = rows[i / GROUPS * DH + i % GROUPS * CHANNELS + threadIdx.x % 32];
    x = rotated(x * ROTATION_OUT);
  }
  __syncthreads();
}

// Rotates a head of which each lane has chunk `chunk` of eight elements. All lanes call.
template <int DH>
__device__ __forceinline__ void rotate_chunks(float (&x)[8], int chunk) {
  float y[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) y[i] = x[i] * ROTATION_OUT;
#pragma unroll
  for (int distance = 1; distance < 8; distance *= 2)
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i & distance) continue;
      const float first = y[i], second = y[i + distance];
      y[i] = first + second, y[i + distance] = first - second;
    }
#pragma unroll
  for (int lanes = 1; lanes < 4; lanes *= 2)
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float other = __shfl_xor_sync(MIE_FULL_WARP, y[i], lanes);
      y[i] = chunk & lanes ? other - y[i] : y[i] + other;
    }
  if ((chunk / 4 + 1) * CHANNELS > DH) return;
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = y[i];
}

// A score in base 2. CAPPED: Gemma 2's soft cap, cap * tanh(score / cap), where the caller has
// divided the scale by the cap instead of folding in log2(e), and `cap` is the cap times log2(e).
template <bool CAPPED>
__device__ __forceinline__ float bounded(float score, float cap) {
  if constexpr (CAPPED)
    return cap * tanhf(score);
  else
    return score;
}

// The softmax-weighted sum of the values seen so far, in a form that allows adding more (Milakov
// and Gimelshein, 2018, arXiv:1805.02867). Scores are in base 2: the caller folds log2(e) into the
// scale, because exp2f is a hardware instruction. `max` starts at -infinity, `sum` and `acc` at 0.
template <int N>
struct OnlineSoftmax {
  float max, sum, acc[N];

  __device__ __forceinline__ void clear() {
    max = -MIE_INF, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) acc[i] = 0.0f;
  }

  // Adds one value with a finite score.
  __device__ __forceinline__ void add(float score, const float (&value)[N]) {
    const float top = fmaxf(max, score);
    const float keep = exp2f(max - top), weight = exp2f(score - top);  // keep is 0 at first
    max = top;
    sum = sum * keep + weight;
#pragma unroll
    for (int i = 0; i < N; ++i) acc[i] = acc[i] * keep + weight * value[i];
  }

  // Adds what the lane `offset` away has seen. Both lanes end with the same result. All lanes call.
  __device__ __forceinline__ void merge_with_lane(int offset) {
    const float other_max = __shfl_xor_sync(MIE_FULL_WARP, max, offset);
    const float other_sum = __shfl_xor_sync(MIE_FULL_WARP, sum, offset);
    const float top = fmaxf(max, other_max);
    const float reference = top == -MIE_INF ? 0.0f : top;  // -inf - -inf is NaN: no key seen
    const float mine = exp2f(max - reference), theirs = exp2f(other_max - reference);
    max = top;
    sum = sum * mine + other_sum * theirs;
#pragma unroll
    for (int i = 0; i < N; ++i)
      acc[i] = acc[i] * mine + __shfl_xor_sync(MIE_FULL_WARP, acc[i], offset) * theirs;
  }
};

// The score of a head's sink: one more key, whose value is zero. It is -inf without sinks.
template <typename T>
__device__ __forceinline__ float sink_of(const T* sinks, int head) {
  constexpr float LOG2_E = 1.44269504f;
  return sinks == nullptr ? -MIE_INF : to_float(sinks[head]) * LOG2_E;
}

// The end of a decode. Each of a block's warps has attended to some of the tokens, for `group`
// query heads. Their results are in shared memory and are merged here. If these were all tokens of
// the query, the output is written. Otherwise a normalised partial result is written with log2 of
// its sum of weights (-inf: it saw no key). A warp has seen no token if its sum is 0. Its maximum
// does not tell, because one of NaN scores stays -inf. Their sum is NaN, and so is the result.
//
//   results  of each warp, `distance` floats apart: weighted sums [rows, DH], maxima [rows],
//            sums of weights [rows]
//   out      the first head's output; head g's partial result is row first_partial + g * stride
//   sinks    [Hq] or null, of which first_head is that of row 0
template <typename T, int DH, int WARPS>
__device__ __forceinline__ void merge_warps(const float* results, int distance, int rows, int group,
                                            bool is_whole, const T* sinks, int first_head, T* out,
                                            float* partial, float* partial_lse,
                                            size_t first_partial, int stride) {
  for (int i = threadIdx.x; i < group * DH; i += 32 * WARPS) {
    const int g = i / DH, d = i % DH;
    const float *maxima = results + rows * DH + g, *sums = maxima + rows;
    float top = -MIE_INF;
    for (int w = 0; w < WARPS; ++w) top = fmaxf(top, maxima[w * distance]);
    float sum = 0.0f, weighted = 0.0f;
    for (int w = 0; w < WARPS; ++w) {
      if (sums[w * distance] == 0.0f) continue;
      const float weight = exp2f(maxima[w * distance] - top);
      sum += sums[w * distance] * weight;
      weighted += results[w * distance + g * DH + d] * weight;
    }
    if (is_whole) {
      if (sum != 0.0f) sum += exp2f(sink_of(sinks, first_head + g) - top);
      out[i] = from_float<T>(sum != 0.0f ? weighted / sum : 0.0f);
    } else {
      const size_t row = first_partial + (size_t)g * stride;
      partial[row * DH + d] = sum != 0.0f ? weighted / sum : 0.0f;
      if (d == 0) partial_lse[row] = sum != 0.0f ? top + log2f(sum) : -MIE_INF;
    }
  }
}

// Merges the parts of `rows` heads: sum of partial * 2^lse / (sum of 2^lse + 2^sink). The order is
// that of the parts, whichever block calls. out(r) is the place of row r's result, sink(r) the
// score of its sink, and place(r, i) the row of its part i in partial and partial_lse. A part
// without a key is zero with an lse of -inf, and every row has a part with one. Every thread of the
// block calls.
//
// A thread merges four elements of a row, alone. The parts come from the L2 cache, whose answer
// takes longer than all arithmetic here. So a thread requests 16 parts before it uses the first.
template <typename T, int DH, typename Out, typename Sink, typename Place>
__device__ __forceinline__ void merge_parts(const float* partial, const float* partial_lse,
                                            int rows, int count, Out out, Sink sink,
                                            Place place) {
  constexpr int AT_ONCE = 16;
  for (int i = threadIdx.x; i < rows * DH / 4; i += blockDim.x) {
    const int r = i / (DH / 4), d = i % (DH / 4) * 4;
    float top = -MIE_INF, sum = 0.0f, weighted[4] = {};
    for (int first = 0; first < count; first += AT_ONCE) {
      float lse[AT_ONCE];
      float4 x[AT_ONCE];
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        lse[j] = -MIE_INF, x[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (first + j >= count) continue;
        const size_t row = place(r, first + j);
        lse[j] = __ldcg(partial_lse + row);
        x[j] = __ldcg(reinterpret_cast<const float4*>(partial + row * DH + d));
      }
      const float before = top;
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) top = fmaxf(top, lse[j]);
      const float reference = top == -MIE_INF ? 0.0f : top;  // -inf - -inf is NaN: no key so far
      const float keep = exp2f(before - reference);
      sum *= keep;
#pragma unroll
      for (int e = 0; e < 4; ++e) weighted[e] *= keep;
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        const float weight = exp2f(lse[j] - reference);
        sum += weight;
        weighted[0] += weight * x[j].x, weighted[1] += weight * x[j].y;
        weighted[2] += weight * x[j].z, weighted[3] += weight * x[j].w;
      }
    }
    const float total = sum + exp2f(sink(r) - top);
#pragma unroll
    for (int e = 0; e < 4; ++e) out(r)[d + e] = from_float<T>(weighted[e] / total);
  }
}
