"""Check settings and build them from tables: bounds, types, unknown keys. Every fault is a ConfigError that names its field."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from edit.errors import ConfigError

__all__ = ["build", "one_of", "positive", "require", "within"]

_T = typing.TypeVar("_T")


def require(ok: bool, field_name: str, value: object, rule: str) -> None:
    """Raise ConfigError("FIELD = VALUE: RULE") unless `ok`."""
    if not ok:
        raise ConfigError(f"{field_name} = {value!r}: {rule}")


def positive(field_name: str, value: float) -> None:
    """Raise ConfigError unless `value` is finite and above 0."""
    require(math.isfinite(value) and value > 0, field_name, value, "must be a finite number above 0")


def within(field_name: str, value: float, low: float, high: float) -> None:
    """Raise ConfigError unless low <= value <= high."""
    require(low <= value <= high, field_name, value, f"must be between {low:g} and {high:g}")


def one_of(field_name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ConfigError unless `value` is one of those allowed."""
    require(value in allowed, field_name, value, f"must be one of {', '.join(allowed)}")


def build(cls: type[_T], mapping: Mapping[str, Any], prefix: str) -> _T:
    """Build a configuration dataclass from nested tables. prefix: stands before its fields in messages, as `sync.`.

    Raises ConfigError for unknown keys and wrong types, and whatever the class itself raises.
    """
    hints = typing.get_type_hints(cls)
    for key in mapping:
        if key not in hints:
            near = difflib.get_close_matches(key, hints, n=1)
            known = f"did you mean {prefix}{near[0]}?" if near else f"known keys: {', '.join(hints)}"
            raise ConfigError(f"{prefix}{key}: unknown key; {known}")
    return cls(**{key: _convert(value, hints[key], f"{prefix}{key}") for key, value in mapping.items()})


def _convert(value: Any, hint: Any, name: str) -> Any:
    origin = typing.get_origin(hint) or hint
    if origin is types.UnionType:  # of a section and None, where its absence means something
        return None if value is None else _convert(value, typing.get_args(hint)[0], name)
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name}: must be a table ([{name}]), not {type(value).__name__}")
        return build(typing.cast(type[Any], hint), value, f"{name}.")
    if origin is tuple:
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{name}: must be a list of strings")
        return tuple(value)
    if origin is Mapping and dataclasses.is_dataclass(entry := typing.get_args(hint)[1]):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name}: must be a table of tables")
        return {key: _convert(one, entry, f'{name}."{key}"') for key, one in value.items()}
    if origin is Mapping:
        if not isinstance(value, Mapping) or not all(isinstance(v, (str, int, float, bool)) for v in value.values()):
            raise ConfigError(f"{name}: must be a table of plain values")
        return dict(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(f"{name}: must be {hint.__name__}, not {type(value).__name__} ({value!r})")
    return value
