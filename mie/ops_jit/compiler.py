"""Compile kernels to machine code with Numba and LLVM.

Numba turns a kernel into LLVM's intermediate code. LLVM turns that into an object file for a CPU.
It may be another CPU than this machine's. An object file loads without Numba and LLVM.
"""

import ctypes
import os
from typing import Any, NamedTuple

NUM_ARGUMENTS = {"run": 7, "work": 3, "multiply": 12, "multiply_int8": 9}
"""Integers that a kernel takes, if not an operator's: args, step, tile, scratch."""


MACHINE = "machine."
"""The beginning of the names of intrinsics of one architecture, instead of "llvm."."""
NEEDED_FEATURES = {"x86_64": ("avx2", "f16c", "fma"), "aarch64": ()}
"""The features that kernels need and a CPU of the architecture may lack."""


AT_HWCAP, HWCAP_ASIMDDP = 16, 1 << 20
"""The word of Linux with a CPU's abilities, and the bit of Armv8.2's dot product of bytes."""


class Cpu(NamedTuple):
    """A CPU as LLVM describes it."""

    triple: str
    name: str
    features: str

    @property
    def vector_bits(self) -> int:
        """The width of its vector registers that kernels use."""
        if self.architecture == "x86_64":
            return 512 if "+avx512f" in self.features else 256
        return 128

    def has(self, feature: str) -> bool:
        """Return whether it has a feature of LLVM's, such as "avx512vnni"."""
        return f"+{feature}" in self.features.split(",")

    @property
    def architecture(self) -> str:
        """The first part of the triple, such as "x86_64"."""
        return self.triple.partition("-")[0]

    @property
    def missing(self) -> tuple[str, ...]:
        """The features that kernels need and the CPU lacks."""
        needed = NEEDED_FEATURES.get(self.architecture, ())
        return tuple(each for each in needed if not self.has(each))


def binding() -> Any:
    """Import LLVM's binding. Nothing else imports it, except the kernels."""
    import llvmlite.binding

    return llvmlite.binding


def host_cpu() -> Cpu:
    """Return this machine's CPU, or an older one that ``MIE_CPU`` names, such as "haswell".

    LLVM derives the features of a named CPU, and kernels need only those in `NEEDED_FEATURES`.
    """
    llvm = binding()
    triple = llvm.get_default_triple()
    if name := os.environ.get("MIE_CPU"):
        needed = NEEDED_FEATURES.get(triple.partition("-")[0], ())
        return Cpu(triple, name, ",".join(f"+{each}" for each in needed))
    features = llvm.get_host_cpu_features().flatten()
    if triple.startswith("aarch64") and ctypes.CDLL(None).getauxval(AT_HWCAP) & HWCAP_ASIMDDP:
        features += ",+dotprod"  # LLVM does not name it on each system
    return Cpu(triple, llvm.get_host_cpu_name(), features)


def kernel_named(name: str, cpu: Cpu) -> Any:
    """Return a kernel's Numba function, such as "linear[bfloat16]". This imports Numba."""
    from mie.ops_jit.kernels import (
        adapters,
        attention,
        elementwise,
        experts,
        int4_cache,
        integers,
        linear,
        logits,
        products,
        recurrent,
        rounding,
        team,
    )
    from mie.ops_jit.kernels.dots import dot_of
    from mie.ops_jit.kernels.formats import FORMATS

    base, _, dtype = name.rstrip("]").partition("[")
    if base == "multiply":
        return products.multiply(FORMATS[dtype], products.tiles_of(FORMATS[dtype], cpu.vector_bits))
    if base in ("linear", "gate_up"):
        fmt, few = FORMATS[dtype], products.FEW_ROWS[cpu.vector_bits]
        return vars(linear)[base](linear.group_product(fmt, few))
    if base in ("linear_int8", "gate_up_int8"):
        product = linear.rounded_group_product(FORMATS[dtype])
        return vars(linear)[base.removesuffix("_int8")](product)
    if base in ("multiply_int8", "round_rows"):
        module = integers if base == "multiply_int8" else rounding
        return vars(module)[base](FORMATS[dtype], dot_of(FORMATS[dtype], cpu))
    if dtype == "int4":
        return vars(int4_cache)[base]()
    modules = (elementwise, attention, experts, recurrent, logits, adapters, team)
    found = next(vars(module)[base] for module in modules if base in vars(module))
    return found(FORMATS[dtype]) if dtype else found


def intermediate_code(name: str, cpu: Cpu) -> str:
    """Return LLVM's intermediate code of a function "kernel", as Numba makes it.

    ``cpu`` chooses its tiles.
    """
    from numba import types

    function = kernel_named(name, cpu)
    function.compile((types.int64,) * NUM_ARGUMENTS.get(name.partition("[")[0], 4))
    (compiled,) = function.overloads.values()
    code: str = compiled.library.get_llvm_str()
    code = code.replace(f"@{compiled.fndesc.llvm_func_name}(", "@kernel(")
    return code.replace(f"@{MACHINE}", "@llvm.")


def compile_kernel(name: str, cpu: Cpu) -> bytes:
    """Return the object file of a kernel. Its function is called "kernel"."""
    module, target = _module(intermediate_code(name, cpu), cpu)
    compiled: bytes = target.emit_object(module)
    return compiled


def assembly(code: str, cpu: Cpu) -> str:
    """Return the assembly of intermediate code, to be read."""
    module, target = _module(code, cpu)
    compiled: str = target.emit_assembly(module)
    return compiled


def _module(code: str, cpu: Cpu) -> tuple[Any, Any]:
    """Return a module with the kernel alone, and the target that compiles it."""
    llvm = binding()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = llvm.parse_assembly(code)
    target = llvm.Target.from_triple(cpu.triple).create_target_machine(
        cpu=cpu.name, features=cpu.features, opt=3, jit=True
    )
    module.triple, module.data_layout = cpu.triple, str(target.target_data)
    for each in module.functions:
        if not each.is_declaration and each.name != "kernel":
            each.linkage = "internal"
    passes = llvm.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options()))
    return module, target
