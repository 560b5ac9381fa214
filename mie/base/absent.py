"""Refuse the modules of vLLM that mie does not have, each with the remedy."""

import sys
from collections.abc import Sequence
from types import ModuleType


class ModulesOfVllm:
    """A finder of modules that comes last, and raises instead of finding."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        """Return None for a module that vLLM does not have either.

        Raises:
            UnsupportedImportError: vLLM has the module. The message has the remedy.
        """
        if not name.startswith("mie."):
            return
        from mie.base.refusals import REFUSED  # ``import mie`` does not need the table
        from mie.errors import UnsupportedImportError

        remedy = REFUSED["modules"].get(name.partition(".")[2])
        if remedy is not None:
            raise UnsupportedImportError(f"mie has no module {name}: {remedy}")


def refuse_modules_of_vllm() -> None:
    """Make imports of vLLM's modules under the name of mie raise the remedy."""
    if ModulesOfVllm not in sys.meta_path:
        sys.meta_path.append(ModulesOfVllm)
