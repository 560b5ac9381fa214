#include "guard.h"

#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdio>

#include "state.h"

namespace mie_emu {

sigjmp_buf on_fault;

static const int FAULTS[] = {SIGSEGV, SIGBUS, SIGFPE};
static int watchdog_signal() { return SIGRTMIN + 7; }

static const void* instruction_of(void* context) {
  const auto& machine = static_cast<ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
  return reinterpret_cast<const void*>(machine.gregs[REG_RIP]);
#else
  return reinterpret_cast<const void*>(machine.pc);
#endif
}

static bool is_kernel_code(const void* instruction) {
  const auto address = reinterpret_cast<uintptr_t>(instruction);
  return address >= runtime.image_low && address < runtime.image_high;
}

static void give_up(const void* instruction, const char* what, const void* where) {
  if (!runtime.has_failed) {
    runtime.has_failed = true;
    snprintf(runtime.message, sizeof runtime.message, what, where);
    // A return address may be on the next line; the byte before it is inside the call.
    const void* call = static_cast<const char*>(runtime.caller) - 1;
    note_fault(is_kernel_code(instruction) ? instruction : call);
  }
  siglongjmp(on_fault, 1);
}

static void handle(int signal, siginfo_t* info, void* context) {
  const void* instruction = instruction_of(context);
  if (signal == watchdog_signal()) {
    // Elsewhere malloc may be running and must not be left. The next enter() or check_access() sees
    // the flag.
    runtime.is_expired = true;
    if (runtime.in_kernel && is_kernel_code(instruction))
      give_up(instruction, TIME_IS_OVER, nullptr);
    return;
  }
  if (!runtime.in_kernel) {  // not caused by a kernel: let it kill the process as usual
    std::signal(signal, SIG_DFL);
    raise(signal);
    return;
  }
  if (signal == SIGFPE)
    give_up(instruction, "integer division by zero or overflow", nullptr);
  else
    give_up(instruction, "out of bounds: no memory at address %p", info->si_addr);
}

SignalGuard::SignalGuard(uint32_t limit_ms) {
  static char stack[64 * 1024];  // the fiber's stack may have overflowed
  stack_t alternate{};
  alternate.ss_sp = stack;
  alternate.ss_size = sizeof stack;
  sigaltstack(&alternate, &previous_stack_);
  struct sigaction action{};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (int i = 0; i < COUNT; ++i) sigaction(FAULTS[i], &action, &previous_[i]);
  sigaction(watchdog_signal(), &action, nullptr);

  sigevent event{};
  event.sigev_notify = SIGEV_THREAD_ID;
  event.sigev_signo = watchdog_signal();
  event._sigev_un._tid = static_cast<pid_t>(syscall(SYS_gettid));
  has_timer_ = limit_ms && !timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer_);
  if (!has_timer_) return;
  itimerspec when{};
  when.it_value = {limit_ms / 1000, static_cast<long>(limit_ms % 1000) * 1000000};
  when.it_interval = {0, 20 * 1000000};  // repeatedly, until it interrupts the kernel's own code
  timer_settime(timer_, 0, &when, nullptr);
}

// The watchdog's handler stays, because a late signal must not end the process.
SignalGuard::~SignalGuard() {
  if (has_timer_) timer_delete(timer_);
  for (int i = 0; i < COUNT; ++i) sigaction(FAULTS[i], &previous_[i], nullptr);
  sigaltstack(&previous_stack_, nullptr);
}

}  // namespace mie_emu
