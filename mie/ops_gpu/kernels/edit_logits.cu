// Writes the effective logits of rows with edits, in the order of mie/ops/sampling.py. Each edit is
// computed in double and rounded to float.
//
//   logits  [R, V] T
//   rows    [R]
//   ids     [...] int32   the rows' lists, see Row
//   values  [...] double
//   edited  [., V] float
//
// grid (parts, R), block PART_THREADS. Every block reads the whole lists, and edits its own part.
#include "sampling.cuh"

template <typename T>
__global__ void __launch_bounds__(PART_THREADS)
    edit_logits(const T* __restrict__ logits, const Row* __restrict__ rows,
                const int* __restrict__ ids, const double* __restrict__ values,
                float* __restrict__ edited, int vocab_size) {
  const Row row = rows[blockIdx.y];
  if (row.edited_row < 0) return;
  logits += static_cast<size_t>(blockIdx.y) * vocab_size;
  float* x = edited + static_cast<size_t>(row.edited_row) * vocab_size;
  const int begin = blockIdx.x * PART, end = min(vocab_size, begin + PART);
  // Calls edit(id, index in ids) for the listed ids in this part.
  const auto each = [&](int first, int last, auto edit) {
    for (int i = first + threadIdx.x; i < last; i += PART_THREADS)
      if (ids[i] >= begin && ids[i] < end) edit(ids[i], i);
    __syncthreads();
  };
  for (int i = begin + threadIdx.x; i < end; i += PART_THREADS) {
    const int form = row.allowed_form;
    const bool is_allowed =
        form == ALL || (form == WORDS && (ids[row.allowed + i / 32] >> i % 32 & 1));
    x[i] = is_allowed ? to_float(logits[i]) : -MIE_INF;
  }
  __syncthreads();
  if (row.allowed_form == IDS)
    each(row.allowed, row.banned, [&](int id, int) { x[id] = to_float(logits[id]); });
  // Allowed ids come before the bias, which cannot bring a token back from -inf.
  each(row.bias, row.allowed, [&](int id, int i) {
    x[id] = static_cast<float>(x[id] + values[row.value_begin + i - row.bias]);
  });
  each(row.banned, row.seen, [&](int id, int) { x[id] = -MIE_INF; });
  each(row.seen, row.output, [&](int id, int) {
    const double seen = x[id], penalty = row.repetition_penalty;
    x[id] = static_cast<float>(seen > 0 ? seen / penalty : seen * penalty);
  });
  const int output_values = row.value_begin + row.allowed - row.bias;
  each(row.output, row.end, [&](int id, int i) {
    x[id] = static_cast<float>(x[id] - values[output_values + i - row.output]);
  });
}
