// The Python module zerogap.kernels._native: finds the kernel libraries beside it, says which ones this CPU can run,
// and calls their tables. Addresses travel as integers (an nb::ndarray costs 5 us a call); the GIL is released.
#include <dlfcn.h>
#include <malloc.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <filesystem>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "table.h"

namespace nb = nanobind;
using zerogap::KernelTable;

namespace {

// From the most general to the fastest.
const char* const kVariants[] = {"baseline", "avx2", "avx512", "avx512_bf16"};

bool cpu_runs(const std::string& variant) {
  if (variant == "baseline") return true;
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (variant == "avx2") return avx2;
  if (variant == "avx512") return avx512;
  if (variant == "avx512_bf16") return avx512 && __builtin_cpu_supports("avx512bf16");
#endif
  return false;
}

std::filesystem::path library_path(const std::string& variant) {
  Dl_info info;
  if (!dladdr(reinterpret_cast<const void*>(&library_path), &info))
    throw std::runtime_error("kernels: the folder of the native module cannot be found");
  return std::filesystem::path(info.dli_fname).parent_path() / ("libzerogap_" + variant + ".so");
}

std::vector<std::string> built() {
  std::vector<std::string> names;
  for (const char* name : kVariants)
    if (std::filesystem::exists(library_path(name))) names.push_back(name);
  return names;
}

struct Variant {
  const KernelTable* table;
};

Variant load(const std::string& name) {
  if (!cpu_runs(name)) throw std::invalid_argument("kernels: this CPU cannot run the variant '" + name + "'");
  const std::string path = library_path(name).string();
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);  // never closed: its threads may outlive any owner
  if (!library) throw std::runtime_error(std::string("kernels: ") + dlerror());
  auto get = reinterpret_cast<const KernelTable* (*)()>(dlsym(library, "zerogap_kernel_table"));
  if (!get || get()->version != zerogap::kTableVersion)
    throw std::runtime_error("kernels: " + path + " does not belong to this build; reinstall zerogap");
  return {get()};
}

template <class T>
using Argument = std::conditional_t<std::is_pointer_v<T>, uintptr_t, T>;

template <class T>
T pass(Argument<T> value) {
  if constexpr (std::is_pointer_v<T>)
    return reinterpret_cast<T>(value);
  else
    return value;
}

// One method per table entry: pointers as integers, everything else as itself.
template <class... Args>
void bind(nb::class_<Variant>& type, const char* name, void (*KernelTable::*entry)(Args...)) {
  type.def(name, [entry](const Variant& variant, Argument<Args>... arguments) {
    nb::gil_scoped_release release;
    (variant.table->*entry)(pass<Args>(arguments)...);
  });
}

// Freed buffers go back to the allocator's heap, not to the kernel, so that their pages are faulted in only once.
void keep_memory() {
#if defined(__GLIBC__)
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, -1);
  mallopt(M_ARENA_MAX, 1);
#endif
}

}  // namespace

NB_MODULE(_native, module) {
  module.def("keep_memory", &keep_memory, "Freed memory stays in the process; see native.keep_memory.");
  nb::set_leak_warnings(false);  // an interrupted interpreter keeps references; the report would bury the real message
  module.def("built", &built, "Names of the built variants, from the most general to the fastest.");
  module.def("cpu_runs", &cpu_runs, nb::arg("variant"));
  module.def("load", &load, nb::arg("variant"));

  nb::class_<Variant> type(module, "Variant");
  type.def_prop_ro("name", [](const Variant& variant) { return variant.table->name; });
  bind(type, "pack", &KernelTable::pack);
  bind(type, "linear", &KernelTable::linear);
  bind(type, "linear_input_gradient", &KernelTable::linear_input_gradient);
  bind(type, "linear_weight_gradient", &KernelTable::linear_weight_gradient);
  bind(type, "column_sum", &KernelTable::column_sum);
  bind(type, "rms_norm", &KernelTable::rms_norm);
  bind(type, "rms_norm_backward", &KernelTable::rms_norm_backward);
  bind(type, "head_norm", &KernelTable::head_norm);
  bind(type, "head_norm_backward", &KernelTable::head_norm_backward);
  bind(type, "embedding", &KernelTable::embedding);
  bind(type, "embedding_backward", &KernelTable::embedding_backward);
  bind(type, "rotary", &KernelTable::rotary);
  bind(type, "silu_mul", &KernelTable::silu_mul);
  bind(type, "silu_mul_backward", &KernelTable::silu_mul_backward);
  bind(type, "attention", &KernelTable::attention);
  bind(type, "attention_backward", &KernelTable::attention_backward);
  bind(type, "head_logprobs", &KernelTable::head_logprobs);
  bind(type, "head_backward", &KernelTable::head_backward);
  bind(type, "sample", &KernelTable::sample);
  bind(type, "exp", &KernelTable::exp);
  bind(type, "log", &KernelTable::log);
}
