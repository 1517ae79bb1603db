"""Check settings and build them from tables: bounds, types, unknown keys. Every fault is a ConfigError that names its field."""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from edit.errors import ConfigError

__all__ = [
    "Between",
    "Bound",
    "Matches",
    "OneOf",
    "Positive",
    "bounds_of",
    "build",
    "check_bounds",
    "one_of",
    "require",
    "within",
]

_T = typing.TypeVar("_T")
_MOST_INTEGER = 1 << 64


def require(ok: bool, field_name: str, value: object, rule: str) -> None:
    """Raise ConfigError("FIELD = VALUE: RULE") unless `ok`."""
    if not ok:
        raise ConfigError(f"{field_name} = {value!r}: {rule}")


class Bound(Protocol):
    """What the value of one setting may be, declared with its type: `every: Annotated[int, Between(1, 100)]`."""

    @property
    def rule(self) -> str:
        """What a message says of a wrong value: "must be ..."."""

    def allows(self, value: Any) -> bool:
        """Return whether the setting may have this value, which is of the declared type."""


@dataclass(frozen=True, slots=True)
class Between:
    """A number from `low` to `high`, both included."""

    low: float
    high: float

    @property
    def rule(self) -> str:
        return f"must be between {self.low:g} and {self.high:g}"

    def allows(self, value: Any) -> bool:
        return bool(self.low <= value <= self.high)


@dataclass(frozen=True, slots=True)
class Positive:
    """A finite number above 0."""

    rule: str = "must be a finite number above 0"

    def allows(self, value: Any) -> bool:
        return bool(0 < value < math.inf)


class OneOf:
    """One of these texts."""

    def __init__(self, *allowed: str) -> None:
        self.allowed = allowed

    @property
    def rule(self) -> str:
        return f"must be one of {', '.join(self.allowed)}"

    def allows(self, value: Any) -> bool:
        return value in self.allowed


@dataclass(frozen=True, slots=True)
class Matches:
    """A value of which a function says whether it is right."""

    test: Callable[[Any], bool]
    rule: str

    def allows(self, value: Any) -> bool:
        return self.test(value)


# Of the classes that were asked for: hints take milliseconds to resolve.
_bounds: dict[type, Mapping[str, Bound]] = {}
_hints: dict[type, Mapping[str, Any]] = {}


def bounds_of(cls: type) -> Mapping[str, Bound]:
    """Return the bounds that the fields of a configuration dataclass are declared with, by field name."""
    if cls not in _bounds:
        hints = typing.get_type_hints(cls, include_extras=True)
        declared = {name: hint for name, hint in hints.items() if typing.get_origin(hint) is typing.Annotated}
        _bounds[cls] = {name: hint.__metadata__[0] for name, hint in declared.items()}
    return _bounds[cls]


def check_bounds(prefix: str, section: object) -> None:
    """Raise ConfigError for a field outside its declared bounds. prefix: stands before its fields in messages, as `sync.`."""
    for name, bound in bounds_of(type(section)).items():
        value = getattr(section, name)
        require(bound.allows(value), f"{prefix}{name}", value, bound.rule)


def within(field_name: str, value: float, low: float, high: float) -> None:
    """Raise ConfigError unless low <= value <= high."""
    bound = Between(low, high)
    require(bound.allows(value), field_name, value, bound.rule)


def one_of(field_name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ConfigError unless `value` is one of those allowed."""
    bound = OneOf(*allowed)
    require(bound.allows(value), field_name, value, bound.rule)


def build(cls: type[_T], mapping: Mapping[str, Any], prefix: str) -> _T:
    """Build a configuration dataclass from nested tables. prefix: stands before its fields in messages, as `sync.`.

    Raises ConfigError for unknown keys and wrong types, and whatever the class itself raises.
    """
    if (hints := _hints.get(cls)) is None:
        hints = _hints[cls] = typing.get_type_hints(cls)
    for key in mapping:
        if key not in hints:
            near = difflib.get_close_matches(key, hints, n=1)
            known = f"did you mean {prefix}{near[0]}?" if near else f"known keys: {', '.join(hints)}"
            raise ConfigError(f"{prefix}{key}: unknown key; {known}")
    return cls(**{key: _convert(value, hints[key], f"{prefix}{key}") for key, value in mapping.items()})


def _has_huge(value: Any) -> bool:
    """Return whether a value has an integer that no setting has, and that may be too large for a float, or to be shown."""
    match value:
        case int():
            return not -_MOST_INTEGER <= value <= _MOST_INTEGER
        case list() | tuple():
            return any(map(_has_huge, value))
        case Mapping():
            return any(map(_has_huge, value.values()))
    return False


def _convert(value: Any, hint: Any, name: str) -> Any:
    origin = typing.get_origin(hint) or hint
    if origin is types.UnionType:  # of a section and None, where its absence means something
        return None if value is None else _convert(value, typing.get_args(hint)[0], name)
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name}: must be a table ([{name}]), not {type(value).__name__}")
        return build(typing.cast(type[Any], hint), value, f"{name}.")
    if _has_huge(value):
        raise ConfigError(f"{name}: must have no integer above 2^64 or below -2^64")
    if origin is tuple and typing.get_origin(pair := typing.get_args(hint)[0]) is tuple:
        numbers = typing.get_args(pair)
        fits = isinstance(value, (list, tuple)) and all(
            isinstance(one, (list, tuple)) and len(one) == len(numbers) and all(type(each) is int for each in one)
            for one in value
        )
        if not fits:
            raise ConfigError(f"{name}: must be a list of lists of {len(numbers)} whole numbers each, not {value!r:.80}")
        return tuple(tuple(one) for one in value)
    if origin is tuple:
        item, of = (int, "whole numbers") if typing.get_args(hint)[0] is int else (str, "strings")
        if not isinstance(value, (list, tuple)) or not all(type(each) is item for each in value):
            raise ConfigError(f"{name}: must be a list of {of}")
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
    if hint is datetime.date and isinstance(value, datetime.datetime):  # which is a date to Python
        raise ConfigError(f"{name} = {value}: must be a day such as 2027-01-01, without a time")
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(f"{name}: must be {hint.__name__}, not {type(value).__name__} ({value!r})")
    return value
