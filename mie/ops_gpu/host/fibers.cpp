// Stacks, and the switch between them. It is written by hand, because ucontext saves the signal
// mask with a system call, and threads are another 50 times slower.
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

#include "state.h"

#if defined(__x86_64__)
asm(R"(
.text
.globl mie_emu_switch
.hidden mie_emu_switch
.type mie_emu_switch, @function
mie_emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size mie_emu_switch, .-mie_emu_switch
)");
#elif defined(__aarch64__)
asm(R"(
.text
.globl mie_emu_switch
.hidden mie_emu_switch
.type mie_emu_switch, %function
mie_emu_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size mie_emu_switch, .-mie_emu_switch
)");
#else
#error "the emulator has a context switch for x86-64 and aarch64 only"
#endif

namespace mie_emu {

static constexpr size_t STACK = 128 * 1024, GUARD = 64 * 1024;  // GUARD: a page on any CPU

// One mapping with an inaccessible gap below each stack, so that an overflow causes a fault and
// does not reach the next stack.
void reserve_stacks(uint32_t count) {
  const size_t size = count * (STACK + GUARD);
  if (runtime.stacks_high - runtime.stacks_low >= size) return;
  if (runtime.stacks_low)
    munmap(reinterpret_cast<void*>(runtime.stacks_low), runtime.stacks_high - runtime.stacks_low);
  runtime.stacks_low = runtime.stacks_high = 0;
  void* memory = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) abort();
  char* base = static_cast<char*>(memory);
  for (uint32_t i = 0; i < count; ++i)
    if (mprotect(base + i * (STACK + GUARD) + GUARD, STACK, PROT_READ | PROT_WRITE)) abort();
  runtime.stacks_low = reinterpret_cast<uintptr_t>(base);
  runtime.stacks_high = runtime.stacks_low + size;
}

// A stack from which the switch "returns" into `function`.
void* fresh_stack(uint32_t fiber, void (*function)()) {
  char* top = reinterpret_cast<char*>(runtime.stacks_low) + (fiber + 1) * (STACK + GUARD);
#if defined(__x86_64__)
  void** slot = reinterpret_cast<void**>(top - 8);  // a function starts 8 below a multiple of 16
  *--slot = reinterpret_cast<void*>(function);
  for (int i = 0; i < 6; ++i) *--slot = nullptr;
  return slot;
#else
  char* frame = top - 160;
  memset(frame, 0, 160);
  reinterpret_cast<void**>(frame)[11] = reinterpret_cast<void*>(function);  // x30
  return frame;
#endif
}

}  // namespace mie_emu
