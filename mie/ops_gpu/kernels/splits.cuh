// Splits of a sequence, for decodes whose results do not depend on the batch. Included after
// mie_cuda.cuh and attention.cuh.
#pragma once

// A split of the tokens that a query sees, for a block to attend to. The splits depend on the
// sequence's length and the window (0: none) alone, so a result does not depend on the batch. They
// begin at the window's first token, rounded down to a multiple of 16, and have split_tokens tokens
// each. A longer sequence has max_splits longer ones. A sequence of length 0 has no splits.
struct Split {
  int begin, end;  // of split number `split`
  int count;       // of the sequence
};
__device__ __forceinline__ Split split_of(int length, int window, int split_tokens, int max_splits,
                                          int split) {
  const int oldest = window > 0 ? max(0, length - window) : 0;
  const int start = oldest / 16 * 16, visible = length - start;
  const int tokens = max(split_tokens, ((visible + max_splits - 1) / max_splits + 15) / 16 * 16);
  const int first = start + split * tokens;
  return {max(first, oldest), min(length, first + tokens), (visible + tokens - 1) / tokens};
}

// The end of a block of a grid (Hkv, sequences, splits) that attended to one of `count` splits: the
// last of them merges their partial results, [sequences, Hq, splits, DH].
template <typename T, int DH>
__device__ __forceinline__ void finish_splits(const float* partial, const float* partial_lse,
                                              int* arrived, T* out, int group, int count) {
  if (count <= 1) return;  // the output is written already
  const int pair = blockIdx.y * gridDim.x + blockIdx.x, num_splits = gridDim.z;
  if (!is_last_to_arrive(arrived + pair, count)) return;
  merge_parts<T, DH>(partial, partial_lse, out, group, count,
                     [&](int g, int split) { return (pair * group + g) * num_splits + split; });
}
