// The functions that g++ -fsanitize=thread,alignment,bounds,... calls. Neither libtsan nor libubsan
// is linked. The calls arrive here, and the rules are CUDA's.
#include <cstring>

#include "state.h"

using mie_emu::Access;
using mie_emu::fail;
using mie_emu::runtime;

static void access(const void* p, size_t size, Access how, const void* caller) {
  runtime.caller = caller;
  mie_emu::check_access(p, size, how);
  if (runtime.launch.is_counted) mie_emu::count_access(p, size, how);
}

// An access that the compiler assumes to be aligned because of its type.
static void aligned_access(const void* p, size_t size, Access how, const void* caller) {
  runtime.caller = caller;
  if (runtime.in_kernel && reinterpret_cast<uintptr_t>(p) % size)
    fail("misaligned: an access of %zu bytes at %p", size, p);
  access(p, size, how, caller);
}

struct SourceLocation {  // the beginning of libubsan's data
  const char* file;
  uint32_t line, column;
};

static void undefined(const void* data, const void* caller, const char* what) {
  if (!runtime.in_kernel) return;
  runtime.caller = caller;
  const auto* where = static_cast<const SourceLocation*>(data);
  const char* slash = where->file ? strrchr(where->file, '/') : nullptr;
  fail("%s (%s:%u)", what, slash ? slash + 1 : where->file ? where->file : "?", where->line);
}

#define CALLER __builtin_return_address(0)
#define ACCESS_HOOKS(SIZE)                                                                      \
  void __tsan_read##SIZE(void* p) { aligned_access(p, SIZE, Access::READ, CALLER); }            \
  void __tsan_write##SIZE(void* p) { aligned_access(p, SIZE, Access::WRITE, CALLER); }          \
  void __tsan_volatile_read##SIZE(void* p) { aligned_access(p, SIZE, Access::READ, CALLER); }   \
  void __tsan_volatile_write##SIZE(void* p) { aligned_access(p, SIZE, Access::WRITE, CALLER); } \
  void __tsan_unaligned_read##SIZE(void* p) { access(p, SIZE, Access::READ, CALLER); }          \
  void __tsan_unaligned_write##SIZE(void* p) { access(p, SIZE, Access::WRITE, CALLER); }
// -fno-sanitize-recover calls the _abort forms. Some have more arguments than needed here.
#define UNDEFINED_HOOK(NAME, WHAT)                                                 \
  void __ubsan_handle_##NAME(void* data, void*) { undefined(data, CALLER, WHAT); } \
  void __ubsan_handle_##NAME##_abort(void* data, void*) { undefined(data, CALLER, WHAT); }

extern "C" {
#pragma GCC visibility push(default)
ACCESS_HOOKS(1)
ACCESS_HOOKS(2)
ACCESS_HOOKS(4)
ACCESS_HOOKS(8)
ACCESS_HOOKS(16)
void __tsan_read_range(void* p, size_t size) { access(p, size, Access::READ, CALLER); }
void __tsan_write_range(void* p, size_t size) { access(p, size, Access::WRITE, CALLER); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_read(void**) {}
void __tsan_vptr_update(void**, void*) {}
UNDEFINED_HOOK(type_mismatch_v1, "misaligned: an access through a pointer that its type forbids")
UNDEFINED_HOOK(out_of_bounds, "out of bounds: an array index")
UNDEFINED_HOOK(add_overflow, "overflow: a signed sum")
UNDEFINED_HOOK(sub_overflow, "overflow: a signed difference")
UNDEFINED_HOOK(mul_overflow, "overflow: a signed product")
UNDEFINED_HOOK(negate_overflow, "overflow: a signed negation")
UNDEFINED_HOOK(shift_out_of_bounds, "shift: out of range")
UNDEFINED_HOOK(divrem_overflow, "division: by zero, or its result overflows")
#pragma GCC visibility pop
}
