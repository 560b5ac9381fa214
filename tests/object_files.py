"""Compile small functions to object files, as kernels are compiled."""

from typing import Any


def object_file(value: str, *, is_large: bool = True) -> bytes:
    """Return the object file of a "kernel" that returns a value, for this machine.

    ``value`` is an instruction of LLVM. It may use the argument %x and call strlen. The code model
    is large, as for kernels, or LLVM's default.
    """
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple().create_target_machine(
        codemodel="jitdefault" if is_large else "small", reloc="static"
    )
    module: Any = llvm.parse_assembly(
        f"""
        @table = internal constant [3 x i64] [i64 5, i64 7, i64 11]
        @entry = internal constant ptr @table
        @zeros = common global i64 0
        declare i64 @strlen(ptr)
        define i64 @other(i64 %x) noinline {{
          %place = getelementptr i64, ptr @table, i64 %x
          %value = load i64, ptr %place
          ret i64 %value
        }}
        define i64 @kernel(i64 %x) {{
          %value = {value}
          ret i64 %value
        }}
        """
    )
    code: bytes = target.emit_object(module)
    return code
