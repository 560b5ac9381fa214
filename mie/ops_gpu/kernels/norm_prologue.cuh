// The rows of x before they are multiplied: measured, normalised, and raised into the range of f16.
// Included after weight_ring.cuh.
//
// All warps measure each row, after the block has requested its first weights. If the block's share
// of x fits in shared memory, it is normalised there once. Else a warp normalises its part of each
// stage.
#pragma once

// For each row its 1 / sqrt(mean(x^2) + eps), and the power of two that brings its normalised
// numbers into the range of f16. `partial` has 2 * ROWS floats for each warp. All threads call.
template <typename S>
__device__ __forceinline__ void measure(const Rows<typename S::T>& rows, float* partial,
                                        float* scales, float* powers) {
  using T = typename S::T;
  constexpr int AT_ONCE = 4;  // rows, so that as many loads of a thread are in flight
  const int warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
  for (int first = 0; first < rows.count; first += AT_ONCE) {
    float squares[AT_ONCE] = {}, largest[AT_ONCE] = {};
    for (int k = threadIdx.x * S::COUNT; k < rows.depth; k += blockDim.x * S::COUNT) {
      uint4 norm = make_uint4(0, 0, 0, 0);
      if constexpr (S::NORM && S::RAISED) norm = load16<T, S::VECTOR>(rows.norm, k, rows.depth);
      const T* weights = reinterpret_cast<const T*>(&norm);
#pragma unroll
      for (int r = 0; r < AT_ONCE; ++r) {
        if (first + r >= rows.count) break;
        const T* row = rows.x + (size_t)(first + r) * rows.depth;
        const uint4 raw = load16<T, S::VECTOR>(row, k, rows.depth);
        const T* elements = reinterpret_cast<const T*>(&raw);
#pragma unroll
        for (int i = 0; i < S::COUNT; ++i) {
          const float value = to_float(elements[i]);
          if constexpr (S::NORM) squares[r] = __fmaf_rn(value, value, squares[r]);
          if constexpr (S::RAISED)
            largest[r] = fmaxf(largest[r], fabsf(S::NORM ? value * to_float(weights[i]) : value));
        }
      }
    }
#pragma unroll
    for (int r = 0; r < AT_ONCE; ++r) {
      if (first + r >= rows.count) break;
      float* to = partial + warp * 2 * S::ROWS + first + r;
      const float sum = S::NORM ? warp_sum(squares[r]) : 0.0f;
      const float top = S::RAISED ? warp_max(largest[r]) : 0.0f;
      if (threadIdx.x % 32 == 0) to[0] = sum, to[S::ROWS] = top;
    }
  }
  __syncthreads();
  for (int row = threadIdx.x; row < S::ROWS; row += blockDim.x) {
    float sum = 0.0f, top = 0.0f, scale = 1.0f;
    if (row < rows.count)
      for (int w = 0; w < num_warps; ++w) {
        sum += partial[w * 2 * S::ROWS + row];
        top = fmaxf(top, partial[(w * 2 + 1) * S::ROWS + row]);
      }
    if constexpr (S::NORM) scale = 1.0f / sqrtf(sum / rows.depth + rows.eps);
    scales[row] = scale;
    // Twice as much, because the products are rounded in another order in `finished`.
    powers[row] = S::RAISED && row < rows.count ? power_for_f16(2.0f * scale * top) : 1.0f;
  }
  __syncthreads();
}

// Elements normalised and rounded to T, as rms_norm rounds them, then raised.
template <typename S>
__device__ __forceinline__ uint4 finished(uint4 x, uint4 norm, float scale, float power) {
  using T = typename S::T;
  if constexpr (S::NORM) {
    T* elements = reinterpret_cast<T*>(&x);
    const T* weights = reinterpret_cast<const T*>(&norm);
#pragma unroll
    for (int i = 0; i < S::COUNT; ++i)
      elements[i] = from_float<T>(to_float(elements[i]) * scale * to_float(weights[i]));
  }
  if constexpr (S::RAISED)
    x = make_uint4(raise<T>(x.x, power), raise<T>(x.y, power), raise<T>(x.z, power),
                   raise<T>(x.w, power));
  return x;
}

// Puts the warp's inputs of `num_slices` iterations from `first` on into shared memory, finished.
// They come one after the other, and go round at the end of K.
template <typename S>
__device__ __forceinline__ void keep_x(const Rows<typename S::T>& rows, const Schedule& schedule,
                                       unsigned char* x, int first, int num_slices,
                                       const float* scales, const float* powers) {
  using T = typename S::T;
  const int block_k = blockDim.x / 32 * S::INPUTS, of_slice = rows.count * S::ROW_VECTORS;
  for (int i = threadIdx.x % 32; i < num_slices * of_slice; i += 32) {
    const int vector = i % S::ROW_VECTORS, row = i / S::ROW_VECTORS % rows.count;
    const int slice = i / of_slice;
    const int k = (first + slice) % schedule.num_slices * block_k +
                  threadIdx.x / 32 * S::INPUTS + vector * S::COUNT;
    uint4 norm = make_uint4(0, 0, 0, 0);
    if constexpr (S::NORM) norm = load16<T, S::VECTOR>(rows.norm, k, rows.depth);
    const T* from = rows.x + (size_t)row * rows.depth;
    const uint4 raw = load16<T, S::VECTOR>(from, k, rows.depth);
    unsigned char* to = x + slice * of_slice * 16 + place_in_x<S>(row, vector, rows.count);
    *reinterpret_cast<uint4*>(to) =
        S::FINISHED ? finished<S>(raw, norm, scales[row], powers[row]) : raw;
  }
}

// Finishes the inputs of a stage from input k on. A lane finishes the vectors that it has copied.
template <typename S>
__device__ __forceinline__ void finish_x(const Rows<typename S::T>& rows, unsigned char* x, int k,
                                         const float* scales, const float* powers) {
  using T = typename S::T;
  if constexpr (S::FINISHED)
    for (int i = threadIdx.x % 32; i < rows.count * S::ROW_VECTORS; i += 32) {
      const int row = i / S::ROW_VECTORS, vector = i % S::ROW_VECTORS;
      uint4 norm = make_uint4(0, 0, 0, 0);
      if constexpr (S::NORM)
        norm = load16<T, S::VECTOR>(rows.norm, k + vector * S::COUNT, rows.depth);
      uint4* at = reinterpret_cast<uint4*>(x + place_in_x<S>(row, vector, rows.count));
      *at = finished<S>(*at, norm, scales[row], powers[row]);
    }
}
