"""Write the tables of settings in docs/ from their declarations.

    python scripts/settings_tables.py

A table is between ``<!-- settings: SECTION -->`` and ``<!-- end of settings -->``. SECTION is one
of `mie.config.settings.Setting`. A test checks that the pages are up to date.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from mie.config.engine_args import EngineArgs
from mie.config.request_limits import RequestLimits
from mie.config.settings import BACKENDS, Setting, settings_of

DOCS = Path(__file__).resolve().parent.parent / "docs"
ALL = (*settings_of(EngineArgs), *settings_of(RequestLimits))
SECTIONS = tuple(dict.fromkeys(declared.section for _, _, declared in ALL))
TABLE = re.compile(r"(<!-- settings: (.+?) -->\n).*?(<!-- end of settings -->)", re.DOTALL)


_ON_THE_COMMAND_LINE = {
    "seed": ["`--seed` of `mie generate` and `mie chat` is each request's own"],
    "trace": ["`--trace` takes the name of the file"],
}
"""The meaning of options that are not the setting of the same name."""


def rewritten(page: str) -> str:
    """Return the page with its tables as declared."""
    return TABLE.sub(lambda match: f"{match[1]}{table(match[2])}{match[3]}", page)


def table(section: str) -> str:
    """Return the rows of a section as Markdown."""
    assert section in SECTIONS, f"there is no section {section!r}; there are {SECTIONS}"
    return "".join(_of_mie(section))


def _of_mie(section: str) -> Iterator[str]:
    yield "| setting | default | meaning |\n|---|---|---|\n"
    for name, default, declared in ALL:
        if declared.section == section and not declared.alias_of:
            yield f"| `{name}` | {_default(default, declared)} | {_meaning(name, declared)} |\n"


def _default(default: object, declared: Setting) -> str:
    if declared.default_text:
        return declared.default_text.replace("|", "\\|")
    return "" if default is None else f"`{default}`"


def _meaning(name: str, declared: Setting) -> str:
    notes = [declared.help]
    aliases = [other for other, _, each in settings_of(EngineArgs) if each.alias_of == name]
    notes += [f"`{other}` is another name of it" for other in aliases]
    if declared.choices and declared.kind == "choice":
        notes.append("one of " + ", ".join(f"`{choice}`" for choice in declared.choices))
    if declared.backends and set(declared.backends) != set(BACKENDS):
        notes.append("backends: " + ", ".join(declared.backends))
    notes += _ON_THE_COMMAND_LINE.get(name, ())
    return "; ".join(notes).replace("|", "\\|")


def main() -> None:
    """Write every page that changes."""
    for path in sorted(DOCS.rglob("*.md")):
        page = path.read_text(encoding="utf-8")
        if rewritten(page) != page:
            path.write_text(rewritten(page), encoding="utf-8")
            print(f"wrote {path.relative_to(DOCS.parent)}")


if __name__ == "__main__":
    main()
