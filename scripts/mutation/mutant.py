"""One wrong line for `mutate.py`, and the tests that should notice it."""

import sys
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A snippet of the source, which must occur exactly once, and its replacement."""

    name: str
    path: str
    old: str
    new: str
    breaks: str
    """The consequence for a user or a maintainer."""
    equivalent: str | None = None
    """Why no test can detect it, if none can."""

    def apply(self, source: str) -> str:
        """Return the source with the mutation.

        Raises:
            ValueError: the snippet does not occur exactly once.
        """
        count = source.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: the snippet occurs {count} times in {self.path}")
        return source.replace(self.old, self.new)


@dataclass(frozen=True, kw_only=True)
class Rung:
    """Tests of similar speed."""

    name: str
    rooms: tuple[str, ...]
    """The beginnings of the paths whose mutants climb it."""
    files: tuple[str, ...]
    limit: float = 600
    """Seconds after which the rung counts as hanging."""

    def fits(self, mutant: Mutant) -> bool:
        """Return whether a mutant climbs it."""
        return mutant.path.startswith(self.rooms)


def read_ladder() -> tuple[tuple[Rung, ...], tuple[Mutant, ...]]:
    """Return the rungs and the mutants of every TOML file in this folder."""
    rungs: list[Rung] = []
    mutants: list[Mutant] = []
    for path in sorted(Path(__file__).parent.glob("*.toml")):
        content = tomllib.loads(path.read_text())
        for rung in content["rung"]:
            rungs.append(
                Rung(name=rung["name"], rooms=tuple(rung["rooms"]), files=tuple(rung["files"]))
            )
        mutants += [Mutant(**mutant) for mutant in content["mutant"]]
    return tuple(rungs), tuple(mutants)
