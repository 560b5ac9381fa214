// Kernels that test the emulator itself. Each uses one part of the dialect, and test_emulator.py
// has the expected results. scripts/gpu_check can run the same kernels on a GPU.
#include "mie_cuda.cuh"
#include "quantized.cuh"

__global__ void saxpy(const float* __restrict__ x, float* __restrict__ y, float a, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] += a * x[i];
}

// The position of each thread, in three dimensions of both grid and block.
__global__ void positions(int* out) {
  const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  out[block * blockDim.x * blockDim.y * blockDim.z + thread] = block * 1000 + thread;
}

struct Line {
  float slope, offset;
  int n;
};
__global__ void struct_argument(float* y, Line line) {
  const int i = threadIdx.x;
  if (i < line.n) y[i] = line.slope * i + line.offset;
}

template <typename T>
__global__ void __launch_bounds__(128) scaled(const T* __restrict__ x, T* __restrict__ y, float a) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  y[i] = from_float<T>(a * to_float(x[i]));
}

// Pairs: the packed conversions against the single ones.
template <typename T>
__global__ void packed(const float* __restrict__ x, unsigned* __restrict__ pairs,
                       float* __restrict__ y) {
  const int i = threadIdx.x;
  const unsigned pair = pack2<T>(x[2 * i], x[2 * i + 1]);
  pairs[i] = pair;
  const float2 both = unpack2<T>(pair);
  y[2 * i] = both.x;
  y[2 * i + 1] = both.y;
}

// a * b + c of pairs.
template <typename T>
__global__ void fused(const unsigned* __restrict__ a, const unsigned* __restrict__ b,
                      const unsigned* __restrict__ c, unsigned* __restrict__ y) {
  const int i = threadIdx.x;
  if constexpr (!IS_QUANTIZED<f16, T>)
    y[i] = fma_f16x2(a[i], b[i], c[i]);
  else
    y[i] = fma_bf16x2(a[i], b[i], c[i]);
}

// Four elements of a quantised cache as two pairs, in both orders that the kernels need.
template <typename C>
__global__ void widened(const unsigned* __restrict__ from, unsigned* __restrict__ pairs) {
  const int i = threadIdx.x;
  unsigned* to = pairs + 4 * i;
  Widening<C>::template four<0, 1, 2, 3>(to[0], to[1], from[i]);
  Widening<C>::template four<0, 2, 1, 3>(to[2], to[3], from[i]);
}
// The same for e4m3 on chips without a conversion.
__global__ void widened_by_bits(const unsigned* __restrict__ from, unsigned* __restrict__ pairs) {
  const int i = threadIdx.x;
  unsigned* to = pairs + 4 * i;
  to[0] = widen_by_bits<0, 1>(from[i]), to[1] = widen_by_bits<2, 3>(from[i]);
  to[2] = widen_by_bits<0, 2>(from[i]), to[3] = widen_by_bits<1, 3>(from[i]);
}

// Powers of two, by the hardware's approximation.
__global__ void base_two(const float* __restrict__ x, float* __restrict__ powers) {
  powers[threadIdx.x] = exp2_approx(x[threadIdx.x]);
}

__global__ void block_sum(const float* __restrict__ x, float* __restrict__ y, int n) {
  __shared__ float part[32];
  float sum = 0.0f;
  for (int i = threadIdx.x; i < n; i += blockDim.x) sum += x[blockIdx.x * n + i];
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x < 32) {
    sum = warp_sum(threadIdx.x < blockDim.x / 32 ? part[threadIdx.x] : 0.0f);
    if (threadIdx.x == 0) y[blockIdx.x] = sum;
  }
}

__global__ void histogram(const int* __restrict__ x, int* __restrict__ counts, int n, int bins) {
  int* mine = reinterpret_cast<int*>(mie_smem);
  for (int i = threadIdx.x; i < bins; i += blockDim.x) mine[i] = 0;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    atomicAdd(&mine[x[i]], 1);
  __syncthreads();
  for (int i = threadIdx.x; i < bins; i += blockDim.x) atomicAdd(&counts[i], mine[i]);
}

// One column for each operation; a block of one warp.
__global__ void warp_operations(const int* __restrict__ x, int* __restrict__ out) {
  const int lane = threadIdx.x, value = x[lane];
  int column = 0;
  auto put = [&](int result) { out[32 * column++ + lane] = result; };
  put(__shfl_sync(MIE_FULL_WARP, value, 5));
  put(__shfl_sync(MIE_FULL_WARP, value, lane + 3, 8));
  put(__shfl_up_sync(MIE_FULL_WARP, value, 3));
  put(__shfl_up_sync(MIE_FULL_WARP, value, 3, 16));
  put(__shfl_down_sync(MIE_FULL_WARP, value, 5));
  put(__shfl_down_sync(MIE_FULL_WARP, value, 5, 8));
  put(__shfl_xor_sync(MIE_FULL_WARP, value, 9));
  put(__shfl_xor_sync(MIE_FULL_WARP, value, 1, 4));
  put(static_cast<int>(__ballot_sync(MIE_FULL_WARP, value > 50)));
  put(__any_sync(MIE_FULL_WARP, value == x[7]));
  put(__all_sync(MIE_FULL_WARP, value >= 0));
  // Halves of a warp that diverge and converge again.
  int halves = value;
  if (lane < 16) {
    halves = __shfl_xor_sync(0x0000ffffu, halves, 1);
    halves += __shfl_xor_sync(0x0000ffffu, halves, 2);
  } else {
    halves = __shfl_xor_sync(0xffff0000u, halves, 8);
  }
  put(__shfl_xor_sync(MIE_FULL_WARP, halves, 16));
}

__global__ void larger(const float* __restrict__ x, const float* __restrict__ y,
                       float* __restrict__ out) {
  const int i = threadIdx.x;
  out[i] = max_nan(x[i], y[i]);
}

__global__ void block_votes(const int* __restrict__ x, int* __restrict__ out) {
  const int i = threadIdx.x;
  const int any = __syncthreads_or(x[i] > 90), all = __syncthreads_and(x[i] >= 0);
  out[i] = any + 2 * all + 4 * __syncthreads_count(x[i] > 50);
}

__global__ void atomics(const int* __restrict__ x, int* __restrict__ out, float* __restrict__ sum,
                        unsigned* __restrict__ ring) {
  const int value = x[blockIdx.x * blockDim.x + threadIdx.x];
  atomicMin(&out[0], value);
  atomicMax(&out[1], value);
  atomicOr(&out[2], value);
  atomicExch(&out[3], 7);
  atomicCAS(&out[4], 0, value + 1);
  atomicAdd(sum, 0.5f);
  atomicInc(ring, 9u);
}

// r = the fragments of ldmatrix and movmatrix; x is 32 rows of 8 elements.
__global__ void matrices(const unsigned short* __restrict__ x, unsigned* __restrict__ out) {
  unsigned short* tile = reinterpret_cast<unsigned short*>(mie_smem);
  const int lane = threadIdx.x;
  cp_async16(tile + 8 * lane, x + 8 * lane);
  cp_async_commit();
  cp_async_wait<0>();
  __syncwarp();
  unsigned four[4];
  int column = 0;
  auto put = [&](unsigned result) { out[32 * column++ + lane] = result; };
  ldmatrix_x4(four, tile + 8 * lane);
  for (int i = 0; i < 4; ++i) put(four[i]);
  put(movmatrix_trans(four[0]));
  ldmatrix_x4_trans(four, tile + 8 * lane);
  for (int i = 0; i < 4; ++i) put(four[i]);
}

// c [M, N] float = a [M, K] * b [N, K]^T: one warp for each tile of 16 x 8, rows past M are zeros.
template <typename T>
__global__ void __launch_bounds__(32) gemm(const T* __restrict__ a, const T* __restrict__ b,
                                           float* __restrict__ c, int m, int n, int k) {
  T* a_ring = reinterpret_cast<T*>(mie_smem);  // [2][16][16]
  T* b_ring = a_ring + 2 * 256;                // [2][8][16]
  const int lane = threadIdx.x, row0 = blockIdx.y * 16, column0 = blockIdx.x * 8;
  auto load = [&](int slot, int k0) {
    const int row = lane / 2, column = lane % 2 * 8;
    cp_async16_or_zero(a_ring + slot * 256 + row * 16 + column,
                       a + static_cast<long long>(row0 + row) * k + k0 + column, row0 + row < m);
    if (row < 8)
      cp_async16(b_ring + slot * 128 + row * 16 + column,
                 b + static_cast<long long>(column0 + row) * k + k0 + column);
    cp_async_commit();
  };
  float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  load(0, 0);
  for (int k0 = 0, slot = 0; k0 < k; k0 += 16, slot ^= 1) {
    if (k0 + 16 < k)
      load(slot ^ 1, k0 + 16);
    else
      cp_async_commit();  // an empty group, so that the wait below always counts the same
    cp_async_wait<1>();
    __syncwarp();
    unsigned a_part[4], b_part[4];
    ldmatrix_x4(a_part, a_ring + slot * 256 + lane % 16 * 16 + lane / 16 * 8);
    // The last two matrices are the first two again.
    ldmatrix_x4(b_part, b_ring + slot * 128 + lane % 8 * 16 + lane / 8 % 2 * 8);
    const unsigned b_pair[2] = {b_part[0], b_part[1]};
    mma_m16n8k16<T>(d, a_part, b_pair);
    __syncwarp();  // the slot was read and may be refilled
  }
  const int column = column0 + lane % 4 * 2;
  for (int i = 0; i < 4; ++i) {
    const int row = row0 + lane / 4 + i / 2 * 8;
    if (row < m) c[static_cast<long long>(row) * n + column + i % 2] = d[i];
  }
}

// The last block sums the results of all blocks, which needs the fence and the ticket.
__global__ void last_block_adds(const float* __restrict__ x, float* partial, int* tickets,
                                float* y) {
  __shared__ bool is_last;
  const float sum = warp_sum(x[blockIdx.x * 32 + threadIdx.x]);
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = sum;
    __threadfence();
    is_last = atomicAdd(tickets, 1) == static_cast<int>(gridDim.x) - 1;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  float total = 0.0f;
  for (int i = threadIdx.x; i < static_cast<int>(gridDim.x); i += 32) total += partial[i];
  total = warp_sum(total);
  if (threadIdx.x == 0) *y = total;
}

// The initial contents of static shared memory.
__global__ void stale_shared(float* out) {
  __shared__ float left_over[32];
  out[blockIdx.x * 32 + threadIdx.x] = left_over[threadIdx.x];
  left_over[threadIdx.x] = 1.0f;
}

// Integer products of bytes: a [16, 32] and b [8, 32] by rows. y[0] [16, 8] has all of them, and
// y[1] those of the first 16 inputs. Sums begin with d [16, 8].
__global__ void integer_matrices(const unsigned* __restrict__ a, const unsigned* __restrict__ b,
                                 const int* __restrict__ d, int* __restrict__ y) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  const unsigned fragment[4] = {a[8 * g + t], a[8 * (g + 8) + t], a[8 * g + t + 4],
                                a[8 * (g + 8) + t + 4]};
  const unsigned half[2] = {fragment[0], fragment[1]}, other[2] = {b[8 * g + t], b[8 * g + t + 4]};
  int sums[2][4];
  for (int e = 0; e < 4; ++e)
    sums[0][e] = sums[1][e] = d[8 * (g + 8 * (e / 2)) + 2 * t + e % 2];
  mma_m16n8k32(sums[0], fragment, other);
  mma_m16n8k16(sums[1], half, other[0]);
  for (int i = 0; i < 2; ++i)
    for (int e = 0; e < 4; ++e)
      y[128 * i + 8 * (g + 8 * (e / 2)) + 2 * t + e % 2] = sums[i][e];
}

// a + b, a * b and a * b + c, each rounded once, with subnormal numbers.
__global__ void ieee(const float* __restrict__ a, const float* __restrict__ b,
                     const float* __restrict__ c, float* __restrict__ y) {
  const int i = threadIdx.x, n = blockDim.x;
  y[i] = ieee_add(a[i], b[i]);
  y[n + i] = ieee_mul(a[i], b[i]);
  y[2 * n + i] = ieee_fma(a[i], b[i], c[i]);
}
