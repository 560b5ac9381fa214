// The code that the generated stub adds to a kernel file: a kernel's signature, and its launch.
#pragma once
#include <cstdio>
#include <type_traits>
#include <utility>

#include "mie_emu.h"

struct f16;  // mie_cuda.cuh defines both
struct bf16;

namespace mie_emu {

// Not instrumented by the checked build, because the launch's memory is not the kernel's.
#define MIE_UNCHECKED __attribute__((no_sanitize("thread")))

// A parameter's type in letters, as mie/ops_gpu/signature.py reads them: i4 u4 f4 ... for numbers,
// f2 and b2 for the 16-bit floats, s<size> for a struct. *c or *m before a type is a pointer to
// constant or to mutable memory.
template <typename T>
void write_type(char* out, size_t size) {
  if constexpr (std::is_pointer<T>::value) {
    using Pointee = std::remove_pointer_t<T>;
    char inner[16];
    write_type<std::remove_cv_t<Pointee>>(inner, sizeof inner);
    snprintf(out, size, "*%c%s", std::is_const<Pointee>::value ? 'c' : 'm', inner);
  } else if constexpr (std::is_same<T, f16>::value) {
    snprintf(out, size, "f2");
  } else if constexpr (std::is_same<T, bf16>::value) {
    snprintf(out, size, "b2");
  } else {
    const char kind = std::is_floating_point<T>::value ? 'f'
                      : !std::is_integral<T>::value    ? 's'
                      : std::is_signed<T>::value       ? 'i'
                                                       : 'u';
    snprintf(out, size, "%c%d", kind, static_cast<int>(sizeof(T)));
  }
}

template <typename... Parameters>
void signature(void (*)(Parameters...), char* out, size_t size) {
  size_t used = 0;
  auto append = [&](auto* type) {
    char one[24];
    write_type<std::remove_cv_t<std::remove_pointer_t<decltype(type)>>>(one, sizeof one);
    used += static_cast<size_t>(snprintf(out + used, size - used, "%s%s", used ? "," : "", one));
  };
  out[0] = 0;
  (append(static_cast<std::remove_cv_t<Parameters>*>(nullptr)), ...);
}

template <typename... Parameters>
struct Call {
  void (*kernel)(Parameters...);
  void** arguments;
  template <size_t... I>
  MIE_UNCHECKED void apply(std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_reference_t<Parameters>*>(arguments[I])...);
  }
  MIE_UNCHECKED static void entry(void* self) {
    static_cast<Call*>(self)->apply(std::index_sequence_for<Parameters...>{});
  }
};

template <typename... Parameters>
MIE_UNCHECKED int launch(void (*kernel)(Parameters...), const Launch* how, void** arguments) {
  static thread_local volatile char anchor;  // accessing it gives this .so's TLS block an address
  anchor = 0;
  Call<Parameters...> call{kernel, arguments};
  return run(*how, &Call<Parameters...>::entry, &call,
             reinterpret_cast<const void*>(&launch<Parameters...>));
}

}  // namespace mie_emu
