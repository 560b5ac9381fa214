// Paged attention of sequences with several queries each, on tensor cores. It computes what
// paged_prefill.cu does, for 16-bit elements and heads of a multiple of 16 up to 128, or of 256, with
// any group and block size.
// The arguments are the same and these, which are null without splits:
//
//   partial      [blocks, 64, Dh]  float   a block's own result, normalised
//   partial_lse  [blocks, 64]      float   log2 of each row's sum of weights; -inf without a key
//   arrived      [tiles of rows]   int32   zeros: blocks that have written a partial result
//
// grid (max_splits * ceil(most queries * G / 64), sequences, Hkv), block (128). The schedule is
// FlashAttention-2 again. A block holds 64 rows, each one (token, query head of the group), 16 to a
// warp, and iterates over the keys in tiles of 64. All warps share a tile. The next tile is loaded
// (cp.async) while this one is multiplied. Rows form the long side of the product:
//
//   scores [16 rows, 8 keys] = Q [16, Dh] . K^T [Dh, 8]       eight such products along a tile
//   output [16 rows, 8]     += weights [16, 64] . V [64, 8]   Dh / 8 such
//
// The scores of two neighbouring products have the register layout of the weights' operand. Keys
// and values are stored swizzled, which avoids bank conflicts. Tiles begin at multiples of 64, so
// without splits a row's result does not depend on how its prompt was cut.
//
// Where a few rows meet many keys, several blocks share the keys of the same rows (`split_of`), and
// the last of them merges. The splits are whole tiles, and depend on the step.
//
// Budget on sm_90, 16 bits. The limit is shared memory: each warp reads every key and value for 16
// rows only.
//
//   heads  keys of a tile  registers  shared KB  blocks a multiprocessor  KB in flight a block
//   64     64              152        32         3                        16
//   96     64              185        48         2                        24
//   128    64              206        64         2                        32
//   256    32              249        96         2                        32
//
// A quantised cache is handled as in decode_mma.cuh. Here a lane's four elements of values belong
// to two columns, 2g and 2g + 1, and become column g of two products. Each row has its own unit,
// because it has its own largest score. Blocks are then a multiple of 16 tokens.
#include "mie_cuda.cuh"
#include "attention.cuh"
#include "splits.cuh"

// What the end of a block needs of its beginning. It waits behind the tiles in shared memory,
// because the loop over tiles needs all registers.
struct Kept {
  int first_token, first_row, row_end, row_tile, num_tiles, num_splits;
};

// With heads of up to 80, three blocks fit a multiprocessor if the compiler is told to leave room.
// With heads of 256, the results take half of the registers. The queries then wait in shared memory,
// and a tile has 32 keys instead of 64.
template <typename T, int DH, typename C = T, bool CAPPED = false>
__global__ void __launch_bounds__(128, DH <= 80 ? 3 : 1)
paged_prefill_mma(const T* __restrict__ q, const C* __restrict__ kv,
                  const float* __restrict__ scales, const int* __restrict__ tables,
                  const int* __restrict__ seq_lens, const int* __restrict__ cu_seqlens_q,
                  const int* __restrict__ sequences, const T* __restrict__ sinks,
                  T* __restrict__ out, float* __restrict__ partial, float* __restrict__ partial_lse,
                  int* __restrict__ arrived, int group, int table_width, int block_size, int window,
                  int split_tokens, int max_splits, float scale, float cap) {
  static_assert(DH % 16 == 0 && sizeof(T) == 2, "a product takes 16 elements of 16 bits");
  using Wide = Widening<C>;
  using Operand = typename Product<T, C>::Operand;
  constexpr float WEIGHT_POWER = ::WEIGHT_POWER<T, Operand>;
  constexpr bool QUANTIZED = IS_QUANTIZED<T, C>;
  constexpr bool QUERIES_WAIT = DH > 128;
  constexpr int WARPS = 4, ROWS = 64, KEYS = QUERIES_WAIT ? 32 : 64, STEPS = DH / 16;
  constexpr int ROW = DH * (int)sizeof(C), CHUNKS = ROW / 16;  // bytes of a key; chunks of 16
  constexpr int PAIRS = (CHUNKS + 1) / 2;  // of chunks, of which the last may be one
  constexpr int TILE = KEYS * ROW, SCALES = QUANTIZED ? KEYS * 4 : 0;  // bytes
  // Keys, values, and of every 16 keys the scales of the keys, then of the values. A warp copies
  // these 32 scales together, which would be in the same banks if each kind were in one place.
  constexpr int STAGE = 2 * (TILE + SCALES);
  constexpr int QUERIES = QUERIES_WAIT ? ROWS * DH * 2 : 0;  // bytes
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4;  // a lane's place in every fragment; see mie_ptx.cuh
  const int sequence = sequences[blockIdx.y], kv_head = blockIdx.z, num_heads = gridDim.z * group;
  const PagedKV<T, C, DH> cache = {kv, scales, (int)gridDim.z, block_size};
  const unsigned block_stride = (unsigned)cache.row(1, 0, 0, 0);  // rows from a block to the next
  const int* table = tables + (size_t)sequence * table_width;

  const int first_token = cu_seqlens_q[sequence];
  const int num_queries = cu_seqlens_q[sequence + 1] - first_token;
  // Blocks start in the order of blockIdx.x. The last rows of a prompt see the most keys, so they
  // come first, and the short blocks fill the chip at the end. Blocks of one split are neighbours,
  // because they read the same keys.
  const int num_tiles = gridDim.x / max_splits, row_tile = blockIdx.x % num_tiles;
  const int num_rows = num_queries * group, first_row = (num_tiles - 1 - row_tile) * ROWS;
  if (first_row >= num_rows) return;  // the grid is sized for the longest sequence
  const int offset = seq_lens[sequence] - num_queries;  // position of the sequence's first query
  const int last_row = min(first_row + ROWS, num_rows) - 1;
  // The keys that any row sees, and this block's.
  const int seen_end = offset + last_row / group + 1;
  const int seen_first = window > 0 ? max(0, offset + first_row / group + 1 - window) : 0;
  const Split split = split_of<KEYS>(seen_first, seen_end, split_tokens, max_splits,
                                     blockIdx.x / num_tiles);
  if ((int)blockIdx.x >= split.count * num_tiles) return;  // and for the most splits
  const int oldest = split.begin, end = split.end;
  Kept& kept = *reinterpret_cast<Kept*>(mie_smem + 2 * STAGE + QUERIES);
  if (threadIdx.x == 0)
    kept = {first_token, first_row, last_row + 1, row_tile, num_tiles, split.count};

  // A lane holds parts of two rows, 8 apart: their places in q, and their positions.
  const int rows[2] = {first_row + warp * 16 + g, first_row + warp * 16 + g + 8};
  size_t place[2];
  int position[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int token = first_token + rows[r] / group;
    place[r] = ((size_t)token * num_heads + kv_head * group + rows[r] % group) * DH;
    position[r] = offset + rows[r] / group;
  }
  // The positions of the warp's first and last row, even of rows past the sequence's last.
  const int warp_first = offset + (first_row + warp * 16) / group;
  const int warp_last = offset + (first_row + warp * 16 + 15) / group;
  unsigned query[STEPS][4];
#pragma unroll
  for (int k = 0; k < STEPS; ++k)
#pragma unroll
    for (int e = 0; e < 4; ++e) {  // e: which row, then which half of 16 elements
      const int element = k * 16 + (QUANTIZED ? e / 2 * 2 + 4 * t : e / 2 * 8 + 2 * t);
      query[k][e] = rows[e % 2] < num_rows
                        ? *reinterpret_cast<const unsigned*>(q + place[e % 2] + element)
                        : 0u;
    }
  float score_scale[2] = {scale, scale};  // of each row, for a key of scale 1
  if constexpr (IS_RAISED<T, Operand>) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = 0.0f;  // of a row, which four neighbouring lanes hold
#pragma unroll
      for (int k = 0; k < STEPS; ++k)
        largest = largest_of<T>(largest_of<T>(largest, query[k][r]), query[k][r + 2]);
      const float power = power_for_f16(warp_max<4>(largest));
      score_scale[r] *= inverse_power(power);
#pragma unroll
      for (int k = 0; k < STEPS; ++k)
#pragma unroll
        for (int e = r; e < 4; e += 2) query[k][e] = raise<T>(query[k][e], power);
    }
  }
  // A lane's own operands: [WARPS][STEPS][32 lanes]. No other lane reads them.
  uint4* waiting = reinterpret_cast<uint4*>(mie_smem + 2 * STAGE) + warp * STEPS * 32 + lane;
  if constexpr (QUERIES_WAIT) {
#pragma unroll
    for (int k = 0; k < STEPS; ++k)
      waiting[k * 32] = make_uint4(query[k][0], query[k][1], query[k][2], query[k][3]);
  }

  // A warp copies a quarter of a tile's rows, 16 bytes a lane at a time. Lane l looks up row
  // l % WARP_ROWS for the warp, which gets its place by a shuffle. It reads the entry of the block
  // table a tile ahead, so that no copy waits for it.
  constexpr int WARP_ROWS = KEYS / WARPS, WARP_CHUNKS = WARP_ROWS * CHUNKS;
  constexpr bool SAME_CHUNK = 32 % CHUNKS == 0;  // whether a lane copies one chunk of several rows
  constexpr int ALIGNED = QUANTIZED ? 16 : 1;  // tokens that are in one block with their first
  constexpr int PER_CHUNK = 16 / (int)sizeof(C);
  const C* planes[2];  // this head's first row of keys and of values, or the lane's chunk of them
#pragma unroll
  for (int plane = 0; plane < 2; ++plane)
    planes[plane] = kv + cache.row(0, 0, kv_head, plane) * DH +
                    (SAME_CHUNK ? lane % CHUNKS * PER_CHUNK : 0);
  int block_id = 0;  // of this lane's row in the tile that is fetched next
  auto look_up = [&](int tile) {
    const int token = tile + warp * WARP_ROWS + lane % WARP_ROWS;
    const int first = token / ALIGNED * ALIGNED;
    const bool is_needed = first + ALIGNED > oldest && first < end;  // else the entry may be stale
    block_id = is_needed ? table[(unsigned)token / (unsigned)block_size] : 0;
  };
  auto fetch = [&](int tile, int stage) {
    if (tile < end) {
      const int token = tile + warp * WARP_ROWS + lane % WARP_ROWS;
      // Rows of a layer are counted in 32 bits; attention.py asserts that they fit.
      const unsigned slot = (unsigned)token % (unsigned)block_size;
      const unsigned row = (unsigned)block_id * block_stride + slot;
      unsigned char* to = mie_smem + stage * STAGE;
#pragma unroll
      for (int j = 0; j < WARP_CHUNKS; j += 32) {
        const int i = SAME_CHUNK ? j / CHUNKS + lane / CHUNKS : (j + lane) / CHUNKS;
        const int chunk = SAME_CHUNK ? lane % CHUNKS : (j + lane) % CHUNKS;
        const unsigned from = __shfl_sync(MIE_FULL_WARP, row, i);
        if (WARP_CHUNKS % 32 != 0 && j + lane >= WARP_CHUNKS) break;
        const int key = warp * WARP_ROWS + i;
        // Zeros where no row looks, because an unwritten slot may hold NaN.
        const bool is_seen = tile + key >= oldest && tile + key < end;
#pragma unroll
        for (int plane = 0; plane < 2; ++plane)
          cp_async16_or_zero(
              to + plane * TILE + swizzled<ROW>(key, chunk),
              planes[plane] + (size_t)from * DH + (SAME_CHUNK ? 0 : chunk * PER_CHUNK), is_seen);
      }
      if constexpr (QUANTIZED) {  // four tokens of a block a lane
        constexpr int FOURS = WARP_ROWS / 4;
        const int plane = lane / FOURS % 2, i = lane % FOURS * 4, key = warp * WARP_ROWS + i;
        const unsigned from = __shfl_sync(MIE_FULL_WARP, row, i);
        const bool is_seen = tile + key + 3 >= oldest && tile + key < end;
        if (lane < 2 * FOURS)
          cp_async16_or_zero(to + 2 * TILE + (key / 16 * 8 + plane * 4 + key % 16 / 4) * 16,
                             cache.scales + cache.row(0, 0, kv_head, plane) + from, is_seen);
      }
      look_up(tile + KEYS);
    }
    cp_async_commit();  // a group for every tile, even an empty one, because the waits count groups
  };

  // The score of a row's product. A cap is applied to the products before their maximum is sought.
  auto scaled = [&](float product, int row) {
    return CAPPED ? product : product * score_scale[row];
  };

  // acc[d] and score[n]: [0], [1] are columns 2t, 2t + 1 of the first row, [2], [3] of the other.
  float acc[DH / 8][4] = {}, top[2] = {-MIE_INF, -MIE_INF}, sum[2] = {};  // top: before the scale
  float unit[2] = {};  // of a quantised cache: acc is in units / WEIGHT_POWER
  const int first_tile = oldest / KEYS * KEYS;
  look_up(first_tile);
  fetch(first_tile, 0);
  for (int tile = first_tile, stage = 0; tile < end; tile += KEYS, stage ^= 1) {
    fetch(tile + KEYS, stage ^ 1);
    cp_async_wait<1>();
    __syncthreads();
    const unsigned char* keys = mie_smem + stage * STAGE;
    const unsigned char* values = keys + TILE;

    float score[KEYS / 8][4] = {};
    // Multiplies 16 keys and a pair of chunks. A pair has one step of 16 elements, or two.
    constexpr int PAIR_STEPS = QUANTIZED ? 2 : 1;
    auto multiply = [&](int n, int k, const unsigned (*steps)[4]) {
      const int key = n * 16 + lane % 8 + lane / 16 * 8;
      unsigned b[4];
      ldmatrix_x4(b, keys + swizzled<ROW>(key, min(k * 2 + lane / 8 % 2, CHUNKS - 1)));
      if constexpr (QUANTIZED) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // eight keys, one chunk
          if (2 * k + i % 2 >= CHUNKS) continue;
          unsigned wide[2];
          Wide::template four<0, 1, 2, 3>(wide[0], wide[1], b[i]);
          mma_m16n8k16<Operand>(score[2 * n + i / 2], steps[i % 2], wide);
        }
      } else {
        mma_m16n8k16<T>(score[2 * n], steps[0], {b[0], b[1]});
        mma_m16n8k16<T>(score[2 * n + 1], steps[0], {b[2], b[3]});
      }
    };
    if constexpr (QUERIES_WAIT) {
#pragma unroll
      for (int k = 0; k < PAIRS; ++k) {
        unsigned steps[PAIR_STEPS][4];
#pragma unroll
        for (int i = 0; i < PAIR_STEPS; ++i) {
          const uint4 four = waiting[(k * PAIR_STEPS + i) * 32];
          steps[i][0] = four.x, steps[i][1] = four.y, steps[i][2] = four.z, steps[i][3] = four.w;
        }
#pragma unroll
        for (int n = 0; n < KEYS / 16; ++n) multiply(n, k, steps);
      }
    } else {
#pragma unroll
      for (int n = 0; n < KEYS / 16; ++n)
#pragma unroll
        for (int k = 0; k < PAIRS; ++k) multiply(n, k, query + k * PAIR_STEPS);
    }

    const float* key_scales = reinterpret_cast<const float*>(keys + 2 * TILE) + 2 * t;
    const float* value_scales = key_scales + 16;
    // Column n * 8 + 2t + e of the tile, in the scales.
    auto column = [](int n, int e) { return n / 2 * 32 + n % 2 * 8 + e; };
    float tile_top[2] = {-MIE_INF, -MIE_INF}, tile_unit[2] = {};
    if constexpr (QUANTIZED) {
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) score[n][e] *= key_scales[column(n, e % 2)];
    }
    if constexpr (CAPPED) {
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          score[n][e] = bounded<CAPPED>(score[n][e] * score_scale[e / 2], cap);
    }
    // Only a tile that a row of the warp sees in part needs the mask. The mask of the diagonal also
    // hides the keys past the end of the context.
    if (tile + KEYS - 1 > warp_first || (window > 0 && tile <= warp_last - window)) {
      const unsigned reach = window > 0 ? window : 0x7fffffff;  // the keys that a row sees
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int i = n * 8 + 2 * t + e % 2;
          // The distance of a later key is negative, and as an unsigned number too large.
          const bool is_visible = (unsigned)(position[e / 2] - tile - i) < reach;
          if (!is_visible) score[n][e] = -MIE_INF;
          if constexpr (QUANTIZED)
            if (is_visible)
              tile_unit[e / 2] = fmaxf(tile_unit[e / 2], value_scales[column(n, e % 2)]);
        }
    } else if constexpr (QUANTIZED) {
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          tile_unit[0] = fmaxf(tile_unit[0], value_scales[column(n, e)]);
      tile_unit[1] = tile_unit[0];
    }
    float reference[2], per_unit[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n)
        tile_top[r] = fmaxf(tile_top[r], fmaxf(score[n][2 * r], score[n][2 * r + 1]));
      tile_top[r] = fmaxf(tile_top[r], __shfl_xor_sync(MIE_FULL_WARP, tile_top[r], 1));
      tile_top[r] = fmaxf(tile_top[r], __shfl_xor_sync(MIE_FULL_WARP, tile_top[r], 2));
      const float new_top = fmaxf(top[r], tile_top[r]);
      reference[r] = new_top == -MIE_INF ? 0.0f : scaled(new_top, r);  // the row sees no key yet
      float keep = exp2_approx(scaled(top[r], r) - reference[r]);
      top[r] = new_top;
      sum[r] *= keep;
      if constexpr (QUANTIZED) {
        tile_unit[r] = fmaxf(tile_unit[r], __shfl_xor_sync(MIE_FULL_WARP, tile_unit[r], 1));
        tile_unit[r] = fmaxf(tile_unit[r], __shfl_xor_sync(MIE_FULL_WARP, tile_unit[r], 2));
        const float new_unit = fmaxf(unit[r], tile_unit[r]);
        per_unit[r] = new_unit > 0.0f ? 1.0f / new_unit : 0.0f;
        keep *= unit[r] * per_unit[r];
        per_unit[r] *= WEIGHT_POWER;
        unit[r] = new_unit;
      }
#pragma unroll
      for (int d = 0; d < DH / 8; ++d) acc[d][2 * r] *= keep, acc[d][2 * r + 1] *= keep;
    }

#pragma unroll
    for (int n = 0; n < KEYS / 16; ++n) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        float& s = score[2 * n + e / 4][e % 4];
        s = exp2_approx(scaled(s, e / 2 % 2) - reference[e / 2 % 2]);
        sum[e / 2 % 2] += s;
        if constexpr (QUANTIZED) {  // 0 where the row does not see the key: its scale may be NaN
          const float value_scale = value_scales[column(2 * n + e / 4, e % 2)];
          s = s == 0.0f ? 0.0f : s * (value_scale * per_unit[e / 2 % 2]);
        }
      }
      const float *left = score[2 * n], *right = score[2 * n + 1];
      const unsigned weights[4] = {
          pack2<Operand>(left[0], left[1]), pack2<Operand>(left[2], left[3]),
          pack2<Operand>(right[0], right[1]), pack2<Operand>(right[2], right[3])};
      const int key = n * 16 + lane % 16;
#pragma unroll
      for (int d = 0; d < PAIRS; ++d) {
        unsigned b[4];  // 16 keys, two chunks, transposed
        ldmatrix_x4_trans(b, values + swizzled<ROW>(key, min(d * 2 + lane / 16, CHUNKS - 1)));
        if constexpr (QUANTIZED) {
#pragma unroll
          for (int c = 0; c < 2 && d * 2 + c < CHUNKS; ++c) {
            const unsigned low = b[2 * c], high = b[2 * c + 1];  // keys 2t, 2t + 1 and 8 further
            float(&even)[4] = acc[4 * d + 2 * c], (&odd)[4] = acc[4 * d + 2 * c + 1];
            unsigned first[2], second[2];
            Wide::template four<0, 2, 1, 3>(first[0], second[0], low);
            Wide::template four<0, 2, 1, 3>(first[1], second[1], high);
            mma_m16n8k16<Operand>(even, weights, first);
            mma_m16n8k16<Operand>(odd, weights, second);
          }
        } else {
          mma_m16n8k16<T>(acc[2 * d], weights, {b[0], b[1]});
          mma_m16n8k16<T>(acc[2 * d + 1], weights, {b[2], b[3]});
        }
      }
    }
    __syncthreads();  // the stage is refilled in the next round
  }
  cp_async_wait<0>();

  const bool is_whole = kept.num_splits == 1;
  const unsigned grid_row = blockIdx.z * gridDim.y + blockIdx.y;
  auto sink = [&](int row) { return sink_of(sinks, kv_head * group + row % group); };
  auto result = [&](int row) {  // the place of a row's output
    const size_t token = kept.first_token + row / group;
    return out + (token * num_heads + kv_head * group + row % group) * DH;
  };
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum[r] += __shfl_xor_sync(MIE_FULL_WARP, sum[r], 1);
    sum[r] += __shfl_xor_sync(MIE_FULL_WARP, sum[r], 2);
    const int tile_row = warp * 16 + g + 8 * r, row = kept.first_row + tile_row;
    if (row >= kept.row_end) continue;
    T* to = result(row);
    const size_t part = (size_t)(grid_row * gridDim.x + blockIdx.x) * ROWS + tile_row;
    if (is_whole) sum[r] += exp2f(sink(row) - scaled(top[r], r));
    // A row may see no key of a split, but it sees one of all keys.
    const bool is_empty = !is_whole && sum[r] == 0.0f;
    const float by = is_empty ? 0.0f : (QUANTIZED ? unit[r] / WEIGHT_POWER : 1.0f) / sum[r];
    if (!is_whole && t == 0)
      partial_lse[part] = is_empty ? -MIE_INF : scaled(top[r], r) + log2f(sum[r]);
    auto write = [&](int column, float x, float y) {  // elements column and column + 1
      if (is_whole)
        *reinterpret_cast<unsigned*>(to + column) = pack2<T>(x * by, y * by);
      else
        *reinterpret_cast<float2*>(partial + part * DH + column) = make_float2(x * by, y * by);
    };
#pragma unroll
    for (int d = 0; d < DH / 8; d += 2) {
      const float *left = acc[d] + 2 * r, *right = acc[d + 1] + 2 * r;
      if constexpr (QUANTIZED) {  // of 16 elements 4t ... 4t + 3
        write(d * 8 + 4 * t, left[0], right[0]);
        write(d * 8 + 4 * t + 2, left[1], right[1]);
      } else {
        write(d * 8 + 2 * t, left[0], left[1]);
        write(d * 8 + 8 + 2 * t, right[0], right[1]);
      }
    }
  }
  int* count = arrived + grid_row * kept.num_tiles + kept.row_tile;
  if (is_whole || !is_last_to_arrive(count, kept.num_splits)) return;
  merge_parts<T, DH>(
      partial, partial_lse, kept.row_end - kept.first_row, kept.num_splits,
      [&](int r) { return result(kept.first_row + r); },
      [&](int r) { return sink(kept.first_row + r); },
      [&](int r, int split) {
        const unsigned block = split * kept.num_tiles + kept.row_tile;
        return (size_t)(grid_row * gridDim.x + block) * ROWS + r;
      });
}
