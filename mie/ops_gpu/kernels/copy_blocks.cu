// Copies whole blocks of one layer of the cache: from block to block (copy-on-write), to a staging
// buffer (swap out), and from it (swap in). A block is 2 * Hkv * B * Dh contiguous elements, keys
// and values, so it is copied without knowing its shape.
//
//   cache    [N, elements] T
//   staging  [C, stride]   T    whose rows begin with the elements
//   src, dst, ids  [C] int32
//
// grid (C, any), block (any): y blocks share one copy. No destination may be named twice. In
// `copy_blocks` no destination may be a source, because the copies of one launch run in no order.
#include "mie_cuda.cuh"

// Copies 16 bytes at a time if a block is a multiple of that, as for any head of 8 elements.
template <typename T>
__device__ __forceinline__ void copy_block(const T* source, T* target, int elements) {
  constexpr int VECTOR = 16 / sizeof(T);
  const int first = blockIdx.y * blockDim.x + threadIdx.x, step = gridDim.y * blockDim.x;
  if (elements % VECTOR == 0) {
    const uint4* from = reinterpret_cast<const uint4*>(source);
    uint4* to = reinterpret_cast<uint4*>(target);
    for (int i = first; i < elements / VECTOR; i += step) to[i] = from[i];
  } else {
    for (int i = first; i < elements; i += step) target[i] = source[i];
  }
}

template <typename T>
__global__ void copy_blocks(T* cache, const int* __restrict__ src, const int* __restrict__ dst,
                            int elements) {
  copy_block(cache + (size_t)src[blockIdx.x] * elements,
             cache + (size_t)dst[blockIdx.x] * elements, elements);
}

template <typename T>
__global__ void gather_blocks(const T* __restrict__ cache, const int* __restrict__ ids,
                              T* __restrict__ staging, int elements, int stride) {
  copy_block(cache + (size_t)ids[blockIdx.x] * elements, staging + (size_t)blockIdx.x * stride,
             elements);
}

template <typename T>
__global__ void scatter_blocks(const T* __restrict__ staging, const int* __restrict__ ids,
                               T* __restrict__ cache, int elements, int stride) {
  copy_block(staging + (size_t)blockIdx.x * stride, cache + (size_t)ids[blockIdx.x] * elements,
             elements);
}
