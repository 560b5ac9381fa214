// The matrix products of experts, for rows that are sorted by expert (route.cu). few_rows.cuh says
// how a block multiplies up to 8 * TILES rows. Here these rows are those of a tile of route.cu, and
// the block finds the matrix of their expert.
//
//   x                [P, K]     T      sorted rows
//   weight                      C      dense [E, N, K], C being T, or E times the codes of a
//   scales, units                      quantised matrix [N, K], and its scales
//   bias             [E, N]     T      or null
//   tiles            [most, 3]  int32
//
// grid (most, output tiles), block (32 to 256, by K alone). A block has one output tile, and no
// blocks share K, because a token's k experts keep a chip busy. So a row's bits do not depend on the
// other rows.
// Blocks of the same outputs are neighbours, and tiles of one expert find its weights in the L2
// cache.
//
// Budget, registers on sm_87: 16 bits take 87 for 8 rows and 115 for 32, and int4 in groups of 64 or
// more takes 89 and 146. In 16 bits a block of 8 rows has 89 KB of shared memory, with four stages of
// 2 KB a warp, and a block of 32 rows 73 KB, with two. The registers leave room for two blocks of a
// multiprocessor with 8 rows, and for one with 32. The limit is the memory for few tokens, and the
// tensor cores for many.
#include "mie_cuda.cuh"
#include "activation.cuh"
#include "quantized.cuh"
#include "weights.cuh"
#include "arrivals.cuh"
#include "few_rows.cuh"

// A tile of sorted rows, and its expert's matrix [width, depth].
template <typename S>
struct ExpertTile {
  using T = typename S::T;
  int expert, first;
  Rows<T> rows;
  Matrix matrix;

  __device__ __forceinline__ ExpertTile(const int* tiles, const T* x, const Matrix& all,
                                        int width) {
    const int* tile = tiles + 3 * blockIdx.x;
    expert = tile[0], first = tile[1];
    rows = {x + (size_t)first * all.depth, nullptr, tile[2], all.depth, 0.0f};
    matrix = all;
    if constexpr (S::DENSE) {
      const T* weight = reinterpret_cast<const T*>(all.weight);
      weight += (size_t)expert * width * all.depth;
      matrix.weight = reinterpret_cast<const uint4*>(weight);
    } else {
      matrix = of_expert<typename S::C, S::SPAN, S::OFFSETS, S::BITS>(all, expert, width);
    }
  }

  // The bias of output n.
  __device__ __forceinline__ float bias_of(const T* bias, int width, int n) const {
    return bias == nullptr ? 0.0f : to_float(bias[(size_t)expert * width + n]);
  }
};

// out [P, F] = the gated activation of x . weight^T + bias, where N = 2 F: gate, then up. Tiles of
// gates and of their ups take turns. If the matrices are quantised, F is a multiple of 16.
template <typename T, typename C, int SPAN, bool OFFSETS, int BITS, int TILES, bool VECTOR>
__global__ void __launch_bounds__(32 * MAX_WARPS, BLOCKS<T, SPAN, OFFSETS, TILES>)
experts_gated(const T* __restrict__ x, const uint4* __restrict__ weight,
              const uint4* __restrict__ scales, const float* __restrict__ units,
              const T* __restrict__ bias, const int* __restrict__ tiles, T* __restrict__ out,
              int depth, int shift, int dim, int activation) {
  using S = ProductShape<T, C, SPAN, OFFSETS, BITS, TILES, false, VECTOR>;
  if (tiles[3 * blockIdx.x + 2] == 0) return;
  const ExpertTile<S> tile(tiles, x, {weight, scales, units, depth, shift}, 2 * dim);
  multiply_rows<S, false>(
      tile.rows, tile.matrix, {nullptr, nullptr}, false, 2 * ((dim + TILE - 1) / TILE), 1,
      [&](int i) -> Outputs {
        const int n = i / 2 * TILE;
        return {n + i % 2 * dim, min(TILE, dim - n)};
      },
      [&](auto get, int first, int count, int begin_row, int end_row) {
        const int gates = count / 2 * TILE;
        for (int i = threadIdx.x; i < gates * (end_row - begin_row); i += blockDim.x) {
          const int output = i % gates, row = begin_row + i / gates;
          const int n = first / 2 * TILE + output;
          if (n >= dim) continue;
          const int place = output / TILE * 2 * TILE + output % TILE;
          const float gate = get(place, row) + tile.bias_of(bias, 2 * dim, n);
          const float up = get(place + TILE, row) + tile.bias_of(bias, 2 * dim, dim + n);
          out[(size_t)(tile.first + row) * dim + n] =
              from_float<T>(activated(gate, up, activation));
        }
      });
}

// out [P, N] = x . weight^T + bias
template <typename T, typename C, int SPAN, bool OFFSETS, int BITS, int TILES, bool VECTOR>
__global__ void __launch_bounds__(32 * MAX_WARPS, BLOCKS<T, SPAN, OFFSETS, TILES>)
experts_linear(const T* __restrict__ x, const uint4* __restrict__ weight,
               const uint4* __restrict__ scales, const float* __restrict__ units,
               const T* __restrict__ bias, const int* __restrict__ tiles, T* __restrict__ out,
               int depth, int shift, int width) {
  using S = ProductShape<T, C, SPAN, OFFSETS, BITS, TILES, false, VECTOR>;
  if (tiles[3 * blockIdx.x + 2] == 0) return;
  const ExpertTile<S> tile(tiles, x, {weight, scales, units, depth, shift}, width);
  multiply_rows<S, false>(
      tile.rows, tile.matrix, {nullptr, nullptr}, false, (width + TILE - 1) / TILE, 1,
      [&](int i) -> Outputs { return {i * TILE, min(TILE, width - i * TILE)}; },
      [&](auto get, int first, int count, int begin_row, int end_row) {
        const int outputs = count * TILE;
        for (int i = threadIdx.x; i < outputs * (end_row - begin_row); i += blockDim.x) {
          const int output = i % outputs, row = begin_row + i / outputs;
          const int n = first * TILE + output;
          if (n >= width) continue;
          const float y = get(output, row) + tile.bias_of(bias, width, n);
          out[(size_t)(tile.first + row) * width + n] = from_float<T>(y);
        }
      });
}
