// Decode attention on tensor cores. One block attends to some tokens of one sequence, for the query
// heads of one KV head. paged_decode_mma.cu and paged_decode_stream.cu share this code and differ
// in how they distribute the tokens. Included after mie_cuda.cuh and attention.cuh.
//
// On CUDA cores, eight query heads to a KV head cost more instructions and shared-memory reads than
// the memory bandwidth leaves time for. So the 16 tokens of a tile form the long side of a tensor
// core's product. The query heads, up to eight at the same cost, form the short side:
//
//   scores  [16 tokens, 8 heads]  = K [16, Dh] . Q^T [Dh, 8]
//   output  [Dh, 8 heads]        += V^T [Dh, 16] . weights [16, 8]
//
// A warp works independently until the end. It owns every WARPS-th tile and a ring of STAGES tiles
// in shared memory, which cp.async fills while older tiles are multiplied. Rows of a tile are
// chunks of 16 bytes, swizzled so that ldmatrix reads eight of them without bank conflicts.
//
// A quantised cache is kept unchanged in the ring, at half the size, and is widened in registers,
// to f16 for bf16 models too. ldmatrix is made for 16-bit elements, so a lane gets four 8-bit
// elements instead of two:
//
//   keys      elements 4t ... 4t + 3 of 16 of one token. The product sums over them in any order,
//             so they take the places 2t, 2t + 1, 2t + 8, 2t + 9, in the queries too.
//   values    (transposed) elements 2g, 2g + 1 of 16 of two tokens. They become rows g and g + 8.
//
// A key's scale multiplies its scores after the product, and a value's scale multiplies its weights
// before the next product. There the weights are 16-bit floats, which small scales would push out
// of range. So they are divided by the largest scale of a value so far, the output's `unit`.
#pragma once

// The arguments of a step for one layer. Shapes as in paged_decode.cu.
template <typename T, typename C>
struct DecodeStep {
  const T* q;
  const C* kv;
  const float* scales;
  const int *tables, *seq_lens, *cu_seqlens_q;
  const T* sinks;
  T* out;
  float *partial, *partial_lse;
  int num_kv_heads, group, table_width, block_size;
  float scale, cap;  // of scores: `bounded` in attention.cuh
};

// Attends to the tokens begin ... end - 1. Writes the output if that is_whole of what the query
// sees, else a partial result in the rows first_partial + g * stride. Every thread of the block
// calls. Dynamic shared memory may be reused after a barrier.
template <typename T, typename C, int DH, int HEAD_TILES, int WARPS, int STAGES, bool CAPPED>
__device__ __forceinline__ void attend_tokens(const DecodeStep<T, C>& step, int sequence,
                                              int kv_head, int begin, int end, bool is_whole,
                                              size_t first_partial, int stride) {
  static_assert(DH % 16 == 0 && sizeof(T) == 2, "a product takes 16 elements of 16 bits");
  constexpr bool QUANTIZED = IS_QUANTIZED<T, C>;
  constexpr int TOKENS = 16, STEPS = DH / 16;               // tokens of a tile; k-steps over a head
  constexpr int ROW = DH * (int)sizeof(C), CHUNKS = ROW / 16;  // bytes of a row; chunks of 16
  constexpr int PAIRS = (CHUNKS + 1) / 2;  // of chunks, of which the last may be one
  constexpr int TILE = TOKENS * ROW, SCALES = QUANTIZED ? TOKENS * 4 : 0;  // bytes
  constexpr int STAGE = 2 * (TILE + SCALES);  // keys, values, the keys' scales, the values'
  constexpr int HEADS = 8 * HEAD_TILES;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4;  // a lane's place in every fragment; see mie_ptx.cuh
  using Wide = Widening<C>;
  using Operand = typename Product<T, C>::Operand;
  constexpr float WEIGHT_POWER = ::WEIGHT_POWER<T, Operand>;
  const int group = step.group, num_heads = step.num_kv_heads * group;
  const PagedKV<T, C, DH> cache = {step.kv, step.scales, step.num_kv_heads, step.block_size};
  unsigned char* ring = mie_smem + warp * (STAGES * STAGE);

  // This warp's tiles: number i begins at token first + i * WARPS * TOKENS.
  const int first = begin / TOKENS * TOKENS + warp * TOKENS;
  const int num_tiles = max(0, (end - first + WARPS * TOKENS - 1) / (WARPS * TOKENS));

  // Q^T as the product's second operand, kept in registers: heads past the group are zero.
  const size_t query_row = (size_t)step.cu_seqlens_q[sequence] * num_heads + kv_head * group;
  unsigned query[HEAD_TILES][STEPS][2];
#pragma unroll
  for (int h = 0; h < HEAD_TILES; ++h) {
    const int head = h * 8 + g;
    const unsigned* row = reinterpret_cast<const unsigned*>(step.q + (query_row + head) * DH);
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
      query[h][k][0] = head < group ? row[k * 8 + (QUANTIZED ? 2 * t : t)] : 0u;
      query[h][k][1] = head < group ? row[k * 8 + (QUANTIZED ? 2 * t + 1 : t + 4)] : 0u;
    }
  }
  // What turns the products of heads 2t and 2t + 1 into scores, for a key of scale 1.
  float score_scale[HEAD_TILES][2];
#pragma unroll
  for (int h = 0; h < HEAD_TILES; ++h) {
    score_scale[h][0] = score_scale[h][1] = step.scale;
    if constexpr (IS_RAISED<T, Operand>) {
      float largest = 0.0f;  // of head g, which four neighbouring lanes hold
#pragma unroll
      for (int k = 0; k < STEPS; ++k)
        largest = largest_of<T>(largest_of<T>(largest, query[h][k][0]), query[h][k][1]);
      const float power = power_for_f16(warp_max<4>(largest));
#pragma unroll
      for (int k = 0; k < STEPS; ++k)
#pragma unroll
        for (int e = 0; e < 2; ++e) query[h][k][e] = raise<T>(query[h][k][e], power);
#pragma unroll
      for (int e = 0; e < 2; ++e)
        score_scale[h][e] *= __shfl_sync(MIE_FULL_WARP, inverse_power(power), (2 * t + e) * 4);
    }
  }

  // A tile lies in one block, because the block size is a multiple of the tile. Its first row of
  // keys is looked up for 32 tiles at once, one a lane, and distributed by shuffles. attention.py
  // asserts that 32 bits count the rows. All lanes call both functions.
  // So a tile is contiguous, and lane l copies its chunks l, l + 32, ...
  constexpr int TILE_CHUNKS = TOKENS * CHUNKS, PER_CHUNK = 16 / (int)sizeof(C);
  const C* planes[2];  // the lane's first chunk of this head's first tile of keys and of values
#pragma unroll
  for (int plane = 0; plane < 2; ++plane)
    planes[plane] = cache.base + cache.row(0, 0, kv_head, plane) * DH + lane * PER_CHUNK;
  unsigned rows = 0;
  auto row_of = [&](int i) {
    if (i % 32 == 0) {
      const int token = first + (i + lane) * (WARPS * TOKENS);
      const unsigned entry = (unsigned)token / (unsigned)step.block_size;
      const unsigned slot = (unsigned)token % (unsigned)step.block_size;
      const int* table = step.tables + (size_t)sequence * step.table_width;
      rows = token < end ? (unsigned)cache.row(table[entry], slot, 0, 0) : 0u;
    }
    return __shfl_sync(MIE_FULL_WARP, rows, i % 32);
  };
  int filled = 0;  // the offset of the stage that is fetched next
  auto fetch = [&](int i) {
    if (i < num_tiles) {
      const unsigned first_row = row_of(i);
      unsigned char* stage = ring + filled;
      // What the query does not see is set to zero, because an unwritten slot may hold NaN.
      const int distance = (first + i * (WARPS * TOKENS) - begin) * CHUNKS + lane;  // in chunks
#pragma unroll
      for (int plane = 0; plane < 2; ++plane) {
        const C* source = planes[plane] + (size_t)first_row * DH;
        if constexpr (QUANTIZED) {
          if (lane < TOKENS / 4)
            cp_async16(stage + 2 * TILE + plane * SCALES + lane * 16,
                       cache.scales + cache.row(0, 0, kv_head, plane) + first_row + lane * 4);
        }
#pragma unroll
        for (int j = 0; j < TILE_CHUNKS; j += 32) {
          const int chunk = j + lane;
          if (TILE_CHUNKS % 32 != 0 && chunk >= TILE_CHUNKS) break;
          cp_async16_or_zero(stage + plane * TILE + swizzled<ROW>(chunk / CHUNKS, chunk % CHUNKS),
                             source + j * PER_CHUNK,
                             (unsigned)(distance + j) < (unsigned)((end - begin) * CHUNKS));
        }
      }
    }
    cp_async_commit();  // a group for every tile, even an empty one, because the waits count groups
    filled = filled == (STAGES - 1) * STAGE ? 0 : filled + STAGE;
  };

  // Per head tile: a lane holds heads 2t and 2t + 1, for tokens g and g + 8 (scores) and for
  // elements g and g + 8 of every 16 (output).
  float acc[HEAD_TILES][STEPS][4] = {}, top[HEAD_TILES][2], sum[HEAD_TILES][2] = {};
#pragma unroll
  for (int h = 0; h < HEAD_TILES; ++h) top[h][0] = top[h][1] = -MIE_INF;
  // Of a quantised cache: acc is in units / WEIGHT_POWER, and per_unit is the inverse of that.
  float unit = 0.0f, per_unit = 0.0f;

#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) fetch(i);
  int used = 0;  // the offset of the stage that is multiplied
  for (int i = 0; i < num_tiles; ++i) {
    cp_async_wait<STAGES - 2>();
    __syncwarp();  // all lanes' fetches are visible, and all are done with tile i - 1,
    fetch(i + STAGES - 1);  // whose stage is refilled
    const unsigned char* keys = ring + used;
    used = used == (STAGES - 1) * STAGE ? 0 : used + STAGE;
    const unsigned char* values = keys + TILE;

    float score[HEAD_TILES][4] = {};
    {
      const int row = lane % 16;
#pragma unroll
      for (int k = 0; k < PAIRS; ++k) {
        unsigned a[4];  // 16 tokens, two chunks
        ldmatrix_x4(a, keys + swizzled<ROW>(row, min(k * 2 + lane / 16, CHUNKS - 1)));
        if constexpr (QUANTIZED) {
#pragma unroll
          for (int chunk = 0; chunk < 2 && k * 2 + chunk < CHUNKS; ++chunk) {
            const unsigned low = a[2 * chunk], high = a[2 * chunk + 1];  // tokens g and g + 8
            unsigned wide[4];
            Wide::template four<0, 1, 2, 3>(wide[0], wide[2], low);
            Wide::template four<0, 1, 2, 3>(wide[1], wide[3], high);
#pragma unroll
            for (int h = 0; h < HEAD_TILES; ++h)
              mma_m16n8k16<Operand>(score[h], wide, query[h][2 * k + chunk]);
          }
        } else {
#pragma unroll
          for (int h = 0; h < HEAD_TILES; ++h) mma_m16n8k16<T>(score[h], a, query[h][k]);
        }
      }
    }

    const int token = first + i * (WARPS * TOKENS) + g;
    const bool sees[2] = {token >= begin && token < end, token + 8 >= begin && token + 8 < end};
    float key_scale[2] = {1.0f, 1.0f}, value_scale[2];
    if constexpr (QUANTIZED) {
      const float* scales = reinterpret_cast<const float*>(keys + 2 * TILE);  // keys', values'
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        key_scale[r] = scales[g + 8 * r];
        value_scale[r] = sees[r] ? scales[TOKENS + g + 8 * r] : 0.0f;  // else it may be NaN
      }
      // This loop runs at most once, and rarely, because the unit is soon the largest scale.
      while (__any_sync(MIE_FULL_WARP, value_scale[0] > unit || value_scale[1] > unit)) {
        float largest = fmaxf(unit, fmaxf(value_scale[0], value_scale[1]));
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2)
          largest = fmaxf(largest, __shfl_xor_sync(MIE_FULL_WARP, largest, offset));
        const float inverse = 1.0f / largest;
        per_unit = inverse * WEIGHT_POWER;
        const float keep = unit * inverse;
        unit = largest;
#pragma unroll
        for (int h = 0; h < HEAD_TILES; ++h)
#pragma unroll
          for (int k = 0; k < STEPS; ++k)
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[h][k][e] *= keep;
      }
    }
    unsigned weights[HEAD_TILES][2];
#pragma unroll
    for (int h = 0; h < HEAD_TILES; ++h) {
      float* s = score[h];
#pragma unroll
      for (int e = 0; e < 4; ++e)
        s[e] = sees[e / 2] ? bounded<CAPPED>(
                                 s[e] * (score_scale[h][e % 2] * key_scale[e / 2]), step.cap)
                           : -MIE_INF;
      // The lanes exchange their maxima only if a score exceeds its head's. This loop runs at most
      // once. Every tile has a token that is seen, so finite scores have finite maxima from the
      // first tile on. A score of NaN exceeds nothing, and makes the sum NaN.
      while (__any_sync(MIE_FULL_WARP,
                        fmaxf(s[0], s[2]) > top[h][0] || fmaxf(s[1], s[3]) > top[h][1])) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float new_top = fmaxf(top[h][e], fmaxf(s[e], s[e + 2]));
#pragma unroll
          for (int offset = 4; offset < 32; offset *= 2)
            new_top = fmaxf(new_top, __shfl_xor_sync(MIE_FULL_WARP, new_top, offset));
          const float keep = exp2_approx(top[h][e] - new_top);
          top[h][e] = new_top;
          sum[h][e] *= keep;
#pragma unroll
          for (int k = 0; k < STEPS; ++k) acc[h][k][e] *= keep, acc[h][k][e + 2] *= keep;
        }
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[e] = exp2_approx(s[e] - top[h][e % 2]);
        sum[h][e % 2] += s[e];
        if constexpr (QUANTIZED) s[e] *= value_scale[e / 2] * per_unit;
      }
      // Converts (token, head) from the product's output layout to its input layout.
      weights[h][0] = movmatrix_trans(pack2<Operand>(s[0], s[1]));
      weights[h][1] = movmatrix_trans(pack2<Operand>(s[2], s[3]));
    }

    {
      const int row = lane % 8 + lane / 16 * 8;
#pragma unroll
      for (int k = 0; k < PAIRS; ++k) {
        unsigned a[4];  // two chunks, 16 tokens
        ldmatrix_x4_trans(a, values + swizzled<ROW>(row, min(k * 2 + lane / 8 % 2, CHUNKS - 1)));
        if constexpr (QUANTIZED) {
#pragma unroll
          for (int chunk = 0; chunk < 2 && k * 2 + chunk < CHUNKS; ++chunk) {
            const unsigned low = a[chunk], high = a[chunk + 2];  // tokens 2t, 2t + 1 and 8 further
            unsigned wide[4];
            Wide::template four<0, 2, 1, 3>(wide[0], wide[1], low);
            Wide::template four<0, 2, 1, 3>(wide[2], wide[3], high);
#pragma unroll
            for (int h = 0; h < HEAD_TILES; ++h)
              mma_m16n8k16<Operand>(acc[h][2 * k + chunk], wide, weights[h]);
          }
        } else {
#pragma unroll
          for (int h = 0; h < HEAD_TILES; ++h) mma_m16n8k16<T>(acc[h][k], a, weights[h]);
        }
      }
    }
  }
  cp_async_wait<0>();

  // A lane has only summed the weights of its own tokens.
#pragma unroll
  for (int h = 0; h < HEAD_TILES; ++h)
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        sum[h][e] += __shfl_xor_sync(MIE_FULL_WARP, sum[h][e], offset);

  __syncthreads();  // the rings are no longer needed, and their memory takes the warps' results
  float* merged = reinterpret_cast<float*>(mie_smem);  // [WARPS][HEADS][DH]
  float* maxima = merged + WARPS * HEADS * DH;         // [WARPS][HEADS]
  float* sums = maxima + WARPS * HEADS;                // [WARPS][HEADS]
#pragma unroll
  for (int h = 0; h < HEAD_TILES; ++h)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = warp * HEADS + h * 8 + 2 * t + e;
#pragma unroll
      for (int k = 0; k < STEPS; ++k) {
        float* to = merged + row * DH + k * 16;
        if constexpr (QUANTIZED) {
          to[2 * g] = acc[h][k][e] * (unit / WEIGHT_POWER);
          to[2 * g + 1] = acc[h][k][e + 2] * (unit / WEIGHT_POWER);
        } else {
          to[g] = acc[h][k][e];
          to[g + 8] = acc[h][k][e + 2];
        }
      }
      if (g == 0) maxima[row] = top[h][e], sums[row] = sum[h][e];
    }
  __syncthreads();
  merge_warps<T, DH, WARPS>(merged, maxima, sums, HEADS, group, is_whole, step.sinks,
                            kv_head * group, step.out + query_row * DH, step.partial,
                            step.partial_lse, first_partial, stride);
}
