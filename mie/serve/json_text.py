"""Read the JSON of a body. Every number must fit a number of Python."""

import json
import re
from typing import Any

from pydantic_core import from_json

from mie.errors import shown_text
from mie.serve.errors import invalid


def json_object(data: bytes) -> dict[str, Any]:
    """Return a body's object, or raise the 400 of a body that is not an object."""
    try:
        values = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        what = f"the body is not valid JSON: {error}"
        if "recursion limit" in str(error):
            what = "the body nests more than 200 levels of objects and lists, which is the limit"
        raise invalid(what, code="invalid_json") from error
    if not isinstance(values, dict):
        kind = type(values).__name__
        raise invalid(f"the body must be a JSON object; got {kind}", code="invalid_json")
    if _may_be_infinite(data):
        for name, value in values.items():
            if not _is_finite(value):
                raise invalid(
                    f"{shown_text(name)} has a number beyond ±1.8e308, the limit of a float",
                    name,
                    code="invalid_json",
                )
    return values


_LARGE_EXPONENT = re.compile(rb"[eE]\+?0*[1-9][0-9]{2}")
_ALL_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_MANY_DIGITS = b"0" * 200


def _may_be_infinite(data: bytes) -> bool:
    """Return False if no number of a JSON text exceeds a float's range.

    Such a number needs an exponent of three digits, or more than 200 digits before it.
    """
    return bool(_LARGE_EXPONENT.search(data)) or _MANY_DIGITS in data.translate(_ALL_ZEROS)


def _is_finite(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True
