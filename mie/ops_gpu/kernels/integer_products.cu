// The products of rounded activations and integer weights (integer.cuh).
//
//   rows     [R, records]  Record  rounded activations (rounded.cuh)
//   weight                         the codes of a quantised matrix [N, K], or of all experts
//   scales, units                  of the matrix (weights.cuh)
//   bias     [N]           T       or null; [E, N] of experts
//   out      [R, stride]   T       the first N columns are written. The sum is float32: of the
//                                  product, then bias, then what is in `out` if is_added
//
// Results are rounded to T once. grid (groups of 8 * TILES or of 64 rows, groups of 32 / TILES or
// of 128 outputs), block (256). Blocks of the same outputs are neighbours, so more rows find the
// weights in the L2 cache. Experts have tiles of 8 or of 32 sorted rows (route.cu) in the first
// place of the grid, and groups of 32 or of 256 outputs in the second.
#include "mie_cuda.cuh"
#include "quantized.cuh"
#include "weights.cuh"
#include "rounded.cuh"
#include "integer.cuh"

template <typename T>
__device__ __forceinline__ void write_sum(T* to, float sum, const T* bias, bool is_added) {
  if (bias != nullptr) sum = ieee_add(sum, to_float(*bias));
  *to = from_float<T>(is_added ? ieee_add(sum, to_float(*to)) : sum);
}

template <typename T, typename C, int SPAN, bool OFFSETS, int BITS, int TILES>
__global__ void __launch_bounds__(256, 2)
integer_few(const Record* __restrict__ rows, const uint4* __restrict__ weight,
            const uint4* __restrict__ scales, const float* __restrict__ units,
            const T* __restrict__ bias, T* __restrict__ out, int num_rows, int depth, int shift,
            int width, int stride, int is_added) {
  const int first = blockIdx.x * 8 * TILES, records = (depth + RECORD - 1) / RECORD;
  multiply_few<IntegerWay<T, C, SPAN, OFFSETS, BITS>, TILES>(
      {rows + (size_t)first * records, min(8 * TILES, num_rows - first), records},
      {weight, scales, units, depth, shift}, blockIdx.y * (2 / TILES), width,
      [&](int n, int row, float sum) {
        write_sum(out + (size_t)(first + row) * stride + n, sum, bias == nullptr ? bias : bias + n,
                  is_added);
      });
}

template <typename T, typename C, int SPAN, bool OFFSETS, int BITS>
__global__ void __launch_bounds__(256, SPAN == 16 && OFFSETS ? 1 : 2)
integer_many(const Record* __restrict__ rows, const uint4* __restrict__ weight,
             const uint4* __restrict__ scales, const float* __restrict__ units,
             const T* __restrict__ bias, T* __restrict__ out, int num_rows, int depth, int shift,
             int width, int stride, int is_added) {
  const int first = blockIdx.x * MANY_ROWS<2>, records = (depth + RECORD - 1) / RECORD;
  multiply_many<IntegerWay<T, C, SPAN, OFFSETS, BITS>, 2>(
      {rows + (size_t)first * records, min(MANY_ROWS<2>, num_rows - first), records},
      {weight, scales, units, depth, shift}, blockIdx.y * MANY_TILES<2>, width,
      [&](int n, int row, float sum) {
        write_sum(out + (size_t)(first + row) * stride + n, sum, bias == nullptr ? bias : bias + n,
                  is_added);
      });
}

// out [P, N] = the products of sorted rows with their experts' matrices [N, K]. IS_FEW: tiles have
// up to 8 rows, else up to 32.
template <typename T, typename C, int SPAN, bool OFFSETS, int BITS, bool IS_FEW>
__global__ void __launch_bounds__(256, IS_FEW ? 2 : 1)
integer_experts(const Record* __restrict__ rows, const uint4* __restrict__ weight,
                const uint4* __restrict__ scales, const float* __restrict__ units,
                const T* __restrict__ bias, const int* __restrict__ tiles, T* __restrict__ out,
                int depth, int shift, int width) {
  using W = IntegerWay<T, C, SPAN, OFFSETS, BITS>;
  const int *tile = tiles + 3 * blockIdx.x, expert = tile[0], first = tile[1], count = tile[2];
  if (count == 0) return;
  const int records = (depth + RECORD - 1) / RECORD;
  const RoundedRows own{rows + (size_t)first * records, count, records};
  const Matrix matrix =
      of_expert<C, SPAN, OFFSETS, BITS>({weight, scales, units, depth, shift}, expert, width);
  auto finish = [&](int n, int row, float sum) {
    const T* from = bias == nullptr ? bias : bias + (size_t)expert * width + n;
    write_sum(out + (size_t)(first + row) * width + n, sum, from, false);
  };
  if constexpr (IS_FEW)
    multiply_few<W, 1>(own, matrix, blockIdx.y * 2, width, finish);
  else
    multiply_many<W, 1>(own, matrix, blockIdx.y * MANY_TILES<1>, width, finish);
}
