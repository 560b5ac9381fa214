// The collective operations of a warp: barriers, exchanges, and the matrix instructions.
#include <algorithm>
#include <cstring>

#include "state.h"

namespace mie_emu {

// Merges the knowledge of all lanes of the mask.
static void join_clocks(uint32_t mask, Fiber* lanes) {
  uint32_t joined[32] = {}, latest = 0;
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    const Fiber& fiber = lanes[__builtin_ctz(rest)];
    for (int i = 0; i < 32; ++i) joined[i] = std::max(joined[i], fiber.clock[i]);
    latest = std::max(latest, fiber.clock[fiber.lane]);
  }
  for (uint32_t rest = mask; rest; rest &= rest - 1) joined[__builtin_ctz(rest)] = latest + 1;
  for (uint32_t rest = mask; rest; rest &= rest - 1)
    memcpy(lanes[__builtin_ctz(rest)].clock, joined, sizeof joined);
}

static void release_buffer(Fiber& fiber, Warp& warp) {
  if (fiber.buffer >= 0) --warp.holders[fiber.buffer];
  fiber.buffer = -1;
}

// The open meeting of these lanes at this place, or a free slot. Others may be open: one half of a
// warp may still shuffle while the other half waits for it elsewhere.
static Meeting& find_meeting(Warp& warp, uint32_t mask, const char* what, Site site) {
  Meeting* free = nullptr;
  uint32_t seen = 0;
  for (Meeting& meeting : warp.meetings) {
    if (!meeting.arrived) {
      if (!free) free = &meeting;
      if (seen == warp.open_meetings) return *free;
      continue;
    }
    ++seen;
    if (meeting.mask == mask && meeting.site.line == site.line && meeting.what == what)
      return meeting;
  }
  return *free;  // there is one, because a lane waits at only one meeting
}

// Returns when all lanes of the mask have arrived. With `bytes` they exchange data in a shared
// buffer. A meeting costs the same for any number of lanes. An exchange that copied for all 32 was
// five times slower.
static void meet(uint32_t mask, const void* bytes, unsigned size, const char* what, Site site) {
  Fiber& fiber = self();
  Warp& warp = runtime.warps[fiber.warp];
  Fiber* lanes = &runtime.fibers[fiber.warp * 32];
  const uint32_t bit = 1u << fiber.lane;
  if (!(mask & bit)) fail("mask: lane %u calls %s, but is not in %08x", fiber.lane, what, mask);
  mask &= warp.present;  // the last warp may be incomplete
  if (mask & warp.exited)
    fail("mask: %08x of %s names lanes %08x, which have exited", mask, what, mask & warp.exited);
  release_buffer(fiber, warp);
  Meeting& meeting = find_meeting(warp, mask, what, site);
  if (!meeting.arrived) {
    meeting = {mask, 0, what, site, -1};
    ++warp.open_meetings;
    if (bytes) {
      do ++meeting.buffer;
      while (warp.holders[meeting.buffer]);
      warp.holders[meeting.buffer] = static_cast<uint8_t>(__builtin_popcount(mask));
    }
  }
  fiber.buffer = meeting.buffer;
  if (bytes) memcpy(warp.buffers[fiber.buffer][fiber.lane], bytes, size);
  meeting.arrived |= bit;
  if (meeting.arrived != mask) {
    fiber.state = State::AT_WARP_BARRIER;
    fiber.waits_for = what;
    fiber.site = site;
    fiber.mask = mask;
    yield_to_next();
    return;
  }
  meeting.arrived = 0;
  --warp.open_meetings;
  if (!bytes && runtime.launch.is_checked) join_clocks(mask, lanes);  // exchanges order no memory
  for (uint32_t rest = mask & ~bit; rest; rest &= rest - 1)
    lanes[__builtin_ctz(rest)].state = State::READY;
}

static const unsigned char* exchange_with(uint32_t mask, const void* bytes, unsigned size,
                                          const char* what, Site site) {
  meet(mask, bytes, size, what, site);
  const Fiber& fiber = self();
  return &runtime.warps[fiber.warp].buffers[fiber.buffer][0][0];
}

void warp_barrier(uint32_t mask, Site site) {
  MIE_ENTER();
  meet(mask, nullptr, 0, "__syncwarp", site);
}

const unsigned char* exchange(uint32_t mask, const void* bytes, unsigned size, const char* what,
                              Site site) {
  MIE_ENTER();
  return exchange_with(mask, bytes, size, what, site);
}

unsigned ballot(uint32_t mask, bool predicate, Site site) {
  MIE_ENTER();
  const unsigned char* lanes = exchange_with(mask, &predicate, 1, "a vote", site);
  unsigned result = 0;
  for (unsigned i = 0; i < 32; ++i)
    if (mask >> i & 1u) result |= (lanes[LANE_BYTES * i] & 1u) << i;
  return result;
}

template <typename T>
static T of_lane(const unsigned char* lanes, unsigned lane, unsigned index = 0) {
  T value;
  memcpy(&value, lanes + LANE_BYTES * lane + sizeof(T) * index, sizeof value);
  return value;
}

// PTX ISA, "Warp-level matrix load instruction: ldmatrix"; layout as in mie_ptx.cuh.
void ldmatrix(unsigned* r, const void* row, int matrices, bool transposed, Site site) {
  MIE_ENTER();
  const void* caller = runtime.caller;
  const unsigned lane = self().lane;
  const unsigned char* lanes = exchange_with(~0u, &row, sizeof row, "ldmatrix", site);
  runtime.caller = caller;  // other fibers ran meanwhile
  if (runtime.launch.is_counted && lane == 0) count_matrices(lanes, matrices);
  for (int i = 0; i < matrices; ++i) {
    uint16_t pair[2];
    for (unsigned j = 0; j < 2; ++j) {
      unsigned from_row = lane / 4, column = 2 * (lane % 4) + j;
      if (transposed) std::swap(from_row, column);
      const auto* elements = of_lane<const uint16_t*>(lanes, 8 * i + from_row);
      if (reinterpret_cast<uintptr_t>(elements) % 16)
        fail("misaligned: the row address %p that lane %u gives to ldmatrix is not a multiple of 16",
             static_cast<const void*>(elements), 8 * i + from_row);
      if (runtime.launch.is_checked) check_access(elements + column, 2, Access::READ);
      pair[j] = elements[column];
    }
    r[i] = pair[0] | static_cast<unsigned>(pair[1]) << 16;
  }
}

unsigned movmatrix_trans(unsigned a, Site site) {
  MIE_ENTER();
  const unsigned lane = self().lane;
  const unsigned char* lanes = exchange_with(~0u, &a, sizeof a, "movmatrix", site);
  unsigned result = 0;
  for (unsigned j = 0; j < 2; ++j) {
    const unsigned row = 2 * (lane % 4) + j, column = lane / 4;  // of the source
    const auto pair = of_lane<unsigned>(lanes, row * 4 + column / 2);
    result |= (pair >> (16 * (column % 2)) & 0xffffu) << (16 * j);
  }
  return result;
}

// PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type". Products and sums are
// rounded to float in order of k. The hardware's order is unspecified.
void mma_m16n8k16(float* d, const unsigned* a, const unsigned* b, float (*widen)(uint16_t),
                  Site site) {
  MIE_ENTER();
  float fragment[12];  // a[0..3], then b[0..1], two elements each
  for (int i = 0; i < 6; ++i) {
    const unsigned pair = i < 4 ? a[i] : b[i - 4];
    fragment[2 * i] = widen(static_cast<uint16_t>(pair));
    fragment[2 * i + 1] = widen(static_cast<uint16_t>(pair >> 16));
  }
  static_assert(sizeof fragment <= LANE_BYTES, "a lane's fragments fit its slot");
  const unsigned lane = self().lane, group = lane / 4, in_group = lane % 4;
  const unsigned char* lanes = exchange_with(~0u, fragment, sizeof fragment, "mma", site);
  if (runtime.launch.is_counted && lane == 0) count_mma();
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned row = group + 8 * (i / 2), column = 2 * in_group + i % 2;
    float sum = d[i];
    for (unsigned k = 0; k < 16; ++k) {
      const unsigned a_register = row / 8 + 2 * (k / 8), b_register = 4 + k / 8;
      const unsigned a_lane = row % 8 * 4 + k % 8 / 2, b_lane = column * 4 + k % 8 / 2;
      sum += of_lane<float>(lanes, a_lane, 2 * a_register + k % 2) *
             of_lane<float>(lanes, b_lane, 2 * b_register + k % 2);
    }
    d[i] = sum;
  }
}

// PTX ISA, "Matrix Fragments for mma.m16n8k32" and "mma.m16n8k16 with integer type". A half is 16
// of k: two registers of a, and one of b.
void mma_bytes(int* d, const unsigned* a, const unsigned* b, int halves, Site site) {
  MIE_ENTER();
  unsigned fragment[6];  // a[0..3], then b[0..1]
  for (int i = 0; i < 2 * halves; ++i) fragment[i] = a[i];
  for (int i = 0; i < halves; ++i) fragment[4 + i] = b[i];
  const unsigned lane = self().lane, group = lane / 4, in_group = lane % 4;
  const unsigned char* lanes = exchange_with(~0u, fragment, sizeof fragment, "mma", site);
  if (runtime.launch.is_counted && lane == 0) count_mma();
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned row = group + 8 * (i / 2), column = 2 * in_group + i % 2;
    for (unsigned k = 0; k < 16u * halves; ++k) {
      const unsigned word = k % 16 / 4, byte = k % 4;
      const unsigned a_at = 4 * (row / 8 + 2 * (k / 16)) + byte, b_at = 4 * (4 + k / 16) + byte;
      d[i] += of_lane<int8_t>(lanes, row % 8 * 4 + word, a_at) *
              of_lane<int8_t>(lanes, column * 4 + word, b_at);
    }
  }
}

}  // namespace mie_emu
