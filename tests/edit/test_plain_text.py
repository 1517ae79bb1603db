import ast
import json
import math
import re
import shlex
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edit.plain_text import MOST_NESTED, json_text, parse_json, printable, quoted, shallow

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
)


ROOT = Path(__file__).parents[2]
# What reads JSON otherwise, each for a reason: the functions that bound its depth, and texts that this program itself has made.
READS_JSON = {
    "edit/plain_text.py",
    "edit/trust/canonical.py",
    "aggregator/server.py",
    "aggregator/swarm/replication.py",
    "peers/identity/policy.py",
}


def no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def as_read(value: object) -> object:
    """What a reader should get of `value`."""
    match value:
        case float() if not math.isfinite(value):
            return None
        case list() | tuple():
            return [as_read(each) for each in value]
        case dict():
            return {key: as_read(each) for key, each in value.items()}
        case _:
            return value


@given(VALUES, st.sampled_from([None, 2]))
def test_json_is_read_back_with_null_for_what_is_not_finite(value, indent):
    assert json.loads(json_text(value, indent=indent), parse_constant=no_constant) == as_read(value)


def test_one_line_without_an_indent():
    assert json_text({"a": [math.nan, 1.5], "b": ("x\ny", -math.inf)}) == '{"a": [null, 1.5], "b": ["x\\ny", null]}'


@pytest.mark.parametrize(
    "number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" + "0" * 400, "-1" + "0" * 400, "9" * 5000]
)
def test_numbers_that_no_double_is_are_refused_where_they_must_be_finite(number):
    with pytest.raises(ValueError, match=r"finite|digits"):
        parse_json(f'{{"a": [1, {number}]}}', finite=True)


@given(VALUES)
def test_what_is_finite_is_read_as_it_is(value):
    text = json_text(value)
    assert parse_json(text, finite=True) == parse_json(text) == json.loads(text)


def test_what_python_writes_of_a_model_is_read():
    assert parse_json('{"time_step_limit": [0.0, Infinity]}') == {"time_step_limit": [0.0, math.inf]}


@pytest.mark.parametrize(("before", "after"), [("[", "]"), ('{"a":', "}"), ('[1, {"a":', "}, []]")])
def test_what_is_nested_more_deeply_than_anybody_writes_it_is_refused(before, after):
    each = before.count("[") + before.count("{")
    fits = before * (MOST_NESTED // each) + "1" + after * (MOST_NESTED // each)
    assert shallow(parse_json(fits, finite=True)) == parse_json(fits) == json.loads(fits)
    for deep in (before + fits + after, before * 300 + "1" + after * 300, "[" * 100_000):
        for finite in (True, False):
            with pytest.raises(ValueError, match="nested too deeply"):
                parse_json(deep, finite=finite)


def test_json_is_read_where_its_depth_is_bounded():
    packages = [ROOT / name for name in ("edit", "peers", "aggregator", "proto")]
    found = {
        str(path.relative_to(ROOT))
        for package in packages
        for path in package.rglob("*.py")
        if not path.is_relative_to(ROOT / "edit/lab")  # reads what it has written
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("json.loads", "json.load")
    }
    assert found <= READS_JSON, "use edit.plain_text.parse_json, or edit.trust.canonical.parse_canonical"


def test_a_value_that_json_does_not_have_is_an_error():
    with pytest.raises(TypeError):
        json_text({"a": {1, 2}})
    with pytest.raises(TypeError):
        json_text({"a": {1, 2}, "b": math.nan})


@given(st.text())
def test_a_printed_line_has_nothing_that_a_terminal_obeys(text):
    shown = printable(text)
    assert len(shown) == len(text)
    assert not {unicodedata.category(c) for c in shown} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert all(a == b for a, b in zip(shown, text, strict=True) if b.isprintable())


@pytest.mark.parametrize("text", ["\x1b[31mred", "a\nb", "a\r\nb", "x\u202ey", "x\u2066y", "\x9b2J", "a\u2028b", "\x07"])
def test_escapes_line_ends_and_marks_of_direction_become_spaces(text):
    assert printable(text).isprintable() and " " in printable(text)
    assert printable("ordinary, auch mit Umlauten: äöü") == "ordinary, auch mit Umlauten: äöü"


@pytest.mark.parametrize("path", ["runs/a", "my run", "it's", "$HOME/run", "-x y"])
def test_a_path_in_a_command_is_one_word(path: str) -> None:
    assert shlex.split(f"edit-peer run --home {quoted(Path(path))} --data PATH") == [
        *("edit-peer", "run", "--home", path, "--data", "PATH")
    ]


def test_commands_are_printed_with_quoted_folders() -> None:
    bare = re.compile(r"edit-(?:coordinator|peer) [^\n]*(?:--home|--state|--below) \{(?!quoted\()")
    sources = (path for folder in ("aggregator", "edit", "peers") for path in (ROOT / folder).rglob("*.py"))
    texts = {path: path.read_text(encoding="utf-8") for path in sources}
    assert [(path.name, found[0]) for path, text in texts.items() for found in bare.finditer(text)] == []
    assert sum(len(re.findall(r"(?:--home|--state) \{quoted\(", text)) for text in texts.values()) > 20
