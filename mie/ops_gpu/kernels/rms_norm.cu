// Computes y = x / sqrt(mean(x^2) + eps) * weight over rows of D elements (Zhang and Sennrich,
// 2019).
//
// The mean of squares is summed in float32 for every T. The order of summation is fixed, so a row's
// result depends only on that row and on the block size.
#include "mie_cuda.cuh"

// The block's sum of `value`, in every thread. Use it once a kernel, because a second call would
// overwrite `partial` while slower warps still read it.
__device__ __forceinline__ float block_sum(float value) {
  __shared__ float partial[32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  value = warp_sum(value);
  if (lane == 0) partial[warp] = value;
  __syncthreads();
  // Every warp adds the partial sums up for itself, which is cheaper than a second barrier.
  value = lane < (int)blockDim.x / 32 ? partial[lane] : 0.0f;
  return warp_sum(value);
}

//   x, y      [R, stride] T    of which D columns are normalised; y may be x
//   weight    [D]         T
//   residual  [R, stride] T    added to the result; or null
// grid (R), block (a multiple of 32)
template <typename T>
__global__ void rms_norm(const T* x, const T* __restrict__ weight, const T* __restrict__ residual,
                         T* y, int dim, int stride, float eps) {
  const size_t first = (size_t)blockIdx.x * stride;
  const T* row = x + first;
  float squares = 0.0f;
  for (int i = threadIdx.x; i < dim; i += blockDim.x) {
    const float value = to_float(row[i]);
    squares += value * value;
  }
  const float scale = 1.0f / sqrtf(block_sum(squares) / dim + eps);
  for (int i = threadIdx.x; i < dim; i += blockDim.x) {  // the second read comes from the L1 cache
    const float value = to_float(row[i]) * scale * to_float(weight[i]);
    y[first + i] =
        from_float<T>(residual == nullptr ? value : value + to_float(residual[first + i]));
  }
}

// Normalises single heads in place (Qwen3): heads first ... first + count - 1 of every token.
//
//   qkv     [T, H, Dh] T
//   weight  [Dh]       T
// grid (ceil(T * count / warps)), block (32 * warps): a warp normalises one head. A lane reads and
// writes the same elements, so working in place is safe.
template <typename T>
__global__ void head_norm(T* __restrict__ qkv, const T* __restrict__ weight, int num_tokens,
                          int num_heads, int first, int count, int head_dim, float eps) {
  const int index = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (index >= num_tokens * count) return;  // the whole warp leaves
  const int token = index / count, head = first + index % count;
  T* row = qkv + ((size_t)token * num_heads + head) * head_dim;
  float squares = 0.0f;
  for (int i = lane; i < head_dim; i += 32) {
    const float value = to_float(row[i]);
    squares += value * value;
  }
  const float scale = 1.0f / sqrtf(warp_sum(squares) / head_dim + eps);
  for (int i = lane; i < head_dim; i += 32)
    row[i] = from_float<T>(to_float(row[i]) * scale * to_float(weight[i]));
}

// Normalises groups of channels of a recurrence's result, times silu(gate). With gates_first the
// gate multiplies what is normalised (Mamba 2), else the result (Gated DeltaNet).
//
//   x, gate, y  [T, K] T
//   weight      [size] T for each group, or [K] for all
// grid (T, K / size), block (a multiple of 32)
template <typename T>
__global__ void gated_norm(const T* __restrict__ x, const T* __restrict__ gate,
                           const T* __restrict__ weight, T* __restrict__ y, int size,
                           int weight_size, float eps, int gates_first) {
  const size_t first = ((size_t)blockIdx.x * gridDim.y + blockIdx.y) * size;
  const T* weights = weight + (weight_size == size ? 0 : blockIdx.y * size);
  auto silu = [&](int i) {
    const float z = to_float(gate[first + i]);
    return z / (1.0f + expf(-z));
  };
  auto value = [&](int i) { return to_float(x[first + i]) * (gates_first ? silu(i) : 1.0f); };
  float squares = 0.0f;
  for (int i = threadIdx.x; i < size; i += blockDim.x) squares += value(i) * value(i);
  const float scale = 1.0f / sqrtf(block_sum(squares) / size + eps);
  for (int i = threadIdx.x; i < size; i += blockDim.x) {
    const float normed = value(i) * scale * to_float(weights[i]);
    y[first + i] = from_float<T>(gates_first ? normed : normed * silu(i));
  }
}
