// Gathers rows of a matrix by index: the embeddings of tokens, or the rows whose logits are wanted.
//
//   table  [V, D] T
//   rows   [R]    int32
//   out    [R, D] T
//
// grid (R), block (any). Rows are copied bit for bit, 16 bytes at a time if a row is a multiple of
// that.
#include "mie_cuda.cuh"

template <typename T>
__global__ void gather_rows(const T* __restrict__ table, const int* __restrict__ rows,
                            T* __restrict__ out, int dim) {
  constexpr int VECTOR = 16 / sizeof(T);
  const T* source = table + (size_t)rows[blockIdx.x] * dim;
  T* target = out + (size_t)blockIdx.x * dim;
  if (dim % VECTOR == 0) {
    const uint4* from = reinterpret_cast<const uint4*>(source);
    uint4* to = reinterpret_cast<uint4*>(target);
    for (int i = threadIdx.x; i < dim / VECTOR; i += blockDim.x) to[i] = from[i];
  } else {
    for (int i = threadIdx.x; i < dim; i += blockDim.x) target[i] = source[i];
  }
}

// Multiplies embeddings x [count] by a number, in place.
//
// grid (ceil(count / block)), block (any)
template <typename T>
__global__ void scale_rows(T* __restrict__ x, int count, float scale) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) x[i] = from_float<T>(to_float(x[i]) * scale);
}
