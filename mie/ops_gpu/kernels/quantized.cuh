// The elements of a quantised cache, as mie/ops/weights/quantised_cache.py defines them. A number is
// its element times the scale of its head and token. Elements are int8 or e4m3 (a sign, four bits of
// exponent with bias 7, three bits of mantissa), or codes of four bits. Included after mie_cuda.cuh.
//
// All of it is integer arithmetic and a multiplication by a power of two, the same on every chip.
#pragma once

// A cache of the queries' own type is not quantised.
template <typename T, typename C>
constexpr bool IS_QUANTIZED = true;
template <typename T>
constexpr bool IS_QUANTIZED<T, T> = false;

__device__ __forceinline__ float to_float(int8 x) { return static_cast<float>(x); }
__device__ __forceinline__ float to_float(e4m3 x) {
  // As an f16 with bias 15, these bits are 2^-8 of the value, subnormals included.
  const unsigned short bits = static_cast<unsigned short>((x & 0x80) << 8 | (x & 0x7f) << 7);
  return f16_bits_to_float(bits) * 256.0f;
}

// int4x8 has a group of 32 channels rotated before it is rounded (mie/ops/weights/int4_cache.py). Its
// scale and its offset are f16, the low and the high half of the 32 bits of a float.
template <typename C>
constexpr bool IS_ROTATED = false;
template <>
constexpr bool IS_ROTATED<int4x8> = true;
constexpr int CHANNELS = 32;
constexpr float ROTATION_IN = 0.125f, ROTATION_OUT = 0.25f;  // two plain rotations multiply by 32

__device__ __forceinline__ float scale_of_group(unsigned factors) {
  return f16_bits_to_float(static_cast<unsigned short>(factors));
}
__device__ __forceinline__ float offset_of_group(unsigned factors) {
  return f16_bits_to_float(static_cast<unsigned short>(factors >> 16));
}

// A warp's 32 numbers, times Hadamard's matrix of order 32. All lanes call.
__device__ __forceinline__ float rotated(float x) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const float other = __shfl_xor_sync(MIE_FULL_WARP, x, distance);
    x = threadIdx.x & distance ? other - x : x + other;
  }
  return x;
}

// Writes a vector as codes, and as a scale and an offset for each group. A warp calls.
__device__ __forceinline__ void quantize_groups(const float* vector, int size, int4x8* codes,
                                                float* factors) {
  const int lane = threadIdx.x % 32;
  for (int first = 0; first < size; first += CHANNELS) {
    const bool is_in = first + lane < size;
    float x = is_in ? vector[first + lane] : 0.0f;
    if (first + CHANNELS <= size) x = rotated(x * ROTATION_IN);  // a last short group stays
    const float highest = warp_max(is_in ? x : -MIE_INF), lowest = -warp_max(is_in ? -x : -MIE_INF);
    unsigned both = float_to_f16_bits((highest - lowest + 0.0f) / 15.0f);  // -0 becomes 0
    both |= static_cast<unsigned>(float_to_f16_bits(lowest + 0.0f)) << 16;
    const bool overflows = (both & 0x7c00u) == 0x7c00u || (both & 0x7c000000u) == 0x7c000000u;
    if (__any_sync(MIE_FULL_WARP, overflows || !(fabsf(x) < MIE_INF))) both = 0x7e007e00u;  // NaN
    const float scale = scale_of_group(both), distance = x - offset_of_group(both);
    unsigned code = scale > 0.0f ? min(max(__float2int_rn(distance / scale), 0), 15) : 0;
    code = is_in ? code << lane % 8 * 4 : 0u;
#pragma unroll
    for (int offset = 1; offset < 8; offset *= 2)
      code |= __shfl_xor_sync(MIE_FULL_WARP, code, offset);
    if (is_in && lane % 8 == 0) codes[(first + lane) / 8] = code;
    if (lane == 0) factors[first / CHANNELS] = __uint_as_float(both);
  }
}

template <typename C>
struct Quantization;
template <>
struct Quantization<int8> {
  static constexpr float LARGEST = 127.0f;
  static __device__ __forceinline__ int8 element(float x) {
    return static_cast<int8>(__float2int_rn(x));
  }
};
template <>
struct Quantization<e4m3> {
  static constexpr float LARGEST = 448.0f;
  // |x| <= 448, rounded to nearest even.
  static __device__ __forceinline__ e4m3 element(float x) {
    const unsigned bits = __float_as_uint(x), size = bits & 0x7fffffffu;
    const unsigned rounded = (size + 0x7ffffu + (size >> 20 & 1u)) >> 20;  // bias 127, three bits
    const unsigned small = __float2int_rn(fabsf(x) * 512.0f);              // below 2^-6: subnormal
    const unsigned code = size < 0x3c800000u ? small : rounded - (120u << 3);
    return static_cast<e4m3>(bits >> 31 << 7 | code);
  }
};

// The scale of a vector, from the bits of its largest magnitude. Bits of magnitudes sort like the
// magnitudes, and those of infinity and NaN sort last, so such a vector reads as NaN.
template <typename C>
__device__ __forceinline__ float scale_of(unsigned largest) {
  if (largest >= 0x7f800000u) return __uint_as_float(0x7fffffffu);
  const float scale = __uint_as_float(largest) / Quantization<C>::LARGEST;
  return scale < 0x1p-100f ? 0.0f : scale;
}
template <typename C>
__device__ __forceinline__ C quantize(float x, float scale) {
  return scale > 0.0f ? Quantization<C>::element(x / scale) : C(0);  // 0 where the scale is NaN
}

// The place of chunk `chunk` of 16 bytes of row `row` in a tile in shared memory, whose rows have
// ROW bytes. The rows are swizzled, so the same chunk of eight consecutive rows is in different
// banks, and so are eight consecutive chunks that begin at a multiple of eight. Chunks move within
// the 128 bytes that they are in.
template <int ROW>
__device__ __forceinline__ int swizzled(int row, int chunk) {
  constexpr int CHUNKS = ROW / 16, FACTOR = CHUNKS & -CHUNKS;  // the power of two in CHUNKS
  if constexpr (CHUNKS == FACTOR) {
    constexpr int ROWS = ROW < 128 ? 128 / ROW : 1;  // that lie side by side over all banks
    return row * ROW + (chunk ^ row / ROWS % (8 / ROWS)) * 16;
  } else {
    static_assert(FACTOR <= 8, "eight rows begin in 8 / FACTOR places of the banks");
    const int at = row * CHUNKS + chunk;
    return (at ^ at / 8 % FACTOR) * 16;
  }
}

// A quantised cache is multiplied in f16, even for bf16 models. Every element is an f16 exactly,
// and its bits become one in fewer instructions than a bf16.
template <typename T, typename C>
struct Product {
  using Operand = f16;
};
template <typename T>
struct Product<T, T> {
  using Operand = T;
};

// Whether queries must be brought into the range of another type.
template <typename T, typename Operand>
constexpr bool IS_RAISED = true;
template <typename T>
constexpr bool IS_RAISED<T, T> = false;

// A row of bf16 queries is multiplied by a power of two, which brings its largest magnitude to
// 2^15 ... 2^16. Elements down to 2^-32 of that magnitude are then f16 exactly, and smaller ones
// are at most 2^-40 of it away. The power is at most 2^120, so its inverse is no subnormal number.
// A row with infinity or NaN keeps it.
__device__ __forceinline__ float power_for_f16(float largest) {
  const int exponent = static_cast<int>(__float_as_uint(largest) >> 23);  // with bias 127
  return __uint_as_float(static_cast<unsigned>(min(127 + 15 - (exponent - 127), 127 + 120)) << 23);
}
// The larger of `largest` and the magnitudes of a pair.
template <typename T>
__device__ __forceinline__ float largest_of(float largest, unsigned pair) {
  const float2 x = unpack2<T>(pair);
  return fmaxf(largest, fmaxf(fabsf(x.x), fabsf(x.y)));
}
template <typename T>
__device__ __forceinline__ unsigned raise(unsigned pair, float power) {
  const float2 x = unpack2<T>(pair);
  return pack_f16x2(x.x * power, x.y * power);
}
__device__ __forceinline__ float inverse_power(float power) {
  return __uint_as_float((254u << 23) - __float_as_uint(power));
}

// The weights of values are at most 1. Those of bf16 models are multiplied by 2^15, because f16 has
// a smaller range. Weights down to 2^-29 are then rounded to 11 bits, and smaller ones are at most
// 2^-40 away.
template <typename T, typename Operand>
constexpr float WEIGHT_POWER = IS_RAISED<T, Operand> ? 0x1p15f : 1.0f;

// Four elements as two pairs of f16, exactly: I and J in `first`, K and L in `second`, I and K in
// the low halves.
template <typename C>
struct Widening;

// Byte I of four in a half with the bytes of `fill` above it, and byte J in the other.
template <int I, int J>
__device__ __forceinline__ unsigned spread(unsigned four, unsigned fill) {
  return __byte_perm(four, fill, I | 4 << 4 | J << 8 | 4 << 12);
}
// The same, with the byte's sign in all bits above it.
template <int I, int J>
__device__ __forceinline__ unsigned spread_signed(unsigned four) {
  return permute_bytes(four, 0u, I | (8 | I) << 4 | J << 8 | (8 | J) << 12);
}

template <>
struct Widening<int8> {
  template <int I, int J, int K, int L>
  static __device__ __forceinline__ void four(unsigned& first, unsigned& second, unsigned from) {
    // The low byte of 0x64__ counts from 1024 on, so that x + 128 there is 1152 + x.
    const unsigned raised = from ^ 0x80808080u;
    first = fma_f16x2(spread<I, J>(raised, 0x64646464u), 0x3c003c00u, 0xe480e480u);
    second = fma_f16x2(spread<K, L>(raised, 0x64646464u), 0x3c003c00u, 0xe480e480u);
  }
};
// e4m3 by its bits, on every chip: shifted, they are an f16 but for the bias, which differs by 8. A
// code of NaN, which no cache contains, becomes 480.
template <int I, int J>
__device__ __forceinline__ unsigned widen_by_bits(unsigned from) {
  return fma_f16x2(spread_signed<I, J>(from) << 7 & 0xbf80bf80u, 0x5c005c00u, 0x80008000u);
}
template <>
struct Widening<e4m3> {
  template <int I, int J, int K, int L>
  static __device__ __forceinline__ void four(unsigned& first, unsigned& second, unsigned from) {
#if MIE_HAS_E4M3_CONVERSION
    constexpr unsigned ORDER = I | J << 4 | K << 8 | L << 12;
    e4m3x4_to_f16x2(first, second, ORDER == 0x3210 ? from : __byte_perm(from, 0u, ORDER));
#else
    first = widen_by_bits<I, J>(from), second = widen_by_bits<K, L>(from);
#endif
  }
};
