"""Canonical JSON: one text for a value, so that its hash can be computed by anybody who has the value.

Sorted keys, no spaces, ASCII only; integers as they are; floats as texts in hexadecimal (`float.hex`), which keep every bit.
The JSON itself therefore has no floats, and two programs cannot write the same value differently.
"""

from __future__ import annotations

import json
from typing import Any

from edit.plain_text import shallow

__all__ = ["MOST_LINE_BYTES", "canonical", "parse_canonical"]

MOST_LINE_BYTES = 16 << 20  # of a line that is read: a commit of 64 peers has 300 kB


def canonical(value: object) -> bytes:
    """Return the canonical JSON of a value, without a line end.

    Args:
        value: dictionaries with string keys, lists, tuples, strings, integers, floats, booleans and None, nested.

    Raises TypeError for any other kind of value, and for a key that is not a string.
    """
    return _dumped(_without_floats(value))


def parse_canonical(line: bytes) -> Any:
    """Return the value of canonical JSON, its floats still as texts. Raises ValueError for any other text of the value.

    Also for a value that is nested too deeply (`edit.plain_text.shallow`).
    """
    if len(line) > MOST_LINE_BYTES:
        raise ValueError(f"{len(line)} bytes, at most {MOST_LINE_BYTES} are read")
    try:
        value = shallow(json.loads(line, parse_float=_refuse, parse_constant=_refuse))
        same = _dumped(value) == line
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not same:
        raise ValueError("not canonical JSON")
    return value


def _dumped(value: object) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.encode()


def _refuse(text: str) -> object:
    raise ValueError(f"canonical JSON has no number {text[:20]}")


def _without_floats(value: object) -> object:
    match value:
        case float():
            return value.hex()
        case None | str() | int():
            return value
        case dict():
            if not all(isinstance(key, str) for key in value):
                raise TypeError("a key of canonical JSON is not a string")
            return {key: _without_floats(each) for key, each in value.items()}
        case list() | tuple():
            return [_without_floats(each) for each in value]
        case _:
            raise TypeError(f"canonical JSON has no {type(value).__name__}")
