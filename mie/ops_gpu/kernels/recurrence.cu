// The recurrences of layers with a state, token by token (mie/ops/layers/recurrent.py): the gated delta
// rule, and Mamba 2. Each head has a state S [Dk, Dv].
//
//   gated delta rule   S *= decay;  d = beta (v - k^T S);  S += k d^T;  y = q^T S
//   Mamba 2            S *= decay;  S += (step b) x^T;     y = c^T S + skip x
//
//   mixed     [T, C]     T      delta: q, k [G, Dk], v [H, Dv]; Mamba: x [H, Dv], b, c [G, Dk]
//   small     [T, 2 H]   T      delta: b, then a; Mamba [T, H]: dt
//   rates, dt_bias, skip [H]  T   skip is null with the delta rule
//   states    [N, H, Dk, Dv]  float
//   cu_seqlens [S + 1], slots, fresh [S]  int32  a fresh sequence begins with zeros; one with a
//                                         negative slot is padding, and keeps nothing
//   out       [T, H Dv]  T
//
// grid (ceil(Dv / 32), H, S), block (128). The columns of a state are independent. A warp has eight
// of them in registers, from the first token to the last, and four lanes share one: lane (r, c) has
// the elements 4 i + r of column c. All threads prepare the keys, queries and values of CHUNK
// tokens in shared memory, and then each warp runs over them for itself. The operations on a token
// are the same for decodes and prompts, and for every chunk.
#include "mie_cuda.cuh"

constexpr int WARPS = 4, COLUMNS = 8 * WARPS, CHUNK = 8;

__device__ __forceinline__ float softplus(float x) {
  return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
}

// The numbers of a chunk of tokens that a block needs. KEYS elements of a column are in a lane.
template <int KEYS>
struct Tokens {
  float keys[CHUNK][4 * KEYS], queries[CHUNK][4 * KEYS], values[CHUNK][COLUMNS];
  float betas[CHUNK], decays[CHUNK];
};

template <typename T, int KEYS, bool DELTA>
__global__ void __launch_bounds__(32 * WARPS)
recurrence(const T* __restrict__ mixed, const T* __restrict__ small, const T* __restrict__ rates,
           const T* __restrict__ dt_bias, const T* __restrict__ skip, float* __restrict__ states,
           const int* __restrict__ cu_seqlens, const int* __restrict__ slots,
           const int* __restrict__ fresh, T* __restrict__ out, int num_groups, int num_heads,
           int key_dim, int value_dim, float most) {
  __shared__ Tokens<KEYS> tokens;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, r = lane / 8;
  const int head = blockIdx.y, sequence = blockIdx.z, slot = slots[sequence];
  const int group = head / (num_heads / num_groups);
  const int first_column = blockIdx.x * COLUMNS, own = warp * 8 + lane % 8;
  const int column = first_column + own;
  const int first = cu_seqlens[sequence], count = cu_seqlens[sequence + 1] - first;
  const int all_keys = num_groups * key_dim, width = num_heads * value_dim;
  const int stride = 2 * all_keys + width;
  const int key_place = (DELTA ? all_keys : width) + group * key_dim;
  const int query_place = (DELTA ? 0 : width + all_keys) + group * key_dim;
  const int value_place = (DELTA ? 2 * all_keys : 0) + head * value_dim;
  const float rate = to_float(rates[head]), bias = to_float(dt_bias[head]);

  // Where element i of this lane's part of its column is, and whether it exists.
  float* at = states + ((size_t)max(slot, 0) * num_heads + head) * key_dim * value_dim + column;
  auto exists = [&](int i) { return 4 * i + r < key_dim && column < value_dim; };
  float state[KEYS];
  const bool has_state = slot >= 0 && fresh[sequence] == 0;
#pragma unroll
  for (int i = 0; i < KEYS; ++i)
    state[i] = has_state && exists(i) ? at[(size_t)(4 * i + r) * value_dim] : 0.0f;

  for (int begin = 0; begin < count; begin += CHUNK) {
    const int num_tokens = min(CHUNK, count - begin);
    __syncthreads();  // the last chunk is done
    for (int j = warp; j < num_tokens; j += WARPS) {
      const size_t token = first + begin + j;
      const T* row = mixed + token * stride;
      float key_scale = 1.0f, query_scale = 1.0f, beta = 0.0f, step;
      if constexpr (DELTA) {
        float keys = 0.0f, queries = 0.0f;  // sums of squares
        for (int i = lane; i < key_dim; i += 32) {
          const float k = to_float(row[key_place + i]), q = to_float(row[query_place + i]);
          keys = __fmaf_rn(k, k, keys), queries = __fmaf_rn(q, q, queries);
        }
        key_scale = 1.0f / sqrtf(warp_sum(keys) + 1e-6f);
        query_scale = 1.0f / sqrtf(warp_sum(queries) + 1e-6f) / sqrtf((float)key_dim);
        const T* gates = small + token * 2 * num_heads;
        beta = most / (1.0f + expf(-to_float(gates[head])));
        step = softplus(to_float(gates[num_heads + head]) + bias);
      } else {
        step = key_scale = softplus(to_float(small[token * num_heads + head]) + bias);
      }
      for (int i = lane; i < 4 * KEYS; i += 32) {
        const bool is_inside = i < key_dim;
        tokens.keys[j][i] = is_inside ? to_float(row[key_place + i]) * key_scale : 0.0f;
        tokens.queries[j][i] = is_inside ? to_float(row[query_place + i]) * query_scale : 0.0f;
      }
      const int v = first_column + lane;
      tokens.values[j][lane] = v < value_dim ? to_float(row[value_place + v]) : 0.0f;
      if (lane == 0) tokens.betas[j] = beta, tokens.decays[j] = expf(-rate * step);
    }
    __syncthreads();
    for (int j = 0; j < num_tokens; ++j) {
      const float *keys = tokens.keys[j] + r, *queries = tokens.queries[j] + r;
      const float decay = tokens.decays[j], value = tokens.values[j][own];
      float change = value, y = 0.0f;
      if constexpr (DELTA) {
        float predicted = 0.0f;
#pragma unroll
        for (int i = 0; i < KEYS; ++i) {
          state[i] *= decay;
          predicted = __fmaf_rn(keys[4 * i], state[i], predicted);
        }
        predicted += __shfl_xor_sync(MIE_FULL_WARP, predicted, 8);
        predicted += __shfl_xor_sync(MIE_FULL_WARP, predicted, 16);
        change = tokens.betas[j] * (value - predicted);
      }
#pragma unroll
      for (int i = 0; i < KEYS; ++i) {
        if constexpr (!DELTA) state[i] *= decay;
        state[i] = __fmaf_rn(keys[4 * i], change, state[i]);
        y = __fmaf_rn(queries[4 * i], state[i], y);
      }
      y += __shfl_xor_sync(MIE_FULL_WARP, y, 8);
      y += __shfl_xor_sync(MIE_FULL_WARP, y, 16);
      if constexpr (!DELTA) y = __fmaf_rn(to_float(skip[head]), value, y);
      if (r == 0 && column < value_dim)
        out[(size_t)(first + begin + j) * width + head * value_dim + column] = from_float<T>(y);
    }
  }
  if (slot < 0) return;
#pragma unroll
  for (int i = 0; i < KEYS; ++i)
    if (exists(i)) at[(size_t)(4 * i + r) * value_dim] = state[i];
}
