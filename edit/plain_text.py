"""Text that others may have written: shown without effects on a terminal or in a shell; and JSON and TOML, of anybody."""

from __future__ import annotations

import json
import math
import shlex
import tomllib
from typing import Any

__all__ = ["MOST_NESTED", "json_text", "parse_json", "parse_toml", "printable", "quoted", "reason_of", "shallow"]

MOST_NESTED = 64  # lists and tables in one another; what this project writes has fewer than 16
_NESTING = (list, dict)
_MOST_DIGITS = 300  # of an integer; a double holds 308


def printable(text: str) -> str:
    """Return `text` as one line that a terminal shows as it stands.

    Whatever `str.isprintable` refuses becomes a space: control characters, so ANSI escapes too, line ends, and marks that turn
    the direction of writing.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


def quoted(path: object) -> str:
    """Return a path as a word of a command that a shell takes: with quotes where it has spaces or other special characters."""
    return shlex.quote(str(path))


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


def parse_json(text: str | bytes, *, finite: bool = False) -> Any:
    """Return the value that JSON text says.

    Args:
        finite: numbers must be those of RFC 8259 and fit into a double, so that arithmetic with them raises no OverflowError.
            False: also NaN, Infinity, and integers of any length, as Python and configurations of models write them.

    Raises ValueError for anything else, and for values that are nested too deeply.
    """
    try:
        if finite:
            return shallow(json.loads(text, parse_int=_integer, parse_float=_number, parse_constant=_number))
        return shallow(json.loads(text))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def shallow(value: Any, most: int = MOST_NESTED) -> Any:
    """Return a value that others wrote, as it is: functions that descend into it, `repr` too, do not run out of stack.

    Raises ValueError where more than `most` lists and dictionaries are nested.
    """
    level = [value] if type(value) in _NESTING else []
    for _ in range(most):
        if not level:
            return value
        level = [
            inner for outer in level for inner in (outer.values() if type(outer) is dict else outer) if type(inner) in _NESTING
        ]
    if level:
        raise ValueError("nested too deeply")
    return value


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables that TOML text says.

    Raises ValueError for anything else, for integers of more digits than Python reads, and for what is nested too deeply.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:
        raise ValueError("an integer has too many digits") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    shallow(tables)
    return tables


def _integer(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is not finite")
    return value


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


def reason_of(error: BaseException) -> str:
    """Return what an exception says; an OSError's reason alone, where the message around it names the path."""
    return (isinstance(error, OSError) and error.strerror) or str(error)
