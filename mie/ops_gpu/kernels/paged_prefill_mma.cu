// Paged attention of sequences with several queries each, on tensor cores. It computes what
// paged_prefill.cu does, for 16-bit elements and heads of a multiple of 16 up to 128, or of 256, with
// any group and block size.
// The arguments are the same and these, which are null without splits:
//
//   partial      [blocks, ROWS, Dh]  float   a block's own result, normalised
//   partial_lse  [blocks, ROWS]      float   log2 of each row's sum of weights; -inf without a key
//   arrived      [tiles of rows]     int32   zeros: blocks that have written a partial result
//
// grid (max_splits * ceil(most queries * G / ROWS), sequences, Hkv), block (128). The schedule is
// FlashAttention-2 again. A block holds ROWS = 64 * M rows, each one (token, query head of the
// group), M times 16 to a warp, and iterates over the keys in tiles of 64. All warps share a tile.
// The next tile is loaded (cp.async) while this one is multiplied. Rows form the long side of the
// product:
//
//   scores [16 rows, 8 keys] = Q [16, Dh] . K^T [Dh, 8]       eight such products along a tile
//   output [16 rows, 8]     += weights [16, 64] . V [64, 8]   Dh / 8 such
//
// The scores of two neighbouring products have the register layout of the weights' operand. Keys
// and values are stored swizzled, which avoids bank conflicts. Tiles begin at multiples of 64, so
// without splits a row's result does not depend on how its prompt was cut. Nor does it depend on M:
// a row has the same operations in the same order.
//
// With M = 2 a fragment of keys or values is read from shared memory once for 32 rows. The results
// then take half of the registers, so the queries wait in shared memory. It is for launches that
// fill the chip (attention.py).
//
// Where a few rows meet many keys, several blocks share the keys of the same rows (`split_of`), and
// the last of them merges. The splits are whole tiles, and depend on the step.
//
// Budget on sm_90, 16 bits. The limit of M = 1 is shared memory. With M = 2 it is the issue of
// instructions: a tile of 64 keys and heads of 128 has 256 products in 1,363 instructions of a warp.
//
//   heads, M  keys of a tile  registers  shared KB  blocks a multiprocessor  KB in flight a block
//   64, 1     64              144        33         3                        16
//   64, 2     64              218        49         2                        16
//   96, 2     64              251        73         2                        24
//   128, 1    64              207        65         2                        32
//   128, 2    64              255        97         2                        32
//   256, 1    32              241        97         2                        32
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

// M: row tiles of a warp. With heads of up to 80, three blocks fit a multiprocessor if the compiler is told to leave room.
// With heads of 256, the results take half of the registers. The queries then wait in shared memory,
// and a tile has 32 keys instead of 64.
template <typename T, int DH, int M, typename C = T, bool CAPPED = false>
__global__ void __launch_bounds__(128, M == 2 ? 2 : DH <= 80 ? 3 : 1)
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
  constexpr bool QUERIES_WAIT = M == 2 || DH > 128;
  constexpr int WARPS = 4, OWN = 16 * M, ROWS = WARPS * OWN, KEYS = DH > 128 ? 32 : 64;
  constexpr int STEPS = DH / 16;
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

  // Of each 16 rows of a warp a lane holds parts of two, 8 apart.
  const int warp_row = warp * OWN;
  // The positions of the block's rows, even past the sequence's last, and of the warp's ends. They
  // are read where a tile is masked. In registers they would displace results.
  int* positions = reinterpret_cast<int*>(mie_smem + 2 * STAGE + QUERIES + sizeof(Kept));
  if (threadIdx.x < ROWS) positions[threadIdx.x] = offset + (first_row + (int)threadIdx.x) / group;
  const int warp_first = offset + (first_row + warp_row) / group;
  const int warp_last = offset + (first_row + warp_row + OWN - 1) / group;
  // A lane's own operands: [WARPS][M][STEPS][32 lanes]. No other lane reads them.
  uint4* waiting = reinterpret_cast<uint4*>(mie_smem + 2 * STAGE) + warp * M * STEPS * 32 + lane;
  unsigned query[STEPS][4];
  float score_scale[M][2];  // of each row, for a key of scale 1
#pragma unroll
  for (int m = 0; m < M; ++m) {
    const T* from[2];  // the queries of two rows, or null past the last
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + warp_row + m * 16 + g + 8 * r;
      const size_t token = first_token + row / group;
      from[r] = row < num_rows ? q + (token * num_heads + kv_head * group + row % group) * DH
                               : nullptr;
      score_scale[m][r] = scale;
    }
#pragma unroll
    for (int k = 0; k < STEPS; ++k)
#pragma unroll
      for (int e = 0; e < 4; ++e) {  // e: which row, then which half of 16 elements
        const int element = k * 16 + (QUANTIZED ? e / 2 * 2 + 4 * t : e / 2 * 8 + 2 * t);
        query[k][e] = from[e % 2] != nullptr
                          ? *reinterpret_cast<const unsigned*>(from[e % 2] + element)
                          : 0u;
      }
    if constexpr (IS_RAISED<T, Operand>) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float largest = 0.0f;  // of a row, which four neighbouring lanes hold
#pragma unroll
        for (int k = 0; k < STEPS; ++k)
          largest = largest_of<T>(largest_of<T>(largest, query[k][r]), query[k][r + 2]);
        const float power = power_for_f16(warp_max<4>(largest));
        score_scale[m][r] *= inverse_power(power);
#pragma unroll
        for (int k = 0; k < STEPS; ++k)
#pragma unroll
          for (int e = r; e < 4; e += 2) query[k][e] = raise<T>(query[k][e], power);
      }
    }
    if constexpr (QUERIES_WAIT) {
#pragma unroll
      for (int k = 0; k < STEPS; ++k)
        waiting[(m * STEPS + k) * 32] =
            make_uint4(query[k][0], query[k][1], query[k][2], query[k][3]);
    }
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
  auto scaled = [&](float product, int m, int r) {
    return CAPPED ? product : product * score_scale[m][r];
  };

  // acc[m][d] and score[m][n]: [0], [1] are columns 2t, 2t + 1 of the first row, [2], [3] of the
  // other.
  float acc[M][DH / 8][4] = {}, top[M][2], sum[M][2] = {};  // top: before the scale
  float unit[M][2] = {};  // of a quantised cache: acc is in units / WEIGHT_POWER
#pragma unroll
  for (int m = 0; m < M; ++m) top[m][0] = top[m][1] = -MIE_INF;
  const int first_tile = oldest / KEYS * KEYS;
  look_up(first_tile);
  fetch(first_tile, 0);
  for (int tile = first_tile, stage = 0; tile < end; tile += KEYS, stage ^= 1) {
    fetch(tile + KEYS, stage ^ 1);
    cp_async_wait<1>();
    __syncthreads();
    const unsigned char* keys = mie_smem + stage * STAGE;
    const unsigned char* values = keys + TILE;

    float score[M][KEYS / 8][4] = {};
    // Multiplies 16 keys and a pair of chunks. A pair has one step of 16 elements, or two.
    constexpr int PAIR_STEPS = QUANTIZED ? 2 : 1;
    auto multiply = [&](int n, int k, const unsigned (*steps)[4]) {  // [M * PAIR_STEPS]
      const int key = n * 16 + lane % 8 + lane / 16 * 8;
      unsigned b[4];
      ldmatrix_x4(b, keys + swizzled<ROW>(key, min(k * 2 + lane / 8 % 2, CHUNKS - 1)));
      if constexpr (QUANTIZED) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // eight keys, one chunk
          if (2 * k + i % 2 >= CHUNKS) continue;
          unsigned wide[2];
          Wide::template four<0, 1, 2, 3>(wide[0], wide[1], b[i]);
#pragma unroll
          for (int m = 0; m < M; ++m)
            mma_m16n8k16<Operand>(score[m][2 * n + i / 2], steps[m * PAIR_STEPS + i % 2], wide);
        }
      } else {
#pragma unroll
        for (int m = 0; m < M; ++m) {
          mma_m16n8k16<T>(score[m][2 * n], steps[m], {b[0], b[1]});
          mma_m16n8k16<T>(score[m][2 * n + 1], steps[m], {b[2], b[3]});
        }
      }
    };
    if constexpr (QUERIES_WAIT) {
#pragma unroll
      for (int k = 0; k < PAIRS; ++k) {
        unsigned steps[M * PAIR_STEPS][4];
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
          for (int i = 0; i < PAIR_STEPS; ++i) {
            if (k * PAIR_STEPS + i >= STEPS) continue;
            const uint4 four = waiting[(m * STEPS + k * PAIR_STEPS + i) * 32];
            unsigned(&step)[4] = steps[m * PAIR_STEPS + i];
            step[0] = four.x, step[1] = four.y, step[2] = four.z, step[3] = four.w;
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
    // Only a tile that a row of the warp sees in part needs the mask. The mask of the diagonal also
    // hides the keys past the end of the context.
    const bool is_masked = tile + KEYS - 1 > warp_first || (window > 0 && tile <= warp_last - window);
    float reference[M][2], per_unit[M][2];
#pragma unroll
    for (int m = 0; m < M; ++m) {
      float tile_top[2] = {-MIE_INF, -MIE_INF}, tile_unit[2] = {};
      if constexpr (QUANTIZED) {
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) score[m][n][e] *= key_scales[column(n, e % 2)];
      }
      if constexpr (CAPPED) {
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            score[m][n][e] = bounded<CAPPED>(score[m][n][e] * score_scale[m][e / 2], cap);
      }
      if (is_masked) {
        const unsigned reach = window > 0 ? window : 0x7fffffff;  // the keys that a row sees
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int distance = positions[warp_row + m * 16 + g + 8 * r] - tile;
#pragma unroll
          for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              // The distance of a later key is negative, and as an unsigned number too large.
              const bool is_visible = (unsigned)(distance - (n * 8 + 2 * t + e)) < reach;
              if (!is_visible) score[m][n][2 * r + e] = -MIE_INF;
              if constexpr (QUANTIZED)
                if (is_visible) tile_unit[r] = fmaxf(tile_unit[r], value_scales[column(n, e)]);
            }
        }
      } else if constexpr (QUANTIZED) {
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            tile_unit[0] = fmaxf(tile_unit[0], value_scales[column(n, e)]);
        tile_unit[1] = tile_unit[0];
      }
      float keep[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n)
          tile_top[r] = fmaxf(tile_top[r], fmaxf(score[m][n][2 * r], score[m][n][2 * r + 1]));
        tile_top[r] = fmaxf(tile_top[r], __shfl_xor_sync(MIE_FULL_WARP, tile_top[r], 1));
        tile_top[r] = fmaxf(tile_top[r], __shfl_xor_sync(MIE_FULL_WARP, tile_top[r], 2));
        const float new_top = fmaxf(top[m][r], tile_top[r]);
        // The row may see no key yet.
        reference[m][r] = new_top == -MIE_INF ? 0.0f : scaled(new_top, m, r);
        keep[r] = exp2_approx(scaled(top[m][r], m, r) - reference[m][r]);
        top[m][r] = new_top;
        sum[m][r] *= keep[r];
        if constexpr (QUANTIZED) {
          tile_unit[r] = fmaxf(tile_unit[r], __shfl_xor_sync(MIE_FULL_WARP, tile_unit[r], 1));
          tile_unit[r] = fmaxf(tile_unit[r], __shfl_xor_sync(MIE_FULL_WARP, tile_unit[r], 2));
          const float new_unit = fmaxf(unit[m][r], tile_unit[r]);
          per_unit[m][r] = new_unit > 0.0f ? 1.0f / new_unit : 0.0f;
          keep[r] *= unit[m][r] * per_unit[m][r];
          per_unit[m][r] *= WEIGHT_POWER;
          unit[m][r] = new_unit;
        }
      }
      // Maxima and units settle soon, and then the results stay as they are.
      if (__any_sync(MIE_FULL_WARP, keep[0] != 1.0f || keep[1] != 1.0f)) {
#pragma unroll
        for (int d = 0; d < DH / 8; ++d)
#pragma unroll
          for (int e = 0; e < 4; ++e) acc[m][d][e] *= keep[e / 2];
      }
    }

#pragma unroll
    for (int n = 0; n < KEYS / 16; ++n) {
      unsigned weights[M][4];
#pragma unroll
      for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          float& s = score[m][2 * n + e / 4][e % 4];
          s = exp2_approx(scaled(s, m, e / 2 % 2) - reference[m][e / 2 % 2]);
          sum[m][e / 2 % 2] += s;
          if constexpr (QUANTIZED) {  // 0 where the row does not see the key: its scale may be NaN
            const float value_scale = value_scales[column(2 * n + e / 4, e % 2)];
            s = s == 0.0f ? 0.0f : s * (value_scale * per_unit[m][e / 2 % 2]);
          }
        }
        const float *left = score[m][2 * n], *right = score[m][2 * n + 1];
        weights[m][0] = pack2<Operand>(left[0], left[1]);
        weights[m][1] = pack2<Operand>(left[2], left[3]);
        weights[m][2] = pack2<Operand>(right[0], right[1]);
        weights[m][3] = pack2<Operand>(right[2], right[3]);
      }
      const int key = n * 16 + lane % 16;
#pragma unroll
      for (int d = 0; d < PAIRS; ++d) {
        unsigned b[4];  // 16 keys, two chunks, transposed
        ldmatrix_x4_trans(b, values + swizzled<ROW>(key, min(d * 2 + lane / 16, CHUNKS - 1)));
        if constexpr (QUANTIZED) {
#pragma unroll
          for (int c = 0; c < 2 && d * 2 + c < CHUNKS; ++c) {
            const unsigned low = b[2 * c], high = b[2 * c + 1];  // keys 2t, 2t + 1 and 8 further
            unsigned first[2], second[2];
            Wide::template four<0, 2, 1, 3>(first[0], second[0], low);
            Wide::template four<0, 2, 1, 3>(first[1], second[1], high);
#pragma unroll
            for (int m = 0; m < M; ++m) {  // even columns, and odd ones
              mma_m16n8k16<Operand>(acc[m][4 * d + 2 * c], weights[m], first);
              mma_m16n8k16<Operand>(acc[m][4 * d + 2 * c + 1], weights[m], second);
            }
          }
        } else {
#pragma unroll
          for (int m = 0; m < M; ++m) {
            mma_m16n8k16<T>(acc[m][2 * d], weights[m], {b[0], b[1]});
            mma_m16n8k16<T>(acc[m][2 * d + 1], weights[m], {b[2], b[3]});
          }
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
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[m][r] += __shfl_xor_sync(MIE_FULL_WARP, sum[m][r], 1);
      sum[m][r] += __shfl_xor_sync(MIE_FULL_WARP, sum[m][r], 2);
      const int tile_row = warp_row + m * 16 + g + 8 * r, row = kept.first_row + tile_row;
      if (row >= kept.row_end) continue;
      T* to = result(row);
      const size_t part = (size_t)(grid_row * gridDim.x + blockIdx.x) * ROWS + tile_row;
      if (is_whole) sum[m][r] += exp2f(sink(row) - scaled(top[m][r], m, r));
      // A row may see no key of a split, but it sees one of all keys.
      const bool is_empty = !is_whole && sum[m][r] == 0.0f;
      const float by = is_empty ? 0.0f : (QUANTIZED ? unit[m][r] / WEIGHT_POWER : 1.0f) / sum[m][r];
      if (!is_whole && t == 0)
        partial_lse[part] = is_empty ? -MIE_INF : scaled(top[m][r], m, r) + log2f(sum[m][r]);
      auto write = [&](int column, float x, float y) {  // elements column and column + 1
        if (is_whole)
          *reinterpret_cast<unsigned*>(to + column) = pack2<T>(x * by, y * by);
        else
          *reinterpret_cast<float2*>(partial + part * DH + column) = make_float2(x * by, y * by);
      };
#pragma unroll
      for (int d = 0; d < DH / 8; d += 2) {
        const float *left = acc[m][d] + 2 * r, *right = acc[m][d + 1] + 2 * r;
        if constexpr (QUANTIZED) {  // of 16 elements 4t ... 4t + 3
          write(d * 8 + 4 * t, left[0], right[0]);
          write(d * 8 + 4 * t + 2, left[1], right[1]);
        } else {
          write(d * 8 + 2 * t, left[0], left[1]);
          write(d * 8 + 8 + 2 * t, right[0], right[1]);
        }
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
