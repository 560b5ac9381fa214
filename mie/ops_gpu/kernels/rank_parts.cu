// Moves the results of ranks between their own arrays and the array that a gather fills.
//
// A gather concatenates the ranks' buffers, parts [N, T, P]. Rank p of N has the columns from
// floor(p W / N) to floor((p + 1) W / N) of a whole result [T, W], and P is the largest number of
// columns of a rank. Elements are copied bit for bit, except where a result is added.
#include "mie_cuda.cuh"

// Copies columns: out[t, to + c] = x[t, from + c], for c < width.
//
//   x    [T, x_width] T
//   out  [T, out_width] T
//
// grid (T, ceil(width / block)), block (any).
template <typename T>
__global__ void copy_columns(const T* __restrict__ x, T* __restrict__ out, int x_width, int from,
                             int out_width, int to, int width) {
  const int c = blockIdx.y * blockDim.x + threadIdx.x;
  const size_t t = blockIdx.x;
  if (c < width) out[t * out_width + to + c] = x[t * x_width + from + c];
}

// Puts the parts of a gather side by side: out [T, width] = parts, or out += parts.
//
// There are num_parts different parts. Part p is the buffer of rank p * step, because ranks that
// share a head have equal parts.
//
// grid (T, ceil(width / block)), block (any).
template <typename T>
__global__ void take_parts(const T* __restrict__ parts, T* __restrict__ out, int width,
                           int part_width, int num_parts, int step, int is_added) {
  const int c = blockIdx.y * blockDim.x + threadIdx.x;
  if (c >= width) return;
  const int p = ((c + 1) * num_parts - 1) / width, first = p * width / num_parts;
  const size_t row = (size_t)p * step * gridDim.x + blockIdx.x;
  const T value = parts[row * part_width + c - first];
  T* target = out + (size_t)blockIdx.x * width + c;
  *target = is_added ? from_float<T>(to_float(*target) + to_float(value)) : value;
}

// Takes the embedding of each token from the rank that has the token's row of the table.
//
//   parts      [N, T, D] T
//   token_ids  [T] int32
//   out        [T, D] T
//
// grid (T), block (any).
template <typename T>
__global__ void pick_rows(const T* __restrict__ parts, const int* __restrict__ token_ids,
                          T* __restrict__ out, int dim, int vocab_size, int num_ranks) {
  const int rank = ((token_ids[blockIdx.x] + 1) * num_ranks - 1) / vocab_size;
  const T* source = parts + ((size_t)rank * gridDim.x + blockIdx.x) * dim;
  T* target = out + (size_t)blockIdx.x * dim;
  for (int i = threadIdx.x; i < dim; i += blockDim.x) target[i] = source[i];
}

// Finds each token's row in a rank's part of the table, rows first to last. Others take row 0.
//
// grid (ceil(T / block)), block (any).
__global__ void own_rows(const int* __restrict__ token_ids, int* __restrict__ rows, int num_tokens,
                         int first, int last) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= num_tokens) return;
  const int id = token_ids[i];
  rows[i] = first <= id && id < last ? id - first : 0;
}
