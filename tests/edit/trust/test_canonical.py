"""Canonical JSON: one text for a value, whoever writes it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edit.trust.canonical import MOST_LINE_BYTES, canonical, parse_canonical

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def test_the_text_of_a_value() -> None:
    value = {"b": (1, None, True), "a": {"ü": 0.1, "inf": float("inf"), "zero": -0.0}}
    assert canonical(value) == b'{"a":{"inf":"inf","zero":"-0x0.0p+0","\\u00fc":"0x1.999999999999ap-4"},"b":[1,null,true]}'


@given(VALUES)
def test_a_text_is_read_as_what_was_written(value: object) -> None:
    assert parse_canonical(canonical(value)) == value


@given(st.floats(allow_nan=False))
def test_a_float_keeps_every_bit(number: float) -> None:
    assert float.fromhex(parse_canonical(canonical(number))).hex() == number.hex()


@pytest.mark.parametrize(
    "line",
    [
        b'{"b":1,"a":2}',
        b'{"a": 1}',
        b'{"a":1}\n',
        b'{"a":1,"a":1}',
        b'"\xc3\xbc"',
        b"1.5",
        b"NaN",
        b'{"a":1.0}',
        b"",
        b"[" * 9999,
        b"[" * 300 + b"]" * 300,
    ],
)
def test_every_other_text_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError):
        parse_canonical(line)


def test_a_line_beyond_the_bound_is_refused_unread() -> None:
    with pytest.raises(ValueError, match="at most"):
        parse_canonical(b" " * (MOST_LINE_BYTES + 1))


@pytest.mark.parametrize("value", [{1: 2}, object(), {"a": b"bytes"}])
def test_what_json_does_not_have_is_an_error(value: object) -> None:
    with pytest.raises(TypeError):
        canonical(value)
