// Products of rounded activations and integer weights, bit for bit as mie/ops/weights/integer.py
// defines them. Included after weights.cuh and rounded.cuh. integer_products.cu has the kernels.
//
//   y[r, n] = fma(t, scale of x, y[r, n])    for one segment after the other, from the first
//   t       = fma(sum of x's codes, offset, sum of products of codes * scale of w)
//
// A segment is min(group, 32) inputs. Its sums are integers, which tensor cores compute exactly in
// any order. The chain of multiply-adds is the same in both ways to divide the work:
//
//   few rows   The warps of a block share K, and each computes the terms t of a unit of 64 inputs.
//              After a barrier each thread continues the chain of one output and row.
//   many rows  A warp has 32 outputs and 32 rows, and goes through all of K alone. A block's
//              records of 32 or 64 rows arrive by cp.async in a ring of three stages.
//
// So a row's bits depend on nothing but the row and the matrix: no batch, split or chip.
#pragma once

// How a kernel computes: the type C of codes, and the SPAN of inputs of a unit with one scale.
template <typename T, typename C_, int SPAN_, bool OFFSETS_, int BITS>
struct IntegerWay {
  using C = C_;
  static constexpr int SPAN = SPAN_, SEGMENT = SPAN < CHUNK ? SPAN : CHUNK;
  static constexpr int SEGMENTS = CHUNK / SEGMENT;  // of a chunk
  static constexpr bool OFFSETS = OFFSETS_;
  // Codes without offsets may count from -8 or -32, which is as much as x's codes times that.
  static constexpr int FROM = OFFSETS ? 0 : CENTRE<C>;
  static constexpr bool NEEDS_SUMS = OFFSETS || FROM != 0;
  using Tile = Weights<T, C, SPAN, OFFSETS, BITS, true>;
};

// Consecutive rows of records.
struct RoundedRows {
  const Record* rows;
  int count, records;  // of a row

  __device__ __forceinline__ const Record& at(int row, int record) const {
    return rows[(size_t)row * records + record];
  }
};

// The second operand of a chunk: the codes of eight rows, of which this lane has row g. W's
// codes of four and six bits come in the order 0, 2, 1, 3 of four inputs, so x's codes take the
// same order.
template <typename W>
__device__ __forceinline__ void codes_of(unsigned (&b)[2], const Record& record, int chunk) {
  const int t = threadIdx.x % 4;
  if constexpr (W::SPAN == 16) {
    b[0] = record.codes[8 * chunk + t], b[1] = record.codes[8 * chunk + 4 + t];
  } else {
    const uint2 eight = *reinterpret_cast<const uint2*>(&record.codes[8 * chunk + 2 * t]);
    b[0] = eight.x, b[1] = eight.y;
  }
  if constexpr (CENTRE<typename W::C> != 0)
    b[0] = __byte_perm(b[0], 0u, 0x3120), b[1] = __byte_perm(b[1], 0u, 0x3120);
}

// The terms t of chunk c of a unit, for a tile's outputs g, g + 8 and the rows 2t, 2t + 1, by
// segment. sums[row] has the sums of x's codes.
template <typename W>
__device__ __forceinline__ void terms_of(float (&terms)[W::SEGMENTS][4],
                                         const typename W::Tile& tile, int c,
                                         const unsigned (&b)[2], const unsigned (&sums)[2]) {
  // Integers below 2^22 in magnitude, added to the bits of 1.5 * 2^23, are the last bits of floats
  // that differ from it by as much. This is one addition instead of a slow conversion.
  constexpr float UNITS = 12582912.0f;
  constexpr int BITS = 0x4b400000;
  unsigned a[4];
  tile.unit.integers(a, c);
#pragma unroll
  for (int s = 0; s < W::SEGMENTS; ++s) {
    int sum[2] = {}, d[4];
    if constexpr (W::NEEDS_SUMS) {
#pragma unroll
      for (int row = 0; row < 2; ++row)
        sum[row] = W::SEGMENTS == 1 ? chunk_sum(sums[row]) : half_sum(sums[row], s);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) d[e] = BITS - W::FROM * sum[e % 2];
    if constexpr (W::SEGMENTS == 1) {
      mma_m16n8k32(d, a, b);
    } else {
      const unsigned half[2] = {a[2 * s], a[2 * s + 1]};
      mma_m16n8k16(d, half, b[s]);
    }
    const int span = (c * CHUNK + s * W::SEGMENT) / W::SPAN;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float number = __int_as_float(d[e]) - UNITS;
      float term = ieee_mul(number, tile.scales.scale(span, e / 2));
      if constexpr (W::OFFSETS)
        term = ieee_fma(static_cast<float>(sum[e % 2]), tile.scales.offset(span, e / 2), term);
      terms[s][e] = term;
    }
  }
}

constexpr int FEW_WARPS = 8, FEW_PAIRS = 32 * FEW_WARPS, SLICE = FEW_WARPS * UNIT;

// Multiplies up to 8 * TILES rows with 32 / TILES outputs, beginning with tile `first`. Then
// finish(output, row, sum) is called for each. Eight warps call, once a kernel. mie_smem has two
// buffers of the terms of a slice: [SLICE / SEGMENT][outputs][rows] floats.
template <typename W, int TILES, typename Finish>
__device__ __forceinline__ void multiply_few(const RoundedRows& rows, const Matrix& matrix,
                                             int first, int width, Finish finish) {
  constexpr int MT = 2 / TILES, ROWS = 8 * TILES, PER_SLICE = SLICE / W::SEGMENT;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int row = threadIdx.x % ROWS, output = first * TILE + threadIdx.x / ROWS;
  const bool has_row = row < rows.count;

  typename W::Tile tiles[MT];
  unsigned codes[2][TILES][2], sums[2][TILES][2] = {};  // of x, by chunk
  auto load = [&](int k) {
#pragma unroll
    for (int m = 0; m < MT; ++m) tiles[m].load(matrix, k), tiles[m].load_scales(matrix);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int record = k / RECORD, chunk = k % RECORD / CHUNK + c;
#pragma unroll
      for (int n = 0; n < TILES; ++n) {
        // Rows past the last have any codes. Their results are dropped.
        codes_of<W>(codes[c][n], rows.at(min(8 * n + g, rows.count - 1), record), chunk);
        if constexpr (W::NEEDS_SUMS)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            sums[c][n][e] = rows.at(min(8 * n + 2 * t + e, rows.count - 1), record).sums[chunk];
      }
    }
  };
  const int begin = warp * UNIT;
#pragma unroll
  for (int m = 0; m < MT; ++m) {
    const int left = width - (first + m) * TILE;
    tiles[m].begin(matrix, {(first + m) * TILE, min(TILE, left)}, begin, g);
  }
  if (begin < matrix.depth) load(begin);

  float total = 0.0f;
  float(*terms)[FEW_PAIRS] = reinterpret_cast<float(*)[FEW_PAIRS]>(mie_smem);
  for (int slice = 0; slice < matrix.depth; slice += SLICE) {
    float(*of_slice)[FEW_PAIRS] = terms + slice / SLICE % 2 * PER_SLICE;
    const int k = slice + begin;
    if (k < matrix.depth) {
#pragma unroll
      for (int c = 0; c < 2; ++c)
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
          for (int n = 0; n < TILES; ++n) {
            float some[W::SEGMENTS][4];
            terms_of<W>(some, tiles[m], c, codes[c][n], sums[c][n]);
#pragma unroll
            for (int s = 0; s < W::SEGMENTS; ++s)
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                float* to = of_slice[(begin + c * CHUNK) / W::SEGMENT + s] +
                            (m * TILE + g + 8 * half) * ROWS + 8 * n + 2 * t;
                *reinterpret_cast<float2*>(to) =
                    make_float2(some[s][2 * half], some[s][2 * half + 1]);
              }
          }
#pragma unroll
      for (int m = 0; m < MT; ++m) tiles[m].advance(matrix, k, SLICE);
      if (k + SLICE < matrix.depth) load(k + SLICE);
    }
    float4 scales[SLICE / RECORD];  // of x
#pragma unroll
    for (int i = 0; i < SLICE / RECORD; ++i)
      if (has_row && slice + i * RECORD < matrix.depth)
        scales[i] = *reinterpret_cast<const float4*>(rows.at(row, slice / RECORD + i).scales);
    __syncthreads();  // the terms are there, and the other buffer is free
    if (!has_row) continue;
#pragma unroll
    for (int i = 0; i < PER_SLICE; ++i) {
      if (slice + i * W::SEGMENT >= matrix.depth) break;
      const int chunk = i * W::SEGMENT / CHUNK;
      const float4& four = scales[chunk / 4];
      const float scale =
          chunk % 4 == 0 ? four.x : chunk % 4 == 1 ? four.y : chunk % 4 == 2 ? four.z : four.w;
      total = ieee_fma(of_slice[i][threadIdx.x], scale, total);
    }
  }
  if (has_row && output < width) finish(output, row, total);
}

// Eight warps divide 32 * GROUPS rows and 256 / GROUPS outputs.
constexpr int STAGES = 3;
template <int GROUPS>
constexpr int MANY_ROWS = 32 * GROUPS;
template <int GROUPS>
constexpr int MANY_TILES = 16 / GROUPS;

// Multiplies many rows with the outputs of MANY_TILES, beginning with tile `first`. Eight warps
// call, once a kernel. mie_smem has the ring: [STAGES][MANY_ROWS] records.
template <typename W, int GROUPS, typename Finish>
__device__ __forceinline__ void multiply_many(const RoundedRows& rows, const Matrix& matrix,
                                              int first, int width, Finish finish) {
  constexpr int MT = 2, TILES = 4, ROWS = MANY_ROWS<GROUPS>, PARTS = sizeof(Record) / 16;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int tile = first + warp / GROUPS * MT, row = warp % GROUPS * 8 * TILES;  // of the warp
  Record* ring = reinterpret_cast<Record*>(mie_smem);
  auto copy = [&](int record) {
    if (record < rows.records) {
      Record* stage = ring + record % STAGES * ROWS;
      for (int i = threadIdx.x; i < ROWS * PARTS; i += blockDim.x) {
        const int r = i / PARTS;
        const Record& from = rows.at(min(r, rows.count - 1), record);
        cp_async16_or_zero(reinterpret_cast<uint4*>(stage + r) + i % PARTS,
                           reinterpret_cast<const uint4*>(&from) + i % PARTS, r < rows.count);
      }
    }
    cp_async_commit();
  };
  typename W::Tile tiles[MT];
#pragma unroll
  for (int m = 0; m < MT; ++m) {
    const int left = width - (tile + m) * TILE;  // may be none
    tiles[m].begin(matrix, {(tile + m) * TILE, min(TILE, left)}, 0, g);
    if (matrix.depth == 0) continue;
    tiles[m].load(matrix, 0), tiles[m].load_scales(matrix);
  }
  for (int i = 0; i < STAGES - 1; ++i) copy(i);

  float total[MT][TILES][4] = {};
  for (int record = 0; record < rows.records; ++record) {
    cp_async_wait<STAGES - 2>();
    __syncthreads();  // the record is there, and the stage of the one before is free
    copy(record + STAGES - 1);
    const Record* x = ring + record % STAGES * ROWS + row;
#pragma unroll 1  // two units at once have too many registers
    for (int unit = 0; unit < RECORD / UNIT; ++unit) {
      const int k = record * RECORD + unit * UNIT;
      if (k >= matrix.depth) break;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (k + c * CHUNK >= matrix.depth) break;
        const int chunk = unit * 2 + c;
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
          unsigned codes[2], sums[2] = {};
          codes_of<W>(codes, x[8 * n + g], chunk);
          const Record *pair = x + 8 * n + 2 * t;
          if constexpr (W::NEEDS_SUMS) sums[0] = pair[0].sums[chunk], sums[1] = pair[1].sums[chunk];
          const float scales[2] = {pair[0].scales[chunk], pair[1].scales[chunk]};
#pragma unroll
          for (int m = 0; m < MT; ++m) {
            float terms[W::SEGMENTS][4];
            terms_of<W>(terms, tiles[m], c, codes, sums);
#pragma unroll
            for (int s = 0; s < W::SEGMENTS; ++s) {
              if (s > 0 && k + c * CHUNK + s * W::SEGMENT >= matrix.depth) break;
#pragma unroll
              for (int e = 0; e < 4; ++e)
                total[m][n][e] = ieee_fma(terms[s][e], scales[e % 2], total[m][n][e]);
            }
          }
        }
      }
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        tiles[m].advance(matrix, k, UNIT);
        if (k + UNIT >= matrix.depth) continue;
        tiles[m].load(matrix, k + UNIT), tiles[m].load_scales(matrix);
      }
    }
  }
  cp_async_wait<0>();
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int output = (tile + m) * TILE + g + 8 * (e / 2), r = row + 8 * n + 2 * t + e % 2;
        if (output < width && r < rows.count) finish(output, r, total[m][n][e]);
      }
}
