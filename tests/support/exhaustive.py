"""What `make test` and `make test-processes` leave to `make test-exhaustive`, which sets EXHAUSTIVE=1.

- A test with the marker `covering` and several parameters runs with each value of each of them, but not with each combination.
- A test with the marker `sampled(n)` runs with one in `n` of its parameters, in their order from the first one on.
- A test, or a parameter, with the marker `exhaustive` does not run at all.
- A property is tried with a quarter of the examples.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import pytest

EXHAUSTIVE = bool(os.environ.get("EXHAUSTIVE"))


def examples(count: int) -> int:
    """How many examples a property is tried with that `make test-exhaustive` tries with `count`."""
    return count if EXHAUSTIVE else max(count // 4, 10)


def rarely(values: Iterable[Any], kept: Sequence[Any]) -> list[Any]:
    """Parameters of which those in `kept` always run; a tuple is a value of each of several names."""
    return [
        value
        if value in kept
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.exhaustive)
        for value in values
    ]


def left_out(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Those of `items` that only `make test-exhaustive` runs."""
    if EXHAUSTIVE:
        return []
    rare = [item for item in items if item.get_closest_marker("exhaustive")]
    for combinations in _with_marker("covering", items, rare):
        kept = _covering(combinations)
        rare += [item for item in combinations if item not in kept]
    for combinations in _with_marker("sampled", items, rare):
        (every,) = next(combinations[0].iter_markers("sampled")).args
        rare += [item for at, item in enumerate(combinations) if at % every]
    return rare


def _with_marker(name: str, items: Sequence[pytest.Item], rare: Sequence[pytest.Item]) -> list[list[pytest.Function]]:
    """The parameters of each test with this marker, without those that are left out already."""
    left, tests = {*items} - {*rare}, dict[str, list[pytest.Function]]()
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker(name) and item in left:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return [*tests.values()]


def _covering(items: Sequence[pytest.Function]) -> list[pytest.Function]:
    """Few of the combinations, in which each value of each parameter occurs: again and again the one with most new values."""
    values = {item: {_value(name, value) for name, value in item.callspec.params.items()} for item in items}
    new = set[Hashable]().union(*values.values())
    kept = []
    while new:
        best = max(items, key=lambda item: len(values[item] & new))
        kept.append(best)
        new -= values[best]
    return kept


def _value(name: str, value: object) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return name, id(value)
    return name, type(value), value
