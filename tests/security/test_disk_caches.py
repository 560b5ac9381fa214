"""Test caches on disk that are wrong, damaged, or owned by another user."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from mie.base.cache_dir import (
    CacheError,
    cache_path,
    is_private_file,
    open_cache,
    read_json,
    write_json,
)
from mie.errors import ConfigError
from mie.ops_gpu.host import build as build_module
from mie.ops_gpu.host.build import Builder

OTHER_USER = 12345


@pytest.fixture(params=[0o022, 0o000, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for $XDG_CACHE_HOME that does not exist yet."""
    folder = tmp_path / "deep" / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def belongs_to_another(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a file appear to belong to another user, because only root could change its owner."""
    real_stat, real_lstat, real_fstat = os.stat, os.lstat, os.fstat
    own = real_lstat(path)

    def changed(about: os.stat_result) -> os.stat_result:
        if (about.st_dev, about.st_ino) != (own.st_dev, own.st_ino):
            return about
        fields = list(about[:10])
        fields[4] = OTHER_USER
        return os.stat_result(fields)

    monkeypatch.setattr(os, "stat", lambda *a, **k: changed(real_stat(*a, **k)))
    monkeypatch.setattr(os, "lstat", lambda *a, **k: changed(real_lstat(*a, **k)))
    monkeypatch.setattr(os, "fstat", lambda *a, **k: changed(real_fstat(*a, **k)))


# The place of a cache, and its owner.


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch):
    assert cache_path("x", {"XDG_CACHE_HOME": "/there"}) == Path("/there/mie/x")
    monkeypatch.setattr(Path, "home", lambda: Path("/home/me"))
    wanted = Path("/home/me/.cache/mie/x")
    for relative in ("not/absolute", ".", "", "~"):
        assert cache_path("x", {"XDG_CACHE_HOME": relative}) == wanted
    assert cache_path("x", {}) == wanted


def test_a_relative_home_disables_the_cache(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Path, "home", lambda: Path("relative"))
    with pytest.raises(CacheError, match="set XDG_CACHE_HOME"):
        open_cache("x", {})

    def homeless() -> Path:
        raise RuntimeError

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(CacheError, match="set XDG_CACHE_HOME"):
        open_cache("x", {})


@pytest.mark.usefixtures("umask")
def test_folders_and_files_are_private_under_any_umask(base: Path):
    folder = open_cache("x")
    assert folder == base / "mie" / "x"
    assert {mode(each) for each in (base, base.parent, folder.parent, folder)} == {0o700}
    write_json(folder / "a.json", {"b": [1]})
    assert mode(folder / "a.json") == 0o600
    assert read_json(folder / "a.json") == {"b": [1]}
    assert [each.name for each in folder.iterdir()] == ["a.json"]


def test_a_folder_that_others_may_read_is_closed(base: Path):
    folder = open_cache("x")
    folder.chmod(0o755)
    folder.parent.chmod(0o750)
    assert open_cache("x") == folder
    assert mode(folder) == mode(folder.parent) == 0o700


@pytest.mark.parametrize("bits", [0o777, 0o770, 0o702])
@pytest.mark.parametrize("level", [0, 1])
def test_a_folder_that_others_may_write_to_is_not_used(base: Path, bits: int, level: int):
    folder = open_cache("x")
    open_folder = [folder, folder.parent][level]
    open_folder.chmod(bits)
    with pytest.raises(CacheError, match=f"{open_folder} is not used: other users may write"):
        open_cache("x")


@pytest.mark.parametrize("level", [0, 1])
def test_a_folder_of_another_user_is_not_used(base, level, monkeypatch):
    folder = open_cache("x")
    belongs_to_another([folder, folder.parent][level], monkeypatch)
    with pytest.raises(CacheError, match=f"belongs to user {OTHER_USER}, not to user"):
        open_cache("x")


def test_a_link_of_another_user_is_not_followed(base, tmp_path, monkeypatch):
    open_cache("x").rmdir()
    (tmp_path / "own").mkdir(mode=0o700)
    (base / "mie" / "x").symlink_to(tmp_path / "own")
    assert open_cache("x") == base / "mie" / "x"  # a link of the user's own
    belongs_to_another(base / "mie" / "x", monkeypatch)
    with pytest.raises(CacheError, match="belongs to user"):
        open_cache("x")


@pytest.mark.parametrize("target", ["missing", "file"])
def test_a_path_that_is_not_a_folder_is_not_used(base: Path, target: str):
    open_cache("x").rmdir()
    (base / "file").write_text("")
    (base / "mie" / "x").symlink_to(base / target)
    with pytest.raises(CacheError, match="cannot be used"):
        open_cache("x")


def test_a_folder_below_a_file_is_not_used(base: Path):
    base.parent.mkdir()
    base.write_text("")
    with pytest.raises(CacheError, match="cannot be used: Not a directory"):
        open_cache("x")


# Reading.


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff",
        b"[" * 500_000,
        b'{"a":' * 150_000,
        b"9" * 100_000,
        b'"' + b"a" * (1 << 20) + b'"',
    ],
    ids=["empty", "cut", "no text", "deep list", "deep object", "long number", "large"],
)
def test_a_damaged_file_is_ignored(content: bytes, tmp_path: Path):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    path.chmod(0o600)
    assert read_json(path) is None


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "link", "open", "another's"])
def test_only_private_regular_files_are_read(kind, tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind != "missing":
        path.write_text("[1]")
        path.chmod(0o600)
        assert read_json(path) == [1]
        assert is_private_file(path)
    if kind == "link":
        path.rename(tmp_path / "b.json")
        path.symlink_to(tmp_path / "b.json")
    elif kind == "open":
        path.chmod(0o620)
    elif kind == "another's":
        belongs_to_another(path, monkeypatch)
    assert read_json(path) is None
    assert not is_private_file(path)


def test_a_write_that_fails_leaves_no_file(tmp_path: Path):
    (tmp_path / "a.json").mkdir()
    with pytest.raises(CacheError, match="cannot be written"):
        write_json(tmp_path / "a.json", 1)
    with pytest.raises(TypeError):
        write_json(tmp_path / "b.json", object())
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]


# The emulator's libraries.


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the libraries that were built, by a compiler that writes empty files."""
    built: list[Path] = []

    def run(self: Builder, command: list[str]) -> str:
        if "-shared" in command:
            built.append(Path(command[command.index("-o") + 1]))
            built[-1].write_text("")
        return "a compiler"

    monkeypatch.setattr(Builder, "_run", run)
    monkeypatch.setattr(build_module, "find_compiler", lambda: (["g++"], "a compiler"))
    return built


def test_libraries_never_come_from_the_current_folder(tmp_path, monkeypatch, compiler):
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    monkeypatch.chdir(tmp_path)
    assert Builder().runtime().parent == tmp_path / "home" / ".cache" / "mie" / "emulator"
    assert not (tmp_path / "cache").exists()


def test_the_emulator_refuses_a_folder_that_others_may_write_to(base: Path, compiler: list[Path]):
    open_cache("emulator").chmod(0o777)
    with pytest.raises(
        ConfigError, match=r"cannot keep its builds: .* other users may write to it"
    ):
        Builder()


@pytest.mark.usefixtures("umask")
def test_a_library_is_built_once_and_private(base: Path, compiler: list[Path]):
    library = Builder().runtime()
    assert Builder().runtime() == library
    assert len(compiler) == 1
    assert mode(library) == 0o700


@pytest.mark.parametrize("kind", ["link", "open", "another's"])
def test_a_library_that_is_not_private_is_rebuilt(kind, base, compiler, monkeypatch):
    library = Builder().runtime()
    library.write_text("planted")
    if kind == "link":
        library.rename(base / "planted.so")
        library.symlink_to(base / "planted.so")
    elif kind == "open":
        library.chmod(0o777)
    else:
        belongs_to_another(library, monkeypatch)
    assert Builder().runtime() == library
    assert library.read_text() == ""
    assert len(compiler) == 2
