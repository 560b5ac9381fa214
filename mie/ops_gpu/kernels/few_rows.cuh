// Products of a few rows with a matrix: y[r, n] = sum over k of x[r, k] * weight[n, k]. Included
// after weights.cuh and arrivals.cuh. few_rows.cu has the kernels.
//
// With few rows a product waits for its weights. Each is read once, 16 bytes a load, straight into
// the registers of a tensor core's first operand:
//
//   outputs [16, rows]  =  weights [16, K] . x^T [K, rows]
//
// The weights are on the product's long side, and eight rows cost as much as one. A block computes
// MT tiles of 16 outputs for up to 8 * TILES rows. Its warps share K: slices of 64 inputs for each
// warp come one after the other. Where a matrix has few outputs, several blocks share K as well.
//
// If the block's share of x fits in shared memory, it is copied and normalised there once, and the
// block multiplies it with one set of tiles after the other. Else the block has one set, and a
// slice of x is copied while the slice before it is multiplied. The next unit of weights is loaded
// as soon as the last one is multiplied, and the next set's first unit while sums are added.
//
// The loop over units has nothing else in it. Copies and norms are in the loop around it.
//
// The order of a sum depends on K and on the number of blocks that share it, and both on the matrix
// alone. A warp adds its units in order, then the warps' sums are added in order, and then the
// blocks'. A row's bits depend neither on the number of rows nor on its place among them.
#pragma once

constexpr int MAX_WARPS = 8;

// Blocks of a multiprocessor, as many as the registers allow.
template <typename T, int SPAN, bool OFFSETS, int TILES>
constexpr int BLOCKS = TILES == 4 || sizeof(T) == 4 ||
                       (TILES == 2 && SPAN == 32 && OFFSETS && !IS_SAME<T, f16>) ? 1 : 2;

// How a kernel computes. SPAN inputs of a unit share a scale.
template <typename T_, typename C_, int SPAN_, bool OFFSETS_, int BITS_, int TILES_, bool NORM_,
          bool VECTOR_>
struct Way {
  using T = T_;
  using C = C_;
  static constexpr int SPAN = SPAN_, BITS = BITS_, TILES = TILES_, ROWS = 8 * TILES;
  static constexpr bool OFFSETS = OFFSETS_, NORM = NORM_, VECTOR = VECTOR_;
  static constexpr bool DENSE = IS_SAME<T, C>, FLOAT = sizeof(T) == 4;
  // bf16 rows are multiplied with codes as f16, and need its range.
  static constexpr bool RAISED = !DENSE && !FLOAT && !IS_SAME<T, f16>;
  // Tiles of outputs of a block, as many as the registers allow.
  static constexpr bool SMALL = IS_SAME<C, nibbles> && SPAN == 64 && !OFFSETS && !FLOAT;
  static constexpr int MT = SMALL && TILES == 1 ? 4 : 2;
  // Whether the registers allow a block to take several sets.
  static constexpr bool LOOPS = !FLOAT && SPAN > 16 && MT == 2 && !(RAISED && TILES == 2);
  // A row of a slice of x. Eight rows of 16 bytes (of 8, if the steps are apart) share no bank.
  static constexpr int ROW_BYTES = MAX_WARPS * UNIT * sizeof(T) + (SPAN == 16 ? 32 : 64);
  static constexpr int SLICE_BYTES = ROWS * ROW_BYTES;
  using Tile = Weights<T, C, SPAN, OFFSETS, BITS, VECTOR>;
};

// The rows of x that a block multiplies, and how they are normalised first (norm null: not at all).
template <typename T>
struct Rows {
  const T* x;     // [rows, depth]
  const T* norm;  // [depth]
  int count, depth;
  float eps;
};

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

// For each row its 1 / sqrt(mean(x^2) + eps), and the power of two that brings its normalised
// numbers into the range of f16. A warp takes a whole row.
template <typename W>
__device__ __forceinline__ void measure(const Rows<typename W::T>& rows, float* scales,
                                        float* powers) {
  using T = typename W::T;
  constexpr int COUNT = 16 / sizeof(T);
  const int lane = threadIdx.x % 32;
  for (int row = threadIdx.x / 32; row < rows.count; row += blockDim.x / 32) {
    float squares = 0.0f, largest = 0.0f;
#pragma unroll 4
    for (int k = lane * COUNT; k < rows.depth; k += 32 * COUNT) {
      const uint4 raw =
          load16<T, W::VECTOR>(rows.x + (size_t)row * rows.depth, k, rows.depth);
      uint4 norm = make_uint4(0, 0, 0, 0);
      if constexpr (W::NORM && W::RAISED) norm = load16<T, W::VECTOR>(rows.norm, k, rows.depth);
      const T* elements = reinterpret_cast<const T*>(&raw);
      const T* weights = reinterpret_cast<const T*>(&norm);
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        const float value = to_float(elements[i]);
        if constexpr (W::NORM) squares = __fmaf_rn(value, value, squares);
        if constexpr (W::RAISED)
          largest = fmaxf(largest, fabsf(W::NORM ? value * to_float(weights[i]) : value));
      }
    }
    float scale = 1.0f;
    if constexpr (W::NORM) scale = 1.0f / sqrtf(warp_sum(squares) / rows.depth + rows.eps);
    if (lane == 0) scales[row] = scale;
    if constexpr (W::RAISED) {
      // Twice as much, because the products are rounded in another order below.
      const float power = power_for_f16(2.0f * scale * warp_max(largest));
      if (lane == 0) powers[row] = power;
    }
  }
}

// The part of a slice that a thread copies: `vector` of the rows `row`, row + STEP and so on.
template <typename W>
struct Copied {
  static constexpr int COUNT = 16 / sizeof(typename W::T), STEP = 32 * COUNT / UNIT;
  int row, vector;

  __device__ __forceinline__ Copied() {
    const int vectors = blockDim.x / STEP;
    row = threadIdx.x / vectors, vector = threadIdx.x % vectors;
  }
  static __device__ __forceinline__ unsigned char* at(unsigned char* slice, int row, int vector) {
    return slice + row * W::ROW_BYTES + vector * 16;
  }
};

// Begins to copy a slice, from input `first` on, of all rows. Rows past the last and inputs past K
// are zeros.
template <typename W>
__device__ __forceinline__ void copy_slice(const Rows<typename W::T>& rows, unsigned char* slice,
                                           int first) {
  using T = typename W::T;
  const Copied<W> part;
  const int k = first + part.vector * part.COUNT;
#pragma unroll
  for (int i = 0; i < W::ROWS; i += part.STEP) {
    const int row = part.row + i;
    unsigned char* to = part.at(slice, row, part.vector);
    const bool is_inside = row < rows.count && k < rows.depth;
    const T* from = rows.x + (size_t)(is_inside ? row : 0) * rows.depth;
    if constexpr (W::VECTOR)
      cp_async16_or_zero(to, from + (is_inside ? k : 0), is_inside);
    else
      *reinterpret_cast<uint4*>(to) = load16<T, false>(from, k, is_inside ? rows.depth : 0);
  }
  cp_async_commit();
}

// Normalises and raises what this thread has copied.
template <typename W>
__device__ __forceinline__ void finish_slice(const Rows<typename W::T>& rows, unsigned char* slice,
                                             int first, const float* scales, const float* powers) {
  using T = typename W::T;
  if constexpr (W::NORM || W::RAISED) {
    const Copied<W> part;
    uint4 norm = make_uint4(0, 0, 0, 0);
    if constexpr (W::NORM)
      norm = load16<T, W::VECTOR>(rows.norm, first + part.vector * part.COUNT, rows.depth);
    for (int row = part.row; row < rows.count; row += part.STEP) {
      uint4* at = reinterpret_cast<uint4*>(part.at(slice, row, part.vector));
      uint4 x = *at;
      if constexpr (W::NORM) x = normalised<T>(x, norm, scales[row]);
      if constexpr (W::RAISED) {
        const float power = powers[row];
        x = make_uint4(raise<T>(x.x, power), raise<T>(x.y, power), raise<T>(x.z, power),
                       raise<T>(x.w, power));
      }
      *at = x;
    }
  }
}

// The sums of a warp's share of K for a block's tiles, [MT][rows].
template <typename W, bool FLOAT = W::FLOAT>
struct Sums {  // on tensor cores: lane (g, t) has the outputs g, g + 8 and the rows 2t, 2t + 1
  static constexpr int MT = W::MT, TILES = W::TILES;
  float acc[MT][TILES][4] = {};

  // Adds a unit's products, and begins to load each tile's unit at `next`, if that is before
  // `last`.
  __device__ __forceinline__ void add(typename W::Tile (&tiles)[MT], const unsigned char* x,
                                      const Matrix& matrix, int next, int last) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    constexpr int SPAN = W::SPAN;
    float part[W::DENSE ? 1 : MT][W::DENSE ? 1 : TILES][4] = {}, sum[TILES][4] = {};
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      unsigned b[2][TILES][2];  // by step
#pragma unroll
      for (int n = 0; n < TILES; ++n) {
        const unsigned char* row = x + (n * 8 + g) * W::ROW_BYTES + 2 * c * CHUNK;
        if constexpr (SPAN == 16) {
#pragma unroll
          for (int s = 0; s < 2; ++s) {
            const uint2 four = *reinterpret_cast<const uint2*>(row + 2 * place<SPAN>(s, t));
            b[s][n][0] = four.x, b[s][n][1] = four.y;
          }
        } else {  // both steps at once
          const uint4 eight = *reinterpret_cast<const uint4*>(row + 2 * place<SPAN>(0, t));
          b[0][n][0] = eight.x, b[0][n][1] = eight.y;
          b[1][n][0] = eight.z, b[1][n][1] = eight.w;
        }
      }
#pragma unroll
      for (int s = 0; s < 2; ++s) {
#pragma unroll
        for (int m = 0; m < MT; ++m) {
          unsigned a[4];
          tiles[m].unit.template fragment<W::OFFSETS>(a, c, s);
#pragma unroll
          for (int n = 0; n < TILES; ++n) {
            if constexpr (W::DENSE)
              mma_m16n8k16<typename W::T>(acc[m][n], a, b[s][n]);
            else
              mma_m16n8k16<f16>(part[m][n], a, b[s][n]);
          }
          if (c == 1 && s == 1 && next < last) tiles[m].load(matrix, next);
        }
        if constexpr (W::OFFSETS) {
          const unsigned ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
#pragma unroll
          for (int n = 0; n < TILES; ++n) mma_m16n8k16<f16>(sum[n], ones, b[s][n]);
        }
        const int end = (2 * c + s + 1) * 16;
        if constexpr (!W::DENSE) {
          if (end % SPAN == 0) scale(part, sum, tiles, end / SPAN - 1);
        }
      }
    }
    if (W::DENSE || next >= last) return;
#pragma unroll
    for (int m = 0; m < MT; ++m) tiles[m].load_scales(matrix);
  }

  // Adds the sums of a span, times its scale, and begins the next span's.
  __device__ __forceinline__ void scale(float (&part)[MT][TILES][4], float (&sum)[TILES][4],
                                        const typename W::Tile (&tiles)[MT], int span) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& to = acc[m][n][e];
          to = __fmaf_rn(part[m][n][e], tiles[m].scales.scale(span, e / 2), to);
          if constexpr (W::OFFSETS)
            to = __fmaf_rn(sum[n][e], tiles[m].scales.offset(span, e / 2), to);
          part[m][n][e] = 0.0f;
        }
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[n][e] = 0.0f;
  }

  // Stores the warp's sums as partial[output][row].
  __device__ __forceinline__ void store(float (*partial)[W::ROWS], const float* powers) const {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = n * 8 + 2 * t + e % 2;
        const float unit = W::RAISED ? inverse_power(powers[row]) : 1.0f;
#pragma unroll
        for (int m = 0; m < MT; ++m)
          partial[m * TILE + g + 8 * (e / 2)][row] = acc[m][n][e] * unit;
      }
  }
};

template <typename W>
struct Sums<W, true> {  // in float32, which tensor cores would round: a lane has all rows
  static constexpr int MT = W::MT;
  float acc[MT][2][W::ROWS] = {};

  __device__ __forceinline__ void add(typename W::Tile (&tiles)[MT], const unsigned char* x,
                                      const Matrix& matrix, int next, int last) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int c = 0; c < 2; ++c)
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const int first = c * CHUNK + place<W::SPAN>(s, t), span = (2 * c + s) * 16 / W::SPAN;
#pragma unroll
        for (int row = 0; row < W::ROWS; ++row) {
          const float* four = reinterpret_cast<const float*>(x + row * W::ROW_BYTES) + first;
#pragma unroll
          for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
              for (int j = 0; j < 4; ++j) {
                float weight = tiles[m].unit.template value<W::OFFSETS>(c, s, half, j);
                if constexpr (!W::DENSE) weight *= tiles[m].scales.scale(span, half);
                if constexpr (W::OFFSETS) weight += tiles[m].scales.offset(span, half);
                acc[m][half][row] = __fmaf_rn(weight, four[j], acc[m][half][row]);
              }
        }
      }
    if (next >= last) return;
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      tiles[m].load(matrix, next);
      tiles[m].load_scales(matrix);
    }
  }

  __device__ __forceinline__ void store(float (*partial)[W::ROWS], const float* powers) const {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int row = 0; row < W::ROWS; ++row) {
          float sum = acc[m][half][row];  // of this lane's inputs
          sum += __shfl_xor_sync(MIE_FULL_WARP, sum, 1);
          sum += __shfl_xor_sync(MIE_FULL_WARP, sum, 2);
          if (t == 0) partial[m * TILE + g + 8 * half][row] = sum;
        }
  }
};

// How blocks divide a matrix, and where those that share K, or the outputs of a head, leave their
// sums for the last of them.
struct Sharing {
  float* sums;   // [splits, rows of the launch, outputs]
  int* arrived;  // [groups of rows, sets of tiles], zeros
  int splits;    // blocks that share K: gridDim.z
  bool is_kept;  // whether the block's share of x fits. Else it has one set: gridDim.y of them
};

// Multiplies the block's rows with the outputs of `num_tiles` tiles, which outputs_of(tile) names.
// The block takes the sets of MT tiles blockIdx.y, blockIdx.y + gridDim.y and so on. Then
// finish(get, first tile, number of tiles) is called once for each `meeting` neighbouring sets,
// where get(output, row) is a sum, and outputs count from the first tile's. Every thread of the
// block calls, once a kernel.
template <typename W, bool LOOPS = W::LOOPS, typename OutputsOf, typename Finish>
__device__ __forceinline__ void multiply_rows(const Rows<typename W::T>& rows, const Matrix& matrix,
                                              const Sharing& sharing, int num_tiles, int meeting,
                                              OutputsOf outputs_of, Finish finish) {
  constexpr int MT = W::MT;
  __shared__ float scales[W::ROWS], powers[W::ROWS];
  const int warp = threadIdx.x / 32, num_warps = blockDim.x / 32, slice = num_warps * UNIT;
  const int num_slices = (matrix.depth + slice - 1) / slice;
  const int each = (num_slices + sharing.splits - 1) / sharing.splits;
  const int begin = min((int)blockIdx.z * each, num_slices), end = min(begin + each, num_slices);
  const int num_sets = (num_tiles + MT - 1) / MT;

  typename W::Tile tiles[MT];
  const int first = begin * slice + warp * UNIT;  // the same for all lanes
  const int last = min(end * slice, matrix.depth);
  auto turn_to = [&](int set) {
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      tiles[m].begin(matrix, outputs_of(set * MT + m), first, threadIdx.x % 32 / 4);
      if (first >= last) continue;
      tiles[m].load(matrix, first);
      tiles[m].load_scales(matrix);
    }
  };
  turn_to(blockIdx.y);  // the weights are on their way while the rows are measured
  const bool is_kept = LOOPS && sharing.is_kept;
  auto buffer = [&](int i) {
    return mie_smem + (is_kept ? i - begin : (i - begin) % 2) * W::SLICE_BYTES;
  };
  const int chunk = is_kept ? max(each, 1) : 1;  // slices between two copies
  const int copied = min(begin + chunk, end);
  for (int i = begin; i < copied; ++i) copy_slice<W>(rows, buffer(i), i * slice);
  if constexpr (W::NORM || W::RAISED) {
    if (W::RAISED && threadIdx.x < W::ROWS) powers[threadIdx.x] = 1.0f;  // of rows past the last
    __syncthreads();
    measure<W>(rows, scales, powers);
    __syncthreads();
  }
  cp_async_wait<0>();
  for (int i = begin; i < copied; ++i) finish_slice<W>(rows, buffer(i), i * slice, scales, powers);
  __syncthreads();

  float(*partial)[W::ROWS] = reinterpret_cast<float(*)[W::ROWS]>(
      mie_smem + (is_kept ? each * W::SLICE_BYTES : 0));
  int set = blockIdx.y;
  do {
    Sums<W> sums;
    for (int i = begin; i < end; i += chunk) {
      if (!is_kept) {
        if (i > begin) {
          cp_async_wait<0>();
          finish_slice<W>(rows, buffer(i), i * slice, scales, powers);
          __syncthreads();  // the slice is there, and the other buffer is free
        }
        if (i + 1 < end) copy_slice<W>(rows, buffer(i + 1), (i + 1) * slice);
      }
      const unsigned char* mine = buffer(i) + warp * UNIT * sizeof(typename W::T);
      const int until = min((i + chunk) * slice, last);
      for (int k = i * slice + warp * UNIT; k < until;
           k += slice, mine += LOOPS ? W::SLICE_BYTES : 0) {
#pragma unroll
        for (int m = 0; m < MT; ++m) tiles[m].advance(matrix, k, slice);
        sums.add(tiles, mine, matrix, k + slice, last);
        if (MT == 4) break;  // a warp has one unit of a slice, and these kernels no registers left
      }
    }
    const int next_set = set + gridDim.y;
    if (LOOPS && next_set < num_sets) turn_to(next_set);  // while the sums of this one are added
    __syncthreads();  // the last set's sums are read, or all slices
    sums.store(partial + warp * MT * TILE, powers);
    __syncthreads();
    auto total = [&](int output, int row) {
      float sum = 0.0f;
#pragma unroll 8
      for (int w = 0; w < num_warps; ++w) sum += partial[w * MT * TILE + output][row];
      return sum;
    };
    if (sharing.splits * meeting == 1) {
      finish(total, set * MT, MT);
      continue;
    }
    const int group = set / meeting;
    const size_t width = (size_t)num_sets * MT * TILE;  // of all rows of the launch
    const int num_rows = gridDim.x * W::ROWS, first_row = blockIdx.x * W::ROWS;
    for (int i = threadIdx.x; i < MT * TILE * rows.count; i += blockDim.x) {
      const int output = i % (MT * TILE), row = i / (MT * TILE);
      const size_t place = (size_t)blockIdx.z * num_rows + first_row + row;
      sharing.sums[place * width + set * MT * TILE + output] = total(output, row);
    }
    const int counter = blockIdx.x * (num_sets / meeting) + group;
    if (!is_last_to_arrive(sharing.arrived + counter, sharing.splits * meeting)) continue;
    const int first_tile = group * meeting * MT;
    finish(
        [&](int output, int row) {
          float sum = 0.0f;
          for (int split = 0; split < sharing.splits; ++split) {
            const size_t place = (size_t)split * num_rows + first_row + row;
            sum += __ldcg(sharing.sums + place * width + first_tile * TILE + output);
          }
          return sum;
        },
        first_tile, meeting * MT);
  } while (LOOPS && (set += gridDim.y) < num_sets);
}
