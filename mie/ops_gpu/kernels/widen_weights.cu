// Rows of a quantised matrix (weights.cuh) as numbers of the activations' type: all of some tiles,
// for cuBLAS, or the rows of an embedding.
//
//   weight, scales, units      the matrix
//   rows     [R]      int32    the rows to gather
//   out      [R, K]   T        rounded once
//
// widen_weights: grid (ceil(units / 8), tiles), block (256): a warp takes a unit of 16 rows,
// beginning with the tile `first`. gather_weights: grid (R), block (any whole warps): four threads
// take a unit of a row.
#include "mie_cuda.cuh"
#include "quantized.cuh"
#include "weights.cuh"

// Four neighbours, which are stored at once.
template <typename T>
struct alignas(4 * sizeof(T)) Four {
  T elements[4];
};

// Writes a lane's share of a unit, for one half of the outputs.
template <typename T, typename C, int SPAN, bool OFFSETS, int BITS>
__device__ __forceinline__ void write_unit(const Weights<T, C, SPAN, OFFSETS, BITS, true>& weights,
                                           int half, T* row, int k, int depth) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int c = 0; c < 2; ++c)
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const int first = k + c * CHUNK + place<SPAN>(s, t), span = (2 * c + s) * 16 / SPAN;
      Four<T> four;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float value = weights.unit.template value<OFFSETS>(c, s, half, j);
        value *= weights.scales.scale(span, half);
        if constexpr (OFFSETS) value += weights.scales.offset(span, half);
        four.elements[j] = from_float<T>(value);
      }
      if (depth % 4 == 0) {
        if (first < depth) *reinterpret_cast<Four<T>*>(row + first) = four;
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (first + j < depth) row[first + j] = four.elements[j];
      }
    }
}

template <typename T, typename C, int SPAN, bool OFFSETS, int BITS>
__global__ void widen_weights(const uint4* __restrict__ weight, const uint4* __restrict__ scales,
                              const float* __restrict__ units, T* __restrict__ out, int first,
                              int num_rows, int depth, int shift) {
  const Matrix matrix{weight, scales, units, depth, shift};
  const int g = threadIdx.x % 32 / 4;
  const int k = (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * UNIT;
  if (k >= depth) return;
  const Outputs tile{(int)(first + blockIdx.y) * TILE, TILE};
  Weights<T, C, SPAN, OFFSETS, BITS, true> weights;
  weights.begin(matrix, tile, k, g);
  weights.load(matrix, k);
  weights.load_scales(matrix);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = blockIdx.y * TILE + g + 8 * half;
    if (row < num_rows) write_unit(weights, half, out + (size_t)row * depth, k, depth);
  }
}

template <typename T, typename C, int SPAN, bool OFFSETS, int BITS>
__global__ void gather_weights(const uint4* __restrict__ weight, const uint4* __restrict__ scales,
                               const float* __restrict__ units, const int* __restrict__ rows,
                               T* __restrict__ out, int depth, int shift) {
  const Matrix matrix{weight, scales, units, depth, shift};
  const int row = rows[blockIdx.x];
  const Outputs tile{row / TILE * TILE, TILE};
  for (int i = threadIdx.x / 4; i * UNIT < depth; i += blockDim.x / 4) {
    Weights<T, C, SPAN, OFFSETS, BITS, true> weights;
    weights.begin(matrix, tile, i * UNIT, row % 8);
    weights.load(matrix, i * UNIT);
    weights.load_scales(matrix);
    write_unit(weights, row / 8 % 2, out + (size_t)blockIdx.x * depth, i * UNIT, depth);
  }
}
