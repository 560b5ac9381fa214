// Rounds rows of activations to eight bits, as mie/ops/weights/integer.py defines it:
// scale = max|x| / 127 and code = rint(x / scale) in each chunk of 32 inputs.
//
//   x     [R, K]        T
//   rows  [R, records]  Record   of 128 inputs each; zeros past K
//
// grid (R), block (any whole warps): a warp takes a record, and eight lanes a chunk.
#include "mie_cuda.cuh"
#include "rounded.cuh"

// The code of an element of a chunk.
__device__ __forceinline__ int code_of(float x, float scale) {
  return __float2int_rn(__fdiv_rn(x, scale));
}

template <typename T>
__global__ void round_rows(const T* __restrict__ x, Record* __restrict__ rows, int depth) {
  const int lane = threadIdx.x % 32, chunk = lane / 8, records = (depth + RECORD - 1) / RECORD;
  const T* row = x + (size_t)blockIdx.x * depth;
  for (int i = threadIdx.x / 32; i < records; i += blockDim.x / 32) {
    Record& record = rows[(size_t)blockIdx.x * records + i];
    const int first = i * RECORD + 4 * lane;
    float values[4];
    unsigned largest = 0;  // bits of magnitudes are in the order of the magnitudes, and NaN is last
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      values[j] = first + j < depth ? to_float(row[first + j]) : 0.0f;
      largest = max(largest, __float_as_uint(values[j]) & 0x7fffffffu);
    }
#pragma unroll
    for (int offset = 4; offset > 0; offset /= 2)
      largest = max(largest, __shfl_xor_sync(MIE_FULL_WARP, largest, offset));
    const float magnitude = __uint_as_float(largest);
    const bool is_finite = largest < 0x7f800000u;
    float scale = magnitude;  // of a chunk with NaN or infinity
    if (is_finite) scale = magnitude < 0x1p-100f ? 0.0f : __fdiv_rn(magnitude, 127.0f);
    unsigned codes = 0;
    int sum = 0;
    if (is_finite && scale > 0.0f) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int code = code_of(values[j], scale);
        codes |= (static_cast<unsigned>(code) & 255u) << 8 * j;
        sum += code;
      }
    }
    record.codes[lane] = codes;
    sum += __shfl_xor_sync(MIE_FULL_WARP, sum, 1);  // of 16 inputs
    sum += __shfl_xor_sync(MIE_FULL_WARP, sum, 2);
    const int next = __shfl_xor_sync(MIE_FULL_WARP, sum, 4);
    if (lane % 8 == 0) {
      record.scales[chunk] = scale;
      record.sums[chunk] = packed_sums(sum, next);
    }
  }
}
