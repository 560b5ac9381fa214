// Asynchronous copies, atomics, fences.
#include <cstring>

#include "state.h"

namespace mie_emu {

static constexpr unsigned COPY_BYTES = 16;

// The bytes arrive at the wait. Until then the destination is poison, so that a kernel that reads
// too early finds NaN, not the data of an earlier copy.
void cp_async16(void* shared, const void* global, bool is_valid, const char* instruction, Site) {
  MIE_ENTER();
  if (reinterpret_cast<uintptr_t>(shared) % COPY_BYTES)
    fail("misaligned: the shared address %p of cp.async is not a multiple of 16", shared);
  if (is_valid && reinterpret_cast<uintptr_t>(global) % COPY_BYTES)
    fail("misaligned: the global address %p of cp.async is not a multiple of 16", global);
  if (runtime.launch.is_checked) {
    if (is_valid) check_access(global, COPY_BYTES, Access::READ);
    check_access(shared, COPY_BYTES, Access::ISSUE);
  }
  if (runtime.launch.is_counted) {
    count_lane(Kind::COPY, locate(shared).address, COPY_BYTES);
    if (is_valid) count_lane(Kind::COPY_SOURCE, device_address(locate(global).address), COPY_BYTES);
    // Past the L1 cache, and into the L2 cache in whole lines.
    if (strcmp(instruction, "cp.async.cg.shared.global.L2::128B")) count_unhinted_copy();
  }
  memset(shared, 0xff, COPY_BYTES);
  self().copies.push_back({shared, global, is_valid, self().open_group});
}

void cp_async_commit() { ++self().open_group; }

void cp_async_wait(int groups_left) {
  MIE_ENTER();
  Fiber& fiber = self();
  const int first_left = fiber.open_group - groups_left;
  size_t kept = 0;
  uint64_t in_flight = 0;  // copies that read memory
  bool has_arrived = false;
  for (const Copy& copy : fiber.copies) {
    if (copy.group >= first_left) {
      in_flight += copy.is_valid;
      fiber.copies[kept++] = copy;
      continue;
    }
    has_arrived |= copy.is_valid;
    if (runtime.launch.is_checked) check_access(copy.shared, COPY_BYTES, Access::WRITE);
    if (copy.is_valid)
      memcpy(copy.shared, copy.global, COPY_BYTES);
    else
      memset(copy.shared, 0, COPY_BYTES);
  }
  fiber.copies.resize(kept);
  if (runtime.launch.is_counted && has_arrived) count_wait(in_flight);
}

void atomic_access(void* p, unsigned size) {
  MIE_ENTER();
  if (reinterpret_cast<uintptr_t>(p) % size) fail("misaligned: an atomic operation at %p", p);
  if (runtime.launch.is_checked) check_access(p, size, Access::ATOMIC);
  if (runtime.launch.is_counted) count_access(p, size, Access::ATOMIC);
}

void copy_unchecked(void* to, const void* from, unsigned size) { memcpy(to, from, size); }

void use_loads() {
  if (runtime.launch.is_counted) count_use();
}

void memory_fence() {
  if (runtime.launch.is_checked) note_fence();
}

}  // namespace mie_emu
