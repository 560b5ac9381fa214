// Chooses the experts of each token, and sorts the rows of all tokens by expert
// (mie/ops/layers/experts.py).
//
//   logits   [T, E]     T
//   routed   [T, 2, k]  float  the chosen experts, by falling logit, and their weights
//   tokens   [T k]      int32  the token of each sorted row
//   places   [T k]      int32  the sorted row of choice j of token t, at t k + j
//   tiles    [most, 3]  int32  an expert, the first of up to `rows` sorted rows of it, and their
//                              number, which is 0 for tiles past the last
//
// The number of tiles follows from the routing, which the host does not wait for. So launches over
// tiles have as many as there can be, and a captured launch fits every routing.
#include "mie_cuda.cuh"

// Orders numbers as unsigned integers. NaN is below all others, and both zeros are equal.
__device__ __forceinline__ unsigned order_of(float x) {
  if (x != x) return 0u;
  const unsigned bits = __float_as_uint(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// grid (ceil(T / warps)), block (32 * warps): a warp chooses for a token. Of equal logits the
// lowest expert comes first. The sums have a fixed order. SIGMOID: experts are chosen by the
// sigmoids of their logits plus bias [E], and weighed by the sigmoids
// (`ops.experts.route_by_sigmoid`).
template <typename T, bool SIGMOID = false>
__global__ void route_tokens(const T* __restrict__ logits, const T* __restrict__ bias,
                             float* __restrict__ routed, int num_tokens, int num_experts,
                             int num_chosen, int is_normalised) {
  const int token = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (token >= num_tokens) return;  // the whole warp leaves
  const T* row = logits + (size_t)token * num_experts;
  float* chosen = routed + (size_t)token * 2 * num_chosen;
  float* weights = chosen + num_chosen;
  auto score_of = [&](int e) {  // before the bias
    const float logit = to_float(row[e]);
    return SIGMOID ? 1.0f / (1.0f + expf(-logit)) : logit;
  };

  unsigned last_order = 0xffffffffu;
  int last = -1;
  float top = 0.0f, sum = 0.0f;
  for (int j = 0; j < num_chosen; ++j) {
    unsigned best_order = 0u;  // of the experts that come after the last one
    int best = num_experts;
    for (int e = lane; e < num_experts; e += 32) {
      const unsigned order = order_of(SIGMOID ? score_of(e) + to_float(bias[e]) : score_of(e));
      const bool is_left = order < last_order || (order == last_order && e > last);
      if (is_left && (best == num_experts || order > best_order)) best_order = order, best = e;
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      const unsigned order = __shfl_xor_sync(MIE_FULL_WARP, best_order, offset);
      const int e = __shfl_xor_sync(MIE_FULL_WARP, best, offset);
      if (order > best_order || (order == best_order && e < best)) best_order = order, best = e;
    }
    last_order = best_order, last = best;
    const float score = score_of(best);
    if (j == 0) top = score;
    const float weight = SIGMOID ? score : expf(score - top);
    sum += weight;
    if (lane == 0) chosen[j] = (float)best, weights[j] = weight;
  }
  if constexpr (SIGMOID) {
    sum += 1e-6f;
  } else if (!is_normalised) {
    sum = 0.0f;
    for (int e = lane; e < num_experts; e += 32) sum += expf(to_float(row[e]) - top);
    sum = warp_sum(sum);
  }
  if (lane == 0)
    for (int j = 0; j < num_chosen; ++j) weights[j] /= sum;
}

// The block's sum of `value` in every thread, with the sum of the threads before this one.
struct Scan {
  int before, total;
};
__device__ __forceinline__ Scan block_scan(int value, int* partial) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int sum = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(MIE_FULL_WARP, sum, offset);
    if (lane >= offset) sum += other;
  }
  __syncthreads();  // the partial sums of the last call are read
  if (lane == 31) partial[warp] = sum;
  __syncthreads();
  Scan scan = {sum - value, 0};
  for (int w = 0; w < (int)blockDim.x / 32; ++w) {
    if (w < warp) scan.before += partial[w];
    scan.total += partial[w];
  }
  return scan;
}

// grid (E), block (a multiple of 32), dynamic shared memory 4 E bytes. A block sorts the rows of
// one expert. Each counts those of all experts for itself, so that no block waits for another.
__global__ void sort_rows(const float* __restrict__ routed, int* __restrict__ tokens,
                          int* __restrict__ places, int* __restrict__ tiles, int num_tokens,
                          int num_chosen, int rows, int most) {
  __shared__ int partial[32];
  int* counts = reinterpret_cast<int*>(mie_smem);  // [E]
  const int num_experts = gridDim.x, own = blockIdx.x, num_pairs = num_tokens * num_chosen;
  auto expert_of = [&](int pair) {
    return (int)routed[(size_t)(pair / num_chosen) * 2 * num_chosen + pair % num_chosen];
  };
  for (int e = threadIdx.x; e < num_experts; e += blockDim.x) counts[e] = 0;
  __syncthreads();
  for (int pair = threadIdx.x; pair < num_pairs; pair += blockDim.x)
    atomicAdd(counts + expert_of(pair), 1);
  __syncthreads();
  int rows_before = 0, tiles_before = 0;  // this thread's share of the experts before
  for (int e = threadIdx.x; e < own; e += blockDim.x) {
    rows_before += counts[e];
    tiles_before += (counts[e] + rows - 1) / rows;
  }
  int next = block_scan(rows_before, partial).total;
  const int first_row = next, first_tile = block_scan(tiles_before, partial).total;

  const int end_tile = first_tile + (counts[own] + rows - 1) / rows;
  const int last_tile = own == num_experts - 1 ? most : end_tile;  // the last expert fills up
  for (int tile = first_tile + threadIdx.x; tile < last_tile; tile += blockDim.x) {
    const int row = (tile - first_tile) * rows;
    tiles[3 * tile] = own;
    tiles[3 * tile + 1] = first_row + row;
    tiles[3 * tile + 2] = max(0, min(rows, counts[own] - row));
  }
  for (int begin = 0; begin < num_pairs; begin += blockDim.x) {
    const int pair = begin + threadIdx.x;
    const bool is_own = pair < num_pairs && expert_of(pair) == own;
    const Scan scan = block_scan(is_own, partial);
    if (is_own) {
      tokens[next + scan.before] = pair / num_chosen;
      places[pair] = next + scan.before;
    }
    next += scan.total;
  }
}

// Adds the weighted results of each token's experts to x [T, D], in the order of its choices.
//
//   results  [T k, D]  T  of the sorted rows
//
// grid (T, ceil(D / block)), block (any)
template <typename T>
__global__ void add_experts(const T* __restrict__ results, const float* __restrict__ routed,
                            const int* __restrict__ places, T* __restrict__ x, int num_chosen,
                            int dim) {
  const int i = blockIdx.y * blockDim.x + threadIdx.x, token = blockIdx.x;
  if (i >= dim) return;
  const float* weights = routed + ((size_t)token * 2 + 1) * num_chosen;
  float sum = 0.0f;
  for (int j = 0; j < num_chosen; ++j) {
    const size_t place = places[token * num_chosen + j];
    sum += weights[j] * to_float(results[place * dim + i]);
  }
  T* to = x + (size_t)token * dim + i;
  *to = from_float<T>(sum + to_float(*to));
}
