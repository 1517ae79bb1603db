"""Text that others may have written: shown without effects on a terminal; and JSON, as every parser reads it, of anybody."""

from __future__ import annotations

import json
import math
from typing import Any

__all__ = ["json_text", "parse_json", "printable"]


def printable(text: str) -> str:
    """Return `text` as one line that a terminal shows as it stands.

    Whatever `str.isprintable` refuses becomes a space: control characters, so ANSI escapes too, line ends, and marks that turn
    the direction of writing.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


def json_text(value: object, *, indent: int | None = None) -> str:
    """Return `value` as JSON of RFC 8259, which has no NaN and no infinity: both become null.

    Args:
        value: dictionaries with string keys, lists, tuples, strings, numbers, booleans and None, nested.
        indent: as that of `json.dumps`; None writes one line.

    Raises TypeError for any other kind of value.
    """
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), indent=indent, allow_nan=False)


def parse_json(text: str | bytes) -> Any:
    """Return the value that JSON text says. Raises ValueError for anything else, and for values that are nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _finite(value: object) -> object:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _finite(each) for key, each in value.items()}
        case list() | tuple():
            return [_finite(each) for each in value]
        case _:
            return value
