// Activations that are rounded to eight bits (round_rows.cu). Included after mie_cuda.cuh.
#pragma once

constexpr int RECORD = 128;  // inputs of a record

// A row's next 128 inputs, in four chunks of 32: x is about code * scale.
struct Record {
  unsigned codes[32];  // of four inputs each, the first one low
  float scales[4];
  unsigned sums[4];  // of the codes of both halves of a chunk, the first one low
};

__device__ __forceinline__ unsigned packed_sums(int first, int second) {
  return (static_cast<unsigned>(first) & 0xffffu) | static_cast<unsigned>(second) << 16;
}
// The sum of the codes of one half of a chunk, or of both.
__device__ __forceinline__ int half_sum(unsigned sums, int half) {
  return half == 0 ? static_cast<short>(sums) : static_cast<int>(sums) >> 16;
}
__device__ __forceinline__ int chunk_sum(unsigned sums) {
  return half_sum(sums, 0) + half_sum(sums, 1);
}
