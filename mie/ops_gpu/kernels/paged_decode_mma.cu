// Paged attention of sequences with one query each, on tensor cores. It computes what
// paged_decode.cu does, for 16-bit elements, the heads of dispatch.py, and blocks of a multiple
// of 16 tokens. decode_mma.cuh explains how.
//
// Arguments, splits and output are as in paged_decode.cu. `group` query heads share a KV head, at
// most 8 * HEAD_TILES. grid (Hkv, sequences, splits), block (32 * WARPS). As there, the splits
// depend only on the sequence, so a result does not depend on the batch, and the last block
// merges. split_tokens is a multiple of 16, so splits begin and end with whole tiles.
#include "mie_cuda.cuh"
#include "attention.cuh"
#include "splits.cuh"
#include "decode_mma.cuh"

template <typename T, int DH, int HEAD_TILES, int WARPS, int STAGES, typename C = T,
          bool CAPPED = false>
__global__ void __launch_bounds__(32 * WARPS, 1)
paged_decode_mma(const T* __restrict__ q, const C* __restrict__ kv,
                 const float* __restrict__ scales, const int* __restrict__ tables,
                 const int* __restrict__ seq_lens, const int* __restrict__ cu_seqlens_q,
                 const int* __restrict__ sequences, const T* __restrict__ sinks,
                 T* __restrict__ out, float* __restrict__ partial, float* __restrict__ partial_lse,
                 int* __restrict__ arrived, int group, int table_width, int block_size,
                 int split_tokens, int max_splits, int window, float scale, float cap) {
  const int kv_head = blockIdx.x, num_splits = gridDim.z, sequence = sequences[blockIdx.y];
  const Split split =
      split_of_decode(seq_lens[sequence], window, split_tokens, max_splits, blockIdx.z);
  if ((int)blockIdx.z >= max(1, split.count)) return;  // the grid is sized for the longest sequence
  const size_t first_head = ((size_t)blockIdx.y * gridDim.x + kv_head) * group;
  const DecodeStep<T, C> step = {q,     kv,    scales,      tables,     seq_lens,
                                 cu_seqlens_q, sinks,       out,        partial,
                                 partial_lse,  (int)gridDim.x, group,   table_width,
                                 block_size,   scale,       cap};
  attend_tokens<T, C, DH, HEAD_TILES, WARPS, STAGES, CAPPED>(
      step, sequence, kv_head, split.begin, split.end, split.count <= 1,
      first_head * num_splits + blockIdx.z, num_splits);
  T* sequence_out = out + ((size_t)cu_seqlens_q[sequence] * gridDim.x + kv_head) * group * DH;
  finish_splits<T, DH>(partial, partial_lse, arrived, sinks, sequence_out, group, split.count);
}
