// The one header that a kernel file includes. It defines the dialect of CUDA C of our kernels.
//
// A .cu file is compiled by NVRTC for the GPU, and by g++ (-DMIE_EMULATE) for the host emulator.
// The rules are:
//   * no other header, no std:: and no CUDA header, because the user's machine has NVRTC only;
//   * asm is in mie_ptx.cuh only;
//   * a kernel is `__global__ void name(...)` or a template of it, never extern "C";
//   * dynamic shared memory is called mie_smem; static shared memory has no initialiser;
//   * a kernel's parameters are scalars, pointers, or small structs of scalars.
#pragma once

#ifdef MIE_EMULATE
#include "mie_emu.h"
#endif

#define MIE_INF __int_as_float(0x7f800000)  // NVRTC has no INFINITY
#define MIE_FULL_WARP 0xffffffffu

extern __shared__ __align__(128) unsigned char mie_smem[];

// 16-bit floats as storage: they are loaded, converted to float, and stored again.
struct __align__(2) f16 {
  unsigned short bits;
};
struct __align__(2) bf16 {
  unsigned short bits;
};

// The elements of a quantised cache (quantized.cuh): an integer, the bits of an 8-bit float, and
// eight codes of four bits, the first in the lowest.
using int8 = signed char;
using e4m3 = unsigned char;
using int4x8 = unsigned;

#include "mie_ptx.cuh"

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(f16 x) { return f16_bits_to_float(x.bits); }
__device__ __forceinline__ float to_float(bf16 x) {
  return __uint_as_float(static_cast<unsigned>(x.bits) << 16);
}

// from_float<T>(x): x rounded to nearest even. pack2<T>(lo, hi): two of them in a register, lo in
// the low half, as the fragments of mma want them. unpack2<T> is its inverse.
template <typename T>
struct Rounding;
template <>
struct Rounding<float> {
  static __device__ __forceinline__ float one(float x) { return x; }
};
template <>
struct Rounding<f16> {
  static __device__ __forceinline__ f16 one(float x) { return f16{float_to_f16_bits(x)}; }
  static __device__ __forceinline__ unsigned two(float lo, float hi) { return pack_f16x2(lo, hi); }
  static __device__ __forceinline__ float2 split(unsigned pair) {
    return make_float2(f16_bits_to_float(static_cast<unsigned short>(pair)),
                       f16_bits_to_float(static_cast<unsigned short>(pair >> 16)));
  }
};
template <>
struct Rounding<bf16> {
  static __device__ __forceinline__ bf16 one(float x) { return bf16{float_to_bf16_bits(x)}; }
  static __device__ __forceinline__ unsigned two(float lo, float hi) { return pack_bf16x2(lo, hi); }
  static __device__ __forceinline__ float2 split(unsigned pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  }
};
template <typename T>
__device__ __forceinline__ T from_float(float x) {
  return Rounding<T>::one(x);
}
template <typename T>
__device__ __forceinline__ unsigned pack2(float lo, float hi) {
  return Rounding<T>::two(lo, hi);
}
template <typename T>
__device__ __forceinline__ float2 unpack2(unsigned pair) {
  return Rounding<T>::split(pair);
}

// Sum and maximum over groups of W neighbouring lanes (W a power of two); every lane gets the
// result. The order of the additions is fixed, so that equal inputs give equal bits.
template <int W = 32>
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = W / 2; offset > 0; offset >>= 1) x += __shfl_xor_sync(MIE_FULL_WARP, x, offset);
  return x;
}
template <int W = 32>
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int offset = W / 2; offset > 0; offset >>= 1)
    x = fmaxf(x, __shfl_xor_sync(MIE_FULL_WARP, x, offset));
  return x;
}
