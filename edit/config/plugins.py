"""The section [plugins]: which plug-ins a configuration may name, and how it pins them. What loads them is `edit.plugins`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from edit.config.validation import OneOf, require, within

__all__ = ["AGREED", "KINDS", "LOCAL", "PREFIX", "OneOfOrEntry", "check_pins", "is_entry", "pin_key"]

PREFIX = "entry:"
AGREED = ("outer", "mergers", "codecs", "penalties")  # whoever computes or replays an outer step must have the same
KINDS = (*AGREED, "models", "optimizers")
LOCAL = ("data", "trackers")  # each process names its own, on its command line: no configuration names or pins them
_PIN = re.compile(r"(?:[0-9A-Za-z.+!-]{1,64} )?sha256:[0-9a-f]{64}")


def is_entry(text: str) -> bool:
    """Return whether `text` is `entry:NAME`."""
    name = text.removeprefix(PREFIX)
    return name != text and name.isascii() and name.isidentifier()


class OneOfOrEntry:
    """One of these texts, or the name of a plug-in."""

    def __init__(self, *built_in: str) -> None:
        self._named = OneOf(*built_in, "entry:NAME")

    @property
    def rule(self) -> str:
        return self._named.rule

    def allows(self, value: str) -> bool:
        return is_entry(value) or (value != "entry:NAME" and self._named.allows(value))


def pin_key(kind: str, name: str) -> str:
    """Return the key of a plug-in in the section."""
    return f"{kind}:{name}"


def check_pins(pins: Mapping[str, str | int | float | bool]) -> None:
    """Raise ConfigError unless each entry is `"KIND:NAME" = "VERSION sha256:HASH"`; the version may be left out."""
    within("plugins (their number)", len(pins), 0, 64)
    for key, value in pins.items():
        kind, _, name = key.partition(":")
        known = kind in KINDS and is_entry(PREFIX + name)
        require(known, f'plugins."{key}"', value, f"must be KIND:NAME with a kind of {', '.join(KINDS)}")
        rule = 'must be "VERSION sha256:HASH"; `--allow` writes it'
        require(isinstance(value, str) and _PIN.fullmatch(value) is not None, f'plugins."{key}"', value, rule)
