// Paged attention of sequences with one query each, on tensor cores, with the work distributed
// evenly for sequences of any lengths. decode_mma.cuh explains how a block attends.
//
// A unit of work is a tile of TILE tokens of one sequence for one KV head. All units of the step
// are numbered, sequence by sequence and head by head. Block i of C does the units i * U / C ... (i
// + 1) * U / C - 1 (stream-K: Osama et al., 2023, arXiv:2301.03598). So a block does a run of tiles
// of one (sequence, head), then perhaps whole others, then a last run. At most its first and its
// last run are parts, which leave partial results for `combine_stream`. C is the number of blocks
// that the chip holds at once, so no block waits for another to end, or fewer if there is little
// work. It is computed here from the lengths, because a captured launch has a fixed grid.
//
//   tiles     [sequences + 1]            int32  tiles of the sequences before: 0, ..., U / Hkv.
//                                               With a window they are from `count_tiles`
//   partial   [2 C, 8 * HEAD_TILES, Dh]  float  rows 2i: the first part of block i; 2i + 1: another
//   the rest as in paged_decode.cu
//
// The cuts of a sequence depend on its batch, and so do the last bits of its result.
#include "mie_cuda.cuh"
#include "attention.cuh"
#include "decode_mma.cuh"

constexpr int MIN_UNITS = 2;  // of a block: merging a part costs about as much

// C: the number of launched blocks that work, each with a unit at least.
__device__ __forceinline__ int working_blocks(int num_units, int num_launched) {
  return max(1, min(num_launched, num_units / MIN_UNITS));
}

// The first unit of block i. It has 64 bits, because a long step has millions of units.
__device__ __forceinline__ int first_unit(int i, int num_units, int num_blocks) {
  return (int)((long long)i * num_units / num_blocks);
}

// Prefix sums of the tiles of tile_tokens tokens that the window lets the queries see.
//
// grid (1), block (32)
__global__ void count_tiles(const int* __restrict__ seq_lens, const int* __restrict__ sequences,
                            int* __restrict__ tiles, int num_sequences, int tile_tokens,
                            int window) {
  const int lane = threadIdx.x;
  int before = 0;
  if (lane == 0) tiles[0] = 0;
  for (int first = 0; first < num_sequences; first += 32) {
    const int row = first + lane;
    int sum = 0;
    if (row < num_sequences) {
      const int length = seq_lens[sequences[row]];
      sum = (length + tile_tokens - 1) / tile_tokens - max(0, length - window) / tile_tokens;
    }
    for (int offset = 1; offset < 32; offset *= 2) {
      const int other = __shfl_up_sync(MIE_FULL_WARP, sum, offset);
      if (lane >= offset) sum += other;
    }
    if (row < num_sequences) tiles[row + 1] = before + sum;
    before += __shfl_sync(MIE_FULL_WARP, sum, 31);
  }
}

// grid (at least 1), block (32 * WARPS)
template <typename T, int DH, int HEAD_TILES, int WARPS, int STAGES, typename C = T>
__global__ void __launch_bounds__(32 * WARPS, 1)
paged_decode_stream(const T* __restrict__ q, const C* __restrict__ kv,
                    const float* __restrict__ scales, const int* __restrict__ tables,
                    const int* __restrict__ seq_lens, const int* __restrict__ cu_seqlens_q,
                    const int* __restrict__ sequences, const int* __restrict__ tiles,
                    T* __restrict__ out, float* __restrict__ partial,
                    float* __restrict__ partial_lse, int num_sequences, int num_kv_heads,
                    int group, int table_width, int block_size, int window, float scale) {
  constexpr int TILE = 16 * WARPS, HEADS = 8 * HEAD_TILES;
  const DecodeStep<T, C> step = {q,            kv,    scales,      tables,     seq_lens,
                                 cu_seqlens_q, out,   partial,     partial_lse,
                                 num_kv_heads, group, table_width, block_size, scale};
  const int num_units = tiles[num_sequences] * num_kv_heads;
  const int num_blocks = working_blocks(num_units, gridDim.x);
  if ((int)blockIdx.x >= num_blocks) return;
  const int begin = first_unit(blockIdx.x, num_units, num_blocks);
  const int end = first_unit(blockIdx.x + 1, num_units, num_blocks);
  for (int unit = begin; unit < end;) {
    int low = 0, high = num_sequences;  // the sequence: the last that begins at or before the unit
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (tiles[middle] * num_kv_heads <= unit) low = middle; else high = middle;
    }
    const int num_tiles = tiles[low + 1] - tiles[low];
    const int offset = unit - tiles[low] * num_kv_heads;
    const int kv_head = offset / num_tiles, tile = offset % num_tiles;
    const int last_tile = min(num_tiles, tile + end - unit);  // one past this block's last
    const int sequence = sequences[low], length = seq_lens[sequence];
    const int oldest = window > 0 ? max(0, length - window) : 0, first_tile = oldest / TILE;
    const int slot = 2 * blockIdx.x + (unit == begin ? 0 : 1);
    attend_tokens<T, C, DH, HEAD_TILES, WARPS, STAGES>(
        step, sequence, kv_head, max(oldest, (first_tile + tile) * TILE),
        min(length, (first_tile + last_tile) * TILE),
        tile == 0 && last_tile == num_tiles, (size_t)slot * HEADS, 1);
    unit += last_tile - tile;
    __syncthreads();  // shared memory is free for the next run
  }
}

// Merges the parts of each (sequence, KV head) that is split over several blocks.
//
// grid (Hkv, sequences), block (any). The numbers alone determine which blocks those are. A
// sequence of length 0, which pads a batch, has no parts, and its output is unchanged.
template <typename T, int DH, int HEAD_TILES>
__global__ void combine_stream(const int* __restrict__ cu_seqlens_q,
                               const int* __restrict__ sequences, const int* __restrict__ tiles,
                               const float* __restrict__ partial,
                               const float* __restrict__ partial_lse, T* __restrict__ out,
                               int num_sequences, int group, int num_launched) {
  constexpr int HEADS = 8 * HEAD_TILES;
  const int kv_head = blockIdx.x, num_kv_heads = gridDim.x, row = blockIdx.y;
  const int num_units = tiles[num_sequences] * num_kv_heads;
  const int num_blocks = working_blocks(num_units, num_launched);
  const int num_tiles = tiles[row + 1] - tiles[row];
  const int begin = tiles[row] * num_kv_heads + kv_head * num_tiles, end = begin + num_tiles;
  // The block that does unit u: the largest i with first_unit(i) <= u.
  const int first = (int)((((long long)begin + 1) * num_blocks - 1) / num_units);
  const int last = (int)(((long long)end * num_blocks - 1) / num_units);
  if (first >= last) return;  // one block did it all, or there was no work
  // In the first of them, the run is the block's first only if it begins with the block.
  const int first_slot = 2 * first + (first_unit(first, num_units, num_blocks) == begin ? 0 : 1);

  const size_t query_row = (size_t)cu_seqlens_q[sequences[row]] * num_kv_heads * group;
  for (int i = threadIdx.x; i < group * DH; i += blockDim.x) {
    const int g = i / DH, d = i % DH;
    float top = -MIE_INF;
    for (int block = first; block <= last; ++block) {
      const int slot = block == first ? first_slot : 2 * block;
      top = fmaxf(top, partial_lse[slot * HEADS + g]);
    }
    float sum = 0.0f, weighted = 0.0f;
    for (int block = first; block <= last; ++block) {
      const size_t from = (size_t)(block == first ? first_slot : 2 * block) * HEADS + g;
      const float weight = exp2f(partial_lse[from] - top);
      sum += weight;
      weighted += weight * partial[from * DH + d];
    }
    out[(query_row + (size_t)kv_head * group) * DH + i] = from_float<T>(weighted / sum);
  }
}
