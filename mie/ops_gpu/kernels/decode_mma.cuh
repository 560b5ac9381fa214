// Decode attention on tensor cores. One block attends to runs of tokens, one after another. A run is
// of one sequence, for the query heads of one KV head. paged_decode_stream.cu deals the runs.
// Included after mie_cuda.cuh and attention.cuh.
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
// Keys are at the end of a chain of loads: a run's sequence, an entry of the block table, the keys.
// The kernel finds a run while the run before is multiplied. Then `look_up` reads the entries of
// its first 32 tiles, and the entries of every later 32 are read 16 tiles ahead. `start` requests
// the run's first tiles before the results of the run before are merged. The merge takes the last
// stages of the ring.
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
  const int* tables;
  const T* sinks;
  T* out;
  float *partial, *partial_lse;
  int num_kv_heads, group, table_width, block_size;
  float scale, cap;  // of scores: `bounded` in attention.cuh
};

// The tokens begin ... end - 1 of a sequence, for one KV head. `query` is the row of q.
struct Run {
  int sequence, query, kv_head, begin, end;
};

constexpr int smaller(int a, int b) { return a < b ? a : b; }

// Attends to runs. Every thread of the block calls each function.
template <typename T, typename C, int DH, int HEAD_TILES, int WARPS, int STAGES, bool CAPPED>
struct Decoder {
  static_assert(DH % 16 == 0 && sizeof(T) == 2, "a product takes 16 elements of 16 bits");
  static constexpr bool QUANTIZED = IS_QUANTIZED<T, C>;
  static constexpr int TOKENS = 16, STEPS = DH / 16;  // tokens of a tile; k-steps over a head
  static constexpr int ROW = DH * (int)sizeof(C), CHUNKS = ROW / 16;  // bytes of a row; chunks of 16
  static constexpr int PAIRS = (CHUNKS + 1) / 2;  // of chunks, of which the last may be one
  static constexpr int TILE = TOKENS * ROW, SCALES = QUANTIZED ? TOKENS * 4 : 0;  // bytes
  static constexpr int STAGE = 2 * (TILE + SCALES);  // keys, values, the keys' scales, the values'
  static constexpr int RING = STAGES * STAGE, HEADS = 8 * HEAD_TILES;
  // Blocks of a multiprocessor with 228 KB of shared memory, of which a block takes 1 KB more. The
  // compiler has to leave them room. attention.py launches no more than three.
  static constexpr int RESIDENT = smaller(3, (228 << 10) / (WARPS * RING + (1 << 10)));
  // A warp's results: weighted sums [HEADS, DH], maxima [HEADS], sums of weights [HEADS].
  static constexpr int RESULTS = 4 * HEADS * (DH + 2);
  static constexpr int MERGE_STAGES = (RESULTS + STAGE - 1) / STAGE;
  // Tiles of the next run that are fetched before the merge.
  static constexpr int AHEAD = STAGES - (MERGE_STAGES > 1 ? MERGE_STAGES : 1);
  static_assert(AHEAD > 0, "a run's first tile is fetched beside the results of the run before");
  static constexpr int TILE_CHUNKS = TOKENS * CHUNKS, PER_CHUNK = 16 / (int)sizeof(C);
  using Wide = Widening<C>;
  using Operand = typename Product<T, C>::Operand;
  static constexpr float WEIGHT_POWER = ::WEIGHT_POWER<T, Operand>;

  const DecodeStep<T, C>& step;
  const PagedKV<T, C, DH> cache;
  const int warp, lane, g, t;  // g, t: a lane's place in every fragment; see mie_ptx.cuh
  unsigned char* const ring;   // of this warp
  // The run that is fetched.
  int begin, end, first, num_tiles;
  const C* planes[2];  // the lane's first chunk of the head's first tile of keys and of values
  unsigned query[HEAD_TILES][STEPS][2];
  // A tile lies in one block, because the block size is a multiple of the tile. Its first row of
  // keys is looked up for 32 tiles at once, one a lane, and distributed by shuffles. attention.py
  // asserts that 32 bits count the rows.
  unsigned rows, later_rows, next_rows;  // of these 32 tiles, of the 32 after, of the next run
  int filled;  // the offset of the stage that is fetched next
  // Per head tile: a lane holds heads 2t and 2t + 1, for tokens g and g + 8 (scores) and for
  // elements g and g + 8 of every 16 (output).
  float acc[HEAD_TILES][STEPS][4], top[HEAD_TILES][2], sum[HEAD_TILES][2];
  // Of a quantised cache: acc is in units / WEIGHT_POWER, and per_unit is the inverse of that.
  float unit, per_unit;

  __device__ __forceinline__ explicit Decoder(const DecodeStep<T, C>& step)
      : step(step),
        cache{step.kv, step.scales, step.num_kv_heads, step.block_size},
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32),
        g(threadIdx.x % 32 / 4),
        t(threadIdx.x % 4),
        ring(mie_smem + threadIdx.x / 32 * RING) {}

  // This warp's first tile of a run begins here, and tile i begins i * WARPS * TOKENS later.
  __device__ __forceinline__ int first_token(const Run& run) const {
    return run.begin / TOKENS * TOKENS + warp * TOKENS;
  }

  // The lane's first row of a tile that begins at this token, or 0 past the run's end.
  __device__ __forceinline__ unsigned row_at(const Run& run, int token) const {
    const unsigned entry = (unsigned)token / (unsigned)step.block_size;
    const unsigned slot = (unsigned)token % (unsigned)step.block_size;
    const int* table = step.tables + (size_t)run.sequence * step.table_width;
    return token < run.end ? (unsigned)cache.row(table[entry], slot, 0, 0) : 0u;
  }

  // Looks up the rows of the first tiles of the run that is started next.
  __device__ __forceinline__ void look_up(const Run& run) {
    next_rows = row_at(run, first_token(run) + lane * (WARPS * TOKENS));
  }

  // Requests tile i of the run. A tile is contiguous, and lane l copies its chunks l, l + 32, ...
  __device__ __forceinline__ void fetch(const Run& run, int i) {
    if (i < num_tiles) {
      if (i % 32 == 0) rows = later_rows;
      if (i % 32 == 16) later_rows = row_at(run, first + (i + 16 + lane) * (WARPS * TOKENS));
      const unsigned first_row = __shfl_sync(MIE_FULL_WARP, rows, i % 32);
      unsigned char* stage = ring + filled;
      // What the query does not see is set to zero, because an unwritten slot may hold NaN.
      const int distance = (first + i * (WARPS * TOKENS) - begin) * CHUNKS + lane;  // in chunks
#pragma unroll
      for (int plane = 0; plane < 2; ++plane) {
        const C* source = planes[plane] + (size_t)first_row * DH;
        if constexpr (QUANTIZED) {
          if (lane < TOKENS / 4)
            cp_async16(stage + 2 * TILE + plane * SCALES + lane * 16,
                       cache.scales + cache.row(0, 0, run.kv_head, plane) + first_row + lane * 4);
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
  }

  // Requests the first tiles and the queries of the run that was looked up last.
  __device__ __forceinline__ void start(const Run& run) {
    begin = run.begin, end = run.end, first = first_token(run);
    num_tiles = max(0, (end - first + WARPS * TOKENS - 1) / (WARPS * TOKENS));
#pragma unroll
    for (int plane = 0; plane < 2; ++plane)
      planes[plane] = cache.base + cache.row(0, 0, run.kv_head, plane) * DH + lane * PER_CHUNK;
    later_rows = next_rows, filled = 0;
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) fetch(run, i);
    // Q^T as the product's second operand, kept in registers: heads past the group are zero.
    const size_t query_row = ((size_t)run.query * step.num_kv_heads + run.kv_head) * step.group;
#pragma unroll
    for (int h = 0; h < HEAD_TILES; ++h) {
      const int head = h * 8 + g;
      const unsigned* row = reinterpret_cast<const unsigned*>(step.q + (query_row + head) * DH);
#pragma unroll
      for (int k = 0; k < STEPS; ++k) {
        query[h][k][0] = head < step.group ? row[k * 8 + (QUANTIZED ? 2 * t : t)] : 0u;
        query[h][k][1] = head < step.group ? row[k * 8 + (QUANTIZED ? 2 * t + 1 : t + 4)] : 0u;
      }
    }
  }

  // Multiplies the run that was started last.
  __device__ __forceinline__ void attend(const Run& run) {
#pragma unroll
    for (int i = AHEAD; i < STAGES - 1; ++i) fetch(run, i);
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
#pragma unroll
    for (int h = 0; h < HEAD_TILES; ++h) {
#pragma unroll
      for (int e = 0; e < 2; ++e) top[h][e] = -MIE_INF, sum[h][e] = 0.0f;
#pragma unroll
      for (int k = 0; k < STEPS; ++k)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[h][k][e] = 0.0f;
    }
    unit = per_unit = 0.0f;

    int used = 0;  // the offset of the stage that is multiplied
    for (int i = 0; i < num_tiles; ++i) {
      cp_async_wait<STAGES - 2>();
      __syncwarp();  // all lanes' fetches are visible, and all are done with tile i - 1,
      fetch(run, i + STAGES - 1);  // whose stage is refilled
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

    __syncwarp();  // all lanes are done with the last tile, whose stage is refilled
  }

  // Merges the warps' results of a run, which may have another run started since. Writes the output
  // if the run is whole, all that the query sees, else a partial result in the rows first_partial +
  // head * stride. The results are in the last stages of the rings until the next barrier.
  __device__ __forceinline__ void finish(const Run& run, bool is_whole, size_t first_partial,
                                         int stride) {
    float* results = reinterpret_cast<float*>(mie_smem + (STAGES - MERGE_STAGES) * STAGE);
    float* own = results + warp * (RING / 4);
#pragma unroll
    for (int h = 0; h < HEAD_TILES; ++h)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = h * 8 + 2 * t + e;
#pragma unroll
        for (int k = 0; k < STEPS; ++k) {
          float* to = own + row * DH + k * 16;
          if constexpr (QUANTIZED) {
            to[2 * g] = acc[h][k][e] * (unit / WEIGHT_POWER);
            to[2 * g + 1] = acc[h][k][e + 2] * (unit / WEIGHT_POWER);
          } else {
            to[g] = acc[h][k][e];
            to[g + 8] = acc[h][k][e + 2];
          }
        }
        if (g == 0) own[HEADS * DH + row] = top[h][e], own[HEADS * (DH + 1) + row] = sum[h][e];
      }
    __syncthreads();
    const size_t query_row = ((size_t)run.query * step.num_kv_heads + run.kv_head) * step.group;
    merge_warps<T, DH, WARPS>(results, RING / 4, HEADS, step.group, is_whole, step.sinks,
                              run.kv_head * step.group, step.out + query_row * DH, step.partial,
                              step.partial_lse, first_partial, stride);
  }
};
