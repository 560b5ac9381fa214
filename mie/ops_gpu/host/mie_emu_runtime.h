// The interface between a kernel (compiled from its .cu) and the runtime (the .cpp files here).
#pragma once
#include <cstddef>
#include <cstdint>

#include "mie_emu_types.h"

namespace mie_emu {

enum Order : uint32_t { FORWARD, REVERSE, RANDOM };

// One launch; mie/ops_gpu/host/emulator.py mirrors this struct.
struct Launch {
  uint32_t grid[3], block[3];
  uint32_t shared_bytes;
  uint32_t order;
  uint64_t seed;
  uint32_t is_checked;
  uint32_t limit_ms;  // of the thread's CPU time, for the watchdog
  uint32_t is_counted;
};

// The running CUDA thread.
struct Thread {
  uint3 index, block;
  uint3 block_size, grid_size;
  uint32_t linear, warp, lane;
};
extern __attribute__((visibility("default"))) Thread* current;

// The place of a collective operation in the source. Threads that meet must be at the same place.
// (A return address does not identify it, because the optimiser may copy the call.)
struct Site {
  const char* file;
  int line;
};
#define MIE_SITE (mie_emu::Site{__FILE__, __LINE__})

#pragma GCC visibility push(default)
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

enum class Vote { NONE, OR, AND, COUNT };
int block_barrier(Vote vote, int predicate, Site site);
void warp_barrier(uint32_t mask, Site site);
void memory_fence();
void use_loads();

constexpr unsigned LANE_BYTES = 64;
// Passes `size` bytes to the other lanes of `mask`, waits for them, and returns the bytes of all
// lanes, LANE_BYTES for each. They are valid until this thread's next exchange.
const unsigned char* exchange(uint32_t mask, const void* bytes, unsigned size, const char* what,
                              Site site);

unsigned ballot(uint32_t mask, bool predicate, Site site);

void cp_async16(void* shared, const void* global, bool is_valid, const char* instruction,
                Site site);
void cp_async_commit();
void cp_async_wait(int groups_left);
void ldmatrix(unsigned* r, const void* row, int matrices, bool transposed, Site site);
unsigned movmatrix_trans(unsigned a, Site site);
void mma_m16n8k16(float* d, const unsigned* a, const unsigned* b, float (*widen)(uint16_t),
                  Site site);
void mma_bytes(int* d, const unsigned* a, const unsigned* b, int halves, Site site);

// Called before an atomic operation. The caller then loads and stores, because blocks and fibers
// never run concurrently.
void atomic_access(void* p, unsigned size);
void copy_unchecked(void* to, const void* from, unsigned size);

// Runs the kernel. Returns 0, or 1 with a message in mie_emu_message().
int run(const Launch& launch, void (*entry)(void*), void* argument, const void* kernel_address);
#pragma GCC visibility pop

}  // namespace mie_emu
