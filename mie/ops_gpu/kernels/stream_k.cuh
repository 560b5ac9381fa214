// Deals the work of a product to the blocks, and adds the sums of the blocks that share an output
// tile (stream-K: Osama et al., 2023, arXiv:2301.03598). Included after product_shape.cuh and
// arrivals.cuh.
//
// An iteration is BLOCK_N outputs times BLOCK_K inputs. All U iterations are numbered, output tile
// by output tile. Block i of C does the iterations i * U / C ... (i + 1) * U / C - 1. So no block has
// more than one iteration more than another, and at most the first and the last output tile of a
// block are parts. C depends on the matrix and on the chip alone, and so does the order of a sum.
#pragma once

// The memory in which blocks leave their sums, or nulls if no two blocks share an output.
struct Sharing {
  float* sums;   // [groups of rows, C, tiles of a block, ROWS, BLOCK_N]
  int* arrived;  // [groups of rows, groups of output tiles], zeros
};

struct Schedule {
  int num_tiles;   // output tiles
  int num_slices;  // iterations of an output tile
  int meeting;     // neighbouring output tiles that are finished together
  int stored;      // output tiles for which a block has room in `Sharing::sums`
  int each, rest;  // U / C and U % C. Divisions of 64 bits would delay the first request

  __device__ __forceinline__ Schedule(int num_tiles, int depth, int block_k, int meeting)
      : num_tiles(num_tiles), num_slices((depth + block_k - 1) / block_k), meeting(meeting) {
    each = num_iterations() / num_blocks(), rest = num_iterations() % num_blocks();
    stored = meeting == 1 ? 2 : (each + (rest > 0) + num_slices - 1) / num_slices + 1;
  }
  __device__ __forceinline__ unsigned num_blocks() const { return gridDim.y; }
  __device__ __forceinline__ int num_iterations() const { return num_tiles * num_slices; }
  __device__ __forceinline__ int first_iteration(int block) const {
    return block * each + (unsigned)(block * rest) / num_blocks();
  }
  // The block that does an iteration: the largest whose first one is not after it. few_rows.py
  // asserts that U * C has 32 bits.
  __device__ __forceinline__ int block_of(int iteration) const {
    return ((unsigned)(iteration + 1) * num_blocks() - 1) / (unsigned)num_iterations();
  }
  __device__ __forceinline__ int first_block(int tile) const { return block_of(tile * num_slices); }
  __device__ __forceinline__ int last_block(int tile) const {
    return block_of((tile + 1) * num_slices - 1);
  }
  // The parts of the output tiles that meet, from `first` on.
  __device__ __forceinline__ int num_parts(int first) const {
    int parts = 0;
    for (int tile = first; tile < first + meeting; ++tile)
      parts += last_block(tile) - first_block(tile) + 1;
    return parts;
  }
  // Where a block leaves its sums of an output tile, in tiles.
  __device__ __forceinline__ size_t place(int block, int tile) const {
    const int own = min(tile - first_iteration(block) / num_slices, stored - 1);
    return ((size_t)blockIdx.x * num_blocks() + block) * stored + own;
  }
};

// The sum of the parts of an output, in the order of the blocks. `output` counts from the first of
// output tile `first`.
template <int ROWS>
__device__ __forceinline__ float sum_of_parts(const Schedule& schedule, const float* sums,
                                              int first, int output, int row) {
  const int tile = first + output / BLOCK_N, last = schedule.last_block(tile);
  const int begin = schedule.first_block(tile);
  float sum = 0.0f;
#pragma unroll 4
  for (int block = begin; block <= last; ++block) {
    // Only the first block may have begun with an earlier tile.
    const size_t place = block == begin ? schedule.place(block, tile)
                                        : ((size_t)blockIdx.x * schedule.num_blocks() + block) *
                                              schedule.stored;
    sum += __ldcg(sums + (place * ROWS + row) * BLOCK_N + output % BLOCK_N);
  }
  return sum;
}
