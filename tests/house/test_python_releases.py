"""No module needs an accident of one release of Python."""

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from functools import partial
from operator import attrgetter, itemgetter, methodcaller
from types import FunctionType
from typing import Any

import pytest

import mie


def classes_of_mie() -> Iterator[type]:
    """Yield the classes of all modules that this environment can import."""
    for module in pkgutil.walk_packages(mie.__path__, "mie."):
        if module.name.endswith("__main__"):
            continue
        try:
            found = importlib.import_module(module.name)
        except ImportError:
            continue  # an extra that is not installed
        for value in vars(found).values():
            if isinstance(value, type) and value.__module__ == module.name:
                yield value


def opaque_accessors(cls: type) -> list[str]:
    """Return the properties with a getter, setter or deleter that is not a function of Python.

    A dataclass with slots is a second class. Newer releases of Python correct ``__class__`` in the
    functions of the first one, and read ``__code__`` of each accessor.
    """
    if not (is_dataclass(cls) and "__slots__" in vars(cls)):
        return []
    return [
        name
        for name, value in vars(cls).items()
        if isinstance(value, property)
        for accessor in (value.fget, value.fset, value.fdel)
        if accessor is not None and not isinstance(accessor, FunctionType)
    ]


def test_properties_of_dataclasses_with_slots_are_functions_of_python():
    classes = set(classes_of_mie())
    assert len(classes) > 300, "the search is broken"
    assert {cls.__qualname__: found for cls in classes if (found := opaque_accessors(cls))} == {}


@pytest.mark.parametrize(
    "accessor",
    [attrgetter("x"), itemgetter(0), methodcaller("f"), partial(getattr), len, str],
    ids=lambda each: type(each).__name__,
)
def test_the_check_sees_each_kind_of_callable_without_code(accessor: Any):
    # `slots=True` fails here on the newest releases.
    @dataclass
    class Value:
        __slots__ = ()
        plain = property(lambda self: 1)
        opaque = property(accessor)

    assert opaque_accessors(Value) == ["opaque"]
