// The matrix products of a step of few rows, with what comes before and after each in the same
// launch. few_rows.cuh says how they are computed.
//
//   x        [R, K]   T
//   norm     [K]      T    NORM: the rows are first normalised with these weights (rms_norm.cu)
//   weight   [N, K]   T    as checkpoints store it
//   bias     [N]      T    or null
//
// grid (ceil(R / 16), ceil(pairs / 8)), block (32 to 256, by K alone). Blocks of the same outputs
// are neighbours, so more than 16 rows find the weights in the L2 cache. Sums are float32 and are
// rounded to T once, after bias, gate, residual or rotation. TILES: 1 for at most 8 rows, else 2.
// VECTOR: K is a multiple of the elements of 16 bytes.
#include "mie_cuda.cuh"
#include "few_rows.cuh"

// The block's rows.
template <typename T>
__device__ __forceinline__ Rows<T> rows_of(const T* x, const T* norm, int num_rows, int depth) {
  const int first = blockIdx.x * FEW_ROWS;
  return {x + (size_t)first * depth, norm, min(FEW_ROWS, num_rows - first), depth};
}

template <typename T>
__device__ __forceinline__ float bias_of(const T* bias, int n) {
  return bias == nullptr ? 0.0f : to_float(bias[n]);
}

// out [R, N] = x . weight^T + bias, plus what is in `out` if is_added. Eight outputs and the next
// eight are pairs.
template <typename T, int TILES, bool NORM, bool VECTOR>
__global__ void __launch_bounds__(32 * MAX_WARPS, 2)
few_rows_linear(const T* __restrict__ x, const T* __restrict__ norm, const T* __restrict__ weight,
                const T* __restrict__ bias, T* __restrict__ out, int num_rows, int depth, int width,
                int is_added, float eps) {
  T* block_out = out + (size_t)blockIdx.x * FEW_ROWS * width;
  multiply_rows<T, TILES, NORM, VECTOR>(
      rows_of(x, norm, num_rows, depth), weight, width, PAIRS, eps,
      [&](int pair, int row, float low, float high) {
        const Pair n = pair_of(pair, PAIRS);
        const int outputs[2] = {n.low, n.high};
        const float sums[2] = {low, high};
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (outputs[e] >= width) continue;
          T* to = block_out + (size_t)row * width + outputs[e];
          const float sum = sums[e] + bias_of(bias, outputs[e]);
          *to = from_float<T>(is_added ? sum + to_float(*to) : sum);
        }
      });
}

// out [R, F] = silu(gate) * up, where the matrix [2 F, K] gives gate, then up (silu_mul.cu). A gate
// and its up are a pair.
template <typename T, int TILES, bool NORM, bool VECTOR>
__global__ void __launch_bounds__(32 * MAX_WARPS, 2)
few_rows_gated(const T* __restrict__ x, const T* __restrict__ norm, const T* __restrict__ weight,
               const T* __restrict__ bias, T* __restrict__ out, int num_rows, int depth, int dim,
               float eps) {
  T* block_out = out + (size_t)blockIdx.x * FEW_ROWS * dim;
  multiply_rows<T, TILES, NORM, VECTOR>(
      rows_of(x, norm, num_rows, depth), weight, 2 * dim, dim, eps,
      [&](int pair, int row, float low, float high) {
        if (pair >= dim) return;
        const float gate = low + bias_of(bias, pair), up = high + bias_of(bias, dim + pair);
        block_out[(size_t)row * dim + pair] = from_float<T>(gate / (1.0f + expf(-gate)) * up);
      });
}

// Query, key and value heads from the matrix [(Hq + 2 Hkv) Dh, K]. Queries and keys are rotated,
// and keys and values written to the cache, as in rope_write_kv.cu, which names the arguments. The
// elements i and i + Dh/2 of a head are a pair.
template <typename T, int TILES, bool NORM, bool VECTOR>
__global__ void __launch_bounds__(32 * MAX_WARPS, 2)
few_rows_qkv(const T* __restrict__ x, const T* __restrict__ norm, const T* __restrict__ weight,
             const T* __restrict__ bias, const float* __restrict__ table,
             const int* __restrict__ positions, const int* __restrict__ slots, T* __restrict__ q,
             T* __restrict__ kv, int num_rows, int depth, int num_heads, int num_kv_heads,
             int head_dim, int block_size, float eps) {
  const int half = head_dim / 2, width = (num_heads + 2 * num_kv_heads) * head_dim;
  multiply_rows<T, TILES, NORM, VECTOR>(
      rows_of(x, norm, num_rows, depth), weight, width, half, eps,
      [&](int pair, int row, float low, float high) {
        const Pair n = pair_of(pair, half);
        if (n.high >= width) return;
        const int head = pair / half, i = pair % half, token = blockIdx.x * FEW_ROWS + row;
        const float x0 = low + bias_of(bias, n.low), x1 = high + bias_of(bias, n.high);
        T* to = q + ((size_t)token * num_heads + head) * head_dim;
        if (head >= num_heads) {
          const int slot = slots[token], h = head - num_heads;
          if (slot < 0) return;
          const size_t tile = (size_t)(slot / block_size) * 2 * num_kv_heads + h;  // keys, values
          to = kv + (tile * block_size + slot % block_size) * head_dim;
        }
        float y0 = x0, y1 = x1;
        if (head < num_heads + num_kv_heads) {  // values are not rotated
          const float* cosines = table + (size_t)positions[token] * head_dim;
          const float c = cosines[i], s = cosines[half + i];
          y0 = __fmaf_rn(-x1, s, __fmul_rn(x0, c));
          y1 = __fmaf_rn(x0, s, __fmul_rn(x1, c));
        }
        to[i] = from_float<T>(y0);
        to[i + half] = from_float<T>(y1);
      });
}
