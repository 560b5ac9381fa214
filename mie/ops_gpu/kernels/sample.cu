// Samples tokens from logits as mie/ops/sampling.py does, with one block for each row.
//
//   logits     [R, V] T
//   rows       [R]         how each row is sampled; null: every row takes its largest logit
//   ids        [...] int32   the rows' lists of token ids, see Row
//   values     [...] double  and what belongs to them
//   scratch    [., V] double  a row for each row that is not plainly greedy
//   token_ids  [R]    int32
//
// grid (R), block (a multiple of 32, at most 512). The vocabulary is never sorted. The last token
// that top-k or top-p keeps is found digit by digit, first of its logit, then of its id. All
// arithmetic is in double and repeats the NumPy operator's operations. Counts and the weights of
// top-p are integers, whose sums do not depend on their order. Only the draw sums doubles, in an
// order that V and the block size fix.
#include "mie_cuda.cuh"

using Key = unsigned long long;

constexpr int KEY_BITS = 63;  // of a double without sign: as integers they have the same order
constexpr int DIGIT_BITS = 11;
constexpr int NUM_BINS = 1 << DIGIT_BITS;
constexpr int ID_BITS = 33;
constexpr double MAX_SUM = 4611686018427387904.0;  // 2^62: the weights of top-p stay below this

enum Kind { GREEDY = 0, DRAWN = 1, FORCED = 2 };
enum Allowed { ALL = 0, IDS = 1, WORDS = 2 };

// One row's controls. The lists are concatenated in `ids`: bias, allowed, banned, seen, output,
// each up to where the next begins. In the form WORDS, allowed has a bit for each token. From value_begin on, `values` has those of bias and of output.
struct Row {
  double temperature, top_p, log_min_p, uniform, repetition_penalty;
  int kind, top_k, forced_id, scratch_row;
  int bias, allowed, banned, seen, output, end;
  int value_begin, allowed_form;
};
static_assert(sizeof(Row) == 88, "sampling.py packs 88 bytes a row");

struct Best {
  double value;
  int id;
};

// Where the masses of ids, in the order of their keys, reach a sum.
struct Reached {
  Key key;      // of the ids that reach it
  Key missing;  // what the ids of lower keys lack to the sum; 0 if all ids together do not reach it
  Key mass;     // of all ids with this key
};

struct Shared {
  Key bins[NUM_BINS];
  double doubles[32];
  int ints[32];
  Key prefix, missing;
};

// ---- a warp, and the block, as a whole

template <typename Number>
__device__ __forceinline__ Number warp_total(Number x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(MIE_FULL_WARP, x, offset);
  return x;
}

// The sum over the block, which every thread gets. `shared` has a place for each warp.
template <typename Number>
__device__ __forceinline__ Number block_sum(Number x, Number* shared) {
  x = warp_total(x);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  Number sum = 0;
  for (int warp = 0; warp < (int)blockDim.x / 32; ++warp) sum += shared[warp];
  __syncthreads();
  return sum;
}

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

// ---- the first tokens, in the order "logit falling, id rising"

// The order of doubles >= 0, as integers, and back.
union Pun {
  double number;
  Key bits;
};
__device__ __forceinline__ Key ascending(double x) {
  Pun pun;
  pun.number = x;
  return pun.bits;
}
__device__ __forceinline__ double number_of(Key key) {
  Pun pun;
  pun.bits = key;
  return pun.number;
}

// The key of a logit <= 0: the largest logit has the smallest key.
__device__ __forceinline__ Key descending(double logit) { return ascending(0.0 - logit); }

// Run by one warp. Finds the first bin up to which the bins sum to `missing`, and the sum before
// it, in shared.prefix and shared.missing. Without such a bin shared.missing is unchanged.
__device__ __forceinline__ void find_bin(Shared& shared, Key prefix, Key missing) {
  constexpr int BINS = NUM_BINS / 32;
  const int lane = threadIdx.x, first = BINS * lane;
  Key own = 0;
  for (int i = 0; i < BINS; ++i) own += shared.bins[first + i];
  Key before = own;
  for (int offset = 1; offset < 32; offset *= 2) {
    const Key other = __shfl_up_sync(MIE_FULL_WARP, before, offset);
    if (lane >= offset) before += other;
  }
  before -= own;
  if (before >= missing || before + own < missing) return;
  int bin = first;
  while (before + shared.bins[bin] < missing) before += shared.bins[bin++];
  shared.prefix = prefix + bin;
  shared.missing = missing - before;
}

// Finds where the masses of all ids, in the order of their keys of BITS bits, sum to `wanted` (at
// least 1). mass_of takes a key: equal keys have equal masses. It is a radix select, most
// significant digit first: ids whose key begins with the prefix found so far are separated by their
// next digit.
template <int BITS, typename KeyOf, typename MassOf>
__device__ __forceinline__ Reached select(KeyOf key_of, MassOf mass_of, Key wanted, int size,
                                          Shared& shared) {
  Reached reached = {0, wanted, 0};
  for (int high = BITS; high > 0;) {
    const int low = high > DIGIT_BITS ? high - DIGIT_BITS : 0, num_bits = high - low;
    const Key digit = (Key(1) << num_bits) - 1;
    for (int bin = threadIdx.x; bin < NUM_BINS; bin += blockDim.x) shared.bins[bin] = 0;
    if (threadIdx.x == 0) shared.missing = 0;  // no bin found
    __syncthreads();
    for (int i = threadIdx.x; i < size; i += blockDim.x) {
      const Key key = key_of(i);
      if (key >> high != reached.key) continue;
      const Key mass = mass_of(key);
      if (mass > 0) atomicAdd(&shared.bins[key >> low & digit], mass);
    }
    __syncthreads();
    if (threadIdx.x < 32) find_bin(shared, reached.key << num_bits, reached.missing);
    __syncthreads();
    if (shared.missing == 0) return Reached{0, 0, 0};
    reached = Reached{shared.prefix, shared.missing, shared.bins[shared.prefix & digit]};
    high = low;
    __syncthreads();
  }
  return reached;
}

// Sets the logits x [V], all <= 0, to -inf except for the first tokens whose masses sum to
// `wanted`: logits falling, ids rising among equals. A thread reads only what it wrote.
template <typename MassOf>
__device__ __forceinline__ void keep_first(MassOf mass_of, Key wanted, double* x, int size,
                                           Shared& shared) {
  const auto key_of = [=](int i) { return descending(x[i]); };
  const Reached last = select<KEY_BITS>(key_of, mass_of, wanted, size, shared);
  if (last.missing == 0) return;
  Key last_id = size;
  const Key each = mass_of(last.key);
  if (last.mass - last.missing >= each) {  // some of the equal ones are too many
    const auto id_of = [=](int i) { return Key(i); };
    const auto mass_of_id = [=](Key id) { return descending(x[id]) == last.key ? each : Key(0); };
    last_id = select<ID_BITS>(id_of, mass_of_id, last.missing, size, shared).key;
  }
  for (int i = threadIdx.x; i < size; i += blockDim.x) {
    const Key key = key_of(i);
    if (key > last.key || (key == last.key && i > last_id)) x[i] = -MIE_INF;
  }
}

// ---- the steps of a row, in x [V]; each ends with a barrier if others read what it wrote

// edit_logits. Allowed ids come before the bias, which cannot bring a token back from -inf.
template <typename T>
__device__ __forceinline__ void edit_logits(const T* logits, const Row& row, const int* ids,
                                            const double* values, double* x, int size) {
  const int first = threadIdx.x, step = blockDim.x, form = row.allowed_form;
  for (int i = first; i < size; i += step) {
    const bool is_allowed =
        form == ALL || (form == WORDS && (ids[row.allowed + i / 32] >> i % 32 & 1));
    x[i] = is_allowed ? to_float(logits[i]) : -MIE_INF;
  }
  __syncthreads();
  const int end_of_ids = form == IDS ? row.banned : 0;
  for (int i = row.allowed + first; i < end_of_ids; i += step) x[ids[i]] = to_float(logits[ids[i]]);
  __syncthreads();
  for (int i = row.bias + first; i < row.allowed; i += step)
    x[ids[i]] += values[row.value_begin + i - row.bias];
  __syncthreads();
  for (int i = row.banned + first; i < row.seen; i += step) x[ids[i]] = -MIE_INF;
  __syncthreads();
  for (int i = row.seen + first; i < row.output; i += step) {
    const double seen = x[ids[i]], penalty = row.repetition_penalty;
    x[ids[i]] = seen > 0 ? seen / penalty : seen * penalty;
  }
  __syncthreads();
  const int output_values = row.value_begin + row.allowed - row.bias;
  for (int i = row.output + first; i < row.end; i += step)
    x[ids[i]] -= values[output_values + i - row.output];
  __syncthreads();
}

// The nucleus: the first tokens whose weights exp(x) sum to at least top_p of the total. As
// integers they are exact in any order.
__device__ __forceinline__ void keep_nucleus(double top_p, double* x, int size, Shared& shared) {
  double scale = MAX_SUM;
  for (int n = size; n > 0; n /= 2) scale /= 2;
  const auto mass_of = [=](Key key) { return Key(exp(0.0 - number_of(key)) * scale); };
  Key total = 0;
  for (int i = threadIdx.x; i < size; i += blockDim.x) total += mass_of(descending(x[i]));
  total = block_sum(total, shared.bins);
  const Key wanted = Key(ceil(top_p * (double)total)), at_least = 1;
  keep_first(mass_of, min(max(wanted, at_least), total), x, size, shared);
}

// Turns the effective logits x into the weights of the tokens: exp((x - max) / temperature), and 0
// for those that min-p, top-k and top-p drop.
__device__ __forceinline__ void weigh(const Row& row, double max, double* x, int size,
                                      Shared& shared) {
  for (int i = threadIdx.x; i < size; i += blockDim.x) {
    const double scaled = (x[i] - max) / row.temperature;
    x[i] = scaled < row.log_min_p ? -MIE_INF : scaled;
  }
  if (row.top_k > 0 && row.top_k < size)
    keep_first([](Key) { return Key(1); }, row.top_k, x, size, shared);
  if (row.top_p < 1) keep_nucleus(row.top_p, x, size, shared);
  for (int i = threadIdx.x; i < size; i += blockDim.x) x[i] = exp(x[i]);
  __syncthreads();
}

// The first id whose cumulative weight exceeds uniform * total. Each warp sums a stretch of the
// vocabulary. The warp whose stretch contains the token searches it, 32 ids at a time. A sum of
// parts can differ from the sum of the whole by a rounding. If the target is then not reached, the
// result is the last token that adds anything, and never a token without weight.
__device__ __forceinline__ void draw(double uniform, const double* x, int size, int* token_id,
                                     Shared& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, num_warps = blockDim.x / 32;
  const int stretch = 32 * ((size + 32 * num_warps - 1) / (32 * num_warps));
  const int begin = min(size, warp * stretch), end = min(size, begin + stretch);
  double own = 0;
  for (int i = begin + lane; i < end; i += 32) own += x[i];
  own = warp_total(own);
  if (lane == 0) shared.doubles[warp] = own;
  __syncthreads();
  double total = 0;
  for (int i = 0; i < num_warps; ++i) total += shared.doubles[i];
  const double target = uniform * total;
  double before = 0, after = shared.doubles[0];
  int chosen = 0;
  while (after <= target && after < total) {
    before = after;
    after += shared.doubles[++chosen];
  }
  if (warp != chosen) return;
  int tile = -1;
  double tile_before = before;
  for (int i = begin; i < end && before <= target; i += 32) {
    const double sum = warp_total(i + lane < end ? x[i + lane] : 0.0);
    if (sum > 0 && (tile < 0 || before + sum > before)) {
      tile = i;
      tile_before = before;
    }
    before += sum;
  }
  if (lane > 0) return;
  int last = -1;
  before = tile_before;
  for (int i = tile; i < min(end, tile + 32) && before <= target; ++i) {
    if (x[i] > 0 && (last < 0 || before + x[i] > before)) last = i;
    before += x[i];
  }
  *token_id = last;
}

template <typename T>
__global__ void __launch_bounds__(512, 1)
    sample(const T* __restrict__ logits, const Row* __restrict__ rows, const int* __restrict__ ids,
           const double* __restrict__ values, double* __restrict__ scratch,
           int* __restrict__ token_ids, int vocab_size) {
  __shared__ Shared shared;
  logits += (size_t)blockIdx.x * vocab_size;
  int* token_id = token_ids + blockIdx.x;
  if (rows == nullptr || rows[blockIdx.x].scratch_row < 0) {
    const bool is_forced = rows != nullptr && rows[blockIdx.x].kind == FORCED;
    const auto logit = [=](int i) { return (double)to_float(logits[i]); };
    const int id = is_forced ? rows[blockIdx.x].forced_id : largest(logit, vocab_size, shared).id;
    if (threadIdx.x == 0) *token_id = id;
    return;
  }
  const Row row = rows[blockIdx.x];
  double* x = scratch + (size_t)row.scratch_row * vocab_size;
  edit_logits(logits, row, ids, values, x, vocab_size);
  const Best best = largest([=](int i) { return x[i]; }, vocab_size, shared);
  const bool is_finite = best.value > -MIE_INF && best.value < MIE_INF;
  if (row.kind == GREEDY || !is_finite) {
    // Without a largest number every weight is NaN, and NumPy's draw returns the first token.
    if (threadIdx.x == 0) *token_id = row.kind == GREEDY ? best.id : 0;
    return;
  }
  weigh(row, best.value, x, vocab_size, shared);
  draw(row.uniform, x, vocab_size, token_id, shared);
}

// Log-probabilities of one row of logits [V], before any edit:
//
//   result  [2 + 2 n] double  the rank of token_id and its log-probability, then the ids of the n
//                             most likely tokens, equal ones by rising id, and theirs
//
// grid (1), block (a multiple of 32, at most 512). Each of the n costs a pass over the row.
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
