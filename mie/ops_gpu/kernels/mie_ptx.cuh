// Thin wrappers over PTX. Nothing outside this file contains asm, and every wrapper has an emulated
// body beside it, written from the fragment layouts of the PTX ISA. The asm strings are compiled
// everywhere but run only on a GPU, so each wrapper needs a golden vector there
// (scripts/gpu_check).
//
// Lane l of a warp: g = l / 4 ("group"), t = l % 4 ("thread in group").
#pragma once

#ifndef MIE_EMULATE
__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}
#endif

// ---- asynchronous copies of 16 bytes, global to shared; both addresses 16-byte aligned. They pass
// the L1 cache, and bring 128 bytes to the L2 cache.

#define MIE_CP_ASYNC "cp.async.cg.shared.global.L2::128B"
__device__ __forceinline__ void cp_async16(void* shared, const void* global) {
#ifdef MIE_EMULATE
  mie_emu::cp_async16(shared, global, true, MIE_CP_ASYNC, MIE_SITE);
#else
  asm volatile(MIE_CP_ASYNC " [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global)
               : "memory");
#endif
}

// Zeros instead of the global bytes if not `valid`. `global` is then not read.
__device__ __forceinline__ void cp_async16_or_zero(void* shared, const void* global, bool valid) {
#ifdef MIE_EMULATE
  mie_emu::cp_async16(shared, global, valid, MIE_CP_ASYNC, MIE_SITE);
#else
  asm volatile(MIE_CP_ASYNC " [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
#endif
}

__device__ __forceinline__ void cp_async_commit() {
#ifdef MIE_EMULATE
  mie_emu::cp_async_commit();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Returns when at most N of this thread's committed groups are in flight. Other threads see the
// bytes after the next barrier.
template <int N>
__device__ __forceinline__ void cp_async_wait() {
#ifdef MIE_EMULATE
  mie_emu::cp_async_wait(N);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

// ---- 8x8 matrices of 16-bit elements
//
// ldmatrix: lane 8i + r names the address of row r of matrix i (16 bytes, 16-byte aligned); r[i] of
// a lane is then elements (g, 2t) and (g, 2t + 1) of matrix i; with _trans (2t, g) and (2t + 1, g).

__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], const void* row) {
#ifdef MIE_EMULATE
  mie_emu::ldmatrix(r, row, 4, false, MIE_SITE);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
#endif
}
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&r)[4], const void* row) {
#ifdef MIE_EMULATE
  mie_emu::ldmatrix(r, row, 4, true, MIE_SITE);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
#endif
}

// A matrix held as a fragment (elements (g, 2t) and (g, 2t + 1) in each lane), transposed.
__device__ __forceinline__ unsigned movmatrix_trans(unsigned a) {
#ifdef MIE_EMULATE
  return mie_emu::movmatrix_trans(a, MIE_SITE);
#else
  unsigned d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
#endif
}

// ---- tensor cores: d (16x8, float) += a (16x16, by rows) * b (16x8, by columns)
//
// a[0] = (g, 2t..)  a[1] = (g + 8, 2t..)  a[2] = (g, 2t + 8..)  a[3] = (g + 8, 2t + 8..)
// b[0] = (2t.., g)  b[1] = (2t + 8.., g)
// d[0] = (g, 2t)    d[1] = (g, 2t + 1)    d[2] = (g + 8, 2t)    d[3] = (g + 8, 2t + 1)

template <typename T>
struct Mma;
template <>
struct Mma<f16> {
  static __device__ __forceinline__ void m16n8k16(float (&d)[4], const unsigned (&a)[4],
                                                  const unsigned (&b)[2]) {
#ifdef MIE_EMULATE
    mie_emu::mma_m16n8k16(d, a, b, &mie_emu::f16_to_float, MIE_SITE);
#else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
  }
};
template <>
struct Mma<bf16> {
  static __device__ __forceinline__ void m16n8k16(float (&d)[4], const unsigned (&a)[4],
                                                  const unsigned (&b)[2]) {
#ifdef MIE_EMULATE
    mie_emu::mma_m16n8k16(d, a, b, &mie_emu::bf16_to_float, MIE_SITE);
#else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
  }
};
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4],
                                             const unsigned (&b)[2]) {
  Mma<T>::m16n8k16(d, a, b);
}

// ---- tensor cores: d (16x8, int) += a (16x32 or 16x16, by rows) * b (32x8 or 16x8, by columns), of
// signed bytes, the first one low
//
// a[0] = (g, 4t..)  a[1] = (g + 8, 4t..)  a[2] = (g, 4t + 16..)  a[3] = (g + 8, 4t + 16..)
// b[0] = (4t.., g)  b[1] = (4t + 16.., g)
// d as above. The product of 16 has the first halves of a and b.

__device__ __forceinline__ void mma_m16n8k32(int (&d)[4], const unsigned (&a)[4],
                                             const unsigned (&b)[2]) {
#ifdef MIE_EMULATE
  mie_emu::mma_bytes(d, a, b, 2, MIE_SITE);
#else
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}
__device__ __forceinline__ void mma_m16n8k16(int (&d)[4], const unsigned (&a)[2], unsigned b) {
#ifdef MIE_EMULATE
  mie_emu::mma_bytes(d, a, &b, 1, MIE_SITE);
#else
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
#endif
}

// ---- float32 as IEEE 754 defines it: rounded once, with subnormal numbers, whatever the options

__device__ __forceinline__ float ieee_add(float a, float b) {
#ifdef MIE_EMULATE
  return a + b;
#else
  float d;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
#endif
}
__device__ __forceinline__ float ieee_mul(float a, float b) {
#ifdef MIE_EMULATE
  return a * b;
#else
  float d;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
#endif
}
__device__ __forceinline__ float ieee_fma(float a, float b, float c) {
#ifdef MIE_EMULATE
  return fmaf(a, b, c);
#else
  float d;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
  return d;
#endif
}

// ---- conversions, rounded to nearest even

__device__ __forceinline__ float f16_bits_to_float(unsigned short bits) {
#ifdef MIE_EMULATE
  return mie_emu::f16_to_float(bits);
#else
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
#endif
}
__device__ __forceinline__ unsigned short float_to_f16_bits(float x) {
#ifdef MIE_EMULATE
  return mie_emu::float_to_f16(x);
#else
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
#endif
}
__device__ __forceinline__ unsigned short float_to_bf16_bits(float x) {
#ifdef MIE_EMULATE
  return mie_emu::float_to_bf16(x);
#else
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
#endif
}
__device__ __forceinline__ unsigned pack_f16x2(float lo, float hi) {
#ifdef MIE_EMULATE
  return mie_emu::float_to_f16(lo) | static_cast<unsigned>(mie_emu::float_to_f16(hi)) << 16;
#else
  unsigned pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
  return pair;
#endif
}
__device__ __forceinline__ unsigned pack_bf16x2(float lo, float hi) {
#ifdef MIE_EMULATE
  return mie_emu::float_to_bf16(lo) | static_cast<unsigned>(mie_emu::float_to_bf16(hi)) << 16;
#else
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
  return pair;
#endif
}

// ---- four e4m3 as two pairs of f16, exactly. Chips have it from sm_89 on. NaN becomes 0x7fff.

#if defined(MIE_EMULATE) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890)
#define MIE_HAS_E4M3_CONVERSION 1
__device__ __forceinline__ void e4m3x4_to_f16x2(unsigned& low, unsigned& high, unsigned codes) {
#ifdef MIE_EMULATE
  auto f16_at = [codes](int shift) {
    return static_cast<unsigned>(mie_emu::e4m3_to_f16(codes >> shift & 255u));
  };
  low = f16_at(0) | f16_at(8) << 16, high = f16_at(16) | f16_at(24) << 16;
#else
  asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; "
      "cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b;}"
      : "=r"(low), "=r"(high)
      : "r"(codes));
#endif
}
#else
#define MIE_HAS_E4M3_CONVERSION 0
#endif

// ---- four bytes of the pair b:a, each picked by a nibble. A nibble's high bit repeats the sign of
// its byte instead, which CUDA's own __byte_perm cannot.

__device__ __forceinline__ unsigned permute_bytes(unsigned a, unsigned b, unsigned selector) {
#ifdef MIE_EMULATE
  return mie_emu::permute_bytes(a, b, selector);
#else
  unsigned d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
#endif
}

// ---- a * b + c of two pairs of f16, or of bf16, rounded once (exactly where the result is exact)

__device__ __forceinline__ unsigned fma_f16x2(unsigned a, unsigned b, unsigned c) {
#ifdef MIE_EMULATE
  return mie_emu::fma_pair(a, b, c, &mie_emu::f16_to_float, &mie_emu::float_to_f16);
#else
  unsigned d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
#endif
}

__device__ __forceinline__ unsigned fma_bf16x2(unsigned a, unsigned b, unsigned c) {
#ifdef MIE_EMULATE
  return mie_emu::fma_pair(a, b, c, &mie_emu::bf16_to_float, &mie_emu::float_to_bf16);
#else
  unsigned d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
#endif
}

// ---- the larger number; NaN if one is NaN. Subnormal numbers count, whatever the options

__device__ __forceinline__ float max_nan(float a, float b) {
#ifdef MIE_EMULATE
  return a != a || b != b ? __int_as_float(0x7fffffff) : a < b ? b : a;
#else
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
#endif
}

// ---- 2^x, one instruction (about 2 ulp; 2^-inf is 0)

__device__ __forceinline__ float exp2_approx(float x) {
#ifdef MIE_EMULATE
  return exp2f(x);
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}
