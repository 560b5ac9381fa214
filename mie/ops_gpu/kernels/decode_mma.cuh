// Decode attention on tensor cores: one block attends to some tokens of one sequence, for the query
// heads of one KV head. Shared by paged_decode_mma.cu and paged_decode_stream.cu, which differ in
// how they share the tokens out. Included after mie_cuda.cuh and attention.cuh.
//
// On CUDA cores eight query heads to a KV head cost more instructions and shared-memory reads than
// the memory leaves time for. So the 16 tokens of a tile stand on the long side of a tensor core's
// product and the query heads, up to eight of them at one price, on the short side:
//
//   scores  [16 tokens, 8 heads]  = K [16, Dh] . Q^T [Dh, 8]
//   output  [Dh, 8 heads]        += V^T [Dh, 16] . weights [16, 8]
//
// A warp works for itself until the end: it owns every WARPS-th tile and a ring of STAGES tiles in
// shared memory, which cp.async fills while older ones are multiplied. Rows of a tile are chunks of
// 16 bytes, stored at chunk ^ (row % 8), so that ldmatrix reads eight rows without bank conflicts.
#pragma once

// What a step asks of one layer. Shapes as in paged_decode.cu.
template <typename T>
struct DecodeStep {
  const T *q, *kv;
  const int *tables, *seq_lens, *cu_seqlens_q;
  T* out;
  float *partial, *partial_lse;
  int num_kv_heads, group, table_width, block_size;
  float scale;  // of scores, times log2(e)
};

// Attends to the tokens begin ... end - 1. Leaves the output if that is_whole of what the query
// sees, else a partial result in the rows first_partial + g * stride. Every thread of the block
// calls; dynamic shared memory may be reused after a barrier.
template <typename T, int DH, int HEAD_TILES, int WARPS, int STAGES>
__device__ __forceinline__ void attend_tokens(const DecodeStep<T>& step, int sequence, int kv_head,
                                              int begin, int end, bool is_whole,
                                              size_t first_partial, int stride) {
  static_assert(DH % 64 == 0 && sizeof(T) == 2, "the swizzle wants rows of 8 chunks");
  constexpr int TOKENS = 16, STEPS = DH / 16;           // tokens of a tile; k-steps over a head
  constexpr int CHUNKS = DH / 8, ROW = 2 * DH;          // 16-byte chunks, and bytes, of a row
  constexpr int TILE = TOKENS * ROW, STAGE = 2 * TILE;  // bytes: keys, then values
  constexpr int HEADS = 8 * HEAD_TILES;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4;  // a lane's place in every fragment; see mie_ptx.cuh
  const int group = step.group, num_heads = step.num_kv_heads * group;
  const PagedKV<T, DH> cache = {step.kv, step.num_kv_heads, step.block_size};
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
      query[h][k][0] = head < group ? row[k * 8 + t] : 0u;
      query[h][k][1] = head < group ? row[k * 8 + t + 4] : 0u;
    }
  }

  // A tile lies in one block, as blocks are multiples of it. The ids of 32 tiles are read at once,
  // one a lane, and handed out by shuffles. All lanes call both.
  int block_ids = 0;
  auto block_of = [&](int i) {
    if (i % 32 == 0) {
      const int token = first + (i + lane) * (WARPS * TOKENS);
      const size_t entry = (size_t)sequence * step.table_width + token / step.block_size;
      block_ids = token < end ? step.tables[entry] : 0;
    }
    return __shfl_sync(MIE_FULL_WARP, block_ids, i % 32);
  };
  auto fetch = [&](int i) {
    if (i < num_tiles) {
      const int block_id = block_of(i), token = first + i * (WARPS * TOKENS);
      unsigned char* stage = ring + i % STAGES * STAGE;
#pragma unroll
      for (int plane = 0; plane < 2; ++plane) {
        const T* source = cache.row(block_id, token % step.block_size, kv_head, plane);
#pragma unroll
        for (int j = 0; j < TOKENS * CHUNKS / 32; ++j) {
          const int row = (j * 32 + lane) / CHUNKS, chunk = (j * 32 + lane) % CHUNKS;
          // What the query does not see is zero: an unwritten slot may hold NaN.
          cp_async16_or_zero(stage + plane * TILE + row * ROW + (chunk ^ row % 8) * 16,
                             source + row * DH + chunk * 8,
                             token + row >= begin && token + row < end);
        }
      }
    }
    cp_async_commit();  // a group for every tile, be it empty: the waits count groups
  };

  // Per head tile: a lane holds heads 2t and 2t + 1, for tokens g and g + 8 (scores) and for
  // elements g and g + 8 of every 16 (output).
  float acc[HEAD_TILES][STEPS][4] = {}, top[HEAD_TILES][2], sum[HEAD_TILES][2] = {};
#pragma unroll
  for (int h = 0; h < HEAD_TILES; ++h) top[h][0] = top[h][1] = -MIE_INF;

#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) fetch(i);
  for (int i = 0; i < num_tiles; ++i) {
    cp_async_wait<STAGES - 2>();
    __syncwarp();  // what the other lanes fetched is there too; and all are done with tile i - 1,
    fetch(i + STAGES - 1);  // whose stage is filled anew
    const unsigned char* keys = ring + i % STAGES * STAGE;
    const unsigned char* values = keys + TILE;

    float score[HEAD_TILES][4] = {};
    {
      const int row = lane % 16;
#pragma unroll
      for (int k = 0; k < STEPS; ++k) {
        unsigned a[4];
        ldmatrix_x4(a, keys + row * ROW + ((k * 2 + lane / 16) ^ row % 8) * 16);
#pragma unroll
        for (int h = 0; h < HEAD_TILES; ++h) mma_m16n8k16<T>(score[h], a, query[h][k]);
      }
    }

    const int token = first + i * (WARPS * TOKENS) + g;
    const bool sees[2] = {token >= begin && token < end, token + 8 >= begin && token + 8 < end};
    unsigned weights[HEAD_TILES][2];
#pragma unroll
    for (int h = 0; h < HEAD_TILES; ++h) {
      float* s = score[h];
#pragma unroll
      for (int e = 0; e < 4; ++e) s[e] = sees[e / 2] ? s[e] * step.scale : -MIE_INF;
      float tile_top[2] = {fmaxf(s[0], s[2]), fmaxf(s[1], s[3])};
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) {
#pragma unroll
        for (int e = 0; e < 2; ++e)
          tile_top[e] = fmaxf(tile_top[e], __shfl_xor_sync(MIE_FULL_WARP, tile_top[e], offset));
      }
      // Every tile has a token that is seen, so the maxima are finite from the first tile on.
      if (__any_sync(MIE_FULL_WARP, tile_top[0] > top[h][0] || tile_top[1] > top[h][1])) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float new_top = fmaxf(top[h][e], tile_top[e]);
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
      }
      // (token, head) as a product leaves it, to (token, head) as a product wants it.
      weights[h][0] = movmatrix_trans(pack2<T>(s[0], s[1]));
      weights[h][1] = movmatrix_trans(pack2<T>(s[2], s[3]));
    }

    {
      const int row = lane % 8 + lane / 16 * 8;
#pragma unroll
      for (int k = 0; k < STEPS; ++k) {
        unsigned a[4];
        ldmatrix_x4_trans(a, values + row * ROW + ((k * 2 + lane / 8 % 2) ^ row % 8) * 16);
#pragma unroll
        for (int h = 0; h < HEAD_TILES; ++h) mma_m16n8k16<T>(acc[h][k], a, weights[h]);
      }
    }
  }
  cp_async_wait<0>();

  // A lane summed the weights of its own tokens only.
#pragma unroll
  for (int h = 0; h < HEAD_TILES; ++h)
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        sum[h][e] += __shfl_xor_sync(MIE_FULL_WARP, sum[h][e], offset);

  __syncthreads();  // the rings are done with: their memory takes the warps' results
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
        merged[row * DH + k * 16 + g] = acc[h][k][e];
        merged[row * DH + k * 16 + g + 8] = acc[h][k][e + 2];
      }
      if (g == 0) maxima[row] = top[h][e], sums[row] = sum[h][e];
    }
  __syncthreads();
  merge_warps<T, DH, WARPS>(merged, maxima, sums, HEADS, group, is_whole,
                            step.out + query_row * DH, step.partial, step.partial_lse,
                            first_partial, stride);
}
