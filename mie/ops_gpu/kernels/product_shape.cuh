// The shape of a block's tile in the products of few rows. Included after weights.cuh.
//
//   BLOCK_N  32 outputs: two of mma's tiles of 16
//   BLOCK_K  INPUTS for each warp: 32 of a dense matrix, 64 (a unit) of a quantised one
//   ROWS     8, 16 or 32 rows of x, on mma's short side
//
// A warp's share of an iteration, BLOCK_N x INPUTS weights, is a stage of the warp's own ring.
#pragma once

constexpr int MAX_WARPS = 8;          // of a block. They share K
constexpr int MT = 2;                 // tiles of 16 outputs of a warp
constexpr int BLOCK_N = MT * TILE;    // outputs of an iteration
constexpr int SUMS_STRIDE = BLOCK_N + 4;  // of a row of sums in shared memory: no bank conflicts

// Blocks of a multiprocessor that the registers leave room for.
template <typename T, int SPAN, bool OFFSETS, int TILES>
constexpr int BLOCKS = TILES == 4 || sizeof(T) == 4 ||
                       (TILES == 2 && SPAN == 32 && OFFSETS && !IS_SAME<T, f16>) ? 1 : 2;

// SPAN inputs of a unit share a scale. few_rows.py computes the same numbers of bytes and stages.
template <typename T_, typename C_, int SPAN_, bool OFFSETS_, int BITS_, int TILES_, bool NORM_,
          bool VECTOR_>
struct ProductShape {
  using T = T_;
  using C = C_;
  using OwnScales = Scales<SPAN_, OFFSETS_, BITS_>;
  static constexpr int SPAN = SPAN_, BITS = BITS_, TILES = TILES_, ROWS = 8 * TILES;
  static constexpr bool OFFSETS = OFFSETS_, NORM = NORM_, VECTOR = VECTOR_;
  static constexpr bool DENSE = IS_SAME<T, C>, FLOAT = sizeof(T) == 4;
  // bf16 rows are multiplied with codes as f16, and need its range.
  static constexpr bool RAISED = !DENSE && !FLOAT && !IS_SAME<T, f16>;
  static constexpr bool FINISHED = NORM || RAISED;  // x is changed before it is multiplied

  // Whether registers hold a stage and the rows' part, so that the stage is filled again while they
  // are multiplied. With codes and 16 rows there are too few for two blocks of a multiprocessor.
  static constexpr bool HELD = !FLOAT && (DENSE || TILES != 2);

  static constexpr int INPUTS = DENSE ? CHUNK : UNIT, CHUNKS = INPUTS / CHUNK;
  static constexpr int COUNT = 16 / sizeof(T);          // elements of a vector
  static constexpr int ROW_VECTORS = INPUTS / COUNT;    // of a row of a stage of x
  static constexpr int CHUNK_BYTES = CHUNK * sizeof(T);  // of a row of x
  // Vectors of 16 bytes of a tile of 16 outputs, in a stage.
  static constexpr int CODES = DENSE ? TILE * INPUTS / COUNT : UNIT_VECTORS<C>;
  static constexpr int SCALES = DENSE ? 0 : 2 * OwnScales::WORDS;
  static constexpr int UNITS = BITS == 8 ? 4 * OwnScales::KINDS : 0;
  static constexpr int WEIGHT_BYTES = MT * (CODES + SCALES + UNITS) * 16;
  static constexpr int X_BYTES = ROWS * ROW_VECTORS * 16;
  // As many stages as a block of 99 KB holds with x in the ring, and with its sums.
  static constexpr int BUDGET = (TILES == 4 ? 88 : 84) * 1024 / MAX_WARPS;
  static constexpr int STAGES = BUDGET / (WEIGHT_BYTES + X_BYTES);
  static_assert(STAGES > 0, "a stage fits");
};

// The rows of x that a block multiplies, and how they are normalised first (norm null: not at all).
template <typename T>
struct Rows {
  const T* x;     // [rows, depth]
  const T* norm;  // [depth]
  int count, depth;
  float eps;
};
