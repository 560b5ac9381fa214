"""Keep compiled kernels on disk, and compile several at once.

CuPy 13, the last for JetPack 6's Python, never reads its own cache for templates of kernels. So
mie keeps machine code itself: a file for each kernel, and beside it the name of the function and
the digest of the code. A pair that is damaged, or that another user can have written, is compiled
again.
"""

import atexit
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from mie.base.cache_dir import CacheError, is_private_file, open_cache, read_json, write_json
from mie.base.resources import usable_cpus
from mie.errors import ConfigError, MieError, install_command
from mie.ops.backend import Progress
from mie.ops_gpu.nvrtc import Compiled, CompileError, Nvrtc, compile_apart
from mie.ops_gpu.source import CUPY_OPTIONS, KERNELS, NVRTC_OPTIONS, flat_source


class KernelName(NamedTuple):
    """A kernel of a file in kernels/, such as ``rms_norm<float>``, and options of its own."""

    file: str
    name: str
    options: tuple[str, ...] = ()


class Cubin(NamedTuple):
    """A file of machine code, and the function in it."""

    path: Path
    function: str


class Cubins:
    """The machine code of kernels for one GPU, of compute capability ``capability``."""

    def __init__(self, nvrtc: Nvrtc, capability: int) -> None:
        self._nvrtc = nvrtc
        # A GPU runs the code of its own major version, up to its minor one.
        known = [each for each in nvrtc.architectures() if each // 10 == capability // 10]
        known = [each for each in known if each <= capability]
        if not known:
            raise ConfigError(
                f"NVRTC {nvrtc.version} does not compile for this GPU, which is sm_{capability} "
                f"(install a CuPy for a newer CUDA: {install_command('cuda13')})"
            )
        self._architecture = f"-arch=sm_{max(known)}"
        self.folder = _folder()

    def get(self, kernel: KernelName) -> Cubin:
        """Return the kernel's code, compiled in this process if it is not there."""
        return self._kept(kernel) or self._keep(kernel, lambda *work: self._nvrtc.compile(*work))

    def build(self, kernels: Iterable[KernelName], progress: Progress) -> None:
        """Compile those that are not there, on all CPUs."""
        missing = [kernel for kernel in dict.fromkeys(kernels) if self._kept(kernel) is None]
        if not missing:
            return
        library = self._nvrtc.path
        with progress(len(missing)) as count, ThreadPoolExecutor(usable_cpus()) as pool:
            tasks = [
                pool.submit(self._keep, kernel, lambda *work: compile_apart(library, *work))
                for kernel in missing
            ]
            try:
                for task in as_completed(tasks):
                    task.result()
                    count(1)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _work(self, kernel: KernelName) -> tuple[str, list[str], list[str]]:
        options = [*NVRTC_OPTIONS, *kernel.options, self._architecture, *CUPY_OPTIONS]
        return flat_source(KERNELS / kernel.file), [kernel.name], options

    def _path(self, kernel: KernelName) -> Path:
        source, names, options = self._work(kernel)
        text = "\0".join([self._nvrtc.version, *names, *options, source])
        stem = kernel.file.partition(".")[0]
        return self.folder / f"{stem}-{hashlib.sha256(text.encode()).hexdigest()[:24]}.cubin"

    def _kept(self, kernel: KernelName) -> Cubin | None:
        """Return the kernel's code if it is there, whole, and of this user."""
        path = self._path(kernel)
        about = read_json(path.with_suffix(".json"))
        if not isinstance(about, dict) or not is_private_file(path):
            return None
        if hashlib.sha256(path.read_bytes()).hexdigest() != about.get("sha256"):
            return None
        return Cubin(path, str(about.get("function")))

    def _keep(self, kernel: KernelName, compile_one: Callable[..., Compiled]) -> Cubin:
        source, names, options = self._work(kernel)
        try:
            compiled = compile_one(source, names, options)
        except CompileError as error:
            raise MieError(
                f"NVRTC {self._nvrtc.version} refuses the kernel {kernel.name} in {kernel.file}: "
                f"{str(error).strip()[:2000]}"
            ) from error
        path, function = self._path(kernel), compiled.mangled[kernel.name]
        handle, name = tempfile.mkstemp(dir=self.folder, prefix=path.name)  # with mode 0600
        with open(handle, "wb") as file:
            file.write(compiled.cubin)
        os.replace(name, path)
        digest = hashlib.sha256(compiled.cubin).hexdigest()
        write_json(path.with_suffix(".json"), {"function": function, "sha256": digest})
        return Cubin(path, function)


def _folder() -> Path:
    """Return the folder of the cubins, or a folder that lasts as long as the process."""
    try:
        folder = open_cache("cubins")
        if os.access(folder, os.W_OK):
            return folder
        why = f"{folder} cannot be written"
    except CacheError as error:
        why = str(error)
    logging.getLogger(__name__).warning("compiled kernels are not kept: %s", why)
    made = Path(tempfile.mkdtemp(prefix="mie-cubins-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made
