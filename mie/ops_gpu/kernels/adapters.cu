// The low-rank changes of a product's rows by LoRA adapters: (x A^T) B^T, where B has the scale. A
// row's adapter is the slot of its token, which the device reads, so captured steps have adapters.
//
//   x      [T, K]              T      the rows of the product
//   norm   [K]                 T      or null: the rows are first normalised with these
//   slots  [T]                 int32  slots count from 1, and 0 is no adapter
//   a      [slots, P, R, K]    float  A of each of the P parts of the matrix, up to rank R
//   b      [slots, R, N]       float  B^T of the parts side by side
//   ranks  [slots, P]          int32  0: the part is not changed
//   h      [T, P, R]           float  x A^T
//
// A block takes ROWS neighbouring tokens, and reads A and B once for each run of one adapter among
// them. Every row has its own sums, in the same order for any ROWS and any neighbours.
#include "mie_cuda.cuh"

// Calls run(slot, begin, end) for the runs of tokens with one adapter among `count` tokens.
template <typename Run>
__device__ __forceinline__ void for_each_run(const int* slots, int count, Run run) {
  for (int begin = 0, end; begin < count; begin = end) {
    const int slot = slots[begin];
    for (end = begin + 1; end < count && slots[end] == slot;) ++end;
    run(slot, begin, end);
  }
}

// h = x A^T. grid (ceil(T / ROWS), P, ceil(R / warps)), block (32 * warps): a warp has a row of A.
template <typename T, int ROWS>
__global__ void shrink_rows(const T* __restrict__ x, const T* __restrict__ norm,
                            const int* __restrict__ slots, const float* __restrict__ a,
                            const int* __restrict__ ranks, float* __restrict__ h, int num_rows,
                            int depth, int max_rank, float eps) {
  const int lane = threadIdx.x % 32, part = blockIdx.y, num_parts = gridDim.y;
  const int r = blockIdx.z * (blockDim.x / 32) + threadIdx.x / 32, first = blockIdx.x * ROWS;
  for_each_run(slots + first, min(ROWS, num_rows - first), [&](int slot, int begin, int end) {
    const int place = (slot - 1) * num_parts + part;
    if (slot == 0 || r >= ranks[place]) return;
    const float* own = a + ((size_t)place * max_rank + r) * depth;
    const T* rows = x + (size_t)(first + begin) * depth;
    float sums[ROWS] = {}, squares[ROWS] = {};
    for (int i = lane; i < depth; i += 32) {
      const float weight = norm == nullptr ? own[i] : own[i] * to_float(norm[i]);
#pragma unroll
      for (int row = 0; row < ROWS; ++row) {
        if (begin + row >= end) continue;
        const float value = to_float(rows[(size_t)row * depth + i]);
        sums[row] = __fmaf_rn(weight, value, sums[row]);
        squares[row] = __fmaf_rn(value, value, squares[row]);
      }
    }
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      if (begin + row >= end) continue;
      float sum = warp_sum(sums[row]);
      if (norm != nullptr) sum *= 1.0f / sqrtf(warp_sum(squares[row]) / depth + eps);
      const size_t token = first + begin + row;
      if (lane == 0) h[(token * num_parts + part) * max_rank + r] = sum;
    }
  });
}

// Adds h B^T to `out` if is_added, and else writes it: -0 for what is not changed, because adding
// -0 to any number leaves its bits.
//
//   ends  [P]     int32  one past the last output of each part
//   out   [T, N]  T
//
// grid (ceil(T / ROWS), ceil(N / block)), block (any): a thread has an output.
template <typename T, int ROWS>
__global__ void expand_rows(const float* __restrict__ h, const int* __restrict__ slots,
                            const float* __restrict__ b, const int* __restrict__ ranks,
                            const int* __restrict__ ends, T* __restrict__ out, int num_rows,
                            int width, int num_parts, int max_rank, int is_added) {
  const int n = blockIdx.y * blockDim.x + threadIdx.x, first = blockIdx.x * ROWS;
  if (n >= width) return;
  int part = 0;
  while (n >= ends[part]) ++part;
  for_each_run(slots + first, min(ROWS, num_rows - first), [&](int slot, int begin, int end) {
    const int rank = slot == 0 ? 0 : ranks[(slot - 1) * num_parts + part];
    if (rank == 0 && is_added) return;
    const float* own = b + (size_t)(slot - 1) * max_rank * width + n;
    const float* rows = h + ((size_t)(first + begin) * num_parts + part) * max_rank;
    float sums[ROWS] = {};
    for (int r = 0; r < rank; ++r) {
      const float weight = own[(size_t)r * width];
#pragma unroll
      for (int row = 0; row < ROWS; ++row) {
        if (begin + row >= end) continue;
        sums[row] = __fmaf_rn(rows[(size_t)row * num_parts * max_rank + r], weight, sums[row]);
      }
    }
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      if (begin + row >= end) continue;
      T* to = out + (size_t)(first + begin + row) * width + n;
      *to = from_float<T>(is_added ? to_float(*to) + sums[row] : rank == 0 ? -0.0f : sums[row]);
    }
  });
}
