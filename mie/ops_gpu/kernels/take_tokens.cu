// Takes a step's tokens from the previous step, whose tokens the host does not know yet.
//
//   drawn      [...]  int32  the token ids of the step before, as `sample` wrote them
//   rows       [T]    int32  the index into drawn of each token
//   token_ids  [T]    int32  out
//
// grid (ceil(T / block)), block (any).
#include "mie_cuda.cuh"

__global__ void take_tokens(const int* __restrict__ drawn, const int* __restrict__ rows,
                            int* __restrict__ token_ids, int num_tokens) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < num_tokens) token_ids[i] = drawn[rows[i]];
}
