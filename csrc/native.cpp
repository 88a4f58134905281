// The Python module zerogap.kernels._native: finds the kernel libraries beside it, says which ones this CPU can run,
// and calls their tables. Addresses travel as integers (an nb::ndarray costs 5 us a call); the GIL is released.
#include <dlfcn.h>
#include <malloc.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

#include "program.h"
#include "table.h"

namespace nb = nanobind;
using zerogap::Argument;
using zerogap::KernelTable;
using zerogap::Operand;
using zerogap::pass;
using zerogap::Program;

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

// One method per table entry: pointers as integers, everything else as itself.
template <class... Args>
void bind(nb::class_<Variant>& type, const char* name, void (*KernelTable::*entry)(Args...)) {
  type.def(name, [entry](const Variant& variant, Argument<Args>... arguments) {
    nb::gil_scoped_release release;
    (variant.table->*entry)(pass<Args>(arguments)...);
  });
}

// Both as a method of the table, which makes the call, and as one of a program, which records it.
template <class... Args>
void bind(nb::class_<Variant>& type, nb::class_<Program>& program, const char* name,
          void (*KernelTable::*entry)(Args...)) {
  bind(type, name, entry);
  program.def(name, [entry](Program& self, const Operand<Args>&... operands) { self.append(entry, operands...); });
}

std::pair<std::vector<int64_t>, std::vector<float>> run(
    Program& program, std::vector<int64_t> tokens_T, std::vector<int32_t> first_positions_S,
    std::vector<int32_t> lengths_S, std::vector<std::vector<int32_t>> page_tables_S, std::vector<int64_t> asked_B,
    std::vector<std::array<int64_t, 4>> keys_B, std::vector<float> inverse_temperatures_B) {
  nb::gil_scoped_release release;
  return program.run({std::move(tokens_T), std::move(first_positions_S), std::move(lengths_S),
                      std::move(page_tables_S), std::move(asked_B), std::move(keys_B),
                      std::move(inverse_temperatures_B)});
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

  nb::class_<zerogap::Address>(module, "Address");
  nb::class_<zerogap::Size>(module, "Size");
  nb::class_<Program> program(module, "Program");
  program.def("array", &Program::array, nb::arg("name"));
  program.def("size", &Program::size, nb::arg("name"));
  program.def("buffer", &Program::buffer, nb::arg("bytes"), nb::arg("count"));
  program.def("run", &run, "Runs the recorded calls on one step, given as lists; see program.py.");

  nb::class_<Variant> type(module, "Variant");
  type.def(
      "program", [](const Variant& variant, long page_size) { return new Program(variant.table, page_size); },
      nb::arg("page_size"), "An empty program: its methods record calls of this table.");
  type.def_prop_ro("name", [](const Variant& variant) { return variant.table->name; });
  bind(type, "pack", &KernelTable::pack);
  bind(type, program, "linear", &KernelTable::linear);
  bind(type, "linear_input_gradient", &KernelTable::linear_input_gradient);
  bind(type, "linear_weight_gradient", &KernelTable::linear_weight_gradient);
  bind(type, "column_sum", &KernelTable::column_sum);
  bind(type, program, "rms_norm", &KernelTable::rms_norm);
  bind(type, "rms_norm_backward", &KernelTable::rms_norm_backward);
  bind(type, program, "head_norm", &KernelTable::head_norm);
  bind(type, "head_norm_backward", &KernelTable::head_norm_backward);
  bind(type, program, "embedding", &KernelTable::embedding);
  bind(type, "embedding_backward", &KernelTable::embedding_backward);
  bind(type, program, "rotary", &KernelTable::rotary);
  bind(type, program, "silu_mul", &KernelTable::silu_mul);
  bind(type, "silu_mul_backward", &KernelTable::silu_mul_backward);
  bind(type, program, "attention", &KernelTable::attention);
  bind(type, "attention_backward", &KernelTable::attention_backward);
  bind(type, "head_logprobs", &KernelTable::head_logprobs);
  bind(type, "head_backward", &KernelTable::head_backward);
  bind(type, program, "sample", &KernelTable::sample);
  bind(type, "exp", &KernelTable::exp);
  bind(type, "log", &KernelTable::log);
}
