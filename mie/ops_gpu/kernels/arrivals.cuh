// The last of several blocks or warps to arrive. Included after mie_cuda.cuh.
#pragma once

// Whether this block is the last of `count` to arrive. All threads of each block call when they
// have written their parts of a result, which the last block then sees. `arrived` begins at zero
// and is zero again afterwards, for the next launch.
__device__ __forceinline__ bool is_last_to_arrive(int* arrived, int count) {
  __threadfence();
  __syncthreads();
  const bool is_last = __syncthreads_or(threadIdx.x == 0 && atomicAdd(arrived, 1) == count - 1);
  if (is_last) {
    __threadfence();
    if (threadIdx.x == 0) atomicExch(arrived, 0);
  }
  return is_last;
}

// The same for warps of several blocks, each with a counter for its place. All lanes call.
__device__ __forceinline__ bool is_last_warp_to_arrive(int* arrived, int count) {
  __threadfence();
  __syncwarp();
  const bool is_mine = threadIdx.x % 32 == 0 && atomicAdd(arrived, 1) == count - 1;
  const bool is_last = __any_sync(MIE_FULL_WARP, is_mine);
  if (is_last) {
    __threadfence();
    if (is_mine) atomicExch(arrived, 0);
  }
  return is_last;
}
