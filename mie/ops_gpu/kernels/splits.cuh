// Splits of the tokens that queries see, which several blocks share. Included after mie_cuda.cuh
// and attention.cuh.
#pragma once

// A split of the tokens oldest ... end - 1, for a block to attend to. The splits begin at `oldest`,
// rounded down to a multiple of ALIGN, and have split_tokens tokens each, another multiple. If
// these were more than max_splits, there are max_splits longer ones. No split is empty. Without
// tokens there are none.
struct Split {
  int begin, end;  // of split number `split`
  int count;       // of all of them
};
template <int ALIGN>
__device__ __forceinline__ Split split_of(int oldest, int end, int split_tokens, int max_splits,
                                          int split) {
  const int start = oldest / ALIGN * ALIGN, visible = end - start;
  const int least = (visible + max_splits - 1) / max_splits;
  const int tokens = max(split_tokens, (least + ALIGN - 1) / ALIGN * ALIGN);
  const int first = start + split * tokens;
  return {max(first, oldest), min(end, first + tokens), (visible + tokens - 1) / tokens};
}

// A split of a decode. It depends on the sequence's length and the window (0: none) alone, so a
// result does not depend on the batch.
__device__ __forceinline__ Split split_of_decode(int length, int window, int split_tokens,
                                                 int max_splits, int split) {
  const int oldest = window > 0 ? max(0, length - window) : 0;
  return split_of<16>(oldest, length, split_tokens, max_splits, split);
}

// The end of a block of a grid (Hkv, sequences, splits) that attended to one of `count` splits: the
// last of them merges their partial results, [sequences, Hq, splits, DH].
template <typename T, int DH>
__device__ __forceinline__ void finish_splits(const float* partial, const float* partial_lse,
                                              int* arrived, const T* sinks, T* out, int group,
                                              int count) {
  if (count <= 1) return;  // the output is written already
  const int pair = blockIdx.y * gridDim.x + blockIdx.x, num_splits = gridDim.z;
  if (!is_last_to_arrive(arrived + pair, count)) return;
  merge_parts<T, DH>(partial, partial_lse, group, count, [&](int g) { return out + g * DH; },
                     [&](int g) { return sink_of(sinks, blockIdx.x * group + g); },
                     [&](int g, int split) { return (pair * group + g) * num_splits + split; });
}
