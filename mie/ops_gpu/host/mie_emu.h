// CUDA C on a CPU: the header of a .cu file that g++ compiles with -DMIE_EMULATE.
// Each CUDA thread is a fiber, which the runtime in mie_emu_runtime.h runs.
#pragma once
#include "mie_emu_runtime.h"
#include "mie_emu_types.h"

// ---- qualifiers
#define __global__ static
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __restrict__ __restrict
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
// Thread-local, so that the TLS segment of a .so is exactly its static shared memory, which the
// runtime can find and poison. In a function thread_local implies static, as __shared__ does.
#define __shared__ thread_local
extern thread_local __attribute__((aligned(128), visibility("default"))) unsigned char mie_smem[];

// ---- built-in variables
#define threadIdx (mie_emu::current->index)
#define blockIdx (mie_emu::current->block)
#define blockDim (mie_emu::current->block_size)
#define gridDim (mie_emu::current->grid_size)
#define warpSize 32

// ---- loads with cache hints
#define __ldcg(p) (*(p))

// ---- an exponential, which uses what was loaded before
#define exp2f(x) (mie_emu::use_loads(), ::exp2f(x))

// ---- barriers and fences
#define __syncthreads() ((void)mie_emu::block_barrier(mie_emu::Vote::NONE, 0, MIE_SITE))
#define __syncthreads_or(p) mie_emu::block_barrier(mie_emu::Vote::OR, (p) != 0, MIE_SITE)
#define __syncthreads_and(p) mie_emu::block_barrier(mie_emu::Vote::AND, (p) != 0, MIE_SITE)
#define __syncthreads_count(p) mie_emu::block_barrier(mie_emu::Vote::COUNT, (p) != 0, MIE_SITE)
#define __syncwarp(...) mie_emu::sync_warp(MIE_SITE, ##__VA_ARGS__)
#define __threadfence() mie_emu::memory_fence()
#define __threadfence_block() ((void)0)

// ---- shuffles and votes
#define __shfl_sync(mask, value, lane, ...) \
  mie_emu::shuffle<mie_emu::Shuffle::INDEX>(MIE_SITE, mask, value, lane, ##__VA_ARGS__)
#define __shfl_up_sync(mask, value, delta, ...) \
  mie_emu::shuffle<mie_emu::Shuffle::UP>(MIE_SITE, mask, value, delta, ##__VA_ARGS__)
#define __shfl_down_sync(mask, value, delta, ...) \
  mie_emu::shuffle<mie_emu::Shuffle::DOWN>(MIE_SITE, mask, value, delta, ##__VA_ARGS__)
#define __shfl_xor_sync(mask, value, lane_mask, ...) \
  mie_emu::shuffle<mie_emu::Shuffle::XOR>(MIE_SITE, mask, value, lane_mask, ##__VA_ARGS__)
#define __ballot_sync(mask, p) mie_emu::ballot(mask, (p) != 0, MIE_SITE)
#define __any_sync(mask, p) (mie_emu::ballot(mask, (p) != 0, MIE_SITE) != 0)
#define __all_sync(mask, p) (mie_emu::ballot(mask, (p) == 0, MIE_SITE) == 0)

// Inlined, so that an address in it is in the kernel and a report can name its line. These
// functions access the emulator's memory through the runtime, which the checked build does not
// instrument.
#define MIE_INLINE inline __attribute__((always_inline))
#define MIE_INLINE_LAMBDA __attribute__((always_inline))

namespace mie_emu {

MIE_INLINE void sync_warp(Site site, uint32_t mask = 0xffffffffu) { warp_barrier(mask, site); }

enum class Shuffle { INDEX, UP, DOWN, XOR };

template <Shuffle MODE, typename T>
MIE_INLINE T shuffle(Site site, uint32_t mask, T value, unsigned by, unsigned width = 32) {
  static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
  const unsigned lane = current->lane, offset = lane & (width - 1), first = lane - offset;
  unsigned source = lane;  // also if the source is outside the group of `width` lanes
  if (MODE == Shuffle::INDEX) source = first + (by & (width - 1));
  if (MODE == Shuffle::UP && offset >= by) source = lane - by;
  if (MODE == Shuffle::DOWN && offset + by < width) source = lane + by;
  if (MODE == Shuffle::XOR && (offset ^ by) < width) source = first + (offset ^ by);
  const unsigned char* lanes = exchange(mask, &value, sizeof value, "a shuffle", site);
  if (!(mask >> source & 1u))
    fail("mask: a shuffle reads lane %u, which is not in %08x", source, mask);
  T result;
  copy_unchecked(&result, lanes + LANE_BYTES * source, sizeof result);
  return result;
}

template <typename T, typename Update>
MIE_INLINE T atomic(T* p, Update update) {
  atomic_access(p, sizeof(T));
  T old;
  copy_unchecked(&old, p, sizeof old);
  const T next = update(old);
  copy_unchecked(p, &next, sizeof next);
  return old;
}

}  // namespace mie_emu

// ---- atomics; the second parameter is not deduced, as in CUDA's overloads
namespace mie_emu {
template <typename T>
struct Same {
  using Type = T;
};
}  // namespace mie_emu
#define MIE_ATOMIC(name, expression)                                                         \
  template <typename T>                                                                      \
  static MIE_INLINE T name(T* p, typename mie_emu::Same<T>::Type value) {                    \
    return mie_emu::atomic(p, [value](T old) MIE_INLINE_LAMBDA -> T { return expression; }); \
  }
MIE_ATOMIC(atomicAdd, old + value)
MIE_ATOMIC(atomicMin, value < old ? value : old)
MIE_ATOMIC(atomicMax, old < value ? value : old)
MIE_ATOMIC(atomicExch, value)
MIE_ATOMIC(atomicOr, old | value)
#undef MIE_ATOMIC
static MIE_INLINE unsigned atomicInc(unsigned* p, unsigned limit) {
  return mie_emu::atomic(p, [limit](unsigned old) MIE_INLINE_LAMBDA {
    return old >= limit ? 0u : old + 1u;
  });
}
template <typename T>
static MIE_INLINE T atomicCAS(T* p, typename mie_emu::Same<T>::Type expected,
                              typename mie_emu::Same<T>::Type desired) {
  return mie_emu::atomic(
      p, [=](T old) MIE_INLINE_LAMBDA -> T { return old == expected ? desired : old; });
}
