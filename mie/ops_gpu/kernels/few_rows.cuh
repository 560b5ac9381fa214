// Products of a few rows with a matrix: y[r, n] = sum over k of x[r, k] * weight[n, k]. Included
// after mie_cuda.cuh. few_rows.cu has the kernels.
//
// With few rows a product waits for its weights. Each is read once, 16 bytes a load, straight into
// the registers of a tensor core's first operand. A block computes 16 outputs of up to 16 rows:
//
//   outputs [16, rows]  =  weights [16, K] . x^T [K, rows]
//
// The weights are on the product's long side, and eight rows cost as much as one. A lane loads
// eight consecutive weights of the outputs g and g + 8, and the same eight places of row g of x.
// The product sums over its places in any order, so they need not be those that mma names.
//
// The 16 outputs are eight pairs, and a lane holds both of a pair. Which outputs make a pair is the
// kernel's choice: neighbours, a gate and its up, or the two elements of a head that RoPE rotates.
//
// The order of a sum depends on K alone, and so does the number of warps. A warp adds its stretches
// of K in order (they take turns), and then the warps' sums are added in order. A row's bits depend
// neither on the number of rows nor on its place among them.
//
// Integer weights can take the place of the 16-bit ones: a lane would load 16 or 32 neighbours
// instead of eight and widen them in registers, as decode_mma.cuh does.
#pragma once

constexpr int MAX_WARPS = 8, FEW_ROWS = 16, PAIRS = 8;

// Loads of a lane in flight for each output. Odd rows and float32 lack registers for more than one.
template <typename T, bool VECTOR>
constexpr int AT_ONCE = VECTOR && sizeof(T) == 2 ? 4 : 1;

// 16 bytes of a row from element k on, with zeros past its end. VECTOR: the row begins at a
// multiple of 16 bytes, and `depth` is a multiple of the elements.
template <typename T, bool VECTOR>
__device__ __forceinline__ uint4 load16(const T* __restrict__ row, int k, int depth) {
  if constexpr (VECTOR) {
    return k < depth ? *reinterpret_cast<const uint4*>(row + k) : make_uint4(0, 0, 0, 0);
  } else {
    constexpr int COUNT = 16 / sizeof(T);
    uint4 raw = make_uint4(0, 0, 0, 0);
    T* elements = reinterpret_cast<T*>(&raw);
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
      if (k + i < depth) elements[i] = row[k + i];
    return raw;
  }
}

// Elements normalised and rounded to T, as rms_norm rounds them.
template <typename T>
__device__ __forceinline__ uint4 normalised(uint4 x, uint4 norm, float scale) {
  constexpr int COUNT = 16 / sizeof(T);
  T* elements = reinterpret_cast<T*>(&x);
  const T* weights = reinterpret_cast<const T*>(&norm);
#pragma unroll
  for (int i = 0; i < COUNT; ++i)
    elements[i] = from_float<T>(to_float(elements[i]) * scale * to_float(weights[i]));
  return x;
}

// The rows of x that a block multiplies, and how they are normalised first (norm null: not at all).
template <typename T>
struct Rows {
  const T* x;     // [rows, depth]
  const T* norm;  // [depth]
  int count, depth;
};

// The sums of a warp's share of K, for TILES of eight rows. WARP_SLICES partial sums of each output
// and row go to shared memory, as partial[slice][2][PAIRS][row].
template <typename T, int TILES>
struct Products {  // 16-bit elements, on tensor cores
  static constexpr int CHUNK = 32;      // elements of K that a warp takes at a time
  static constexpr int WARP_SLICES = 1;  // of each warp
  float acc[TILES][4] = {};

  // Adds the products with the weights `low` and `high` of this lane's pair, from element k on.
  template <bool NORM, bool VECTOR>
  __device__ __forceinline__ void add(uint4 low, uint4 high, const Rows<T>& rows,
                                      const float* scales, int k) {
    const int g = threadIdx.x % 32 / 4;
    const unsigned a[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
    uint4 norm = make_uint4(0, 0, 0, 0);
    if constexpr (NORM) norm = load16<T, VECTOR>(rows.norm, k, rows.depth);
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      const int row = tile * 8 + g;
      uint4 x = make_uint4(0, 0, 0, 0);
      if (row < rows.count) {
        x = load16<T, VECTOR>(rows.x + (size_t)row * rows.depth, k, rows.depth);
        if constexpr (NORM) x = normalised<T>(x, norm, scales[row]);
      }
      const unsigned b[2][2] = {{x.x, x.y}, {x.z, x.w}};
      mma_m16n8k16<T>(acc[tile], a[0], b[0]);
      mma_m16n8k16<T>(acc[tile], a[1], b[1]);
    }
  }

  __device__ __forceinline__ void store(float (*partial)[2][PAIRS][FEW_ROWS]) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        partial[warp][e / 2][g][tile * 8 + 2 * t + e % 2] = acc[tile][e];
  }
};

template <int TILES>
struct Products<float, TILES> {  // the same places in float32, which tensor cores would round
  static constexpr int CHUNK = 16, WARP_SLICES = 4;
  float acc[8 * TILES][2] = {};

  template <bool NORM, bool VECTOR>
  __device__ __forceinline__ void add(uint4 low, uint4 high, const Rows<float>& rows,
                                      const float* scales, int k) {
    const float* weights[2] = {reinterpret_cast<const float*>(&low),
                               reinterpret_cast<const float*>(&high)};
    uint4 norm = make_uint4(0, 0, 0, 0);
    if constexpr (NORM) norm = load16<float, VECTOR>(rows.norm, k, rows.depth);
#pragma unroll
    for (int row = 0; row < 8 * TILES; ++row) {
      if (row >= rows.count) continue;
      uint4 raw = load16<float, VECTOR>(rows.x + (size_t)row * rows.depth, k, rows.depth);
      if constexpr (NORM) raw = normalised<float>(raw, norm, scales[row]);
      const float* x = reinterpret_cast<const float*>(&raw);
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e) acc[row][e] = __fmaf_rn(weights[e][i], x[i], acc[row][e]);
    }
  }

  __device__ __forceinline__ void store(float (*partial)[2][PAIRS][FEW_ROWS]) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int row = 0; row < 8 * TILES; ++row)
#pragma unroll
      for (int e = 0; e < 2; ++e) partial[warp * 4 + t][e][g][row] = acc[row][e];
  }
};

// 1 / sqrt(mean(x^2) + eps) of each row. A warp takes a whole row.
template <typename T, bool VECTOR>
__device__ __forceinline__ void norm_scales(const Rows<T>& rows, float eps, float* scales) {
  constexpr int COUNT = 16 / sizeof(T);
  const int lane = threadIdx.x % 32;
  for (int row = threadIdx.x / 32; row < rows.count; row += blockDim.x / 32) {
    float squares = 0.0f;
#pragma unroll 4
    for (int k = lane * COUNT; k < rows.depth; k += 32 * COUNT) {
      const uint4 raw =
          load16<T, VECTOR>(rows.x + (size_t)row * rows.depth, k, rows.depth);
      const T* elements = reinterpret_cast<const T*>(&raw);
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        const float value = to_float(elements[i]);
        squares = __fmaf_rn(value, value, squares);
      }
    }
    squares = warp_sum(squares);
    if (lane == 0) scales[row] = 1.0f / sqrtf(squares / rows.depth + eps);
  }
}

// Where the outputs of a pair are: `span` pairs after one another, then their second outputs.
//
//   8        outputs n and n + 8 of every 16
//   N / 2    outputs n and n + N / 2
//   Dh / 2   elements i and i + Dh / 2 of every head
struct Pair {
  int low, high;
};
__device__ __forceinline__ Pair pair_of(int index, int span) {
  const int low = index / span * 2 * span + index % span;
  return {low, low + span};
}

// Multiplies the block's rows with the outputs of its pairs, which begin at pair blockIdx.y *
// PAIRS, and calls finish(pair, row, sum of its first output, sum of its second) for each. Outputs
// at or past `width` have arbitrary sums. Every thread of the block calls, once a kernel.
template <typename T, int TILES, bool NORM, bool VECTOR, typename Finish>
__device__ __forceinline__ void multiply_rows(const Rows<T>& rows, const T* __restrict__ weight,
                                              int width, int span, float eps, Finish finish) {
  constexpr int CHUNK = Products<T, TILES>::CHUNK, SLICES = Products<T, TILES>::WARP_SLICES;
  constexpr int LOADS = AT_ONCE<T, VECTOR>, STRETCH = LOADS * CHUNK;
  __shared__ float partial[SLICES * MAX_WARPS][2][PAIRS][FEW_ROWS], scales[FEW_ROWS];
  const int num_warps = blockDim.x / 32, warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const Pair mine = pair_of(blockIdx.y * PAIRS + g, span);
  const T* low_row = weight + (size_t)mine.low * rows.depth;
  const T* high_row = weight + (size_t)mine.high * rows.depth;

  uint4 low[LOADS], high[LOADS];
  auto fetch = [&](int first) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int k = first + i * CHUNK + t * (CHUNK / 4);
      low[i] = load16<T, VECTOR>(low_row, k, mine.low < width ? rows.depth : 0);
      high[i] = load16<T, VECTOR>(high_row, k, mine.high < width ? rows.depth : 0);
    }
  };
  int first = warp * STRETCH;
  fetch(first);  // the weights are on their way while the rows are normalised
  if constexpr (NORM) {
    norm_scales<T, VECTOR>(rows, eps, scales);
    __syncthreads();
  }
  Products<T, TILES> products;
  while (first < rows.depth) {  // the same for all lanes
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
      products.template add<NORM, VECTOR>(low[i], high[i], rows, scales,
                                          first + i * CHUNK + t * (CHUNK / 4));
    first += num_warps * STRETCH;
    fetch(first);
  }
  products.store(partial);
  __syncthreads();
  for (int i = threadIdx.x; i < PAIRS * rows.count; i += blockDim.x) {
    const int pair = i % PAIRS, row = i / PAIRS;
    float sum[2] = {};
#pragma unroll 8
    for (int slice = 0; slice < num_warps * SLICES; ++slice)
#pragma unroll
      for (int e = 0; e < 2; ++e) sum[e] += partial[slice][e][pair][row];
    finish(blockIdx.y * PAIRS + pair, row, sum[0], sum[1]);
  }
}
