// Paged attention of sequences with one query each, on tensor cores. decode_mma.cuh explains how a
// block attends. This file deals the work to as many blocks as the chip holds at once, for sequences
// of any lengths.
//
// A unit of work is a tile of TILE tokens of one sequence for one KV head. All units of the step
// are numbered, sequence by sequence and head by head. Block i of C has the stretch of units
// i * U / C ... (i + 1) * U / C - 1, and does it in runs of one (sequence, head) each. C is the
// number of blocks that the chip holds, so no block waits for another to end, or fewer if there is
// little work. It is computed here from the lengths, because a captured launch has a fixed grid. A
// run that is not all that a query sees is a part, and the last block to end merges the parts.
//
//   max_pieces 0   A block does all units of its stretch (stream-K: Osama et al., 2023,
//                  arXiv:2301.03598). At most its first and its last run are parts. The cuts of a
//                  sequence depend on its batch, and so do the last bits of its result.
//   else           A sequence has up to max_pieces pieces of PIECE_TILES tiles, or longer ones, from
//                  the beginning of its window. A block does the pieces that begin in its stretch.
//                  Pieces depend on the sequence alone, and so do the bits of its result.
//
//   tiles     [sequences + 1]            int32  tiles of the sequences before: 0, ..., U / Hkv.
//                                               With a window they are from `count_tiles`
//   partial   [2 C, 8 * HEAD_TILES, Dh]  float  rows 2i: the first part of block i; 2i + 1: another
//             [sequences, Hq, max_pieces, Dh]   with pieces
//   arrived   [sequences, Hkv]           int32  zeros: blocks that have written a part
//   the rest as in paged_decode.cu
//
// Budget on sm_90, 16 bits and groups of up to 8: a block has 4 warps. The limit is the memory. With
// few sequences it is the latency of a run: indices, table, keys, the merge.
//
//   heads  registers  shared KB  blocks a multiprocessor  KB in flight a multiprocessor
//   64     164        64         3                        144
//   96     168        72         3                        144
//   128    177        96         2                        128
//   256    230        128        1                        64
#include "mie_cuda.cuh"
#include "attention.cuh"
#include "decode_mma.cuh"

constexpr int MIN_UNITS = 2;    // of a block: merging a part costs about as much
constexpr int PIECE_TILES = 4;  // of a piece, at least

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

// The sequences of a step in the order of their units. A warp holds 32 of them, one a lane, so that
// a run is found without waiting for memory. All lanes call.
struct Line {
  const int *tiles, *sequences, *seq_lens, *cu_seqlens_q;
  int num_sequences, num_kv_heads, lane;
  int first;                                // the number of lane 0's sequence
  int before, count, sequence, length, query;  // tiles before the lane's sequence, and its own

  __device__ __forceinline__ void hold(int number) {
    first = number;
    const int own = min(first + lane, num_sequences - 1);
    before = tiles[own], count = tiles[own + 1] - before, sequence = sequences[own];
    length = seq_lens[sequence], query = cu_seqlens_q[sequence];
  }

  // Holds the sequence of the unit and its successors. Of more than 32 sequences, every 32nd part of
  // the line is looked at first.
  __device__ __forceinline__ void begin(int unit, int stride, int sample) {
    const unsigned vote = __ballot_sync(MIE_FULL_WARP, sample * num_kv_heads <= unit);
    hold(stride == 1 ? 0 : min(num_sequences - 1, (__popc(vote) - 1) * stride));
  }

  // The lane with the unit's sequence: the last that begins at or before the unit.
  __device__ __forceinline__ int find(int unit) {
    while (true) {
      const bool begins = first + lane < num_sequences && before * num_kv_heads <= unit;
      const int found = __popc(__ballot_sync(MIE_FULL_WARP, begins)) - 1;
      if (found < 31 || first + 32 >= num_sequences) return found;
      hold(first + 31);
    }
  }
};

// A run, the tiles of it, and the number of its sequence.
struct DealtRun : Run {
  int number, tile, last_tile, num_tiles;  // tile ... last_tile - 1 of those that the query sees
  int unit, next_unit;
};

// grid (at least 1), block (32 * WARPS)
template <typename T, int DH, int HEAD_TILES, int WARPS, int STAGES, typename C = T,
          bool CAPPED = false>
__global__ void
__launch_bounds__(32 * WARPS, Decoder<T, C, DH, HEAD_TILES, WARPS, STAGES, CAPPED>::RESIDENT)
paged_decode_stream(const T* __restrict__ q, const C* __restrict__ kv,
                    const float* __restrict__ scales, const int* __restrict__ tables,
                    const int* __restrict__ seq_lens, const int* __restrict__ cu_seqlens_q,
                    const int* __restrict__ sequences, const T* __restrict__ sinks,
                    const int* __restrict__ tiles, T* __restrict__ out, float* __restrict__ partial,
                    float* __restrict__ partial_lse, int* __restrict__ arrived, int num_sequences,
                    int num_kv_heads, int group, int table_width, int block_size, int window,
                    int max_pieces, float scale, float cap) {
  constexpr int TILE = 16 * WARPS, HEADS = 8 * HEAD_TILES;
  const int lane = threadIdx.x % 32;
  const int stride = (num_sequences + 31) / 32;
  const int sample = tiles[min(lane * stride, num_sequences)];  // of every 32nd part of the line
  const int num_units = tiles[num_sequences] * num_kv_heads;
  const int num_blocks = working_blocks(num_units, gridDim.x);
  if ((int)blockIdx.x >= num_blocks) return;
  const int begin = first_unit(blockIdx.x, num_units, num_blocks);
  const int end = first_unit(blockIdx.x + 1, num_units, num_blocks);
  if (begin == end) return;  // no sequence has a token
  Line line = {tiles, sequences, seq_lens, cu_seqlens_q, num_sequences, num_kv_heads, lane};
  line.begin(begin, stride, sample);

  // Tiles of a piece of a sequence with that many.
  auto piece_of = [&](int num_tiles) {
    return max(PIECE_TILES, (num_tiles + max_pieces - 1) / max_pieces);
  };
  // Whether the stretch has a run at this unit or later, and the run.
  auto deal = [&](int unit, DealtRun& run) {
    while (unit < end) {
      const int held = line.find(unit);
      const int num_tiles = __shfl_sync(MIE_FULL_WARP, line.count, held);
      const int offset = unit - __shfl_sync(MIE_FULL_WARP, line.before, held) * num_kv_heads;
      int tile = offset % num_tiles, last_tile = min(num_tiles, tile + end - unit);
      if (max_pieces > 0) {  // the first piece from here on
        const int size = piece_of(num_tiles), piece = (tile + size - 1) / size * size;
        unit += min(piece, num_tiles) - tile;
        if (piece >= num_tiles) continue;
        if (unit >= end) return false;
        tile = piece, last_tile = min(num_tiles, tile + size);
      }
      const int length = __shfl_sync(MIE_FULL_WARP, line.length, held);
      const int oldest = window > 0 ? max(0, length - window) : 0, first_tile = oldest / TILE;
      run.sequence = __shfl_sync(MIE_FULL_WARP, line.sequence, held);
      run.query = __shfl_sync(MIE_FULL_WARP, line.query, held);
      run.kv_head = offset / num_tiles;
      run.begin = max(oldest, (first_tile + tile) * TILE);
      run.end = min(length, (first_tile + last_tile) * TILE);
      run.number = line.first + held;
      run.tile = tile, run.last_tile = last_tile, run.num_tiles = num_tiles;
      run.unit = unit, run.next_unit = unit + last_tile - tile;
      return true;
    }
    return false;
  };

  const DecodeStep<T, C> step = {q,           kv,           scales, tables,      sinks,
                                 out,         partial,      partial_lse, num_kv_heads, group,
                                 table_width, block_size,   scale,  cap};
  Decoder<T, C, DH, HEAD_TILES, WARPS, STAGES, CAPPED> decoder(step);
  DealtRun run, next;
  if (!deal(begin, run)) return;
  decoder.look_up(run);
  decoder.start(run);
  while (true) {
    const bool goes_on = deal(run.next_unit, next);
    if (goes_on) decoder.look_up(next);
    decoder.attend(run);
    if (goes_on) decoder.start(next);

    // The place of the run's result, and the parts of this sequence and head.
    const bool is_whole = run.tile == 0 && run.last_tile == run.num_tiles;
    const int pair = run.number * num_kv_heads + run.kv_head;
    int count, first_slot = 0, first = 0;
    if (max_pieces > 0) {
      const int size = piece_of(run.num_tiles);
      count = (run.num_tiles + size - 1) / size;
      decoder.finish(run, is_whole, (size_t)pair * group * max_pieces + run.tile / size,
                     max_pieces);
    } else {
      // The blocks of this sequence and head: the largest i with first_unit(i) <= its units.
      const int head_begin = run.unit - run.tile, head_end = head_begin + run.num_tiles;
      first = (int)((((long long)head_begin + 1) * num_blocks - 1) / num_units);
      count = (int)(((long long)head_end * num_blocks - 1) / num_units) - first + 1;
      // In the first of them, the run is the block's first only if it begins with the block.
      first_slot = 2 * first + (first_unit(first, num_units, num_blocks) == head_begin ? 0 : 1);
      const int slot = 2 * blockIdx.x + (run.unit == begin ? 0 : 1);
      decoder.finish(run, is_whole, (size_t)slot * HEADS, 1);
    }
    if (!is_whole && is_last_to_arrive(arrived + pair, count)) {
      const size_t row = (size_t)run.query * num_kv_heads + run.kv_head;
      merge_parts<T, DH>(partial, partial_lse, group, count,
                         [&](int g) { return out + (row * group + g) * DH; },
                         [&](int g) { return sink_of(sinks, run.kv_head * group + g); },
                         [&](int g, int i) -> size_t {
                           if (max_pieces > 0) return ((size_t)pair * group + g) * max_pieces + i;
                           return (size_t)(i == 0 ? first_slot : 2 * (first + i)) * HEADS + g;
                         });
    }
    if (!goes_on) return;
    run = next;
    __syncthreads();  // the results' stages are free for the next run
  }
}
