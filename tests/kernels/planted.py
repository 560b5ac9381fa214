"""Plant a bug in a copy of the kernels (the fixture ``copied_kernels``)."""

from pathlib import Path


def plant(folder: Path, file: str, old: str, new: str) -> None:
    """Replace ``old``, which occurs once in a file of the copy."""
    source = (folder / file).read_text()
    assert source.count(old) == 1
    (folder / file).write_text(source.replace(old, new))
