// While a kernel runs, a bad address becomes an error of the launch, and a hang is ended.
#pragma once
#include <csetjmp>
#include <csignal>
#include <cstdint>
#include <ctime>

namespace mie_emu {

extern sigjmp_buf on_fault;

class SignalGuard {
 public:
  explicit SignalGuard(uint32_t limit_ms);
  ~SignalGuard();
  SignalGuard(const SignalGuard&) = delete;
  SignalGuard& operator=(const SignalGuard&) = delete;

 private:
  static constexpr int COUNT = 3;
  struct sigaction previous_[COUNT];
  stack_t previous_stack_;
  timer_t timer_;
  bool has_timer_;
};

}  // namespace mie_emu
