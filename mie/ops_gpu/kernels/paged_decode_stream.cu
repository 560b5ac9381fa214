// Paged attention of sequences with one query each, on tensor cores, with the work distributed
// evenly for sequences of any lengths. decode_mma.cuh explains how a block attends.
//
// A unit of work is a tile of TILE tokens of one sequence for one KV head. All units of the step
// are numbered, sequence by sequence and head by head. Block i of C does the units i * U / C ... (i
// + 1) * U / C - 1 (stream-K: Osama et al., 2023, arXiv:2301.03598). So a block does a run of tiles
// of one (sequence, head), then perhaps whole others, then a last run. At most its first and its
// last run are parts, whose partial results the last block to end merges. C is the number of blocks
// that the chip holds at once, so no block waits for another to end, or fewer if there is little
// work. It is computed here from the lengths, because a captured launch has a fixed grid.
//
//   tiles     [sequences + 1]            int32  tiles of the sequences before: 0, ..., U / Hkv.
//                                               With a window they are from `count_tiles`
//   partial   [2 C, 8 * HEAD_TILES, Dh]  float  rows 2i: the first part of block i; 2i + 1: another
//   arrived   [sequences, Hkv]           int32  zeros: blocks that have written a part
//   the rest as in paged_decode.cu
//
// The cuts of a sequence depend on its batch, and so do the last bits of its result.
//
// Budget on sm_90, 16 bits and groups of up to 8: a block has 4 warps. The limit is the memory.
//
//   heads  registers  shared KB  blocks a multiprocessor  KB in flight a multiprocessor
//   64     88         64         3                        144
//   96     138        72         3                        144
//   128    149        96         2                        128
//   256    208        128        1                        64
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
template <typename T, int DH, int HEAD_TILES, int WARPS, int STAGES, typename C = T,
          bool CAPPED = false>
__global__ void __launch_bounds__(32 * WARPS, 1)
paged_decode_stream(const T* __restrict__ q, const C* __restrict__ kv,
                    const float* __restrict__ scales, const int* __restrict__ tables,
                    const int* __restrict__ seq_lens, const int* __restrict__ cu_seqlens_q,
                    const int* __restrict__ sequences, const T* __restrict__ sinks,
                    const int* __restrict__ tiles, T* __restrict__ out, float* __restrict__ partial,
                    float* __restrict__ partial_lse, int* __restrict__ arrived, int num_sequences,
                    int num_kv_heads, int group, int table_width, int block_size, int window,
                    float scale, float cap) {
  constexpr int TILE = 16 * WARPS, HEADS = 8 * HEAD_TILES;
  const DecodeStep<T, C> step = {q,            kv,    scales,      tables,     seq_lens,
                                 cu_seqlens_q, sinks, out,         partial,    partial_lse,
                                 num_kv_heads, group, table_width, block_size, scale, cap};
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
    attend_tokens<T, C, DH, HEAD_TILES, WARPS, STAGES, CAPPED>(
        step, sequence, kv_head, max(oldest, (first_tile + tile) * TILE),
        min(length, (first_tile + last_tile) * TILE),
        tile == 0 && last_tile == num_tiles, (size_t)slot * HEADS, 1);
    if (tile > 0 || last_tile < num_tiles) {
      // The blocks of this sequence and head: the largest i with first_unit(i) <= its units.
      const int head_begin = unit - tile, head_end = head_begin + num_tiles;
      const int first = (int)((((long long)head_begin + 1) * num_blocks - 1) / num_units);
      const int last = (int)(((long long)head_end * num_blocks - 1) / num_units);
      // In the first of them, the run is the block's first only if it begins with the block.
      const int first_slot =
          2 * first + (first_unit(first, num_units, num_blocks) == head_begin ? 0 : 1);
      if (is_last_to_arrive(arrived + low * num_kv_heads + kv_head, last - first + 1)) {
        const size_t row = (size_t)cu_seqlens_q[sequence] * num_kv_heads + kv_head;
        merge_parts<T, DH>(partial, partial_lse, group, last - first + 1,
                           [&](int g) { return out + (row * group + g) * DH; },
                           [&](int g) { return sink_of(sinks, kv_head * group + g); },
                           [&](int g, int i) {
                             return (i == 0 ? first_slot : 2 * (first + i)) * HEADS + g;
                           });
      }
    }
    unit += last_tile - tile;
    __syncthreads();  // shared memory is free for the next run
  }
}
