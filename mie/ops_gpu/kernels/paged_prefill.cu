// Paged attention of sequences with several queries each (prompts or chunks of them), on CUDA
// cores.
//
//   q, out     [T, Hq, Dh]          T      from row cu_seqlens_q[s] on sequence s
//   kv         [N, 2, Hkv, B, Dh]   C      one layer of the cache: T, int8, e4m3 or int4x8
//   scales     [N, 2, Hkv, B]       float  of a quantised cache; else null (`PagedKV`)
//   tables     [S, M]               int32  never read past a sequence's length
//   sinks      [Hq]                T      the score of one more key without value; or null
//   seq_lens   [S], cu_seqlens_q [S + 1], sequences [grid.y]   int32
//
// grid (ceil(most queries * G / ROWS), sequences, Hkv), block (32 * WARPS). The schedule is that of
// FlashAttention-2 (Dao, 2023, arXiv:2307.08691): a block holds ROWS queries and iterates over the
// keys in tiles of 32, which all its queries share. A row is one (token, query head of the KV
// head's group), so a tile of keys serves the whole group. The query at position p sees the keys up
// to p, and with a window back to p - window + 1. Prefix hits and chunks need nothing else.
//
// A warp owns ROWS / WARPS rows. For the scores a lane is a key, and for the values it is an
// element of the head. The weights pass between them through shared memory. Tiles begin at
// multiples of 32, so a row's result does not depend on how its prompt was cut.
#include "mie_cuda.cuh"
#include "attention.cuh"

// What shared memory holds of a cache: its own elements, or the numbers that they represent.
template <typename T, typename C>
struct Shared {
  using Number = float;
};
template <typename T>
struct Shared<T, T> {
  using Number = T;
};

template <typename T, int DH, typename C = T, bool CAPPED = false>
__global__ void __launch_bounds__(128, 4)
paged_prefill(const T* __restrict__ q, const C* __restrict__ kv, const float* __restrict__ scales,
              const int* __restrict__ tables, const int* __restrict__ seq_lens,
              const int* __restrict__ cu_seqlens_q, const int* __restrict__ sequences,
              const T* __restrict__ sinks, T* __restrict__ out, int group, int table_width,
              int block_size, int window, float scale, float cap) {
  using Number = typename Shared<T, C>::Number;
  constexpr int WARPS = 4, ROWS = 16, OWN = ROWS / WARPS, TILE = 32;
  constexpr int COLUMNS = (DH + 31) / 32;           // elements of a head that a lane accumulates
  constexpr int STRIDE = DH + 4 / (int)sizeof(Number);  // padded by one bank, to avoid conflicts
  const int sequence = sequences[blockIdx.y], kv_head = blockIdx.z, num_heads = gridDim.z * group;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const PagedKV<T, C, DH> cache = {kv, scales, (int)gridDim.z, block_size};

  const int first_token = cu_seqlens_q[sequence];
  const int num_queries = cu_seqlens_q[sequence + 1] - first_token;
  const int num_rows = num_queries * group, first_row = blockIdx.x * ROWS;
  if (first_row >= num_rows) return;  // the grid is sized for the longest sequence
  const int offset = seq_lens[sequence] - num_queries;  // position of the sequence's first query
  const int last_row = min(first_row + ROWS, num_rows) - 1;
  const int end = offset + last_row / group + 1;  // one past the last key that any row sees
  const int oldest = window > 0 ? max(0, offset + first_row / group + 1 - window) : 0;

  float* queries = reinterpret_cast<float*>(mie_smem);         // [ROWS][DH]
  float* weights = queries + ROWS * DH;                        // [WARPS][TILE]
  Number* keys = reinterpret_cast<Number*>(weights + WARPS * TILE);  // [TILE][STRIDE]
  Number* values = keys + TILE * STRIDE;                             // [TILE][STRIDE]

  // Row r is token r / group, query head kv_head * group + r % group.
  auto element = [&](int row) {
    return ((size_t)(first_token + row / group) * num_heads + kv_head * group + row % group) * DH;
  };
  for (int i = threadIdx.x; i < ROWS * DH; i += 32 * WARPS) {
    const int row = first_row + i / DH;
    queries[i] = row < num_rows ? to_float(q[element(row) + i % DH]) * scale : 0.0f;
  }

  if constexpr (IS_ROTATED<C> && DH >= CHANNELS) rotate_rows<DH>(queries, ROWS);

  float top[OWN], sum[OWN], acc[OWN][COLUMNS];
#pragma unroll
  for (int r = 0; r < OWN; ++r) {
    top[r] = -MIE_INF, sum[r] = 0.0f;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) acc[r][c] = 0.0f;
  }

  for (int tile = oldest / TILE * TILE; tile < end; tile += TILE) {
    __syncthreads();  // the warps are done with the last tile (and the queries are written)
    for (int i = threadIdx.x; i < TILE * (DH / 8); i += 32 * WARPS) {
      const int key = i / (DH / 8), chunk = i % (DH / 8) * 8, position = tile + key;
      float k[8] = {}, v[8] = {};  // zeros where no row looks: unwritten slots may hold NaN
      if (position >= oldest && position < end) {
        const int block_id = tables[(size_t)sequence * table_width + position / block_size];
        cache.read8(k, cache.row(block_id, position % block_size, kv_head, 0), chunk);
        cache.read8(v, cache.row(block_id, position % block_size, kv_head, 1), chunk);
      }
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        keys[key * STRIDE + chunk + e] = from_float<Number>(k[e]);
        values[key * STRIDE + chunk + e] = from_float<Number>(v[e]);
      }
    }
    __syncthreads();

#pragma unroll
    for (int r = 0; r < OWN; ++r) {
      const int row = warp * OWN + r, position = offset + (first_row + row) / group;
      const int key = tile + lane;
      const bool visible = key <= position && key < end && (window <= 0 || key > position - window);
      float score = 0.0f;
      for (int d = 0; d < DH; ++d)
        score += queries[row * DH + d] * to_float(keys[lane * STRIDE + d]);
      score = visible ? bounded<CAPPED>(score, cap) : -MIE_INF;
      const float new_top = fmaxf(top[r], warp_max(score));
      // The row sees no key of the tile, or all its scores are -infinity. Scores of NaN go on.
      if (new_top == -MIE_INF && !__any_sync(MIE_FULL_WARP, score != score)) continue;
      const float weight = exp2f(score - new_top), keep = exp2f(top[r] - new_top);
      top[r] = new_top;
      sum[r] = sum[r] * keep + warp_sum(weight);
      weights[warp * TILE + lane] = weight;
      __syncwarp();
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        const int d = c * 32 + lane;
        if (d >= DH) continue;
        float weighted = 0.0f;
        for (int k = 0; k < TILE; ++k)
          weighted += weights[warp * TILE + k] * to_float(values[k * STRIDE + d]);
        acc[r][c] = acc[r][c] * keep + weighted;
      }
      __syncwarp();  // the next row overwrites the weights
    }
  }

#pragma unroll
  for (int r = 0; r < OWN; ++r) {
    const int row = first_row + warp * OWN + r;
    if (row >= num_rows) continue;
    const float sink = sink_of(sinks, kv_head * group + row % group);
    const float total = sum[r] + exp2f(sink - top[r]);
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      const int d = c * 32 + lane;
      if constexpr (IS_ROTATED<C>)
        if ((c + 1) * CHANNELS <= DH) acc[r][c] = rotated(acc[r][c] * ROTATION_OUT);
      if (d < DH) out[element(row) + d] = from_float<T>(acc[r][c] / total);
    }
  }
}
