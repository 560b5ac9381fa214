"""Check the cache of compiled kernels: damaged, missing, shared, or not private.

A kernel that cannot be read from it is compiled, and computes the same.
"""

import os
import shutil
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from deadlines import PATIENCE
from object_files import object_file

pytest.importorskip("numba")

from mie.base import cache_dir
from mie.base.cache_dir import DIGEST_BYTES
from mie.ops_jit import compiler, kernel_cache
from mie.ops_jit.compiler import Cpu, host_cpu
from mie.ops_jit.environment import CannotRun
from mie.ops_jit.jit_backend import JitBackend
from mie.ops_jit.kernel_cache import Kernels, kept_cpu, key_of

CPU = host_cpu()
KERNEL = "gate_mul"
X = np.linspace(-4, 4, 96, dtype=np.float32).reshape(3, 32)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the kernels of these tests."""
    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        assert result() == 3
    return folder


@pytest.fixture
def cache(compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that cache, which is used."""
    shutil.copytree(compiled, tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/mie/jit"


def result() -> int:
    """Use a new backend, check its result, and return how many kernels it compiled."""
    backend = JitBackend(num_threads=2)
    gate, up = X[:, :16].astype(np.float64), X[:, 16:]
    np.testing.assert_allclose(
        backend.activate(X, "silu"), gate / (1 + np.exp(-gate)) * up, rtol=1e-5
    )
    return backend.recorder.kernels.num_compiled


def file_of(cache: Path, kernel: str = KERNEL) -> Path:
    (path,) = cache.glob(f"{kernel}-*")
    return path


def test_the_files_are_private_and_used_again(cache: Path) -> None:
    assert result() == 0
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert stat.S_IMODE(cache.parent.stat().st_mode) == 0o700
    for path in cache.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def flipped(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x80
    path.write_bytes(content)


def replace_by_link(path: Path) -> None:
    other = path.with_name("elsewhere")
    path.rename(other)
    path.symlink_to(other)


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "empty": lambda path: path.write_bytes(b""),
    "cut in the digest": lambda path: path.write_bytes(path.read_bytes()[: DIGEST_BYTES - 1]),
    "a bit of the code": lambda path: flipped(path, 1000),
    "a bit of the digest": lambda path: flipped(path, 3),
    "a link": replace_by_link,
    "a pipe": replace_by_pipe,
    "others may write": lambda path: path.chmod(0o666),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_file_that_cannot_be_trusted_is_compiled_anew(cache, damage) -> None:
    path = file_of(cache)
    whole = path.read_bytes()
    damage(path)
    assert result() == 1
    assert file_of(cache).read_bytes()[:DIGEST_BYTES] != b""
    assert stat.S_ISREG(os.lstat(path).st_mode)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(path.read_bytes()) == len(whole)
    assert result() == 0


def file_in_the_way(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    path.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))


def full_disk(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    def refuse(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    monkeypatch.setattr(cache_dir.os, "replace", refuse)


@pytest.mark.parametrize("lack", [file_in_the_way, full_disk])
def test_without_a_cache_kernels_are_compiled_each_time(lack, tmp_path, monkeypatch) -> None:
    lack(monkeypatch, tmp_path / "place")
    kernels = Kernels()
    assert kernels["take_rows"] != 0
    assert kernels["take_rows"] != 0
    assert kernels.num_compiled == 1
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size]


@pytest.mark.parametrize("field", ["triple", "name", "features"])
def test_a_kernel_of_another_cpu_is_not_used(cache: Path, field: str) -> None:
    other = CPU._replace(**{field: "other"})
    assert kernel_cache.read(KERNEL, key_of(CPU)) is not None
    assert kernel_cache.read(KERNEL, key_of(other)) is None


@pytest.mark.parametrize(
    "source",
    ["layout.py", "compiler.py"]
    + [f"kernels/{path.name}" for path in Path(compiler.__file__).parent.glob("kernels/[!_]*.py")],
)
def test_a_kernel_of_other_sources_is_not_used(cache, source, tmp_path, monkeypatch) -> None:
    own = Path(kernel_cache.__file__).parent
    shutil.copytree(own, tmp_path / "room", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(kernel_cache, "__file__", str(tmp_path / "room/kernel_cache.py"))
    assert kernel_cache.read(KERNEL, key_of(CPU)) is not None
    path = tmp_path / "room" / source
    path.write_text(path.read_text() + "# changed\n")
    assert kernel_cache.read(KERNEL, key_of(CPU)) is None


def test_an_interrupt_while_a_file_is_written_leaves_nothing(cache, monkeypatch) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    before = {*cache.iterdir()}
    monkeypatch.setattr(cache_dir.os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        kernel_cache.write("new", key_of(CPU), b"code")
    assert {*cache.iterdir()} == before


def test_an_interrupt_after_a_file_was_written_is_not_lost(cache, monkeypatch) -> None:
    real = os.replace

    def interrupt(source: str, target: str) -> None:
        real(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(cache_dir.os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        kernel_cache.write("new", key_of(CPU), b"code")
    assert kernel_cache.read("new", key_of(CPU)) == b"code"


PROGRAM = """
    import sys
    import numpy as np
    from mie.ops_jit.jit_backend import JitBackend

    backend = JitBackend(num_threads=2)
    x = np.linspace(-4, 4, 96, dtype=np.float32).reshape(3, 32)
    print(backend.activate(x, "silu").tobytes().hex())
    print({"numba", "llvmlite"} & {*sys.modules})
"""


def start() -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_warm_start_loads_neither_numba_nor_llvm(cache: Path) -> None:
    """LLVM's library takes 50 MiB, and Numba a third of a second."""
    with start() as process:
        assert process.communicate(timeout=PATIENCE)[0].split()[1] == "set()"


def test_llvm_describes_a_cpu_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked = []

    def described() -> Cpu:
        asked.append(os.environ.get("MIE_CPU"))
        return host_cpu()

    monkeypatch.setattr(kernel_cache, "host_cpu", described)
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(kernel_cache, "CPU_FILE", file)
    for _ in range(2):  # nothing tells this CPU from another one
        assert kept_cpu() == CPU
    assert len(asked) == 2
    one = "processor\t: 0\nflags\t\t: sse fma\ncpu MHz\t\t: 2596.120\n\n"
    file.write_text(one)
    assert [kept_cpu(), kept_cpu()] == [CPU, CPU]
    file.write_text(one.replace("2596", "800") + one.replace(": 0", ": 1"))
    assert kept_cpu() == CPU
    assert len(asked) == 3
    file.write_text(one.replace("fma", "fma avx512f"))
    assert kept_cpu() == CPU
    monkeypatch.setenv("MIE_CPU", "haswell")
    assert [kept_cpu().name, kept_cpu().name] == ["haswell", "haswell"]
    monkeypatch.setattr(kernel_cache, "version_of", lambda package: "0.99.0")
    assert kept_cpu().name == "haswell"
    assert asked == [None] * 4 + ["haswell"] * 2


def test_a_kernel_that_cannot_be_loaded_is_refused_by_name(cache: Path) -> None:
    """A compiler of another version might make it."""
    kernel_cache.write("take_rows", key_of(CPU), object_file("call i64 @strlen(ptr null)"))
    message = r"jit cannot run here: kernel take_rows cannot be loaded: .* another library \(pip"
    with pytest.raises(CannotRun, match=message):
        Kernels()["take_rows"]
