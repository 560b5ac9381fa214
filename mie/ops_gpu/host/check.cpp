// The checked build: each access is checked here, byte by byte.
//
// Two accesses of one byte, one of them a write, must be ordered by a block barrier, inside a warp
// by __syncwarp (a vector clock per lane), or between blocks by a fence and an atomic. Shuffles and
// votes order nothing. The order in which the emulator runs the fibers does not count either: a
// race is reported in every order.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "state.h"

extern thread_local __attribute__((aligned(128), visibility("default"))) unsigned char mie_smem[];

namespace mie_emu {

// The thread and the time of an access. Epoch 0 means never.
struct Event {
  uint32_t epoch, clock;
  uint16_t thread;
};

// The history of one byte: its last plain write, and the atomic operations and reads since.
struct Shadow {
  Event write, atomic;
  uint32_t read_epoch, read_clock, read_lanes;
  uint16_t reader_warp;
  bool is_pending;            // the write is a cp.async that was not waited for
  bool is_atomic_by_threads;  // more than one thread in the atomic's epoch
  bool is_read_by_warps, is_read_by_other_block;
};
constexpr size_t PAGE_BYTES = 256;
using Page = std::array<Shadow, PAGE_BYTES>;

struct Region {  // an array among the arguments
  uintptr_t low, high;
  bool is_writable;
  std::string name;
  unsigned char* written;  // one flag per byte if the contents began as garbage, else null
};

struct Checker {
  std::vector<Region> regions;
  std::vector<Shadow> dynamic_shared, static_shared;
  std::unordered_map<uintptr_t, std::unique_ptr<Page>> global;
  uintptr_t last_page_address = 0;
  Page* last_page = nullptr;
  // The first epoch of each block in the order in which they ran, and the epoch up to which it has
  // published its writes (by an atomic operation after a fence).
  std::vector<uint32_t> first_epochs, published;
  bool has_fenced = false, has_acquired = false;
};
static Checker checker;

struct Place {  // of an access: the region and the offset in it
  const char* name;
  uintptr_t offset;
  bool is_shared;
  std::string text() const { return std::string(name) + " at byte " + std::to_string(offset); }
};

static const char* verb(Access access) {
  switch (access) {
    case Access::READ:
      return "a read";
    case Access::WRITE:
      return "a write";
    case Access::ATOMIC:
      return "an atomic operation";
    case Access::ISSUE:
      return "a cp.async";
  }
  return "";
}

void start_checked_launch(uint64_t blocks) {
  const Shadow fresh{};
  checker.dynamic_shared.assign(runtime.launch.shared_bytes, fresh);
  checker.static_shared.assign(runtime.static_high - runtime.static_low, fresh);
  checker.global.clear();
  checker.last_page_address = 0;
  checker.last_page = nullptr;
  checker.first_epochs.clear();
  checker.published.assign(blocks, 0);
}

void start_checked_block() {
  checker.first_epochs.push_back(runtime.block_first_epoch);
  checker.has_fenced = checker.has_acquired = false;
}

void note_fence() { checker.has_fenced = true; }

// ---- order

static bool is_of_this_block(uint32_t epoch) { return epoch >= runtime.block_first_epoch; }

// Whether the earlier block that ran in `epoch` has published its writes, and this block has read
// the flag.
static bool is_published(uint32_t epoch) {
  const auto& first = checker.first_epochs;
  const auto block = std::upper_bound(first.begin(), first.end(), epoch) - first.begin() - 1;
  return checker.has_acquired && checker.published[static_cast<size_t>(block)] >= epoch;
}

static bool is_after(const Event& event) {
  const Fiber& fiber = self();
  if (!event.epoch) return true;
  if (!is_of_this_block(event.epoch)) return is_published(event.epoch);
  if (event.epoch != runtime.epoch || event.thread == fiber.linear) return true;
  return event.thread / 32u == fiber.warp && fiber.clock[event.thread % 32] > event.clock;
}

static bool is_after_atomics(const Shadow& shadow) {
  return is_after(shadow.atomic) &&
         !(shadow.is_atomic_by_threads && shadow.atomic.epoch == runtime.epoch);
}

static bool is_after_lanes(const Shadow& shadow) {
  const Fiber& fiber = self();
  for (uint32_t rest = shadow.read_lanes & ~(1u << fiber.lane); rest; rest &= rest - 1)
    if (fiber.clock[__builtin_ctz(rest)] <= shadow.read_clock) return false;
  return true;
}

static bool is_after_reads(const Shadow& shadow) {
  if (shadow.is_read_by_other_block) return false;
  if (!shadow.read_epoch) return true;
  if (!is_of_this_block(shadow.read_epoch)) return is_published(shadow.read_epoch);
  if (shadow.read_epoch != runtime.epoch) return true;
  if (shadow.is_read_by_warps || shadow.reader_warp != self().warp) return false;
  return is_after_lanes(shadow);
}

static void record_read(Shadow& shadow) {
  const Fiber& fiber = self();
  if (shadow.read_epoch != runtime.epoch) {
    if (shadow.read_epoch && !is_of_this_block(shadow.read_epoch) &&
        !is_published(shadow.read_epoch))
      shadow.is_read_by_other_block = true;
    shadow.read_epoch = runtime.epoch;
    shadow.reader_warp = static_cast<uint16_t>(fiber.warp);
    shadow.read_lanes = shadow.read_clock = 0;
    shadow.is_read_by_warps = false;
  } else if (shadow.reader_warp != fiber.warp) {
    shadow.is_read_by_warps = true;
  } else if (is_after_lanes(shadow)) {
    shadow.read_lanes = shadow.read_clock = 0;
  }
  shadow.read_lanes |= 1u << fiber.lane;
  shadow.read_clock = std::max(shadow.read_clock, fiber.clock[fiber.lane]);
}

static Event now() {
  const Fiber& fiber = self();
  return {runtime.epoch, fiber.clock[fiber.lane], static_cast<uint16_t>(fiber.linear)};
}

static void record_write(Shadow& shadow, Access access) {
  shadow = Shadow{};
  shadow.write = now();
  shadow.is_pending = access == Access::ISSUE;
}

static void record_atomic(Shadow& shadow) {
  shadow.is_atomic_by_threads = shadow.atomic.epoch == runtime.epoch &&
                                (shadow.is_atomic_by_threads || !is_after(shadow.atomic));
  shadow.atomic = now();
}

// ---- reports

static std::string by(uint32_t epoch, uint32_t thread) {
  if (!is_of_this_block(epoch)) return " by another block";
  const uint3 index = thread_index(thread);
  char text[64];
  snprintf(text, sizeof text, " by thread (%u,%u,%u)", index.x, index.y, index.z);
  return text;
}

[[noreturn]] static void report_race(const Place& place, Access access, const std::string& before) {
  fail("race: %s of %s and %s, without synchronization", verb(access), place.text().c_str(),
       before.c_str());
}

static std::string earlier_read(const Shadow& shadow) {
  const bool is_other = shadow.is_read_by_other_block || !is_of_this_block(shadow.read_epoch);
  if (is_other) return "a read by another block";
  const uint32_t others = shadow.reader_warp == self().warp ? ~(1u << self().lane) : ~0u;
  const uint32_t lanes = shadow.read_lanes & others;
  if (!lanes) return "a read by another warp";
  return "a read" + by(shadow.read_epoch, shadow.reader_warp * 32u + __builtin_ctz(lanes));
}

static void check_byte(Shadow& shadow, Access access, const Place& place) {
  const bool reads = access == Access::READ || access == Access::ATOMIC;
  if (place.is_shared && !is_of_this_block(shadow.write.epoch)) {
    if (reads) fail("uninitialised: %s of %s, not yet written", verb(access), place.text().c_str());
    shadow = Shadow{};  // it belonged to an earlier block
  }
  if (!is_after(shadow.write))
    report_race(place, access, "a write" + by(shadow.write.epoch, shadow.write.thread));
  if (access != Access::ATOMIC && !is_after_atomics(shadow))
    report_race(place, access,
                "an atomic operation" + by(shadow.atomic.epoch, shadow.atomic.thread));
  const bool is_arrival = access == Access::WRITE && shadow.write.thread == self().linear;
  if (shadow.is_pending && !is_arrival)
    fail("too early: %s of %s, where a cp.async is still pending", verb(access),
         place.text().c_str());
  if (access == Access::READ) return record_read(shadow);
  if (!is_after_reads(shadow)) report_race(place, access, earlier_read(shadow));
  if (access == Access::ATOMIC) return record_atomic(shadow);
  record_write(shadow, access);
}

// ---- finding the region of an address

static void check_shared(std::vector<Shadow>& shadows, const char* name, uintptr_t offset,
                         size_t size, Access access) {
  if (offset + size > shadows.size())
    fail("out of bounds: %s of %zu bytes at byte %zu of %s, which has %zu", verb(access), size,
         static_cast<size_t>(offset), name, shadows.size());
  for (uintptr_t i = offset; i < offset + size; ++i)
    check_byte(shadows[i], access, Place{name, i, true});
}

static Shadow& global_shadow(uintptr_t address) {
  const uintptr_t page = address / PAGE_BYTES;
  if (page != checker.last_page_address || !checker.last_page) {
    auto& found = checker.global[page];
    if (!found) found = std::make_unique<Page>();
    checker.last_page_address = page;
    checker.last_page = found.get();
  }
  return (*checker.last_page)[address % PAGE_BYTES];
}

[[noreturn]] static void report_out_of_bounds(uintptr_t address, size_t size, Access access) {
  std::string nearest = "and no array is near";
  uintptr_t best = UINTPTR_MAX;
  for (const Region& region : checker.regions) {
    const bool is_past = address + size > region.high;
    const uintptr_t distance = is_past ? address + size - region.high : region.low - address;
    if (distance >= best) continue;
    best = distance;
    nearest = std::to_string(distance) + (is_past ? " bytes past the end of " : " bytes before ") +
              region.name;
  }
  fail("out of bounds: %s of %zu bytes, %s", verb(access), size, nearest.c_str());
}

// `written` has a flag for each byte of an array whose contents began as garbage.
static void check_written(unsigned char* written, size_t size, Access access, const Place& place) {
  if (access != Access::WRITE) {
    for (size_t i = 0; i < size; ++i)
      if (!written[i])
        fail("uninitialised: %s of %s, not yet written", verb(access), place.text().c_str());
  }
  memset(written, 1, size);
}

static void check_global(uintptr_t address, size_t size, Access access) {
  const Region *inside = nullptr, *writable = nullptr, *garbage = nullptr;
  for (const Region& region : checker.regions) {  // regions may overlap: x as input and output
    if (address < region.low || address + size > region.high) continue;
    inside = &region;
    if (region.is_writable) writable = &region;
    if (region.written) garbage = &region;
  }
  if (!inside) report_out_of_bounds(address, size, access);
  Place place{inside->name.c_str(), address - inside->low, false};
  if (garbage) check_written(garbage->written + (address - garbage->low), size, access, place);
  if (access == Access::READ && !writable) return;
  if (!writable) fail("read-only: %s of %s", verb(access), place.text().c_str());
  if (access == Access::ATOMIC) {
    checker.has_acquired = true;
    if (checker.has_fenced) checker.published[checker.first_epochs.size() - 1] = runtime.epoch;
  }
  for (size_t i = 0; i < size; ++i, ++place.offset)
    check_byte(global_shadow(address + i), access, place);
}

template <typename T>
static bool lies_in(uintptr_t address, const std::vector<T>& memory) {
  return address - reinterpret_cast<uintptr_t>(memory.data()) < memory.size() * sizeof(T);
}

void check_access(const void* p, size_t size, Access access) {
  if (!runtime.in_kernel || !size) return;
  if (runtime.is_expired) fail(TIME_IS_OVER);
  const auto [space, address] = locate(p);
  if (space == Space::DYNAMIC_SHARED)
    check_shared(checker.dynamic_shared, "dynamic shared memory", address, size, access);
  if (space == Space::STATIC_SHARED)
    check_shared(checker.static_shared, "static shared memory", address, size, access);
  if (space == Space::GLOBAL) check_global(address, size, access);
}

Location locate(const void* p) {
  const auto address = reinterpret_cast<uintptr_t>(p);
  if (address >= runtime.stacks_low && address < runtime.stacks_high)
    return {Space::LOCAL, address};
  if (lies_in(address, runtime.fibers) || p == &current)
    return {Space::CONSTANT, address};  // threadIdx and the like
  const auto dynamic = reinterpret_cast<uintptr_t>(mie_smem);
  if (address >= dynamic && address < dynamic + MAX_SHARED + CANARY)
    return {Space::DYNAMIC_SHARED, address - dynamic};
  if (address >= runtime.static_low && address < runtime.static_high)
    return {Space::STATIC_SHARED, address - runtime.static_low};
  if (address >= runtime.image_low && address < runtime.image_high)
    return {Space::CONSTANT, address};
  return {Space::GLOBAL, address};
}

uintptr_t device_address(uintptr_t address) {
  for (size_t i = 0; i < checker.regions.size(); ++i) {
    const Region& region = checker.regions[i];
    if (address >= region.low && address < region.high) return (i << 40) + address - region.low;
  }
  return address;
}

}  // namespace mie_emu

// ---- what emulator.py calls

extern "C" {
#pragma GCC visibility push(default)
void mie_emu_forget_arrays() { mie_emu::checker.regions.clear(); }
void mie_emu_add_array(void* p, size_t size, int is_writable, unsigned char* written,
                       const char* name) {
  const auto low = reinterpret_cast<uintptr_t>(p);
  mie_emu::checker.regions.push_back({low, low + size, is_writable != 0, name, written});
}
#pragma GCC visibility pop
}
