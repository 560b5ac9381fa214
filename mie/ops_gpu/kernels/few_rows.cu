// The matrix products of a step of few rows, with what comes before and after each in the same
// launch. few_rows.cuh says how they are computed, and weights.cuh how weights are stored.
//
//   x                [R, K]   T
//   norm             [K]      T      NORM: the rows are first normalised with these (rms_norm.cu)
//   weight                    C      dense [N, K], C being T, or the codes of a quantised matrix
//   scales, units                    of a quantised matrix
//   bias             [N]      T      or null
//   changes          [R, N]   float  CHANGED: added to each row like a bias (adapters.cu)
//   sums, arrived             float, int32: where blocks that share outputs meet (Sharing)
//
// grid (ceil(R / (8 * TILES)), blocks that share the work: stream_k.cuh), block (32 to 256, by K
// alone). is_kept: the block's share of x fits in shared memory. Blocks of the same outputs are
// neighbours, so more rows find the weights in the L2 cache. Sums are float32 and are rounded to T
// once, after bias, gate, residual or rotation. VECTOR: K is a multiple of the elements of 16 bytes.
//
// Budget of a linear layer with a norm, K 2,048, registers on sm_87. A block has 8 warps, and the
// registers leave room for two blocks of a multiprocessor. "Shared" is of a block with 8 or 16 rows.
// An H200 (228 KB) holds two of each, and an Orin (164 KB) two up to 81 KB: with one row a block takes
// 77 KB in 16 bits and 53 KB in int4. The limit is the memory, and for 9 to 16 rows of codes the
// issue of instructions.
//
//   weights  rows   registers  stages  shared KB  KB in flight, two blocks
//   16 bits  1-8    91         4       89         128
//   16 bits  9-16   95         3       81         96
//   int4     1-8    98         4       81         80
//   int4     9-16   122        3       87         60
//   Q4_K     1-8    127        4       85         88
//   Q4_K     9-16   127        3       90         66
//   int8     1-8    102        3       87         108
//   int8     9-16   114        2       77         72
#include "mie_cuda.cuh"
#include "quantized.cuh"
#include "weights.cuh"
#include "arrivals.cuh"
#include "few_rows.cuh"

template <typename S>
__device__ __forceinline__ Rows<typename S::T> rows_of(const typename S::T* x,
                                                       const typename S::T* norm, int num_rows,
                                                       int depth, float eps) {
  const int first = blockIdx.x * S::ROWS;
  return {x + (size_t)first * depth, norm, min(S::ROWS, num_rows - first), depth, eps};
}

// The bias of an output, and CHANGED: the change of a row, whose changes begin at `first`. A launch
// has up to 256 rows, so 32 bits count them.
template <bool CHANGED, typename T>
__device__ __forceinline__ float bias_of(const T* bias, int n, const float* changes, int first) {
  const float own = bias == nullptr ? 0.0f : to_float(bias[n]);
  if constexpr (CHANGED) return own + changes[first + n];
  return own;
}

// out [R, stride] = x . weight^T + bias, plus what is in `out` if is_added, in its first N columns.
template <typename T, typename C, int SPAN, bool OFFSETS, int BITS, int TILES, bool NORM,
          bool VECTOR, bool CHANGED = false>
__global__ void __launch_bounds__(32 * MAX_WARPS, BLOCKS<T, SPAN, OFFSETS, TILES>)
few_rows_linear(const T* __restrict__ x, const T* __restrict__ norm,
                const uint4* __restrict__ weight, const uint4* __restrict__ scales,
                const float* __restrict__ units, const T* __restrict__ bias,
                const float* __restrict__ changes, T* __restrict__ out, float* sums, int* arrived,
                int num_rows, int depth, int shift, int is_kept, int width, int stride,
                int is_added, float eps) {
  using S = ProductShape<T, C, SPAN, OFFSETS, BITS, TILES, NORM, VECTOR>;
  const Rows<T> rows = rows_of<S>(x, norm, num_rows, depth, eps);
  const int first_row = blockIdx.x * S::ROWS;
  T* block_out = out + (size_t)first_row * stride;
  multiply_rows<S>(
      rows, {weight, scales, units, depth, shift}, {sums, arrived}, is_kept != 0,
      (width + TILE - 1) / TILE, 1,
      [&](int tile) -> Outputs { return {tile * TILE, min(TILE, width - tile * TILE)}; },
      [&](auto get, int first, int count, int begin_row, int end_row) {
        const int outputs = count * TILE;
        for (int i = threadIdx.x; i < outputs * (end_row - begin_row); i += blockDim.x) {
          const int output = i % outputs, row = begin_row + i / outputs;
          const int n = first * TILE + output;
          if (n >= width) continue;
          T* to = block_out + (size_t)row * stride + n;
          const float sum =
              get(output, row) + bias_of<CHANGED>(bias, n, changes, (first_row + row) * stride);
          *to = from_float<T>(is_added ? sum + to_float(*to) : sum);
        }
      });
}

// out [R, F] = silu(gate) * up, where the matrix [2 F, K] gives gate, then up (activation.cuh).
// Tiles of gates and of their ups take turns. If the matrix is quantised, F is a multiple of 16.
template <typename T, typename C, int SPAN, bool OFFSETS, int BITS, int TILES, bool NORM,
          bool VECTOR, bool CHANGED = false>
__global__ void __launch_bounds__(32 * MAX_WARPS, BLOCKS<T, SPAN, OFFSETS, TILES>)
few_rows_gated(const T* __restrict__ x, const T* __restrict__ norm,
               const uint4* __restrict__ weight, const uint4* __restrict__ scales,
               const float* __restrict__ units, const T* __restrict__ bias,
               const float* __restrict__ changes, T* __restrict__ out, float* sums, int* arrived,
               int num_rows, int depth, int shift, int is_kept, int dim, float eps) {
  using S = ProductShape<T, C, SPAN, OFFSETS, BITS, TILES, NORM, VECTOR>;
  const Rows<T> rows = rows_of<S>(x, norm, num_rows, depth, eps);
  const int first_row = blockIdx.x * S::ROWS;
  T* block_out = out + (size_t)first_row * dim;
  multiply_rows<S>(
      rows, {weight, scales, units, depth, shift}, {sums, arrived}, is_kept != 0,
      2 * ((dim + TILE - 1) / TILE), 1,
      [&](int tile) -> Outputs {
        const int n = tile / 2 * TILE;
        return {n + tile % 2 * dim, min(TILE, dim - n)};
      },
      [&](auto get, int first, int count, int begin_row, int end_row) {
        const int gates = count / 2 * TILE;
        for (int i = threadIdx.x; i < gates * (end_row - begin_row); i += blockDim.x) {
          const int output = i % gates, row = begin_row + i / gates;
          const int n = first / 2 * TILE + output;
          if (n >= dim) continue;
          const int place = output / TILE * 2 * TILE + output % TILE;
          const int own = (first_row + row) * 2 * dim;
          const float gate = get(place, row) + bias_of<CHANGED>(bias, n, changes, own);
          const float up = get(place + TILE, row) + bias_of<CHANGED>(bias, dim + n, changes, own);
          block_out[(size_t)row * dim + n] = from_float<T>(gate / (1.0f + expf(-gate)) * up);
        }
      });
}

// Query, key and value heads from the matrix [(Hq + 2 Hkv) Dh, K]. Queries and keys are normalised
// over their heads with q_norm and k_norm [Dh], unless these are null, and rotated, and keys and
// values written to the cache, as in rope_write_kv.cu, which names the arguments. Tiles of a head's
// elements i and i + Dh/2 take turns, and `tiles` of them are a head, of which the last may be
// empty. `width` is that of the matrix, as a number because registers are scarce. If the matrix is quantised, Dh is a multiple of 32.
template <typename T, typename C, int SPAN, bool OFFSETS, int BITS, int TILES, bool NORM,
          bool VECTOR, bool CHANGED = false>
__global__ void __launch_bounds__(32 * MAX_WARPS, BLOCKS<T, SPAN, OFFSETS, TILES>)
few_rows_qkv(const T* __restrict__ x, const T* __restrict__ norm, const uint4* __restrict__ weight,
             const uint4* __restrict__ scales, const float* __restrict__ units,
             const T* __restrict__ bias, const float* __restrict__ changes,
             const T* __restrict__ q_norm, const T* __restrict__ k_norm,
             const float* __restrict__ table,
             const int* __restrict__ positions, const int* __restrict__ slots, T* __restrict__ q,
             T* __restrict__ kv, float* sums, int* arrived, int num_rows, int depth, int shift,
             int is_kept, int num_heads, int num_kv_heads, int head_dim, int tiles, int block_size,
             int width, float eps) {
  using S = ProductShape<T, C, SPAN, OFFSETS, BITS, TILES, NORM, VECTOR>;
  const Rows<T> rows = rows_of<S>(x, norm, num_rows, depth, eps);
  const int half = head_dim / 2, num_all = num_heads + 2 * num_kv_heads;
  const int meeting = k_norm == nullptr ? 1 : tiles / MT;  // output tiles of a whole head
  multiply_rows<S>(
      rows, {weight, scales, units, depth, shift}, {sums, arrived}, is_kept != 0,
      tiles * num_all, meeting,
      [&](int tile) -> Outputs {
        const int head = tile / tiles, i = tile % tiles / 2 * TILE;
        return {head * head_dim + i + tile % 2 * half, head < num_all ? min(TILE, half - i) : 0};
      },
      [&](auto get, int first, int count, int begin_row, int end_row) {
        // A warp takes the pairs of one head and row, as many as there are among these tiles.
        const int pairs = count / 2 * TILE, lane = threadIdx.x % 32;
        const int head = first / tiles, begin = first % tiles / 2 * TILE;
        const bool is_query = head < num_heads, is_value = head >= num_heads + num_kv_heads;
        if (head >= num_all) return;
        const T* weights = is_value ? nullptr : is_query ? q_norm : k_norm;
        for (int row = begin_row + threadIdx.x / 32; row < end_row; row += blockDim.x / 32) {
          const int token = blockIdx.x * S::ROWS + row;
          auto element = [&](int pair, int second) {
            const int output = pair / TILE * 2 * TILE + pair % TILE + second * TILE;
            const int n = head * head_dim + begin + pair + second * half;
            return get(output, row) + bias_of<CHANGED>(bias, n, changes, token * width);
          };
          float scale = 1.0f;
          if (weights != nullptr) {
            float squares = 0.0f;
            for (int pair = lane; pair < half; pair += 32)
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                const float value = element(pair, e);
                squares = __fmaf_rn(value, value, squares);
              }
            scale = 1.0f / sqrtf(warp_sum(squares) / head_dim + eps);
          }
          T* to = q + ((size_t)token * num_heads + head) * head_dim;
          if (!is_query) {
            const int slot = slots[token], h = head - num_heads;
            if (slot < 0) continue;
            const size_t tile = (size_t)(slot / block_size) * 2 * num_kv_heads + h;
            to = kv + (tile * block_size + slot % block_size) * head_dim;  // keys, then values
          }
          for (int pair = lane; pair < pairs && begin + pair < half; pair += 32) {
            const int i = begin + pair;
            float x0 = element(pair, 0), x1 = element(pair, 1);
            if (weights != nullptr) {
              x0 *= scale * to_float(weights[i]);
              x1 *= scale * to_float(weights[i + half]);
            }
            float y0 = x0, y1 = x1;
            if (!is_value) {
              const float* cosines = table + (size_t)positions[token] * head_dim;
              const float c = cosines[i], s = cosines[half + i];
              y0 = __fmaf_rn(-x1, s, __fmul_rn(x0, c));
              y1 = __fmaf_rn(x0, s, __fmul_rn(x1, c));
            }
            to[i] = from_float<T>(y0);
            to[i + half] = from_float<T>(y1);
          }
        }
      });
}
