// A launch runs blocks one after another. The threads of a block are fibers that run until they
// wait.
#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#include "guard.h"
#include "state.h"

extern thread_local __attribute__((aligned(128), visibility("default"))) unsigned char mie_smem[];
thread_local unsigned char mie_smem[mie_emu::MAX_SHARED + mie_emu::CANARY];

namespace mie_emu {

Thread* current = nullptr;
Runtime runtime;

uint3 thread_index(uint32_t linear) {
  const uint32_t* size = runtime.launch.block;
  return {linear % size[0], linear / size[0] % size[1], linear / size[0] / size[1]};
}

const char* file_name(Site site) {
  const char* slash = strrchr(site.file, '/');
  return slash ? slash + 1 : site.file;
}

// ---- failing

void note_fault(const void* instruction) {
  Dl_info info{};
  const auto address = reinterpret_cast<uintptr_t>(instruction);
  if (address < runtime.image_low || address >= runtime.image_high) return;
  if (!dladdr(instruction, &info) || !info.dli_fname) return;
  snprintf(runtime.fault_image, sizeof runtime.fault_image, "%s", info.dli_fname);
  runtime.fault_offset = address - reinterpret_cast<uintptr_t>(info.dli_fbase);
}

void fail(const char* format, ...) {
  if (!runtime.has_failed) {
    runtime.has_failed = true;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(runtime.message, sizeof runtime.message, format, arguments);
    va_end(arguments);
    note_fault(static_cast<const char*>(runtime.caller) - 1);  // inside the call instruction
  }
  leave_kernel();
  abort();
}

void leave_kernel() {
  void* unused;
  mie_emu_switch(&unused, runtime.main_stack_pointer);
}

static void report_deadlock() {
  std::map<std::string, int> groups;
  for (const Fiber& fiber : runtime.fibers) {
    char where[600] = "exited";
    if (fiber.state != State::DONE) {
      const int used = snprintf(where, sizeof where, "wait at %s (%s:%d", fiber.waits_for,
                                file_name(fiber.site), fiber.site.line);
      const bool by_warp = fiber.state == State::AT_WARP_BARRIER;
      snprintf(where + used, sizeof where - used, by_warp ? ", mask %08x)" : ")", fiber.mask);
    }
    ++groups[where];
  }
  std::string text = "deadlock:";
  for (const auto& [where, count] : groups)
    text += (text.back() == ':' ? " " : "; ") + std::to_string(count) + " threads " + where;
  runtime.has_failed = true;
  runtime.is_thread_known = false;
  snprintf(runtime.message, sizeof runtime.message, "%s", text.c_str());
}

// ---- the scheduler

void yield_to_next() {
  Fiber& from = self();
  const auto count = static_cast<uint32_t>(runtime.order.size());
  uint32_t position = runtime.position;
  for (uint32_t i = 0; i < count; ++i) {
    if (++position == count) position = 0;
    Fiber& to = runtime.fibers[runtime.order[position]];
    if (to.state != State::READY) continue;
    runtime.position = position;
    if (&to == &from) return;
    current = &to;
    mie_emu_switch(&from.stack_pointer, to.stack_pointer);
    return;
  }
  if (runtime.alive) report_deadlock();
  leave_kernel();
}

static uint64_t next_random() {  // xorshift64
  uint64_t& x = runtime.random;
  x ^= x << 13;
  x ^= x >> 7;
  x ^= x << 17;
  return x;
}

static void shuffle_order() {
  if (runtime.launch.order != RANDOM) return;
  auto& order = runtime.order;
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[next_random() % i]);
}

// ---- barriers

int block_barrier(Vote vote, int predicate, Site site) {
  MIE_ENTER();
  Fiber& fiber = self();
  const auto count = static_cast<uint32_t>(runtime.fibers.size());
  if (runtime.at_barrier && runtime.barrier_site.line != site.line)
    fail("divergent barrier: %s:%d is reached while %u threads wait at line %d", file_name(site),
         site.line, runtime.at_barrier, runtime.barrier_site.line);
  if (runtime.alive != count)
    fail("divergent barrier: %s:%d is reached after %u threads exited", file_name(site), site.line,
         count - runtime.alive);
  runtime.barrier_site = site;
  runtime.votes += predicate;
  int& result = runtime.vote_results[runtime.epoch & 1];  // the other one may still be read
  if (++runtime.at_barrier < count) {
    fiber.state = State::AT_BLOCK_BARRIER;
    fiber.waits_for = "__syncthreads";
    fiber.site = site;
    yield_to_next();
    return result;
  }
  for (Fiber& each : runtime.fibers) each.state = State::READY;
  result = runtime.votes;
  if (vote == Vote::OR) result = runtime.votes > 0;
  if (vote == Vote::AND) result = runtime.votes == static_cast<int>(count);
  runtime.votes = 0;
  runtime.at_barrier = 0;
  ++runtime.epoch;
  if (runtime.launch.is_counted) count_barrier();
  shuffle_order();
  return result;
}

// ---- a launch

// Finds the image and the TLS segment (the static shared memory) of the .so that holds `address`.
struct Search {
  uintptr_t address;
  bool is_found = false;
};
static int look_at(dl_phdr_info* info, size_t, void* data) {
  auto& search = *static_cast<Search*>(data);
  uintptr_t low = UINTPTR_MAX, high = 0, tls_size = 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& header = info->dlpi_phdr[i];
    const uintptr_t start = info->dlpi_addr + header.p_vaddr;
    if (header.p_type == PT_LOAD) {
      low = std::min(low, start);
      high = std::max<uintptr_t>(high, start + header.p_memsz);
    } else if (header.p_type == PT_TLS) {
      tls_size = header.p_memsz;
    }
  }
  if (search.address < low || search.address >= high) return 0;
  search.is_found = true;
  runtime.image_low = low;
  runtime.image_high = high;
  runtime.static_low = reinterpret_cast<uintptr_t>(info->dlpi_tls_data);
  runtime.static_high = runtime.static_low + (info->dlpi_tls_data ? tls_size : 0);
  return 1;
}

static void run_thread() {
  runtime.entry(runtime.argument);
  Fiber& fiber = self();
  Warp& warp = runtime.warps[fiber.warp];
  warp.exited |= 1u << fiber.lane;
  enter(nullptr);  // it has ended
  for (const Meeting& meeting : warp.meetings)
    if (meeting.arrived && (meeting.mask >> fiber.lane & 1u))
      fail("divergence: %s (%s:%d) with mask %08x waits for lane %u, which exits", meeting.what,
           file_name(meeting.site), meeting.site.line, meeting.mask, fiber.lane);
  if (!fiber.copies.empty())
    fail("not waited for: a thread exits with pending cp.async copies");
  if (runtime.at_barrier)
    fail("divergent barrier: a thread exits while %u threads wait at %s:%d", runtime.at_barrier,
         file_name(runtime.barrier_site), runtime.barrier_site.line);
  fiber.state = State::DONE;
  --runtime.alive;
  yield_to_next();
  abort();
}

static void prepare_block(uint32_t block) {
  const Launch& launch = runtime.launch;
  const auto count = static_cast<uint32_t>(runtime.fibers.size());
  runtime.block = block;
  runtime.block_first_epoch = ++runtime.epoch;
  runtime.alive = count;
  runtime.at_barrier = 0;
  runtime.votes = 0;
  // All ones: NaN as float, f16 and bf16, and -1 as an index.
  memset(reinterpret_cast<void*>(runtime.static_low), 0xff,
         runtime.static_high - runtime.static_low);
  memset(mie_smem, 0xff, launch.shared_bytes + CANARY);
  const uint32_t *grid = launch.grid, *size = launch.block;
  const uint3 index = {block % grid[0], block / grid[0] % grid[1], block / grid[0] / grid[1]};
  for (uint32_t i = 0; i < count; ++i) {
    Fiber& fiber = runtime.fibers[i];
    fiber.index = thread_index(i);
    fiber.block = index;
    fiber.block_size = {size[0], size[1], size[2]};
    fiber.grid_size = {grid[0], grid[1], grid[2]};
    fiber.linear = i;
    fiber.warp = i / 32;
    fiber.lane = i % 32;
    fiber.state = State::READY;
    fiber.buffer = -1;
    memset(fiber.clock, 0, sizeof fiber.clock);
    fiber.open_group = 0;
    fiber.copies.clear();
    fiber.stack_pointer = fresh_stack(i, run_thread);
    runtime.order[i] = launch.order == REVERSE ? count - 1 - i : i;
  }
  for (uint32_t i = 0; i < runtime.warps.size(); ++i) {
    Warp& warp = runtime.warps[i];
    const uint32_t lanes = std::min(count - 32 * i, 32u);
    warp.present = lanes == 32 ? ~0u : (1u << lanes) - 1;
    warp.exited = warp.open_meetings = 0;
    memset(warp.holders, 0, sizeof warp.holders);
    for (Meeting& meeting : warp.meetings) meeting.arrived = 0;
  }
  shuffle_order();
  if (launch.is_checked) start_checked_block();
  if (launch.is_counted) start_counted_block();
}

static void run_block() {
  runtime.position = 0;
  Fiber& first = runtime.fibers[runtime.order[0]];
  current = &first;
  runtime.in_kernel = true;
  if (!sigsetjmp(on_fault, 0)) mie_emu_switch(&runtime.main_stack_pointer, first.stack_pointer);
  runtime.in_kernel = false;
  const uint32_t used = runtime.launch.shared_bytes;
  for (uint32_t i = used; i < used + CANARY && !runtime.has_failed; ++i) {
    if (mie_smem[i] == 0xff) continue;
    runtime.has_failed = true;
    runtime.is_thread_known = false;
    snprintf(runtime.message, sizeof runtime.message,
             "out of bounds: a write %u bytes past the end of dynamic shared memory", i - used);
  }
}

// A prime that is larger than any grid, so that every block has its turn.
constexpr uint64_t SCATTER = 2654435761u;

int run(const Launch& launch, void (*entry)(void*), void* argument, const void* kernel_address) {
  const uint32_t threads = launch.block[0] * launch.block[1] * launch.block[2];
  const uint64_t blocks = uint64_t{launch.grid[0]} * launch.grid[1] * launch.grid[2];
  runtime.launch = launch;
  runtime.entry = entry;
  runtime.argument = argument;
  runtime.random = launch.seed * 2654435761u + 88172645463325252ull;
  runtime.has_failed = runtime.is_expired = false;
  runtime.message[0] = runtime.fault_image[0] = 0;
  runtime.caller = nullptr;
  runtime.is_thread_known = true;
  runtime.epoch = 0;
  reserve_stacks(threads);
  runtime.fibers.resize(threads);
  runtime.warps.resize((threads + 31) / 32);
  runtime.order.resize(threads);
  Search search{reinterpret_cast<uintptr_t>(kernel_address)};
  if (!dl_iterate_phdr(look_at, &search)) abort();
  if (launch.is_checked) start_checked_launch(blocks);
  if (launch.is_counted) start_counted_launch(blocks);

  SignalGuard guard(launch.limit_ms);
  for (uint64_t i = 0; i < blocks && !runtime.has_failed; ++i) {
    const uint64_t block = launch.order == REVERSE  ? blocks - 1 - i
                           : launch.order == RANDOM ? i * SCATTER % blocks
                                                    : i;
    prepare_block(static_cast<uint32_t>(block));
    run_block();
    if (launch.is_counted) end_counted_block();
  }
  return runtime.has_failed;
}

}  // namespace mie_emu

// ---- functions that emulator.py calls besides the kernel

extern "C" {
#pragma GCC visibility push(default)
const char* mie_emu_message() { return mie_emu::runtime.message; }
const char* mie_emu_fault_image() { return mie_emu::runtime.fault_image; }
uint64_t mie_emu_fault_offset() { return mie_emu::runtime.fault_offset; }
int mie_emu_fault_place(uint32_t* block_and_thread) {  // 1 if the fault belongs to one thread
  const mie_emu::Thread& thread = *mie_emu::current;
  const uint32_t place[6] = {thread.block.x, thread.block.y, thread.block.z,
                             thread.index.x, thread.index.y, thread.index.z};
  memcpy(block_and_thread, place, sizeof place);
  return mie_emu::runtime.is_thread_known;
}
#pragma GCC visibility pop
}
