// The weights of a matrix [N, K] in the registers of a warp, 16 outputs and 64 inputs at a time (a
// unit). Included after quantized.cuh.
//
// A lane (group g, thread t) has the weights that mma_m16n8k16 wants of it: those of the outputs g
// and g + 8. A unit is two chunks of 32 inputs, and a chunk two steps of 16. In step s of chunk c
// the lane has four neighbouring inputs, c * 32 + place(s, t) ... + 3. The product may sum its
// inputs in any order, so they need not be those that mma names.
//
//   dense      rows as checkpoints store them, in the type of the activations (weight_ring.cuh)
//   quantised  [N / 16][K / 64] units of codes, in the order of the registers. Inputs past K and
//              outputs past N have the code of zero.
//
//   w[n, k] = code * scale[n, k / group] + offset[n, k / group]
//   scales  [N / 16][cells][8 lanes g] records of a lane's scales and offsets in BITS bits. A
//           cell is a unit, or a group of more inputs. Zeros past K and past N
//   units   [N / 16][K / 256][8 lanes g] floats, with BITS 8: scales and offsets are multiples
//
// Codes become f16 exactly, by magic numbers: 0x6400 | q is 1024 + q. They become bf16 exactly, too:
// 0x4300 | q is 128 + q. The sum over a span of inputs that share a scale is multiplied by it in
// float32.
#pragma once

constexpr int UNIT = 64, CHUNK = 32, TILE = 16;

struct nibbles;  // codes of four bits, 0 ... 15. Without offsets they count from -8.
struct sextets;  // codes of six bits, 0 ... 63. Without offsets they count from -32.

template <typename T, typename C>
constexpr bool IS_SAME = false;  // a matrix with codes of the activations' type is dense
template <typename T>
constexpr bool IS_SAME<T, T> = true;

// The vectors of 16 bytes of a unit.
template <typename C>
constexpr int UNIT_VECTORS = IS_SAME<C, nibbles> ? 32 : IS_SAME<C, sextets> ? 48 : 64;
// What codes without offsets count from.
template <typename C>
constexpr int CENTRE = IS_SAME<C, nibbles> ? 8 : IS_SAME<C, sextets> ? 32 : 0;

// The matrix of a kernel. A dense one has no scales. 1 << shift inputs share a scale.
struct Matrix {
  const uint4 *weight, *scales;
  const float* units;
  int depth, shift;
};

// Sixteen outputs, of which the first `count` count. Those of a quantised matrix begin at a
// multiple of 16. Where there are none, any are loaded and dropped.
struct Outputs {
  int first, count;
};

// Groups of 16 inputs need steps of 16 neighbours. Else the inputs of both steps are neighbours.
template <int SPAN>
__device__ __forceinline__ int place(int step, int t) {
  return SPAN == 16 ? 16 * step + 4 * t : 8 * t + 4 * step;
}

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

__device__ __forceinline__ unsigned word_of(const uint4& vector, int i) {
  return i == 0 ? vector.x : i == 1 ? vector.y : i == 2 ? vector.z : vector.w;
}

// Two integers of up to seven bits, less FROM, as bf16.
template <int FROM>
__device__ __forceinline__ unsigned small_to_bf16(unsigned pair) {
  constexpr unsigned MINUS = FROM == 0 ? 0xc300c300u : FROM == 8 ? 0xc308c308u : 0xc320c320u;
  static_assert(FROM == 0 || FROM == 8 || FROM == 32, "MINUS is -(128 + FROM)");
  return fma_bf16x2(pair | 0x43004300u, 0x3f803f80u, MINUS);
}

// Four codes of eight bits as two pairs of the operand's type (Widening in quantized.cuh).
template <typename Operand, typename C>
struct WideningTo : Widening<C> {};
template <>
struct WideningTo<bf16, int8> {
  template <int I, int J, int K, int L>
  static __device__ __forceinline__ void four(unsigned& first, unsigned& second, unsigned from) {
    first = two(spread<I, J>(from, 0u)), second = two(spread<K, L>(from, 0u));
  }
  // The low seven bits count from 128 on. The sign makes the -128 beside them -256.
  static __device__ __forceinline__ unsigned two(unsigned pair) {
    return fma_bf16x2((pair & 0x007f007fu) | 0x43004300u, 0x3f803f80u,
                      (pair & 0x00800080u) | 0xc300c300u);
  }
};
template <>
struct WideningTo<bf16, e4m3> {
  template <int I, int J, int K, int L>
  static __device__ __forceinline__ void four(unsigned& first, unsigned& second, unsigned from) {
    first = two(spread_signed<I, J>(from)), second = two(spread_signed<K, L>(from));
  }
  // Shifted, the bits are a bf16 but for the bias, which differs by 120.
  static __device__ __forceinline__ unsigned two(unsigned pair) {
    return fma_bf16x2(pair << 4 & 0x87f087f0u, 0x7b807b80u, 0x80008000u);
  }
};

// The registers of a unit that is in flight or in use. begin() finds input k, the first of a unit,
// in a tile. advance() goes on by whole units, and load() begins to load the unit of input k. g is
// the lane's group. Places are kept from unit to unit, because compilers do not keep what they can
// compute again, and would find the tile anew for each unit.
template <int VECTORS>
struct PackedUnit {
  uint4 raw[VECTORS];
  unsigned at;

  __device__ __forceinline__ void begin(const Matrix& matrix, Outputs tile, int k, int g) {
    const unsigned units = (matrix.depth + UNIT - 1) / UNIT, t = threadIdx.x % 4;
    at = ((tile.count > 0 ? tile.first / TILE : 0) * units + k / UNIT) * VECTORS * 32 + g * 4 + t;
  }
  __device__ __forceinline__ void advance(int inputs) { at += inputs / UNIT * VECTORS * 32; }
  __device__ __forceinline__ void load(const Matrix& matrix, int) {
    const uint4* from = matrix.weight + at;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) raw[v] = from[v * 32];
  }
};

// fragment() is the first operand of step s of chunk c, in f16 or in bf16. value() is the weight of
// input j of its four for output g (half 0) or g + 8 (half 1), without scale and offset. integers()
// is the first operand of mma_m16n8k32 for chunk c. Codes of four and six bits there are 0 ... 15
// and 0 ... 63, and the inputs of four have the order 0, 2, 1, 3.
template <typename T, typename C, bool VECTOR>
struct Unit : PackedUnit<2> {  // codes of eight bits
  template <bool OFFSETS, typename Operand = f16>
  __device__ __forceinline__ void fragment(unsigned (&a)[4], int c, int s) const {
    using Widened = WideningTo<Operand, C>;
    Widened::template four<0, 1, 2, 3>(a[0], a[2], word_of(raw[c], 2 * s));
    Widened::template four<0, 1, 2, 3>(a[1], a[3], word_of(raw[c], 2 * s + 1));
  }
  template <bool OFFSETS>
  __device__ __forceinline__ float value(int c, int s, int half, int j) const {
    return to_float(static_cast<C>(word_of(raw[c], 2 * s + half) >> 8 * j));
  }
  __device__ __forceinline__ void integers(unsigned (&a)[4], int c) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = word_of(raw[c], i);
  }
};

template <typename T, bool VECTOR>
struct Unit<T, nibbles, VECTOR> : PackedUnit<1> {
  template <bool OFFSETS, typename Operand = f16>
  __device__ __forceinline__ void fragment(unsigned (&a)[4], int c, int s) const {
    if constexpr (IS_SAME<Operand, bf16>) {
      const unsigned four = word_of(raw[0], 2 * c + s);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        a[i] = small_to_bf16<OFFSETS ? 0 : CENTRE<nibbles>>(four >> 4 * i & 0x000f000fu);
      return;
    }
    // (1024 + q) - 1024 and (1024 + 16 q) / 16 - 64, less the 8 from which codes may count.
    constexpr unsigned ONE = 0x3c003c00u, SIXTEENTH = 0x2c002c00u;
    constexpr unsigned LOW = OFFSETS ? 0xe400e400u : 0xe408e408u;
    constexpr unsigned HIGH = OFFSETS ? 0xd400d400u : 0xd480d480u;
    const unsigned word = word_of(raw[0], 2 * c + s), next = word >> 8;
    a[0] = fma_f16x2((word & 0x000f000fu) | 0x64006400u, ONE, LOW);
    a[1] = fma_f16x2((word & 0x00f000f0u) | 0x64006400u, SIXTEENTH, HIGH);
    a[2] = fma_f16x2((next & 0x000f000fu) | 0x64006400u, ONE, LOW);
    a[3] = fma_f16x2((next & 0x00f000f0u) | 0x64006400u, SIXTEENTH, HIGH);
  }
  template <bool OFFSETS>
  __device__ __forceinline__ float value(int c, int s, int half, int j) const {
    const int nibble = 4 * (j % 2) + 2 * (j / 2) + half;
    const int code = static_cast<int>(word_of(raw[0], 2 * c + s) >> 4 * nibble & 15u);
    return static_cast<float>(OFFSETS ? code : code - 8);
  }
  __device__ __forceinline__ void integers(unsigned (&a)[4], int c) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = word_of(raw[0], 2 * c + i / 2) >> 4 * (i % 2) & 0x0f0f0f0fu;
  }
};

// The low four bits are those of nibbles. The high two bits of a lane's 32 codes of a unit follow
// the low bits of all lanes, in a word for each chunk. place_of() is where the word has the first
// of register i's two codes of step s. The second is 16 bits higher.
template <typename T, bool VECTOR>
struct Unit<T, sextets, VECTOR> {
  uint4 low;
  uint2 high;
  unsigned at, lane;

  static __device__ __forceinline__ constexpr int place_of(int s, int i) {
    return s == 0 ? (i == 0 ? 4 : i == 1 ? 8 : i == 2 ? 6 : 10)
                  : (i == 0 ? 0 : i == 1 ? 12 : i == 2 ? 2 : 14);
  }
  static __device__ __forceinline__ unsigned shifted(unsigned word, int left) {
    return left > 0 ? word << left : word >> -left;
  }
  __device__ __forceinline__ void begin(const Matrix& matrix, Outputs tile, int k, int g) {
    const unsigned units = (matrix.depth + UNIT - 1) / UNIT;
    at = ((tile.count > 0 ? tile.first / TILE : 0) * units + k / UNIT) * UNIT_VECTORS<sextets>;
    lane = g * 4 + threadIdx.x % 4;
  }
  __device__ __forceinline__ void advance(int inputs) {
    at += inputs / UNIT * UNIT_VECTORS<sextets>;
  }
  __device__ __forceinline__ void load(const Matrix& matrix, int) {
    low = matrix.weight[at + lane];
    high = reinterpret_cast<const uint2*>(matrix.weight + at + 32)[lane];
  }
  template <bool OFFSETS, typename Operand = f16>
  __device__ __forceinline__ void fragment(unsigned (&a)[4], int c, int s) const {
    if constexpr (IS_SAME<Operand, bf16>) {
      const unsigned four = word_of(low, 2 * c + s), two = c == 0 ? high.x : high.y;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        a[i] = small_to_bf16<OFFSETS ? 0 : CENTRE<sextets>>(
            (four >> 4 * i & 0x000f000fu) | (shifted(two, 4 - place_of(s, i)) & 0x00300030u));
      return;
    }
    // As with nibbles, less the 32 from which codes may count. A low code is in bits 0 ... 5, and
    // one times 16 in bits 4 ... 9.
    constexpr unsigned ONE = 0x3c003c00u, SIXTEENTH = 0x2c002c00u;
    constexpr unsigned LOW = OFFSETS ? 0xe400e400u : 0xe420e420u;
    constexpr unsigned HIGH = OFFSETS ? 0xd400d400u : 0xd600d600u;
    const unsigned word = word_of(low, 2 * c + s), bits = c == 0 ? high.x : high.y;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const unsigned four = word >> 4 * i;
      const unsigned first = shifted(bits, 4 - place_of(s, i)) & 0x00300030u;
      const unsigned second = shifted(bits, 8 - place_of(s, i + 1)) & 0x03000300u;
      a[i] = fma_f16x2((four & 0x000f000fu) | first | 0x64006400u, ONE, LOW);
      a[i + 1] = fma_f16x2((four & 0x00f000f0u) | second | 0x64006400u, SIXTEENTH, HIGH);
    }
  }
  template <bool OFFSETS>
  __device__ __forceinline__ float value(int c, int s, int half, int j) const {
    const int nibble = 4 * (j % 2) + 2 * (j / 2) + half, place = place_of(s, half + j / 2 * 2);
    const unsigned bits = (c == 0 ? high.x : high.y) >> (place + 16 * (j % 2)) & 3u;
    const int code = static_cast<int>((word_of(low, 2 * c + s) >> 4 * nibble & 15u) | bits << 4);
    return static_cast<float>(OFFSETS ? code : code - CENTRE<sextets>);
  }
  __device__ __forceinline__ void integers(unsigned (&a)[4], int c) const {
    const unsigned bits = c == 0 ? high.x : high.y;
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // step i / 2, half i % 2
      const int s = i / 2, half = i % 2;
      a[i] = (word_of(low, 2 * c + s) >> 4 * half & 0x0f0f0f0fu) |
             (shifted(bits, 4 - place_of(s, half)) & 0x00300030u) |
             (shifted(bits, 12 - place_of(s, half + 2)) & 0x30003000u);
    }
  }
};

// The scales, and the offsets if OFFSETS, of each span of inputs of a unit, for the outputs g and
// g + 8: float, f16, or integers of eight bits times the units of 256 inputs.
template <int SPAN, bool OFFSETS, int BITS>
struct Scales {
  static constexpr int SPANS = UNIT / SPAN, KINDS = OFFSETS ? 2 : 1;
  static constexpr int WORDS = KINDS * 2 * SPANS * BITS / 32;
  unsigned words[WORDS];       // by kind, by half, by span
  float units[KINDS * 2 + 1];  // by kind, by half

  // Loads the record `at` of [8 lanes], and the record `unit`.
  __device__ __forceinline__ void load(const Matrix& matrix, unsigned at, unsigned unit) {
    load_words<WORDS>(words, matrix.scales, at);
    if constexpr (BITS == 8) {
      unsigned bits[KINDS * 2];
      load_words<KINDS * 2>(bits, reinterpret_cast<const uint4*>(matrix.units), unit);
#pragma unroll
      for (int i = 0; i < KINDS * 2; ++i) units[i] = __uint_as_float(bits[i]);
    }
  }
  __device__ __forceinline__ float scale(int span, int half) const {
    return number(half * SPANS + span, half);
  }
  __device__ __forceinline__ float offset(int span, int half) const {
    return number((2 + half) * SPANS + span, 2 + half);
  }

 private:
  template <int COUNT>
  static __device__ __forceinline__ void load_words(unsigned (&to)[COUNT], const uint4* from,
                                                    unsigned record) {
    if constexpr (COUNT % 4 == 0) {
#pragma unroll
      for (int i = 0; i < COUNT; i += 4) {
        const uint4 four = from[record * (COUNT / 4) + i / 4];
        to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
      }
    } else if constexpr (COUNT == 2) {
      const uint2 two = reinterpret_cast<const uint2*>(from)[record];
      to[0] = two.x, to[1] = two.y;
    } else {
      static_assert(COUNT == 1, "a record has a power of two of words");
      to[0] = reinterpret_cast<const unsigned*>(from)[record];
    }
  }
  __device__ __forceinline__ float number(int i, int unit) const {
    if constexpr (BITS == 32)
      return __uint_as_float(words[i]);
    else if constexpr (BITS == 16)
      return f16_bits_to_float(static_cast<unsigned short>(words[i / 2] >> 16 * (i % 2)));
    else
      return ieee_mul(static_cast<float>(static_cast<signed char>(words[i / 4] >> 8 * (i % 4))),
                      units[unit]);
  }
};

// The weights of a tile's unit, with its scales and offsets: begin() and advance(), then load() and
// load_scales(). The matrix has offsets if OFFSETS.
template <typename T, typename C, int SPAN, bool OFFSETS, int BITS, bool VECTOR>
struct Weights {
  Unit<T, C, VECTOR> unit;
  Scales<SPAN, OFFSETS, BITS> scales;
  unsigned at;  // the record of the unit's scales
  static_assert(BITS != 8 || SPAN < UNIT, "scales of eight bits have four cells for each unit");

  static __device__ __forceinline__ int cell_of(const Matrix& matrix, int k) {
    return SPAN < UNIT ? k / UNIT : k >> matrix.shift;
  }
  __device__ __forceinline__ void begin(const Matrix& matrix, Outputs tile, int k, int g) {
    const unsigned cells = cell_of(matrix, matrix.depth - 1) + 1;
    const unsigned number = tile.count > 0 ? tile.first / TILE : 0;
    unit.begin(matrix, tile, k, g);
    at = (number * cells + cell_of(matrix, k)) * 8 + g;
  }
  __device__ __forceinline__ void advance(const Matrix& matrix, int k, int inputs) {
    unit.advance(inputs);
    at += (cell_of(matrix, k + inputs) - cell_of(matrix, k)) * 8;
  }
  __device__ __forceinline__ void load(const Matrix& matrix, int k) { unit.load(matrix, k); }
  __device__ __forceinline__ void load_scales(const Matrix& matrix) {
    if constexpr (!IS_SAME<T, C>) scales.load(matrix, at, at / 32 * 8 + at % 8);
  }
};

// The matrix [width, depth] of an expert, of those of all experts one after the other.
template <typename C, int SPAN, bool OFFSETS, int BITS>
__device__ __forceinline__ Matrix of_expert(Matrix matrix, int expert, int width) {
  const size_t before = (size_t)expert * ((width + TILE - 1) / TILE);  // tiles of outputs
  using Own = Scales<SPAN, OFFSETS, BITS>;
  using Whole = Weights<float, C, SPAN, OFFSETS, BITS, true>;
  const int cells = Whole::cell_of(matrix, matrix.depth - 1) + 1;
  matrix.weight += before * ((matrix.depth + UNIT - 1) / UNIT) * UNIT_VECTORS<C>;
  matrix.scales += before * cells * (8 * Own::WORDS) / 4;
  if constexpr (BITS == 8) matrix.units += before * (matrix.depth / 256) * (8 * 2 * Own::KINDS);
  return matrix;
}
