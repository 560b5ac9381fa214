// A warp's ring of weights in shared memory. Included after product_shape.cuh.
//
// The producer requests a stage by cp.async, which passes L1 and needs no registers on the way. The
// consumer reads a stage into registers, and while it multiplies them, the stage is filled again. So
// all stages are in flight while a warp multiplies. The warp fills and reads its own ring, and waits
// for no other warp.
//
// A stage has, of each of its two tiles, vectors of 16 bytes in the order in which lanes read them,
// then scales and units. Where x does not stay in shared memory, the rows' inputs follow.
#pragma once

// The part of x that a warp multiplies in an iteration, [chunk][row][32 inputs], or in groups of 16
// inputs [step][row][16]. So the lanes of a fragment read neighbouring bytes, and there are no bank
// conflicts without padding. `count` rows are stored.
template <typename S>
__device__ __forceinline__ int place_in_x(int row, int vector, int count) {
  constexpr int PER_CHUNK = S::ROW_VECTORS / S::CHUNKS;
  const int chunk = vector / PER_CHUNK, i = vector % PER_CHUNK;
  const int first = chunk * count * S::CHUNK_BYTES;
  if constexpr (S::SPAN == 16 && !S::FLOAT)
    return first + (i / 2 * count + row) * 32 + i % 2 * 16;
  else
    return first + row * S::CHUNK_BYTES + i * 16;
}

// Requests one stage after the other, for the iterations of a block.
template <typename S, typename OutputsOf>
struct Producer {
  using T = typename S::T;
  static constexpr int SCALE_LOADS = (MT * S::SCALES + 31) / 32;
  const Matrix& matrix;
  const Rows<T>& rows;
  const Schedule& schedule;
  OutputsOf outputs_of;
  const int block_k;
  const bool has_x;
  int left, tile, slice, k;  // iterations to request, and the next one's place and first input
  // The lane's first element or vector of each tile, and its vectors of scales and units.
  unsigned codes[MT][S::DENSE ? 2 : 1], scales[SCALE_LOADS + 1], units;

  // For the iterations begin ... end - 1.
  __device__ __forceinline__ Producer(const Matrix& matrix, const Rows<T>& rows,
                                      const Schedule& schedule, OutputsOf outputs_of, bool has_x,
                                      int begin, int end)
      : matrix(matrix), rows(rows), schedule(schedule), outputs_of(outputs_of),
        block_k(blockDim.x / 32 * S::INPUTS), has_x(has_x), left(end - begin),
        tile(begin / schedule.num_slices), slice(begin % schedule.num_slices) {
    k = slice * block_k + threadIdx.x / 32 * S::INPUTS;
    if (left > 0) turn_to_tile();
  }

  // Finds the weights of the output tile's first input.
  __device__ __forceinline__ void turn_to_tile() {
    const int lane = threadIdx.x % 32;
    unsigned numbers[MT];
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      const Outputs outputs = outputs_of(tile * MT + m);
      if constexpr (S::DENSE) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int n = outputs.first + min(lane / 4 + 8 * half, outputs.count - 1);
          codes[m][half] = (unsigned)(outputs.count > 0 ? n : 0) * (unsigned)matrix.depth;
        }
      } else {
        numbers[m] = outputs.count > 0 ? outputs.first / TILE : 0;
        codes[m][0] = numbers[m] * ((matrix.depth + UNIT - 1) / UNIT) * S::CODES + lane;
      }
    }
    if constexpr (!S::DENSE) {
      const unsigned cells = cell_of(matrix.depth - 1) + 1;
#pragma unroll
      for (int i = 0; i < SCALE_LOADS; ++i) {
        const int vector = 32 * i + lane;
        const unsigned number = vector < S::SCALES ? numbers[0] : numbers[1];
        scales[i] = number * cells * S::SCALES + vector % S::SCALES;
      }
      if constexpr (S::BITS == 8)
        units = (lane < S::UNITS ? numbers[0] : numbers[1]) * (matrix.depth / 256) * S::UNITS +
                lane % S::UNITS;
    }
  }

  __device__ __forceinline__ int cell_of(int input) const {
    return S::SPAN < UNIT ? input / UNIT : input >> matrix.shift;
  }

  // Requests the next iteration into a stage, with zeros past K. A group of copies is committed even
  // if there is none, because the waits count groups. All lanes call.
  __device__ __forceinline__ void request(unsigned char* stage) {
    if (left > 0) {
      if constexpr (S::DENSE)
        request_dense(stage);
      else
        request_codes(stage);
      if (has_x) request_x(stage + S::WEIGHT_BYTES);
      --left, k += block_k;
      if (++slice == schedule.num_slices) {
        k -= slice * block_k, slice = 0, ++tile;
        if (left > 0) turn_to_tile();
      }
    }
    cp_async_commit();
  }

 private:
  __device__ __forceinline__ void request_dense(unsigned char* stage) const {
    constexpr int PARTS = S::CODES / 64;  // vectors of a lane's eight inputs
    const int lane = threadIdx.x % 32, t = lane % 4;
    const T* weight = reinterpret_cast<const T*>(matrix.weight);
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
          const int first = k + 8 * t + part * S::COUNT;
          void* to = stage + (((m * 2 + half) * PARTS + part) * 32 + lane) * 16;
          const T* row = weight + codes[m][half];
          if constexpr (S::VECTOR)
            cp_async16_or_zero(to, row + first, first < matrix.depth);
          else
            *static_cast<uint4*>(to) = load16<T, false>(row, first, matrix.depth);
        }
  }

  __device__ __forceinline__ void request_codes(unsigned char* stage) const {
    const int lane = threadIdx.x % 32, unit = k / UNIT;
    const bool is_inside = k < matrix.depth;
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      const uint4* from = matrix.weight + (codes[m][0] + unit * S::CODES);
#pragma unroll
      for (int v = 0; v < S::CODES; v += 32)
        if (v + 32 <= S::CODES || lane < S::CODES % 32)
          cp_async16_or_zero(stage + (m * S::CODES + v + lane) * 16, from + v, is_inside);
    }
    unsigned char* to = stage + MT * S::CODES * 16 + lane * 16;
    const int cell = cell_of(k);
#pragma unroll
    for (int i = 0; i < SCALE_LOADS; ++i)
      if (32 * i + lane < MT * S::SCALES)
        cp_async16_or_zero(to + i * 512, matrix.scales + (scales[i] + cell * S::SCALES), is_inside);
    if constexpr (S::BITS == 8) {
      const uint4* from = reinterpret_cast<const uint4*>(matrix.units);
      if (lane < MT * S::UNITS)
        cp_async16_or_zero(to + MT * S::SCALES * 16, from + (units + k / 256 * S::UNITS),
                           is_inside);
    }
  }

  __device__ __forceinline__ void request_x(unsigned char* x) const {
    for (int i = threadIdx.x % 32; i < rows.count * S::ROW_VECTORS; i += 32) {
      const int row = i / S::ROW_VECTORS, vector = i % S::ROW_VECTORS;
      const int first = k + vector * S::COUNT;
      void* to = x + place_in_x<S>(row, vector, rows.count);
      const T* from = rows.x + (size_t)row * rows.depth;
      if constexpr (S::VECTOR)
        cp_async16_or_zero(to, from + first, first < rows.depth);
      else
        *static_cast<uint4*>(to) = load16<T, false>(from, first, rows.depth);
    }
  }
};

// The registers of a dense stage: fragment() and value() as of the units of weights.cuh.
template <typename T>
struct DenseUnit {
  static constexpr int COUNT = 16 / sizeof(T), PARTS = 8 / COUNT;
  uint4 raw[2][PARTS];  // by half of the outputs

  template <bool OFFSETS>
  __device__ __forceinline__ void fragment(unsigned (&a)[4], int, int s) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = word_of(raw[i % 2][0], 2 * s + i / 2);
  }
  template <bool OFFSETS>
  __device__ __forceinline__ float value(int, int s, int half, int j) const {
    const int i = 4 * s + j;
    return __uint_as_float(word_of(raw[half][i / COUNT], i % COUNT));
  }
};

template <typename T>
__device__ __forceinline__ void read_unit(DenseUnit<T>& unit, const uint4* from) {
  constexpr int PARTS = DenseUnit<T>::PARTS;
#pragma unroll
  for (int i = 0; i < 2 * PARTS; ++i)
    unit.raw[i / PARTS][i % PARTS] = from[i * 32 + threadIdx.x % 32];
}
template <int VECTORS>
__device__ __forceinline__ void read_unit(PackedUnit<VECTORS>& unit, const uint4* from) {
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) unit.raw[v] = from[v * 32 + threadIdx.x % 32];
}
template <typename T, bool VECTOR>
__device__ __forceinline__ void read_unit(Unit<T, sextets, VECTOR>& unit, const uint4* from) {
  unit.low = from[threadIdx.x % 32];
  unit.high = reinterpret_cast<const uint2*>(from + 32)[threadIdx.x % 32];
}

template <typename S, bool DENSE = S::DENSE>
struct Staged {  // the registers of a stage's weights
  Unit<typename S::T, typename S::C, S::VECTOR> units[MT];
  typename S::OwnScales scales[MT];
};
template <typename S>
struct Staged<S, true> {
  DenseUnit<typename S::T> units[MT];
};

template <typename S>
__device__ __forceinline__ void read_stage(Staged<S>& weights, const unsigned char* stage) {
  const uint4* codes = reinterpret_cast<const uint4*>(stage);
#pragma unroll
  for (int m = 0; m < MT; ++m) {
    read_unit(weights.units[m], codes + m * S::CODES);
    if constexpr (!S::DENSE) {
      const uint4 *scales = codes + MT * S::CODES, *units = scales + MT * S::SCALES;
      const Matrix staged = {nullptr, scales + m * S::SCALES,
                             reinterpret_cast<const float*>(units + m * S::UNITS), 0, 0};
      const unsigned g = threadIdx.x % 32 / 4;
      weights.scales[m].load(staged, g, g);
    }
  }
}
