"""Every setting that the documents name exists, and what they tell the reader to write together is a configuration.

As a reader would: what a passage writes is put into the run.toml of `edit-coordinator init`, and what an error then calls
ineffective is removed, unless the passage itself wrote it.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aggregator.run_template import RUN_TOML
from edit.config.run import RunConfig, SwarmConfig
from edit.config.validation import build
from edit.errors import ConfigError
from peers.identity.policy import Sections
from tests.test_documents import DOCUMENTS

DEFAULTS = RunConfig()
TEMPLATE = tomllib.loads(RUN_TOML)
SECTIONS = {
    f.name: getattr(DEFAULTS, f.name) for f in dataclasses.fields(DEFAULTS) if dataclasses.is_dataclass(f.default_factory)
} | {"swarm": SwarmConfig()}
PLACEHOLDER = 4  # for N, P and the like: divides the template's H, so that it is a number of groups, too
FILE = "py|pem|key|json|safetensors"  # `server.key` is none
NAMED = re.compile(rf"`(?P<section>{'|'.join(SECTIONS)})\.(?!(?:{FILE})`)(?P<key>\w+)(?: = (?P<value>[^`]+))?`")
BRACKETED = re.compile(r"`\[(?P<section>[a-z]+)\](?: (?P<key>\w+)(?: = (?P<value>[^`]+))?)?`")
BARE = re.compile(r"`(?P<key>[a-z]\w*) = (?P<value>[^`]+)`")
INEFFECTIVE = re.compile(r"(\w+)\.(\w+) has no effect with .*; remove it")
Written = dict[str, dict[str, Any]]


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def passages(text: str) -> Iterator[tuple[str, str]]:
    """(section of the table it stands in or '', one sentence or cell): what is written together belongs together."""
    section = ""
    for line in re.sub(r"\n(?![\n|#-])", " ", without_blocks(text)).split("\n"):
        if not line.startswith("|"):
            section = ""
        elif not section:
            headed = BRACKETED.findall(line)
            section = headed[0][0] if len(headed) == 1 else "-"
        for cell in line.split("|") if line.startswith("|") else [line]:
            for sentence in re.split(r"(?<=[.;?:])\s", cell):
                yield section.strip("-"), sentence


def value_of(text: str) -> Any:
    return PLACEHOLDER if re.fullmatch("[A-Z]", text) else tomllib.loads(f"value = {text}")["value"]


def settings_in(section: str, passage: str) -> Iterator[tuple[str, str, str | None]]:
    """(section, key, what is written or None) of every setting that a passage names."""
    for match in [*NAMED.finditer(passage), *BRACKETED.finditer(passage)]:
        yield match["section"], match["key"], match["value"]
    alone = {match["section"] for match in BRACKETED.finditer(passage) if not match["key"]}
    section = section or (alone.pop() if len(alone) == 1 else "")  # `key = value` in `[section]`
    for match in BARE.finditer(passage):
        yield section, match["key"], match["value"]


def read(written: Written) -> RunConfig:
    """The template's configuration with this written into it. Raises ConfigError."""
    whole = copy.deepcopy(TEMPLATE)
    if "swarm" in written:  # in place of these
        del whole["server"], whole["aggregators"]
    for section, values in written.items():
        whole.setdefault(section, {}).update(values)
    while True:
        try:
            return RunConfig.from_mapping(whole)
        except ConfigError as error:
            found = INEFFECTIVE.fullmatch(str(error))
            if found is None or found[2] in written.get(found[1], {}):
                raise
            del whole[found[1]][found[2]]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_settings_that_are_named_exist(document: Path) -> None:
    for section, passage in passages(document.read_text(encoding="utf-8")):
        for of, key, _ in settings_in(section, passage):
            assert of in SECTIONS, f"{key}: of which section? {passage}"
            assert not key or hasattr(SECTIONS[of], key), f"{of}.{key}: {passage}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_passage_writes_is_a_configuration(document: Path) -> None:
    before: Written = {}
    for section, passage in passages(document.read_text(encoding="utf-8")):
        written: Written = copy.deepcopy(before) if passage.strip().startswith("the same") else {}
        for of, key, value in settings_in(section, passage):
            if value is not None:
                written.setdefault(of, {})[key] = value_of(value)
        if not written:
            continue
        try:
            config = read(written)
        except ConfigError as error:
            pytest.fail(f"{error}\n  in: {passage}")
        for of, values in written.items():
            for key, value in values.items():
                read_back = getattr(getattr(config, of), key)
                assert read_back == (tuple(value) if isinstance(value, list) else value)
        before = written


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_toml_blocks_are_configurations(document: Path) -> None:
    for block in blocks(document.read_text(encoding="utf-8"), "toml"):
        values = tomllib.loads(block)
        if values.keys() & {"accept", "limits", "require"}:  # a policy.toml
            assert build(Sections, values, ""), block
        else:
            assert read(values), block


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_defaults_that_are_told_are_the_defaults(document: Path) -> None:
    """`section.key` (3): the number in parentheses right behind a setting is its default."""
    for section, key, told in re.findall(
        rf"`({'|'.join(SECTIONS)})\.(\w+)` \(([\d.]+)\)", document.read_text(encoding="utf-8")
    ):
        assert getattr(SECTIONS[section], key) == float(told), f"{section}.{key}"


def test_uncommenting_a_line_of_the_template_changes_nothing_or_names_what_makes_it_ineffective() -> None:
    section = ""
    template = RunConfig.from_mapping(tomllib.loads(RUN_TOML))
    for line in RUN_TOML.splitlines():
        section = line[1 : line.index("]")] if line.startswith("[") else section
        if not re.match(r"#\w+ = ", line):
            continue
        try:
            found = RunConfig.from_mapping(tomllib.loads(RUN_TOML.replace(line, line[1:], 1)))
            expected = template if found.outer.preset == "auto" else dataclasses.replace(template, outer=RunConfig().outer)
            assert found == expected and (found.outer == template.outer or section == "outer"), line
        except ConfigError as error:
            assert INEFFECTIVE.fullmatch(str(error)) and str(error).startswith(f"{section}."), line


def test_the_documents_name_many_settings() -> None:
    """Else the patterns above would find nothing, and prove nothing."""
    named = {
        (of, key)
        for document in DOCUMENTS
        for section, passage in passages(document.read_text(encoding="utf-8"))
        for of, key, _ in settings_in(section, passage)
    }
    assert len(named) > 40
