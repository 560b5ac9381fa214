// Computes log-probabilities of one row of logits [V], before any edit:
//
//   result  [2 + 2 n] double  the rank of token_id and its log-probability, then the ids of the n
//                             most likely tokens, equal ones by rising id, and theirs
//
// grid (1), block (a multiple of 32, at most 512). Each of the n costs a pass over the row.
#include "mie_cuda.cuh"
#include "sums.cuh"

struct Best {
  double value;
  int id;
};

struct Shared {
  double doubles[32];
  int ints[32];
};

// As in numpy.argmax, a NaN counts as the largest, and the lowest id wins among equals.
__device__ __forceinline__ Best better(Best a, Best b) {
  const bool a_is_nan = a.value != a.value, b_is_nan = b.value != b.value;
  const bool equal = a.value == b.value || (a_is_nan && b_is_nan);
  if (equal) return a.id < b.id ? a : b;
  if (a_is_nan || b_is_nan) return a_is_nan ? a : b;
  return a.value > b.value ? a : b;
}

// The best over the block, which every thread gets.
__device__ __forceinline__ Best block_best(Best best, Shared& shared) {
  for (int offset = 16; offset > 0; offset /= 2) {
    const double value = __shfl_xor_sync(MIE_FULL_WARP, best.value, offset);
    const int id = __shfl_xor_sync(MIE_FULL_WARP, best.id, offset);
    best = better(best, Best{value, id});
  }
  if (threadIdx.x % 32 == 0) {
    shared.doubles[threadIdx.x / 32] = best.value;
    shared.ints[threadIdx.x / 32] = best.id;
  }
  __syncthreads();
  for (int warp = 0; warp < (int)blockDim.x / 32; ++warp)
    best = better(best, Best{shared.doubles[warp], shared.ints[warp]});
  __syncthreads();
  return best;
}

template <typename Value>
__device__ __forceinline__ Best largest(Value value, int size, Shared& shared) {
  Best best = {-MIE_INF, size - 1};  // loses to everything but itself
  for (int i = threadIdx.x; i < size; i += blockDim.x) best = better(best, Best{value(i), i});
  return block_best(best, shared);
}

template <typename T>
__global__ void __launch_bounds__(512, 1)
    top_logprobs(const T* __restrict__ logits, double* __restrict__ result, int vocab_size,
                 int token_id, int num_top) {
  __shared__ Shared shared;
  const auto logit = [=](int i) { return (double)to_float(logits[i]); };
  const double max = largest(logit, vocab_size, shared).value;
  double sum = 0;
  for (int i = threadIdx.x; i < vocab_size; i += blockDim.x) sum += exp(logit(i) - max);
  const double log_sum = log(block_sum(sum, shared.doubles));
  const auto logprob = [=](int i) { return logit(i) - max - log_sum; };
  double above = 0;
  for (int i = threadIdx.x; i < vocab_size; i += blockDim.x)
    above += logprob(i) > logprob(token_id) ? 1.0 : 0.0;
  above = block_sum(above, shared.doubles);
  if (threadIdx.x == 0) {
    result[0] = 1 + above;
    result[1] = logprob(token_id);
  }
  Best previous = {MIE_INF, -1};
  for (int n = 0; n < num_top; ++n) {
    Best next = {-MIE_INF, vocab_size - 1};
    for (int i = threadIdx.x; i < vocab_size; i += blockDim.x) {
      const double value = logprob(i);
      if (value < previous.value || (value == previous.value && i > previous.id))
        next = better(next, Best{value, i});
    }
    previous = block_best(next, shared);
    if (threadIdx.x == 0) {
      result[2 + n] = previous.id;
      result[2 + num_top + n] = previous.value;
    }
  }
}
