// The state that the parts of the runtime share. Kernels do not include this header.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "mie_emu_runtime.h"

namespace mie_emu {

enum class State : uint8_t { READY, AT_BLOCK_BARRIER, AT_WARP_BARRIER, DONE };

struct Copy {  // a pending cp.async
  void* shared;
  const void* global;
  bool is_valid;
  int group;
};

struct Loads {  // of global memory by a thread, in bytes: count.cpp
  uint64_t bytes, products;
  uint64_t at_products, at_last;  // the bytes at each product, summed, and at the last
  uint64_t at_barrier;            // the bytes at the block's last barrier
  bool is_round;                  // whether loads are not used yet
};

struct Fiber : Thread {
  void* stack_pointer;
  State state;
  const char* waits_for;
  Site site;
  uint32_t mask;
  int buffer;          // the warp's buffer since the last exchange, or -1
  uint32_t clock[32];  // what this lane knows of each lane; its own entry counts its barriers
  int open_group;      // the open group of cp.async; lower ones are committed
  std::vector<Copy> copies;
  Loads loads;
};

// Lanes that wait for the others of their mask. It is free if none has arrived.
struct Meeting {
  uint32_t mask, arrived;
  const char* what;
  Site site;
  int buffer;
};

struct Warp {
  uint32_t present, exited, open_meetings;
  Meeting meetings[32];
  // A lane holds at most one buffer, or waits with others for one, so 32 are enough.
  unsigned char buffers[32][32][LANE_BYTES];
  uint8_t holders[32];
};

struct Runtime {
  Launch launch{};
  void (*entry)(void*) = nullptr;
  void* argument = nullptr;
  uint64_t random = 1;

  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<uint32_t> order;  // the order in which the fibers run
  uint32_t position = 0;        // index of the running one in `order`
  uint32_t alive = 0, at_barrier = 0;
  Site barrier_site{};
  int votes = 0, vote_results[2] = {};
  void* main_stack_pointer = nullptr;

  uint32_t block = 0;  // serial number of the running block
  uint32_t epoch = 0;  // block barriers passed, over all blocks of the launch
  uint32_t block_first_epoch = 0;

  // Address ranges of the kernel: static shared memory, the .so's image, the stacks.
  uintptr_t static_low = 0, static_high = 0;
  uintptr_t image_low = 0, image_high = 0;
  uintptr_t stacks_low = 0, stacks_high = 0;

  volatile bool in_kernel = false, is_expired = false;
  bool has_failed = false, is_thread_known = false;
  const void* caller = nullptr;  // the kernel's instruction that called the runtime last
  char message[1024];
  char fault_image[512];
  uintptr_t fault_offset = 0;
};
extern Runtime runtime;

inline Fiber& self() { return *static_cast<Fiber*>(current); }
uint3 thread_index(uint32_t linear);
const char* file_name(Site site);  // without its folder
void note_fault(const void* instruction);

constexpr char TIME_IS_OVER[] = "watchdog: the launch used more CPU time than limit_s allows";

// Where the kernel enters the runtime: the watchdog ends the launch at the kernel's own call.
inline void enter(const void* caller) {
  runtime.caller = caller;
  if (runtime.is_expired) fail(TIME_IS_OVER);
}
#define MIE_ENTER() enter(__builtin_return_address(0))

// fibers.cpp
extern "C" void mie_emu_switch(void** save, void* load);
void reserve_stacks(uint32_t count);
void* fresh_stack(uint32_t fiber, void (*function)());

// launch.cpp
void yield_to_next();
void leave_kernel();

// check.cpp
enum class Access { READ, WRITE, ATOMIC, ISSUE };  // ISSUE: cp.async starts to write
void start_checked_launch(uint64_t blocks);
void start_checked_block();
void check_access(const void* p, size_t size, Access access);
void note_fence();
enum class Space { LOCAL, DYNAMIC_SHARED, STATIC_SHARED, CONSTANT, GLOBAL };
struct Location {
  Space space;
  uintptr_t address;  // in shared memory the offset in its array
};
Location locate(const void* p);
uintptr_t device_address(uintptr_t address);  // as if arrays were aligned like those of a GPU

// count.cpp
enum class Kind { MATRIX, COPY, SHARED, COPY_SOURCE, GLOBAL };
void start_counted_launch(uint64_t blocks);
void start_counted_block();
void end_counted_block();
void count_lane(Kind kind, uintptr_t address, size_t size);
void count_wait(uint64_t in_flight);
void count_unhinted_copy();
void count_mma();
void count_barrier();
void count_use();
void count_access(const void* p, size_t size, Access access);
void count_matrices(const unsigned char* lanes, int matrices);  // the row addresses that lanes give

constexpr size_t MAX_SHARED = 227 * 1024, CANARY = 4096;

}  // namespace mie_emu
