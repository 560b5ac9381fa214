// The bug zoo: small kernels, each with one planted bug that the checked build must report, at a line
// marked "<- caught" (for a race, either of its two accesses). With -DFIX the bug is repaired, and
// the kernel must pass. tests/planted/zoo.toml has the expected reports. These never run on a GPU.
#include "mie_cuda.cuh"

#ifdef FIX
#define BUG(...)
#define REPAIR(...) __VA_ARGS__
#else
#define BUG(...) __VA_ARGS__
#define REPAIR(...)
#endif

// ---- races inside a block

__global__ void neighbour_without_barrier(const float* x, float* y, int n) {
  __shared__ float row[64];
  const int i = threadIdx.x;
  row[i] = x[i];
  REPAIR(__syncthreads();)
  y[i] = row[(i + n - 1) % n];  // <- caught
}

__global__ void write_after_read(const float* x, float* y, int n) {
  __shared__ float row[64];
  const int i = threadIdx.x;
  row[i] = x[i];
  __syncthreads();
  const float next = row[(i + 1) % n];  // <- caught
  REPAIR(__syncthreads();)
  row[i] = next;  // <- caught
  y[i] = row[i];
}

__global__ void missing_syncwarp(const float* x, float* y, int n) {
  __shared__ float row[32];
  const int i = threadIdx.x;
  row[i] = x[i];
  REPAIR(__syncwarp();)
  y[i] = row[n - 1 - i];  // <- caught
}

__global__ void shuffle_is_no_barrier(const float* x, float* y, int n) {
  __shared__ float row[32];
  const int i = threadIdx.x;
  row[i] = x[i];
  const float sum = warp_sum(x[i]);
  REPAIR(__syncwarp();)
  y[i] = row[n - 1 - i] / sum;  // <- caught
}

__global__ void syncwarp_of_half_a_warp(const float* x, float* y, int n) {
  __shared__ float row[32];
  const int i = threadIdx.x;
  row[i] = x[i];
  __syncwarp(i < 16 ? 0x0000ffffu : 0xffff0000u);
  y[i] = row[BUG(n - 1 - i) REPAIR(i ^ 15)];  // <- caught
}

__global__ void atomic_beside_plain_write(const float* x, float* y, int n) {
  __shared__ int count;
  if (threadIdx.x == 0) count = 0;
  REPAIR(__syncthreads();)
  if (x[threadIdx.x] > 0.0f) atomicAdd(&count, 1);  // <- caught
  __syncthreads();
  y[threadIdx.x] = count + n;
}

// ---- races between blocks

__global__ void blocks_write_one_output(const float* x, float* y, int n) {
  const int i = threadIdx.x BUG(+0 * n) REPAIR(+blockIdx.x * blockDim.x);
  y[i] = x[i] + blockIdx.x;  // <- caught
}

__global__ void blocks_without_fence(const float* x, float* y, int* tickets) {
  y[blockIdx.x] = x[blockIdx.x];
  REPAIR(__threadfence();)
  if (atomicAdd(tickets, 1) != static_cast<int>(gridDim.x) - 1) return;
  float sum = 0.0f;  // the last block sums the results of all
  for (unsigned i = 0; i < gridDim.x; ++i)
    sum += y[i];  // <- caught
  y[gridDim.x] = sum;
}

// ---- barriers and warp operations that not all threads reach

__global__ void divergent_barrier(const float* x, float* y, int n) {
  y[threadIdx.x] = x[threadIdx.x];
  BUG(if (threadIdx.x < 40)) __syncthreads();  // <- caught
  y[threadIdx.x] += n;
}

__global__ void two_barriers_for_one(const float* x, float* y, int n) {
  __shared__ float row[64];
  row[threadIdx.x] = x[threadIdx.x];
  BUG(if (threadIdx.x < 32) __syncthreads(); else)  // <- caught
  __syncthreads();  // <- caught
  y[threadIdx.x] = row[n - 1 - threadIdx.x];
}

__global__ void exit_before_a_barrier(const float* x, float* y, int n) {
  __shared__ float row[64];
  BUG(if (static_cast<int>(threadIdx.x) >= n / 2) return;)
  row[threadIdx.x] = x[threadIdx.x];
  __syncthreads();  // <- caught
  y[threadIdx.x] = row[n / 2 - 1];
}

__global__ void shuffle_in_a_branch(const float* x, float* y, int n) {
  float value = x[threadIdx.x];
  BUG(if (static_cast<int>(threadIdx.x) < n / 2))
  value += __shfl_xor_sync(MIE_FULL_WARP, value, 8);  // <- caught
  y[threadIdx.x] = value;
}

__global__ void warp_waits_for_itself(const float* x, float* y, int n) {
  float value = x[threadIdx.x];
  BUG(if (static_cast<int>(threadIdx.x) < n / 2))
  value += __shfl_xor_sync(MIE_FULL_WARP, value, 8);  // <- caught
  __syncthreads();
  y[threadIdx.x] = value;
}

__global__ void shuffle_from_a_lane_outside_its_mask(const float* x, float* y, int n) {
  float value = x[threadIdx.x];
  if (threadIdx.x < 16)
    value += __shfl_xor_sync(0xffffu, value, BUG(16) REPAIR(8));  // <- caught
  y[threadIdx.x] = value + n;
}

__global__ void mask_without_the_caller(const float* x, float* y, int n) {
  const bool is_low = threadIdx.x < 16;
  const unsigned mask = is_low ? 0xffffu : BUG(0xffffu) REPAIR(0xffff0000u);
  y[threadIdx.x] = x[threadIdx.x] + n + __ballot_sync(mask, is_low);  // <- caught
}

// ---- out of bounds

__global__ void write_past_the_end(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  REPAIR(if (i < n))
  y[i] = x[i % n];  // <- caught
}

__global__ void read_before_the_start(const float* x, float* y, int n) {
  const int i = threadIdx.x;
  y[i] = x[BUG(i - 1) REPAIR((i + n - 1) % n)];  // <- caught
}

__global__ void wild_pointer(const float* x, float* y, int n) {
  float* far = y BUG(+1000000000LL * (threadIdx.x + 1));
  far[threadIdx.x] = x[n - 1];  // <- caught
}

__global__ void past_dynamic_shared_memory(const float* x, float* y, int n) {  // gets n floats
  float* row = reinterpret_cast<float*>(mie_smem);
  row[threadIdx.x BUG(+1)] = x[threadIdx.x];  // <- caught
  __syncthreads();
  y[threadIdx.x] = row[n - 1];
}

__global__ void past_static_shared_memory(const float* x, float* y, int n) {
  __shared__ float row[64];
  row[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = row[threadIdx.x BUG(+1)] + n;  // <- caught
}

__global__ void past_a_local_array(const float* x, float* y, int n) {
  float part[4];
  for (int i = 0; i < 4; ++i) part[i] = x[i];
  y[threadIdx.x] = part[n / 16 REPAIR(-1)];  // <- caught
}

__global__ void write_to_constant_input(const float* x, float* y, int n) {
  float* out = BUG(const_cast<float*>(x)) REPAIR(y);
  out[threadIdx.x] = n;  // <- caught
}

// ---- uninitialised

__global__ void uninitialised_shared(const float* x, float* y, int n) {
  __shared__ float row[64];
  if (threadIdx.x BUG(+1) < 64) row[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = row[n - 1 - threadIdx.x];  // <- caught
}

__global__ void uninitialised_scratch(const float* x, float* y, float* scratch) {
  REPAIR(scratch[threadIdx.x] = 0.0f;)
  scratch[threadIdx.x] += x[threadIdx.x];  // <- caught
  y[threadIdx.x] = scratch[threadIdx.x];
}

// ---- alignment and arithmetic

__global__ void misaligned_vector(const float* x, float* y, int n) {
  const float4 four = *reinterpret_cast<const float4*>(x + n / 16 BUG(+1));  // <- caught
  y[threadIdx.x] = four.x + four.w;
}

__global__ void misaligned_ldmatrix(const float* x, float* y, int n) {
  const int lane = threadIdx.x;
  for (int i = lane; i < 256; i += 32) reinterpret_cast<float*>(mie_smem)[i] = x[i % n];
  __syncwarp();
  unsigned r[4];
  ldmatrix_x4(r, mie_smem + lane * 16 BUG(+8));  // <- caught
  y[lane] = r[0] + r[3];
}

__global__ void signed_overflow(const float* x, float* y, int n) {
  const int stride = 1 << 26;  // e.g. elements of a KV cache
  const long long at = BUG(n * stride) REPAIR(static_cast<long long>(n) * stride);  // <- caught
  y[threadIdx.x] = x[threadIdx.x] + at;
}

__global__ void shift_too_far(const float* x, float* y, int n) {
  y[threadIdx.x] = x[threadIdx.x] + (1u << (n REPAIR(-33)));  // <- caught
}

__global__ void division_by_zero(const float* x, float* y, int n) {
  const int parts = n / 64 BUG(-1);
  y[threadIdx.x] = x[0] + n / parts;  // <- caught
}

// ---- cp.async: 64 floats in 16 copies of 16 bytes

__global__ void copy_not_waited_for(const float* x, float* y, int n) {
  float* row = reinterpret_cast<float*>(mie_smem);
  const int i = threadIdx.x;
  if (i < n / 4) cp_async16(row + 4 * i, x + 4 * i);
  cp_async_commit();
  cp_async_wait<BUG(1) REPAIR(0)>();
  __syncthreads();
  y[i] = row[i];  // <- caught
  cp_async_wait<0>();
}

__global__ void copy_not_committed(const float* x, float* y, int n) {
  float* row = reinterpret_cast<float*>(mie_smem);
  const int i = threadIdx.x;
  if (i < n / 4) cp_async16(row + 4 * i, x + 4 * i);
  REPAIR(cp_async_commit();)
  cp_async_wait<0>();
  __syncthreads();
  y[i] = row[i];  // <- caught
  cp_async_commit();
  cp_async_wait<0>();
}

__global__ void copy_seen_without_barrier(const float* x, float* y, int n) {
  float* row = reinterpret_cast<float*>(mie_smem);
  const int i = threadIdx.x;
  if (i < n / 4) cp_async16(row + 4 * i, x + 4 * i);
  cp_async_commit();
  cp_async_wait<0>();
  REPAIR(__syncthreads();)
  y[i] = row[i];  // <- caught
}

__global__ void copy_into_a_slot_being_read(const float* x, float* y, int n) {
  float* row = reinterpret_cast<float*>(mie_smem);
  const int i = threadIdx.x;
  float sum = 0.0f;
  for (int turn = 0; turn < 2; ++turn) {
    REPAIR(__syncthreads();)
    if (i < n / 4) cp_async16(row + 4 * i, x + 4 * i);  // <- caught
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    sum += row[i];  // <- caught
  }
  y[i] = sum;
}

__global__ void copy_never_waited_for(const float* x, float* y, int n) {
  const int i = threadIdx.x;
  if (i < n / 4) cp_async16(mie_smem + 16 * i, x + 4 * i);
  cp_async_commit();
  REPAIR(cp_async_wait<0>();)
  y[i] = x[i];
}

__global__ void copy_to_a_misaligned_place(const float* x, float* y, int n) {
  const int i = threadIdx.x;
  if (i < n / 4) cp_async16(mie_smem + 16 * i BUG(+4), x + 4 * i);  // <- caught
  cp_async_commit();
  cp_async_wait<0>();
  y[i] = x[i];
}

__global__ void copy_of_a_masked_row(const float* x, float* y, int n) {
  float* row = reinterpret_cast<float*>(mie_smem);
  const int i = threadIdx.x;
  const float* beyond = x + 4 * (i + n / 8);  // the second half is past the end
  const bool is_inside = i < n / 8;
  BUG((void)is_inside);
  if (i < n / 4) cp_async16_or_zero(row + 4 * i, beyond, REPAIR(is_inside) BUG(true));  // <- caught
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  y[i] = row[i];
}

// ---- endless loops

__global__ void spin(const float* x, float* y, int n) {
  BUG(volatile float* flag = y + threadIdx.x; while (*flag != x[0] + n) {})  // <- caught
  y[threadIdx.x] = x[n - 1];
}

__global__ void spin_on_an_atomic(const float* x, float* y, int n) {
  BUG(while (atomicAdd(y + threadIdx.x, 0.0f) != x[0] + n) {})  // <- caught
  y[threadIdx.x] = x[n - 1];
}
