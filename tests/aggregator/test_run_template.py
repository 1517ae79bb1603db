"""The run.toml of `edit-coordinator init` names every setting, each with a sentence, and changes no default silently."""

from __future__ import annotations

import dataclasses
import re
import tomllib

import pytest

from aggregator.run_template import RUN_TOML, template
from edit.config.run import RunConfig, SwarmConfig

LINE = re.compile(r"(?P<off>#?)(?P<key>\w+) = (?P<value>.*?) +# (?P<meaning>[A-Za-z].*\.)")


def lines_by_section() -> dict[str, dict[str, re.Match[str]]]:
    found: dict[str, dict[str, re.Match[str]]] = {"": {}}
    section = ""
    for line in RUN_TOML.splitlines():
        if line.startswith("["):
            section = line[1 : line.index("]")]
            found[section] = {}
        elif line and not line.startswith("# "):
            match = LINE.fullmatch(line)
            assert match is not None, line
            assert match["key"] not in found[section], line
            found[section][match["key"]] = match
    return found


def test_every_key_of_every_section_is_there_with_a_sentence() -> None:
    config, found = RunConfig(), lines_by_section()
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    sections = {name: value for name, value in values.items() if dataclasses.is_dataclass(value)}
    assert set(found) == {"", *sections}
    for name, section in sections.items():
        assert set(found[name]) == {field.name for field in dataclasses.fields(section)}, name
    assert set(found[""]) == {"name", "seed"}


def test_what_is_commented_out_has_its_default() -> None:
    defaults = dataclasses.asdict(RunConfig())
    for section, keys in lines_by_section().items():
        for key, line in keys.items():
            if line["off"]:
                value = tomllib.loads(f"{key} = {line['value']}")[key]
                assert value == (list(default) if isinstance(default := defaults[section][key], tuple) else default), line[0]


def test_the_template_is_a_configuration() -> None:
    """Its values are the defaults: with the file and without it a run is the same."""
    found = RunConfig.from_mapping(tomllib.loads(RUN_TOML))
    assert found == RunConfig.from_mapping({})
    assert found == dataclasses.replace(RunConfig(), outer=found.outer) and found.outer.preset == "auto"
    assert found.outer == dataclasses.replace(RunConfig().outer, preset="auto", chosen=found.outer.chosen)


def test_the_comment_on_a_swarm_names_its_keys_with_their_defaults() -> None:
    comment = RUN_TOML.split("# Its keys and their defaults", 1)[1].split("\n[", 1)[0]
    named = tomllib.loads("\n".join(re.findall(r"\w+ = [^,\s]+", comment)))
    assert named == dataclasses.asdict(SwarmConfig())


@pytest.mark.parametrize(("peers", "quorum"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (1 << 20, 1 << 19)])
def test_a_template_for_so_many_peers(peers: int, quorum: int) -> None:
    config = RunConfig.from_mapping(tomllib.loads(template(peers)))
    assert config == RunConfig.from_mapping({"rounds": {"start_peers": peers, "quorum": quorum}})
    assert [len(line.partition("#")[0]) for line in template(peers).splitlines() if line.startswith("quorum")] == [32]
