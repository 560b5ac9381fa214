// Products of a few rows with a matrix: y[r, n] = sum over k of x[r, k] * weight[n, k]. Included
// after weights.cuh and arrivals.cuh. few_rows.cu and expert_rows.cu have the kernels.
//
// With few rows a product waits for its weights. They are on the long side of mma.m16n8k16, and eight
// rows cost as much as one:
//
//   outputs [16, rows]  =  weights [16, K] . x^T [K, rows]
//
// A block goes through a run of iterations, of 32 outputs times BLOCK_K inputs each:
//
//              K: warp 0   warp 1   ...  warp 7 | warp 0  ...
//   outputs  0   +--------+--------+----+-------+--------+---
//           16   | stage  | stage  |    | stage | the next iteration
//           32   +--------+--------+----+-------+--------+---
//
//   stream_k.cuh       which iterations, and the sums of blocks that share outputs
//   weight_ring.cuh    producer: each warp requests its stages ahead, before x is read
//   norm_prologue.cuh  x: measured by all warps, normalised
//   row_products.cuh   consumer: a stage's products, in registers
//   below              the loop, the reduction over warps, and the epilogue of the kernel
//
// The order of a sum depends on K, on the matrix and on the chip alone. A warp adds its stages in
// order, then the warps' sums are added in order, and then the blocks'. A row's bits depend neither
// on the number of rows nor on its place among them.
#pragma once
#include "product_shape.cuh"
#include "stream_k.cuh"
#include "weight_ring.cuh"
#include "norm_prologue.cuh"
#include "row_products.cuh"

// Multiplies the block's rows with the outputs of tiles of 16, which outputs_of(tile) names. Then
// finish(get, first tile, number of tiles, first row, end of rows) is called for each `meeting`
// neighbouring output tiles, where get(output, row) is a sum, and outputs count from the first
// tile's. Each row is finished once. is_kept: the block's share of x fits in shared memory. SHARED:
// blocks share output tiles. Every thread of the block calls, once a kernel.
template <typename S, bool SHARED = true, typename OutputsOf, typename Finish>
__device__ __forceinline__ void multiply_rows(const Rows<typename S::T>& rows, const Matrix& matrix,
                                              const Sharing& sharing, bool is_kept, int num_tiles,
                                              int meeting, OutputsOf outputs_of, Finish finish) {
  __shared__ float scales[S::ROWS], powers[S::ROWS];
  const int warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
  const int block_k = num_warps * S::INPUTS;
  const Schedule schedule((num_tiles + MT - 1) / MT, matrix.depth, block_k, meeting);
  const int num_slices = schedule.num_slices;
  const int begin = schedule.first_iteration(blockIdx.y);
  const int end = schedule.first_iteration(blockIdx.y + 1);
  const int stage_bytes = S::WEIGHT_BYTES + (is_kept ? 0 : S::X_BYTES);
  const int kept_slices = is_kept ? min(end - begin, num_slices) : 0;
  const int slice_bytes = rows.count * S::ROW_VECTORS * 16;

  // Shared memory: the warps' sums, their rings, and x if it is kept.
  float* sums = reinterpret_cast<float*>(mie_smem);  // [warps][8 rows][SUMS_STRIDE]
  unsigned char* rings = mie_smem + num_warps * 8 * SUMS_STRIDE * 4;
  unsigned char* ring = rings + warp * S::STAGES * stage_bytes;
  unsigned char* kept =
      rings + num_warps * S::STAGES * stage_bytes + warp * kept_slices * slice_bytes;

  Producer<S, OutputsOf> producer(matrix, rows, schedule, outputs_of, !is_kept, begin, end);
#pragma unroll 1
  for (int i = 0; i < S::STAGES; ++i) producer.request(ring + i * stage_bytes);
  if constexpr (S::FINISHED) measure<S>(rows, sums, scales, powers);
  if (is_kept) {
    keep_x<S>(rows, schedule, kept, begin, kept_slices, scales, powers);
    __syncwarp();
  }

  Accumulator<S> accumulator;
  int tile = begin / num_slices, slice = begin % num_slices;
  int first_slice = slice;  // of this output tile in this block
  unsigned char *stage = ring, *const last_stage = ring + (S::STAGES - 1) * stage_bytes;
  const unsigned char *x = kept, *const last_x = kept + (kept_slices - 1) * slice_bytes;
  for (int i = begin; i < end; ++i) {
    cp_async_wait<S::STAGES - 1>();
    if (!is_kept) {
      x = stage + S::WEIGHT_BYTES;
      finish_x<S>(rows, stage + S::WEIGHT_BYTES, slice * block_k + warp * S::INPUTS, scales, powers);
    }
    __syncwarp();  // the stage is there for all lanes
    Staged<S> weights;
    read_stage<S>(weights, stage);
    auto refill = [&] {
      __syncwarp();  // all lanes have read the stage
      producer.request(stage);
    };
    if constexpr (S::FLOAT) {
      accumulator.add(weights, x, rows.count);
      refill();
    } else {
      RowFragments<S> fragments;
      fragments.read(x, rows.count);
      if constexpr (S::HELD) refill();  // while the registers are multiplied
      accumulator.add(weights, fragments);
      if constexpr (!S::HELD) refill();
    }
    stage = stage == last_stage ? ring : stage + stage_bytes;
    if (is_kept) x = x == last_x ? kept : x + slice_bytes;
    if (++slice < num_slices && i + 1 < end) continue;

    // The output tile's sums of this block are complete. The ring goes on meanwhile.
    const bool is_whole =
        !SHARED || (meeting == 1 && first_slice == 0 && slice == num_slices);
#pragma unroll 1
    for (int n = 0; n < S::TILES && n * 8 < rows.count; ++n) {
      __syncthreads();  // the last sums are read
      accumulator.store(sums + warp * 8 * SUMS_STRIDE, n, powers);
      __syncthreads();
      auto total = [&](int output, int row) {
        float sum = 0.0f;
#pragma unroll 8
        for (int w = 0; w < num_warps; ++w)
          sum += sums[(w * 8 + row - n * 8) * SUMS_STRIDE + output];
        return sum;
      };
      const int end_row = min(n * 8 + 8, rows.count);
      if (is_whole) {
        finish(total, tile * MT, MT, n * 8, end_row);
      } else if constexpr (SHARED) {
        float* to = sharing.sums + schedule.place(blockIdx.y, tile) * S::ROWS * BLOCK_N;
        for (int j = n * 8 * BLOCK_N + threadIdx.x; j < end_row * BLOCK_N; j += blockDim.x)
          to[j] = total(j % BLOCK_N, j / BLOCK_N);
      }
    }
    if constexpr (SHARED) {
      if (!is_whole) {
        const int group = tile / meeting, first = group * meeting;
        const int counter = blockIdx.x * (schedule.num_tiles / meeting) + group;
        if (is_last_to_arrive(sharing.arrived + counter, schedule.num_parts(first)))
          finish(
              [&](int output, int row) {
                return sum_of_parts<S::ROWS>(schedule, sharing.sums, first, output, row);
              },
              first * MT, meeting * MT, 0, rows.count);
      }
    }
    accumulator = Accumulator<S>();
    ++tile, slice = 0, first_slice = 0;
  }
}
