"""Settings on the command line: `--set SECTION.KEY=VALUE`, into tables or into the text of a run.toml, whose comments stay."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from typing import Any

from edit.errors import ConfigError
from edit.plain_text import parse_toml

__all__ = ["commented_out", "options_of", "set_key", "with_settings"]


def set_key(tables: dict[str, Any], setting: str) -> None:
    """Write `KEY=VALUE` into nested tables. The value is TOML's, or a word without quotes, as in sync.mode=delayed.

    Raises ConfigError when it is not of that form.
    """
    names, value = _parse(setting)
    for name in names[:-1]:
        tables = tables.setdefault(name, {})
        if not isinstance(tables, dict):
            raise ConfigError(f"--set {setting}: {name} is not a table")
    tables[names[-1]] = value


def options_of(option: str, given: Sequence[str]) -> dict[str, str | int | float | bool]:
    """Return the values that a repeatable command-line option names, each `KEY=VALUE`; the last one of a key counts.

    option: its name, for the message. A value is TOML's string, integer, float or boolean, or a word without quotes.
    Raises ConfigError for another form.
    """
    values: dict[str, str | int | float | bool] = {}
    for each in given:
        key, _, _ = each.partition("=")
        if "=" not in each or not key.strip().isidentifier():
            raise ConfigError(f"{option} {each}: must be KEY=VALUE, as split=train")
        _, value = _parse(each)
        if not isinstance(value, str | int | float | bool):
            raise ConfigError(f"{option} {each}: must be a word, a number, true or false")
        values[key.strip()] = value
    return values


def with_settings(text: str, settings: Sequence[str]) -> str:
    """Return the text of a run.toml with these settings, `KEY=VALUE` or `SECTION.KEY=VALUE`, written into it.

    A line that sets a key, or shows its default behind a "#", is replaced in its place and keeps its comment; another key is
    added to its section. What a key may be is not checked here. Raises ConfigError where that is not possible, and
    ValueError when the text is not TOML.
    """
    for setting in settings:
        tables = parse_toml(text)
        before = parse_toml(text)
        set_key(tables, setting)
        if tables == before:
            continue
        names, value = _parse(setting)
        if len(names) <= 2:
            section, key = ["", *names][-2:]
            text = _written(text, section, key, value)
        try:
            done = parse_toml(text) == tables
        except ValueError:
            done = False
        if not done:
            raise ConfigError(f"--set {setting}: cannot be written on a line of its own; edit run.toml instead")
    return text


def commented_out(text: str, section: str, key: str) -> str:
    """Return the text with all lines that set this key behind a "#". Raises ConfigError where it has no line of its own."""
    lines, now = text.splitlines(), ""
    for first, end in _statements(lines):
        if head := re.match(r"\s*\[\s*([^\]]*?)\s*\]", lines[first]):
            now = head[1]
        elif now == section and re.match(rf"{re.escape(key)}\s*=", lines[first]):
            lines[first:end] = [f"#{line}" for line in lines[first:end]]
            return "\n".join(lines) + "\n"
    raise ConfigError(f"{section}.{key} has no line of its own; edit run.toml instead")


def _statements(lines: Sequence[str]) -> list[tuple[int, int]]:
    """Return where each head, each key with its value, each comment and each empty line begins and ends: a value, such as an
    array, may have several lines.
    """
    found, first = [], 0
    while first < len(lines):
        ends = range(first + 1, len(lines) + 1)
        end = next((end for end in ends if _is_toml("\n".join(lines[first:end]))), first + 1)
        found.append((first, end))
        first = end
    return found


def _is_toml(text: str) -> bool:
    try:
        parse_toml(text)
    except ValueError:
        return False
    return True


def _parse(setting: str) -> tuple[list[str], Any]:
    key, equals, value = setting.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise ConfigError(f"--set {setting}: must be KEY=VALUE, as sync.every=100")
    try:
        return names, parse_toml(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return names, value.strip()
    except ValueError as error:
        raise ConfigError(f"--set {key}: {error}") from error


def _written(text: str, section: str, key: str, value: Any) -> str:
    """Return the text with this key of this section; section: '' for the keys above all sections."""
    lines = text.splitlines()
    begins = [first for first, _ in _statements(lines)]
    heads = [i for i in begins if lines[i].lstrip().startswith("[")]
    of_section = re.compile(rf"\s*\[\s*{re.escape(section)}\s*\]")
    first = -1 if not section else next((i for i in heads if of_section.match(lines[i])), None)
    assignment = f"{key} = {_toml(value)}"
    if first is None:
        return "\n".join([*lines, "", f"[{section}]", assignment]) + "\n"
    end = next((i for i in heads if i > first), len(lines))
    shown = re.compile(rf"#?{re.escape(key)}\s*=(.*)")
    found = [i for i in begins if first < i < end and shown.fullmatch(lines[i])]
    found = [i for i in found if not lines[i].startswith("#")] or found
    if found:
        comment = _comment(lines[found[0]].partition("=")[2])
        lines[found[0]] = f"{assignment:<31} {comment}" if comment else assignment
    else:
        lines.insert(first + 1, assignment)
    return "\n".join(lines) + "\n"


def _comment(rest: str) -> str:
    """Return the comment behind the value of a line, with its #."""
    for match in re.finditer("#", rest):
        try:
            parse_toml(f"value = {rest[: match.start()]}")
        except ValueError:
            continue
        return rest[match.start() :]
    return ""


def _toml(value: Any) -> str:
    """Return a value as TOML writes it on one line."""
    match value:
        case dict():
            return (
                "{ " + ", ".join(f"{json.dumps(key)} = {_toml(each)}" for key, each in value.items()) + " }" if value else "{}"
            )
        case list():
            return f"[{', '.join(map(_toml, value))}]"
        case bool() | str():
            return json.dumps(value)
        case _:
            return str(value)
