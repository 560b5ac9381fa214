// Does the work of rope_write_kv.cu for a quantised cache. Keys and values become elements of one
// byte, with a scale for each head of each token, or codes of four bits (quantized.cuh).
//
//   kv      [N, 2, Hkv, B, Dh]  C      one layer of the cache; int4x8: [N, 2, Hkv, B, Dh / 8]
//   scales  [N, 2, Hkv, B]      float  its scales; int4x8: [N, 2, Hkv, B, groups]
//   the rest as in rope_write_kv.cu
//
// grid (T), block (warps): a warp takes a whole head, because a scale needs all of it. The
// rotation's float result is quantised directly, without rounding to T first.
#include "mie_cuda.cuh"
#include "quantized.cuh"

template <typename T, typename C>
__global__ void rope_quantize_kv(const T* __restrict__ qkv, const float* __restrict__ table,
                                 const int* __restrict__ positions, const int* __restrict__ slots,
                                 T* __restrict__ q, C* __restrict__ kv, float* __restrict__ scales,
                                 int num_heads, int num_kv_heads, int head_dim, int block_size) {
  constexpr int PAIRS = 4;  // maximum pairs of a lane: heads of up to 256
  const int token = blockIdx.x, half = head_dim / 2, slot = slots[token];
  const int lane = threadIdx.x % 32, num_all = num_heads + 2 * num_kv_heads;
  const float* cosines = table + (size_t)positions[token] * head_dim;
  const float* sines = cosines + half;

  for (int head = threadIdx.x / 32; head < num_all; head += blockDim.x / 32) {
    const bool is_query = head < num_heads, is_value = head >= num_heads + num_kv_heads;
    if (!is_query && slot < 0) continue;
    const T* from = qkv + ((size_t)token * num_all + head) * head_dim;
    float x[PAIRS][2];
    unsigned largest = 0;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      const int pair = i * 32 + lane;
      if (pair >= half) continue;
      const float x0 = to_float(from[pair]), x1 = to_float(from[pair + half]);
      const float c = cosines[pair], s = sines[pair];
      x[i][0] = is_value ? x0 : x0 * c - x1 * s;
      x[i][1] = is_value ? x1 : x1 * c + x0 * s;
#pragma unroll
      for (int e = 0; e < 2; ++e) largest = max(largest, __float_as_uint(fabsf(x[i][e])));
    }
    if (is_query) {
      T* to = q + ((size_t)token * num_heads + head) * head_dim;
#pragma unroll
      for (int i = 0; i < PAIRS; ++i) {
        const int pair = i * 32 + lane;
        if (pair >= half) continue;
        to[pair] = from_float<T>(x[i][0]);
        to[pair + half] = from_float<T>(x[i][1]);
      }
      continue;
    }
    const int kv_head = is_value ? head - num_heads - num_kv_heads : head - num_heads;
    const size_t tile = ((size_t)(slot / block_size) * 2 + is_value) * num_kv_heads + kv_head;
    const size_t row = tile * block_size + slot % block_size;
    if constexpr (IS_ROTATED<C>) {
      __shared__ float vectors[8][256];  // of each warp, because a lane has channels of two groups
      float* vector = vectors[threadIdx.x / 32];
      __syncwarp();  // all lanes are done with the last head
#pragma unroll
      for (int i = 0; i < PAIRS; ++i) {
        const int pair = i * 32 + lane;
        if (pair < half) vector[pair] = x[i][0], vector[pair + half] = x[i][1];
      }
      __syncwarp();
      quantize_groups(vector, head_dim, kv + row * (head_dim / 8),
                      scales + row * ((head_dim + CHANNELS - 1) / CHANNELS));
    } else {
#pragma unroll
      for (int offset = 16; offset > 0; offset >>= 1)
        largest = max(largest, __shfl_xor_sync(MIE_FULL_WARP, largest, offset));
      const float scale = scale_of<C>(largest);
      if (lane == 0) scales[row] = scale;
      C* to = kv + row * head_dim;
#pragma unroll
      for (int i = 0; i < PAIRS; ++i) {
        const int pair = i * 32 + lane;
        if (pair >= half) continue;
        to[pair] = quantize<C>(x[i][0], scale);
        to[pair + half] = quantize<C>(x[i][1], scale);
      }
    }
  }
}
