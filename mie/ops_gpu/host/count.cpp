// Counts what a launch asks of memory, if Launch::is_counted: how many requests its warps make, and
// in how many passes memory serves them.
//
// The lanes of a warp make a request together on a GPU. Here they run one after another, so the
// accesses that lanes make for the n-th time at one instruction are one request. The passes are
//
//   shared memory   wavefronts: 32 banks of 4 bytes, one word a bank and pass. 128 bytes are served
//                   at a time, so 32 lanes of 4 bytes, 16 of 8, or 8 of 16 (and 8 rows of ldmatrix)
//   global memory   sectors of 32 bytes
//
// and the least number is that of the same bytes side by side. The rest are bank conflicts, or
// bytes of sectors that no lane asked for.
#include <algorithm>
#include <array>
#include <map>
#include <tuple>
#include <vector>

#include "state.h"

namespace mie_emu {

struct Count {
  uint64_t requests, passes, least;
};
constexpr size_t KINDS = 5;  // of enum Kind

struct Request {
  uint32_t lanes;
  std::array<uintptr_t, 32> address;
  std::array<uint32_t, 32> size;
};

struct Log {  // of an instruction and a warp
  std::array<uint32_t, 32> seen;  // how often each lane was here
  std::vector<Request> requests;
};

struct Counter {
  uint64_t blocks, idle_blocks, in_flight, unhinted_copies, mma, barriers, loads_in_flight;
  uint64_t copies_at_barriers, load_rounds, longest_loads;
  std::array<Count, KINDS> counts;
  std::vector<uint64_t> products;  // of warps, by the block's number in the grid
  bool has_written;
  std::map<std::tuple<const void*, uint32_t, Kind>, Log> logs;
};
static Counter counter;

// The smallest number of units of `size` bytes that these bytes fill, and how many they touch.
static void count_units(std::vector<std::pair<uintptr_t, uintptr_t>>& ranges, uintptr_t size,
                        uint64_t& touched, uint64_t& least) {
  std::sort(ranges.begin(), ranges.end());
  uintptr_t reached = 0, next_unit = 0, bytes = 0;
  for (const auto& [low, high] : ranges) {
    if (high > reached) bytes += high - std::max(low, reached);
    reached = std::max(reached, high);
    const uintptr_t first = std::max(low / size, next_unit), last = (high - 1) / size;
    if (last >= first) touched += last - first + 1;
    next_unit = std::max(next_unit, last + 1);
  }
  least += (bytes + size - 1) / size;
}

static void count_global(const Request& request, Count& count) {
  std::vector<std::pair<uintptr_t, uintptr_t>> ranges;
  for (int lane = 0; lane < 32; ++lane)
    if (request.lanes >> lane & 1u)
      ranges.emplace_back(request.address[lane], request.address[lane] + request.size[lane]);
  count_units(ranges, 32, count.passes, count.least);
}

static void count_shared(const Request& request, Count& count) {
  const uint32_t widest = *std::max_element(request.size.begin(), request.size.end());
  const int together = static_cast<int>(std::clamp(128 / std::max(widest, 4u), 1u, 32u));
  for (int first = 0; first < 32; first += together) {
    std::vector<uintptr_t> words;
    for (int lane = first; lane < first + together; ++lane)
      if (request.lanes >> lane & 1u)
        for (uintptr_t word = request.address[lane] / 4;
             word <= (request.address[lane] + request.size[lane] - 1) / 4; ++word)
          words.push_back(word);
    std::sort(words.begin(), words.end());
    words.erase(std::unique(words.begin(), words.end()), words.end());
    std::array<uint64_t, 32> banks{};
    for (const uintptr_t word : words) ++banks[word % 32];
    count.passes += *std::max_element(banks.begin(), banks.end());
    count.least += (words.size() + 31) / 32;
  }
}

static void add(Kind kind, const Request& request) {
  Count& count = counter.counts[static_cast<size_t>(kind)];
  ++count.requests;
  if (kind == Kind::GLOBAL || kind == Kind::COPY_SOURCE)
    count_global(request, count);
  else
    count_shared(request, count);
}

void start_counted_launch(uint64_t blocks) {
  counter = Counter{};
  counter.products.resize(blocks);
}

void start_counted_block() {
  counter.has_written = false;
  for (Fiber& fiber : runtime.fibers) fiber.loads = Loads{};
}

// The bytes in flight at each product, if products use the loaded bytes evenly and in order: the
// bytes loaded so far, less their share of all bytes that are loaded before the last product.
static uint64_t loads_in_flight(const Loads& loads) {
  const uint64_t used = loads.at_last * (loads.products + 1) / 2;
  return loads.at_products > used ? loads.at_products - used : 0;
}

void end_counted_block() {
  ++counter.blocks;
  counter.idle_blocks += !counter.has_written;
  for (const auto& [key, log] : counter.logs)
    for (const Request& request : log.requests) add(std::get<Kind>(key), request);
  counter.logs.clear();
  for (const Fiber& fiber : runtime.fibers)
    if (fiber.lane == 0) counter.loads_in_flight += loads_in_flight(fiber.loads);
}

void count_lane(Kind kind, uintptr_t address, size_t size) {
  const Fiber& fiber = self();
  Log& log = counter.logs[{runtime.caller, fiber.warp, kind}];
  const uint32_t time = log.seen[fiber.lane]++;
  if (time == log.requests.size()) log.requests.push_back({});
  Request& request = log.requests[time];
  request.lanes |= 1u << fiber.lane;
  request.address[fiber.lane] = address;
  request.size[fiber.lane] = static_cast<uint32_t>(size);
}

void count_wait(uint64_t in_flight) { counter.in_flight += in_flight; }

void count_unhinted_copy() { ++counter.unhinted_copies; }

void count_use() {
  Fiber& fiber = self();
  counter.load_rounds += fiber.lane == 0 && fiber.loads.is_round;
  fiber.loads.is_round = false;
}

void count_mma() {  // lane 0 calls
  count_use();
  ++counter.mma;
  ++counter.products[runtime.block];
  Loads& loads = self().loads;
  ++loads.products;
  loads.at_last = loads.bytes;
  loads.at_products += loads.bytes;
}

void count_barrier() {  // when all threads have arrived
  ++counter.barriers;
  uint64_t most = 0;
  for (Fiber& fiber : runtime.fibers) {
    counter.copies_at_barriers += fiber.copies.size();
    Loads& loads = fiber.loads;
    if (fiber.lane == 0) most = std::max(most, loads.bytes - loads.at_barrier);
    loads.at_barrier = loads.bytes;
  }
  counter.longest_loads += most;
}

void count_access(const void* p, size_t size, Access access) {
  if (!runtime.in_kernel || !size) return;
  const Location location = locate(p);
  if (location.space == Space::GLOBAL) {
    counter.has_written |= access != Access::READ;
    if (access == Access::READ) self().loads.bytes += size, self().loads.is_round = true;
    count_lane(Kind::GLOBAL, device_address(location.address), size);
  } else if (location.space == Space::DYNAMIC_SHARED || location.space == Space::STATIC_SHARED) {
    count_lane(Kind::SHARED, location.address, size);
  }
}

void count_matrices(const unsigned char* lanes, int matrices) {
  Request request{};
  for (int i = 0; i < 8 * matrices; ++i) {
    const void* row;
    copy_unchecked(&row, lanes + LANE_BYTES * i, sizeof row);
    request.lanes |= 1u << i;
    request.address[i] = locate(row).address;
    request.size[i] = 16;
  }
  add(Kind::MATRIX, request);
}

}  // namespace mie_emu

extern "C" {
#pragma GCC visibility push(default)
// The blocks, those of them that wrote no global memory, the copies that stay in flight while a
// thread waits for others, summed over all waits, the copies without cache hints, the warps'
// products, the blocks' barriers, the bytes that lane 0 of each warp has in flight, summed over its
// products, the copies in flight at barriers, the rounds of loads, the bytes of the
// lane 0 that loads most between two barriers, and three counts for each kind.
void mie_emu_counts(uint64_t* out) {
  const mie_emu::Counter& all = mie_emu::counter;
  for (const uint64_t count : {all.blocks, all.idle_blocks, all.in_flight, all.unhinted_copies,
                               all.mma, all.barriers, all.loads_in_flight, all.copies_at_barriers,
                               all.load_rounds, all.longest_loads})
    *out++ = count;
  for (const mie_emu::Count& count : all.counts) {
    *out++ = count.requests;
    *out++ = count.passes;
    *out++ = count.least;
  }
}

// The warps' products of each block, in the order of the grid.
void mie_emu_products(uint64_t* out) {
  for (const uint64_t count : mie_emu::counter.products) *out++ = count;
}
#pragma GCC visibility pop
}
