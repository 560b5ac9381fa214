// The causal convolution of layers with a state (mie/ops/layers/recurrent.py): each channel's last W
// inputs, weighted and summed from the oldest to the newest.
//
//   x         [T, C], gated [T, 3 C]   T      the inputs; gated: b, c and x, whose inputs are b x
//   weight    [W, C]                   T      the last row is for the token itself
//   bias      [C]                      T      or null
//   columns   [N, W - 1, C]            float  the inputs before a sequence's next token
//   cu_seqlens [S + 1], slots, fresh [S]  int32  a fresh sequence begins with zeros; one with a
//                                             negative slot is padding, and keeps nothing
//   out       [T, C]                   T      SiLU of the sums, gated: c times the sums
//
// grid (ceil(C / block), S, tiles), block (any). A thread computes a channel of one sequence, for
// the tokens of a tile. If all of them are one tile, it also keeps the last inputs. Else
// keep_columns does so afterwards, because the first tile reads those that it replaces. Products
// and sums are the same in every tile, so no chunk changes a bit.
#include "mie_cuda.cuh"

template <typename T, int W>
struct Inputs {
  const T* x;      // the sequence's first
  float* columns;  // this channel's in the slot; null without a state
  bool is_fresh, is_gated;
  int channels;

  __device__ __forceinline__ Inputs(const T* x, float* columns, const int* cu_seqlens,
                                    const int* slots, const int* fresh, int channel, int channels,
                                    int is_gated)
      : is_gated(is_gated), channels(channels) {
    const int sequence = blockIdx.y, slot = slots[sequence];
    this->x = x + (size_t)cu_seqlens[sequence] * (is_gated ? 3 * channels : channels) + channel;
    this->columns = slot < 0 ? nullptr : columns + (size_t)slot * (W - 1) * channels + channel;
    is_fresh = fresh[sequence] != 0;
  }
  // The input of token t, counted from the first of this step.
  __device__ __forceinline__ float operator[](int t) const {
    if (t < 0) return columns == nullptr || is_fresh ? 0.0f : columns[(W - 1 + t) * channels];
    if (!is_gated) return to_float(x[(size_t)t * channels]);
    const T* row = x + (size_t)t * 3 * channels;
    return to_float(row[0]) * to_float(row[2 * channels]);
  }
};

template <typename T, int W>
__global__ void causal_conv(const T* __restrict__ x, const T* __restrict__ weight,
                            const T* __restrict__ bias, float* columns,
                            const int* __restrict__ cu_seqlens, const int* __restrict__ slots,
                            const int* __restrict__ fresh, T* __restrict__ out, int channels,
                            int tile_tokens, int is_gated) {
  const int channel = blockIdx.x * blockDim.x + threadIdx.x;
  if (channel >= channels) return;
  const Inputs<T, W> input(x, columns, cu_seqlens, slots, fresh, channel, channels, is_gated);
  const int first = cu_seqlens[blockIdx.y], count = cu_seqlens[blockIdx.y + 1] - first;
  const int begin = blockIdx.z * tile_tokens, end = min(begin + tile_tokens, count);
  if (begin >= end) return;  // the grid is sized for the longest sequence
  float weights[W], last[W];
#pragma unroll
  for (int j = 0; j < W; ++j) weights[j] = to_float(weight[j * channels + channel]);
#pragma unroll
  for (int j = 1; j < W; ++j) last[j] = input[begin - W + j];
  for (int t = begin; t < end; ++t) {
#pragma unroll
    for (int j = 1; j < W; ++j) last[j - 1] = last[j];
    last[W - 1] = input[t];
    float sum = __fmul_rn(last[0], weights[0]);
#pragma unroll
    for (int j = 1; j < W; ++j) sum = __fmaf_rn(last[j], weights[j], sum);
    if (bias != nullptr) sum += to_float(bias[channel]);
    const size_t token = first + t;
    if (is_gated)
      sum *= to_float(x[(token * 3 + 1) * channels + channel]);
    else
      sum /= 1.0f + expf(-sum);
    out[token * channels + channel] = from_float<T>(sum);
  }
  if (gridDim.z > 1 || input.columns == nullptr) return;
#pragma unroll
  for (int j = 1; j < W; ++j) input.columns[(j - 1) * channels] = last[j];
}

// grid (ceil(C / block), S), block (any)
template <typename T, int W>
__global__ void keep_columns(const T* __restrict__ x, float* columns,
                             const int* __restrict__ cu_seqlens, const int* __restrict__ slots,
                             const int* __restrict__ fresh, int channels, int is_gated) {
  const int channel = blockIdx.x * blockDim.x + threadIdx.x;
  if (channel >= channels) return;
  const Inputs<T, W> input(x, columns, cu_seqlens, slots, fresh, channel, channels, is_gated);
  if (input.columns == nullptr) return;
  const int count = cu_seqlens[blockIdx.y + 1] - cu_seqlens[blockIdx.y];
  float last[W];  // all are read before one is written
#pragma unroll
  for (int j = 1; j < W; ++j) last[j] = input[count - W + j];
#pragma unroll
  for (int j = 1; j < W; ++j) input.columns[(j - 1) * channels] = last[j];
}
