// Rotates queries and keys by position and writes keys and values into the paged cache, reading a
// token's qkv row once.
//
//   qkv    [T, Hq + 2 Hkv, Dh]    T      query heads, key heads, value heads
//   table  [P, 2, Dh/2]           float  cosines and sines of every position, for every T
//   positions, slots  [T]         int32  block_id * B + offset; a negative one is not written
//   q      [T, Hq, Dh]            T      out: the rotated queries
//   kv     [N, 2, Hkv, B, Dh]     T      one layer of the cache
//
// grid (T), block (any). The pair (x[i], x[i + Dh/2]) turns by one angle, as Hugging Face stores q
// and k. Two tokens never share a slot, so blocks do not conflict.
#include "mie_cuda.cuh"

template <typename T>
__global__ void rope_write_kv(const T* __restrict__ qkv, const float* __restrict__ table,
                              const int* __restrict__ positions, const int* __restrict__ slots,
                              T* __restrict__ q, T* __restrict__ kv, int num_heads,
                              int num_kv_heads, int head_dim, int block_size) {
  const int token = blockIdx.x, half = head_dim / 2, slot = slots[token];
  const T* heads = qkv + (size_t)token * (num_heads + 2 * num_kv_heads) * head_dim;
  const float* cosines = table + (size_t)positions[token] * head_dim;
  const float* sines = cosines + half;

  // The place of this token's KV head h in the cache, in plane 0 (keys) or 1 (values).
  auto cached = [&](int plane, int h) {
    const size_t tile = ((size_t)(slot / block_size) * 2 + plane) * num_kv_heads + h;
    return kv + (tile * block_size + slot % block_size) * head_dim;
  };

  for (int i = threadIdx.x; i < (num_heads + num_kv_heads) * half; i += blockDim.x) {
    const int head = i / half, pair = i % half;
    const float x0 = to_float(heads[head * head_dim + pair]);
    const float x1 = to_float(heads[head * head_dim + pair + half]);
    const float c = cosines[pair], s = sines[pair];
    if (head >= num_heads && slot < 0) continue;
    T* to = head < num_heads ? q + ((size_t)token * num_heads + head) * head_dim
                             : cached(0, head - num_heads);
    to[pair] = from_float<T>(x0 * c - x1 * s);
    to[pair + half] = from_float<T>(x1 * c + x0 * s);
  }
  if (slot < 0) return;
  const T* values = heads + (num_heads + num_kv_heads) * head_dim;
  for (int i = threadIdx.x; i < num_kv_heads * head_dim; i += blockDim.x)
    cached(1, i / head_dim)[i % head_dim] = values[i];
}
