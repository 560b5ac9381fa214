// The consumer of a stage: the products of BLOCK_N outputs with the rows, summed by a warp over its
// share of K. Included after weight_ring.cuh.
#pragma once

// The rows' inputs of a stage, as mma's second operands.
template <typename S>
struct RowFragments {
  unsigned b[S::CHUNKS][2][S::TILES][2];  // by chunk, by step

  // Rows past the last repeat it. Their sums are dropped.
  __device__ __forceinline__ void read(const unsigned char* x, int count) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < S::TILES; ++n) {
      const int row = min(n * 8 + g, count - 1);
#pragma unroll
      for (int c = 0; c < S::CHUNKS; ++c) {
        const unsigned char* chunk = x + c * count * S::CHUNK_BYTES;
        if constexpr (S::SPAN == 16) {
#pragma unroll
          for (int s = 0; s < 2; ++s) {
            const unsigned char* from = chunk + (s * count + row) * 32 + t * 8;
            const uint2 four = *reinterpret_cast<const uint2*>(from);
            b[c][s][n][0] = four.x, b[c][s][n][1] = four.y;
          }
        } else {  // both steps at once
          const uint4 eight = *reinterpret_cast<const uint4*>(chunk + row * S::CHUNK_BYTES + t * 16);
          b[c][0][n][0] = eight.x, b[c][0][n][1] = eight.y;
          b[c][1][n][0] = eight.z, b[c][1][n][1] = eight.w;
        }
      }
    }
  }
};

// On tensor cores: lane (g, t) has the outputs g, g + 8 and the rows 2t, 2t + 1.
template <typename S, bool FLOAT = S::FLOAT>
struct Accumulator {
  static constexpr int TILES = S::TILES;
  float acc[MT][TILES][4] = {};

  __device__ __forceinline__ void add(const Staged<S>& weights, const RowFragments<S>& x) {
    float part[S::DENSE ? 1 : MT][S::DENSE ? 1 : TILES][4] = {}, sum[TILES][4] = {};
#pragma unroll
    for (int c = 0; c < S::CHUNKS; ++c)
#pragma unroll
      for (int s = 0; s < 2; ++s) {
#pragma unroll
        for (int m = 0; m < MT; ++m) {
          unsigned a[4];
          weights.units[m].template fragment<S::OFFSETS>(a, c, s);
#pragma unroll
          for (int n = 0; n < TILES; ++n) {
            if constexpr (S::DENSE)
              mma_m16n8k16<typename S::T>(acc[m][n], a, x.b[c][s][n]);
            else
              mma_m16n8k16<f16>(part[m][n], a, x.b[c][s][n]);
          }
        }
        if constexpr (S::OFFSETS) {
          const unsigned ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
#pragma unroll
          for (int n = 0; n < TILES; ++n) mma_m16n8k16<f16>(sum[n], ones, x.b[c][s][n]);
        }
        const int end = (2 * c + s + 1) * 16;
        if constexpr (!S::DENSE) {
          if (end % S::SPAN == 0) scale(part, sum, weights, end / S::SPAN - 1);
        }
      }
  }

  // Adds the sums of a span, times its scale, and begins the next span's.
  __device__ __forceinline__ void scale(float (&part)[MT][TILES][4], float (&sum)[TILES][4],
                                        const Staged<S>& weights, int span) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& to = acc[m][n][e];
          to = __fmaf_rn(part[m][n][e], weights.scales[m].scale(span, e / 2), to);
          if constexpr (S::OFFSETS)
            to = __fmaf_rn(sum[n][e], weights.scales[m].offset(span, e / 2), to);
          part[m][n][e] = 0.0f;
        }
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[n][e] = 0.0f;
  }

  // Stores the warp's sums of eight rows as sums[row][output].
  __device__ __forceinline__ void store(float* sums, int row_tile, const float* powers) const {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
      if (n != row_tile) continue;  // registers have no index
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = 2 * t + e % 2;
        const float unit = S::RAISED ? inverse_power(powers[n * 8 + row]) : 1.0f;
#pragma unroll
        for (int m = 0; m < MT; ++m)
          sums[row * SUMS_STRIDE + m * TILE + g + 8 * (e / 2)] = acc[m][n][e] * unit;
      }
    }
  }
};

// In float32, which tensor cores would round: a lane has all rows, and the inputs of its t.
template <typename S>
struct Accumulator<S, true> {
  float acc[MT][2][S::ROWS] = {};

  __device__ __forceinline__ void add(const Staged<S>& weights, const unsigned char* x, int count) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int c = 0; c < S::CHUNKS; ++c)
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const int span = (2 * c + s) * 16 / S::SPAN;
#pragma unroll
        for (int row = 0; row < S::ROWS; ++row) {
          const int at = (c * count + min(row, count - 1)) * CHUNK + place<S::SPAN>(s, t);
          const float* four = reinterpret_cast<const float*>(x) + at;
#pragma unroll
          for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
              for (int j = 0; j < 4; ++j) {
                float weight = weights.units[m].template value<S::OFFSETS>(c, s, half, j);
                if constexpr (!S::DENSE) weight *= weights.scales[m].scale(span, half);
                if constexpr (S::OFFSETS) weight += weights.scales[m].offset(span, half);
                acc[m][half][row] = __fmaf_rn(weight, four[j], acc[m][half][row]);
              }
        }
      }
  }

  __device__ __forceinline__ void store(float* sums, int, const float*) const {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int row = 0; row < S::ROWS; ++row) {
          float sum = acc[m][half][row];  // of this lane's inputs
          sum += __shfl_xor_sync(MIE_FULL_WARP, sum, 1);
          sum += __shfl_xor_sync(MIE_FULL_WARP, sum, 2);
          if (t == 0) sums[row * SUMS_STRIDE + m * TILE + g + 8 * half] = sum;
        }
  }
};
