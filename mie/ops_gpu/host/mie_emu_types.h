// Features of CUDA C that C++ lacks: vector types, bit casts, mathematical functions, 16-bit
// floats.
#pragma once
// The math.h of C, as <cmath> itself includes it. The rest of <cmath> would be half the time of a
// small kernel's build.
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <math.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS

#include <cstddef>
#include <cstdint>
#include <cstring>

#define MIE_VECTOR2(Name, T)                            \
  struct __attribute__((aligned(2 * sizeof(T)))) Name { \
    T x, y;                                             \
  };                                                    \
  static inline Name make_##Name(T x, T y) { return Name{x, y}; }
#define MIE_VECTOR3(Name, T) \
  struct Name {              \
    T x, y, z;               \
  };                         \
  static inline Name make_##Name(T x, T y, T z) { return Name{x, y, z}; }
#define MIE_VECTOR4(Name, T)                            \
  struct __attribute__((aligned(4 * sizeof(T)))) Name { \
    T x, y, z, w;                                       \
  };                                                    \
  static inline Name make_##Name(T x, T y, T z, T w) { return Name{x, y, z, w}; }
MIE_VECTOR2(char2, signed char)
MIE_VECTOR2(uchar2, unsigned char)
MIE_VECTOR2(short2, short)
MIE_VECTOR2(ushort2, unsigned short)
MIE_VECTOR2(int2, int)
MIE_VECTOR2(uint2, unsigned)
MIE_VECTOR2(float2, float)
MIE_VECTOR3(int3, int)
MIE_VECTOR3(uint3, unsigned)
MIE_VECTOR3(float3, float)
MIE_VECTOR4(char4, signed char)
MIE_VECTOR4(uchar4, unsigned char)
MIE_VECTOR4(short4, short)
MIE_VECTOR4(ushort4, unsigned short)
MIE_VECTOR4(int4, int)
MIE_VECTOR4(uint4, unsigned)
MIE_VECTOR4(float4, float)
#undef MIE_VECTOR2
#undef MIE_VECTOR3
#undef MIE_VECTOR4

template <typename To, typename From>
static inline To mie_bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
static inline float __int_as_float(int i) { return mie_bit_cast<float>(i); }
static inline int __float_as_int(float f) { return mie_bit_cast<int>(f); }
static inline float __uint_as_float(unsigned i) { return mie_bit_cast<float>(i); }
static inline unsigned __float_as_uint(float f) { return mie_bit_cast<unsigned>(f); }

// The fast functions of the GPU are a few ulp off. libm's are close enough for the tolerances of
// the tests. These are macros, because glibc declares some of the names.
#define __expf(x) expf(x)
#define __exp10f(x) exp10f(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __powf(x, y) powf(x, y)
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
static inline float __frcp_rn(float x) { return 1.0f / x; }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __saturatef(float x) { return fminf(fmaxf(x, 0.0f), 1.0f); }
static inline int __float2int_rn(float x) { return static_cast<int>(rintf(x)); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int i = 0; i < 32; ++i) reversed |= (x >> i & 1u) << (31 - i);
  return reversed;
}
static inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>((static_cast<uint64_t>(a) * b) >> 32);
}
namespace mie_emu {
static inline unsigned permute_bytes(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned pick = selector >> (4 * i);
    unsigned byte = static_cast<unsigned>(bytes >> (8 * (pick & 7))) & 255u;
    if (pick & 8) byte = byte & 128u ? 255u : 0u;
    result |= byte << (8 * i);
  }
  return result;
}
}  // namespace mie_emu
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  return mie_emu::permute_bytes(x, y, selector & 0x7777u);  // as a GPU reads it
}
#define MIE_MIN_MAX(T)                                    \
  static inline T min(T a, T b) { return b < a ? b : a; } \
  static inline T max(T a, T b) { return a < b ? b : a; }
MIE_MIN_MAX(int)
MIE_MIN_MAX(unsigned)
MIE_MIN_MAX(long)
MIE_MIN_MAX(unsigned long)
MIE_MIN_MAX(long long)
MIE_MIN_MAX(unsigned long long)
#undef MIE_MIN_MAX
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }

namespace mie_emu {

static inline float f16_to_float(uint16_t h) {
  const uint32_t sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31u, mantissa = h & 1023u;
  if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | mantissa << 13);
  if (exponent) return __uint_as_float(sign | (exponent + 112) << 23 | mantissa << 13);
  return __uint_as_float(sign | __float_as_uint(mantissa * 0x1p-24f));  // subnormal
}
static inline uint16_t float_to_f16(float f) {  // to nearest, ties to even
  const uint32_t bits = __float_as_uint(f), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return 0x7fff;                                  // NaN
  if (size >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to infinity
  if (size < 0x38800000u) {  // subnormal: adding 0.5 lets the FPU round at the right place
    const float shifted = __uint_as_float(size) + 0.5f;
    return static_cast<uint16_t>(sign | (__float_as_uint(shifted) - 0x3f000000u));
  }
  return static_cast<uint16_t>(sign | (size + 0xc8000fffu + (size >> 13 & 1u)) >> 13);
}
static inline uint16_t e4m3_to_f16(uint32_t code) {  // bias 7, three bits of mantissa, no infinity
  const uint32_t exponent = code >> 3 & 15u, mantissa = code & 7u;
  if ((code & 127u) == 127u) return 0x7fff;  // NaN
  const float size = exponent ? ldexpf(8.0f + mantissa, static_cast<int>(exponent) - 10)
                              : mantissa * 0x1p-9f;
  return float_to_f16(code & 128u ? -size : size);
}
static inline float bf16_to_float(uint16_t h) {
  return __uint_as_float(static_cast<uint32_t>(h) << 16);
}
static inline uint16_t float_to_bf16(float f) {  // to nearest, ties to even
  const uint32_t bits = __float_as_uint(f);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
// Computed as float: exact results stay exact, others may be rounded twice.
static inline uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c, float (*wide)(uint16_t),
                                uint16_t (*narrow)(float)) {
  uint32_t result = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    auto half = [shift, wide](uint32_t pair) { return wide(static_cast<uint16_t>(pair >> shift)); };
    result |= static_cast<uint32_t>(narrow(fmaf(half(a), half(b), half(c)))) << shift;
  }
  return result;
}

}  // namespace mie_emu
