// Paged attention of sequences with one query each, on CUDA cores. It is the readable reference,
// and the kernel for shapes that the tensor-core kernel does not support.
//
//   q, out       [T, Hq, Dh]           T      row cu_seqlens_q[s] is the query of sequence s
//   kv           [N, 2, Hkv, B, Dh]    C      one layer of the cache: T, int8, e4m3 or int4x8
//   scales       [N, 2, Hkv, B]        float  of a quantised cache; else null (`PagedKV`)
//   tables       [S, M]                int32  never read past a sequence's length
//   seq_lens     [S], cu_seqlens_q [S + 1], sequences [grid.y]   int32
//   sinks        [Hq]                  T      the score of one more key without value; or null
//   partial      [grid.y, Hq, splits, Dh]  float   a split's own result, normalised
//   partial_lse  [grid.y, Hq, splits]      float   log2 of its sum of weights
//   arrived      [grid.y, Hkv]             int32   zeros: blocks that have written a partial result
//
// grid (Hkv, sequences, splits), block (32 * WARPS). A block serves all query heads of a KV head,
// so each key and value is read once. Block z attends to split z (`split_of_decode`), and returns
// at once if its sequence has fewer. A sequence with a single split is written directly. The splits
// of the others are merged by the block that ends last. The three pointers are null without splits.
// A warp has one token's keys and values a lane group in flight, so the limit is the latency of
// memory, or for large groups the products. CAPPED: scores have a soft cap (`bounded`). All attention kernels have this switch.
#include "mie_cuda.cuh"
#include "attention.cuh"
#include "splits.cuh"

constexpr int power_of_two_at_least(int n) {
  int power = 1;
  while (power < n) power *= 2;
  return power;
}

template <typename T, int DH, int GROUP, int WARPS, typename C = T, bool CAPPED = false>
__global__ void __launch_bounds__(32 * WARPS, 2)
paged_decode(const T* __restrict__ q, const C* __restrict__ kv, const float* __restrict__ scales,
             const int* __restrict__ tables, const int* __restrict__ seq_lens,
             const int* __restrict__ cu_seqlens_q, const int* __restrict__ sequences,
             const T* __restrict__ sinks, T* __restrict__ out, float* __restrict__ partial,
             float* __restrict__ partial_lse, int* __restrict__ arrived, int table_width,
             int block_size, int split_tokens, int max_splits, int window, float scale, float cap) {
  static_assert(DH % 8 == 0 && DH <= 256, "a lane holds 8 elements of a head");
  constexpr int CHUNKS = DH / 8;                        // lanes that hold one token's head
  constexpr int LANES = power_of_two_at_least(CHUNKS);  // rounded up, so that shuffles can sum
  constexpr int TOKENS = 32 / LANES;                    // tokens that a warp scores at once
  const int kv_head = blockIdx.x, num_splits = gridDim.z;
  const int sequence = sequences[blockIdx.y], num_heads = gridDim.x * GROUP;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int chunk = lane % LANES, first_head = kv_head * GROUP;
  const PagedKV<T, C, DH> cache = {kv, scales, (int)gridDim.x, block_size};

  const Split split =
      split_of_decode(seq_lens[sequence], window, split_tokens, max_splits, blockIdx.z);
  if ((int)blockIdx.z >= max(1, split.count)) return;  // the grid is sized for the longest sequence

  // Queries are in shared memory. In registers they would displace the accumulators of a large
  // group.
  float* queries = reinterpret_cast<float*>(mie_smem);  // [GROUP][DH]
  const size_t query_row = (size_t)cu_seqlens_q[sequence] * num_heads + first_head;
  for (int i = threadIdx.x; i < GROUP * DH; i += 32 * WARPS)
    queries[i] = to_float(q[query_row * DH + i]) * scale;
  __syncthreads();
  if constexpr (IS_ROTATED<C> && DH >= CHANNELS) rotate_rows<DH>(queries, GROUP);

  OnlineSoftmax<8> state[GROUP];
#pragma unroll
  for (int g = 0; g < GROUP; ++g) state[g].clear();

  // All lanes make the same number of steps, because the sum of a score needs the whole warp.
  for (int step = split.begin + warp * TOKENS; step < split.end; step += WARPS * TOKENS) {
    const int token = step + lane / LANES;
    float key[8] = {}, value[8] = {};
    if (token < split.end && chunk < CHUNKS) {
      const int block_id = tables[(size_t)sequence * table_width + token / block_size];
      cache.read8(key, cache.row(block_id, token % block_size, kv_head, 0), chunk * 8);
      cache.read8(value, cache.row(block_id, token % block_size, kv_head, 1), chunk * 8);
    }
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      float score = 0.0f;
      if (chunk < CHUNKS) {
        float query[8];
        load8(query, queries + g * DH + chunk * 8);
#pragma unroll
        for (int i = 0; i < 8; ++i) score += query[i] * key[i];
      }
      score = bounded<CAPPED>(warp_sum<LANES>(score), cap);
      if (token < split.end) state[g].add(score, value);
    }
  }

  // Merges the tokens of a warp by shuffles, then the warps through shared memory.
  constexpr int DISTANCE = GROUP * (DH + 2);  // floats from a warp's results to the next one's
  float* results = queries + GROUP * DH;
#pragma unroll
  for (int g = 0; g < GROUP; ++g) {
#pragma unroll
    for (int offset = LANES; offset < 32; offset *= 2) state[g].merge_with_lane(offset);
    if constexpr (IS_ROTATED<C> && DH >= CHANNELS) rotate_chunks<DH>(state[g].acc, chunk);
    float* own = results + warp * DISTANCE;
    if (lane < CHUNKS) {
#pragma unroll
      for (int i = 0; i < 8; ++i) own[g * DH + lane * 8 + i] = state[g].acc[i];
    }
    if (lane == 0) own[GROUP * DH + g] = state[g].max, own[GROUP * (DH + 1) + g] = state[g].sum;
  }
  __syncthreads();

  const size_t first_partial =
      ((size_t)blockIdx.y * num_heads + first_head) * num_splits + blockIdx.z;
  merge_warps<T, DH, WARPS>(results, DISTANCE, GROUP, GROUP, split.count <= 1, sinks, first_head,
                            out + query_row * DH, partial, partial_lse, first_partial, num_splits);
  finish_splits<T, DH>(partial, partial_lse, arrived, sinks, out + query_row * DH, GROUP,
                       split.count);
}
