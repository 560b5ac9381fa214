// Products of 17 rows and more with a quantised matrix, on its codes (weights.cuh):
//
//   out[r, n] = sum over k of x[r, k] * w[n, k], plus bias[n], plus out[r, n] if is_added
//
//   x              [R, K]  T      f16 or bf16, K a multiple of 8
//   weight                 C      the codes of a quantised matrix [N, K]
//   scales, units                 of the matrix
//   bias           [N]     T      or null
//   out       [R, stride]  T      its first N columns, rounded once
//   sums, arrived                 float, int32: where blocks that share K meet, or null
//
//   block tile     128 outputs x 8 * NT rows: 8 warps, 4 along the outputs and 2 along K
//   warp tile      32 outputs x 8 * NT rows: 2 x NT products m16n8k16 for 16 inputs
//   stage          two units of 64 inputs, one for each half of the warps. A unit is eight tiles of
//                  16 outputs, with their scales, and the rows of x
//   pipeline       STAGES stages by cp.async, of which all but one are in flight; one barrier a stage
//   grid           (groups of rows, groups of 128 outputs, splits of K), block (256)
//
// Codes are widened in registers, once for all rows of the block. They become f16 or bf16 exactly,
// as x is, so no row is brought into another range. The sum over a span of inputs with one scale is
// multiplied by it in float32. An offset counts times the sum of x, which is one more product, with
// ones. At the end each half of the warps gets half of the rows, and adds the other half's sums.
//
// Budget, int4 in groups of 32 on sm_90 (NVRTC 13.4), for 64 rows and for 32:
//   registers      234 and 128 a thread, one block and two a multiprocessor
//   stage          26 KB and 18 KB, six of which are a block's shared memory on an H200
//   in flight      130 KB and 180 KB a multiprocessor, of which 50 KB and 100 KB are weights
//   instructions   51 and 39 of a warp for 16 outputs and 16 inputs, with copies
// Expected limit: the issue of instructions. The weights alone would take half as long.
//
// The order of a sum depends on K and on the number of splits, and both on the matrix and the chip.
// A warp adds every second unit of its split in order. Then the two halves are added, and then the
// splits in order. So a row has the same bits in blocks of 32 and of 64 rows, at any place among
// any others.
#include "mie_cuda.cuh"
#include "quantized.cuh"
#include "weights.cuh"
#include "arrivals.cuh"

constexpr int OUTPUT_WARPS = 4, K_WARPS = 2, WARPS = OUTPUT_WARPS * K_WARPS, THREADS = 32 * WARPS;
constexpr int MT = 2, BLOCK_TILES = OUTPUT_WARPS * MT;  // tiles of outputs of a warp, of a block
constexpr int X_ROW_BYTES = UNIT * 2, X_VECTORS = X_ROW_BYTES / 16;

// Blocks of a multiprocessor, as many as the registers allow.
template <typename C, bool OFFSETS, int NT>
constexpr int BLOCKS = NT == 4 && CENTRE<C> != 0 && !OFFSETS ? 2 : 1;

template <typename T_, typename C_, int SPAN_, bool OFFSETS_, int BITS, int NT_, int STAGES_>
struct Wide {
  using T = T_;
  using C = C_;
  using Tile = Weights<T, C, SPAN_, OFFSETS_, BITS, true>;
  using Scale = Scales<SPAN_, OFFSETS_, BITS>;
  static constexpr int SPAN = SPAN_, NT = NT_, STAGES = STAGES_, ROWS = 8 * NT;
  static constexpr bool OFFSETS = OFFSETS_;
  // 16-byte vectors of a tile's unit of codes, of its records of scales, and of its float units.
  static constexpr int CODES = UNIT_VECTORS<C>, RECORDS = 8 * Scale::WORDS / 4;
  static constexpr int FLOATS = BITS == 8 ? 8 * 2 * Scale::KINDS / 4 : 0;
  static constexpr int TILE_BYTES = 16 * (CODES + RECORDS + FLOATS);
  static constexpr int X = BLOCK_TILES * TILE_BYTES;  // where a unit has its rows
  static constexpr int UNIT_BYTES = X + ROWS * X_ROW_BYTES, STAGE_BYTES = K_WARPS * UNIT_BYTES;
};

// Where a unit has the 16 bytes `vector` of a row. Lanes that read at once then share no bank: they
// read 16 bytes each of two neighbouring rows, or 8 bytes of four.
__device__ __forceinline__ int swizzled(int row, int vector) {
  return row * X_ROW_BYTES + (vector ^ ((row & 1) << 2 | (row & 2))) * 16;
}

// What a thread copies of each unit: a vector of a tile's codes, of its records and floats if its
// lane has some, and a vector of every 32nd row. Rows past the last and inputs past K are zeros,
// and tiles past the last are any. Places are kept, because they would cost more than the copies.
template <typename W>
struct Copies {
  static constexpr int STEP = THREADS / X_VECTORS;
  unsigned codes, records, floats, x, to_tile, to_x;

  __device__ __forceinline__ Copies(const Matrix& matrix, int first_tile, int last_tile) {
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const unsigned num_units = (matrix.depth + UNIT - 1) / UNIT;
    const unsigned cells = W::Tile::cell_of(matrix, matrix.depth - 1) + 1;
    const unsigned tile = min(first_tile + (int)warp, last_tile);
    codes = tile * num_units * W::CODES + lane;
    records = tile * cells * W::RECORDS + lane;
    floats = tile * (cells / 4) * W::FLOATS + lane;
    to_tile = warp * W::TILE_BYTES + lane * 16;
    const int row = threadIdx.x / X_VECTORS, vector = threadIdx.x % X_VECTORS;
    x = row * (matrix.depth / 8) + vector;
    to_x = W::X + swizzled(row, vector);
  }

  // Begins to copy unit `unit` of the tiles, and of `count` rows of x.
  __device__ __forceinline__ void begin(unsigned char* to, const Matrix& matrix, const uint4* rows,
                                        int count, int unit) const {
    const int lane = threadIdx.x % 32, cell = W::Tile::cell_of(matrix, unit * UNIT);
    const uint4* from = matrix.weight + (codes + unit * W::CODES);
#pragma unroll
    for (int v = 0; v < W::CODES; v += 32)
      if (v + 32 <= W::CODES || lane < W::CODES - v)
        cp_async16(to + to_tile + v * 16, from + v);
    unsigned char* to_records = to + to_tile + W::CODES * 16;
    if (lane < W::RECORDS) cp_async16(to_records, matrix.scales + (records + cell * W::RECORDS));
    if constexpr (W::FLOATS > 0) {
      const uint4* units = reinterpret_cast<const uint4*>(matrix.units);
      if (lane < W::FLOATS)
        cp_async16(to_records + W::RECORDS * 16, units + (floats + unit / 4 * W::FLOATS));
    }
    const int row = threadIdx.x / X_VECTORS, k = unit * UNIT + threadIdx.x % X_VECTORS * 8;
#pragma unroll
    for (int i = 0; i < W::ROWS; i += STEP) {
      const bool is_inside = k < matrix.depth && row + i < count;
      const unsigned at = x + i * (matrix.depth / 8) + unit * X_VECTORS;
      cp_async16_or_zero(to + to_x + i * X_ROW_BYTES, rows + (is_inside ? at : 0), is_inside);
    }
  }
};

// Sums of MT x COUNT products: lane (g, t) has the outputs g, g + 8 and the rows 2t, 2t + 1 of each.
template <int COUNT>
struct Sums {
  float acc[MT][COUNT][4] = {};

  __device__ __forceinline__ float4 get(int i) const {
    const float(&four)[4] = acc[i / COUNT][i % COUNT];
    return make_float4(four[0], four[1], four[2], four[3]);
  }
  __device__ __forceinline__ void add(int i, float4 four) {
    float(&to)[4] = acc[i / COUNT][i % COUNT];
    to[0] += four.x, to[1] += four.y, to[2] += four.z, to[3] += four.w;
  }
};

// Adds the products of the warp's two tiles, the first at `tiles`, with the rows of a unit.
template <typename W>
__device__ __forceinline__ void multiply(Sums<W::NT>& sums, const unsigned char* tiles,
                                         const unsigned char* x) {
  using Operand = typename W::T;
  constexpr int SPAN = W::SPAN, NT = W::NT;
  constexpr int STEPS = SPAN == 16 ? 1 : 2;  // of a chunk that share a scale
  constexpr unsigned ONE = IS_SAME<Operand, f16> ? 0x3c003c00u : 0x3f803f80u;
  const unsigned ones[4] = {ONE, ONE, ONE, ONE};
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  float part[MT][NT][4], sum_of_x[NT][4];  // of a span
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    // Compilers would load the second chunk before the first is multiplied, and spill registers.
    if (c == 1 && (W::OFFSETS || SPAN == 16)) __syncwarp();
    unsigned b[2][NT][2];  // by step
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const int row = n * 8 + g;
      if constexpr (SPAN == 16) {
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          const unsigned char* at = x + swizzled(row, 4 * c + 2 * s + t / 2) + t % 2 * 8;
          const uint2 four = *reinterpret_cast<const uint2*>(at);
          b[s][n][0] = four.x, b[s][n][1] = four.y;
        }
      } else {  // both steps at once
        const uint4 eight = *reinterpret_cast<const uint4*>(x + swizzled(row, 4 * c + t));
        b[0][n][0] = eight.x, b[0][n][1] = eight.y;
        b[1][n][0] = eight.z, b[1][n][1] = eight.w;
      }
    }
#pragma unroll
    for (int first = 0; first < 2; first += STEPS) {
      const int begin = (2 * c + first) * 16, end = begin + STEPS * 16, span = begin / SPAN;
      if (begin % SPAN == 0) {
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) sum_of_x[n][e] = part[0][n][e] = part[1][n][e] = 0.0f;
      }
      if constexpr (W::OFFSETS) {
#pragma unroll
        for (int s = first; s < first + STEPS; ++s)
#pragma unroll
          for (int n = 0; n < NT; ++n) mma_m16n8k16<Operand>(sum_of_x[n], ones, b[s][n]);
      }
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        // A tile of a unit is a matrix of 16 outputs and 64 inputs.
        const uint4* codes = reinterpret_cast<const uint4*>(tiles + m * W::TILE_BYTES);
        const uint4* records = codes + W::CODES;
        const float* floats = reinterpret_cast<const float*>(records + W::RECORDS);
        const Matrix matrix{codes, records, floats, UNIT, 6};
        typename W::Tile own;
        own.begin(matrix, {0, TILE}, 0, g);
        own.load(matrix, 0);
#pragma unroll
        for (int s = first; s < first + STEPS; ++s) {
          unsigned a[4];
          own.unit.template fragment<W::OFFSETS, Operand>(a, c, s);
#pragma unroll
          for (int n = 0; n < NT; ++n) mma_m16n8k16<Operand>(part[m][n], a, b[s][n]);
        }
        if (end % SPAN != 0) continue;
        own.load_scales(matrix);
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            float& to = sums.acc[m][n][e];
            to = __fmaf_rn(part[m][n][e], own.scales.scale(span, e / 2), to);
            if constexpr (W::OFFSETS)
              to = __fmaf_rn(sum_of_x[n][e % 2], own.scales.offset(span, e / 2), to);
          }
      }
    }
  }
}

// Adds the sums of both halves of the warps. A half gets half of the rows. Every thread calls.
template <int NT>
__device__ __forceinline__ Sums<NT / 2> add_halves(const Sums<NT>& sums) {
  constexpr int COUNT = NT / 2, VECTORS = MT * COUNT * 32;  // of a warp
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool is_second = warp >= OUTPUT_WARPS;
  Sums<COUNT> own, other;
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int n = 0; n < COUNT; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float low = sums.acc[m][n][e], high = sums.acc[m][n + COUNT][e];
        own.acc[m][n][e] = is_second ? high : low;
        other.acc[m][n][e] = is_second ? low : high;
      }
  float4* left = reinterpret_cast<float4*>(mie_smem);
#pragma unroll
  for (int i = 0; i < MT * COUNT; ++i) left[warp * VECTORS + i * 32 + lane] = other.get(i);
  __syncthreads();
  const int partner = (warp + OUTPUT_WARPS) % WARPS;
#pragma unroll
  for (int i = 0; i < MT * COUNT; ++i) own.add(i, left[partner * VECTORS + i * 32 + lane]);
  __syncthreads();  // the memory is free
  return own;
}

// Leaves a warp's sums for the last of the splits, and returns whether this is the last one. It then
// has the sums of all. `place` is the warp's among the `count` warps of a split.
template <int COUNT>
__device__ __forceinline__ bool meet(Sums<COUNT>& own, float* sums, int* arrived, size_t place,
                                     size_t count) {
  constexpr int VECTORS = MT * COUNT * 32;  // of a warp
  float4* first = reinterpret_cast<float4*>(sums) + place * VECTORS + threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < MT * COUNT; ++i) first[blockIdx.z * count * VECTORS + i * 32] = own.get(i);
  if (!is_last_warp_to_arrive(arrived + place, gridDim.z)) return false;
  own = {};
#pragma unroll 2
  for (int split = 0; split < (int)gridDim.z; ++split, first += count * VECTORS)
#pragma unroll
    for (int i = 0; i < MT * COUNT; ++i) own.add(i, __ldcg(first + i * 32));
  return true;
}

// Adds bias and the old numbers, and writes `count` rows of a warp's 32 outputs, beginning with
// output `first`. A lane writes an output of each row, after the sums crossed through `staged`.
template <int COUNT, typename T>
__device__ __forceinline__ void write_rows(const Sums<COUNT>& own, unsigned char* staged,
                                           const T* bias, T* out, int first, int count, int width,
                                           int stride, bool is_added) {
  constexpr int PITCH = MT * TILE + 4;  // rows 2t of the lanes begin in different banks
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, output = first + lane;
  float(*rows)[PITCH] = reinterpret_cast<float(*)[PITCH]>(staged);
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int n = 0; n < COUNT; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        rows[n * 8 + 2 * t + e % 2][m * TILE + g + 8 * (e / 2)] = own.acc[m][n][e];
  __syncwarp();
  if (output >= width) return;
  const float own_bias = bias == nullptr ? 0.0f : to_float(bias[output]);
  T* to = out + output;
  constexpr int SOME = 16;  // rows whose old numbers are loaded at once
#pragma unroll 1
  for (int row = 0; row < count; row += SOME, to += (size_t)SOME * stride) {
    float old[SOME] = {};
    if (is_added) {
#pragma unroll
      for (int i = 0; i < SOME; ++i)
        if (row + i < count) old[i] = to_float(to[(size_t)i * stride]);
    }
#pragma unroll
    for (int i = 0; i < SOME; ++i)
      if (row + i < count)
        to[(size_t)i * stride] = from_float<T>(rows[row + i][lane] + own_bias + old[i]);
  }
}

template <typename T, typename C, int SPAN, bool OFFSETS, int BITS, int NT, int STAGES>
__global__ void __launch_bounds__(THREADS, BLOCKS<C, OFFSETS, NT>)
wide_linear(const T* __restrict__ x, const uint4* __restrict__ weight,
            const uint4* __restrict__ scales, const float* __restrict__ units,
            const T* __restrict__ bias, T* __restrict__ out, float* sums, int* arrived,
            int num_rows, int depth, int shift, int width, int stride, int is_added) {
  using W = Wide<T, C, SPAN, OFFSETS, BITS, NT, STAGES>;
  constexpr int HALF = W::ROWS / 2;
  const int warp = threadIdx.x / 32, output_warp = warp % OUTPUT_WARPS, k_warp = warp / OUTPUT_WARPS;
  const int first_row = blockIdx.x * W::ROWS, count = min(W::ROWS, num_rows - first_row);
  const int first_tile = blockIdx.y * BLOCK_TILES, last_tile = (width - 1) / TILE;
  const Matrix matrix{weight, scales, units, depth, shift};
  const uint4* rows = reinterpret_cast<const uint4*>(x + (size_t)first_row * depth);

  const int num_units = (depth + UNIT - 1) / UNIT;
  const int num_stages = (num_units + K_WARPS - 1) / K_WARPS;
  const int each = (num_stages + gridDim.z - 1) / gridDim.z;
  const int begin = blockIdx.z * each, end = min(begin + each, num_stages);
  const Copies<W> copies(matrix, first_tile, last_tile);
  auto copy = [&](int stage, int place) {  // the last unit of K may be the first of a stage
#pragma unroll
    for (int i = 0; i < K_WARPS; ++i)
      if (stage < end && stage * K_WARPS + i < num_units)
        copies.begin(mie_smem + place + i * W::UNIT_BYTES, matrix, rows, count,
                     stage * K_WARPS + i);
    cp_async_commit();
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) copy(begin + i, i * W::STAGE_BYTES);

  Sums<NT> all;
  int place = 0, before = (STAGES - 1) * W::STAGE_BYTES;
  for (int stage = begin; stage < end; ++stage) {
    cp_async_wait<STAGES - 2>();
    __syncthreads();  // the stage is there, and the memory of the one before is free
    copy(stage + STAGES - 1, before);
    const unsigned char* unit = mie_smem + place + k_warp * W::UNIT_BYTES;
    if (stage * K_WARPS + k_warp < num_units)
      multiply<W>(all, unit + output_warp * MT * W::TILE_BYTES, unit + W::X);
    before = place;
    place = place + W::STAGE_BYTES < STAGES * W::STAGE_BYTES ? place + W::STAGE_BYTES : 0;
  }
  cp_async_wait<0>();
  __syncthreads();  // the stages are free
  Sums<NT / 2> own = add_halves(all);
  const int own_row = k_warp * HALF, own_count = min(HALF, count - own_row);
  if (own_count <= 0) return;
  if (gridDim.z > 1) {
    const size_t own_place = ((size_t)blockIdx.y * gridDim.x + blockIdx.x) * WARPS + warp;
    if (!meet(own, sums, arrived, own_place, (size_t)gridDim.y * gridDim.x * WARPS)) return;
  }
  const int first_output = (first_tile + output_warp * MT) * TILE;
  write_rows(own, mie_smem + warp * HALF * (MT * TILE + 4) * sizeof(float), bias,
             out + (size_t)(first_row + own_row) * stride, first_output, own_count, width, stride,
             is_added != 0);
}
