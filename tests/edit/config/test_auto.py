from __future__ import annotations

import pytest

from aggregator.run_template import template
from edit.config.auto import choose_outer
from edit.config.overrides import with_settings
from edit.config.presets import without_ineffective
from edit.config.run import RunConfig
from edit.errors import ConfigError


@pytest.mark.parametrize(
    ("outer_steps", "groups", "every", "expected"),
    [
        (1, 1, 30, (0.7, 0.6)),
        (99, 1, 128, (0.7, 0.6)),
        (198, 2, 30, (0.7, 0.6)),
        (100, 1, 16, (0.7, 0.6)),
        (100, 1, 17, (0.8, 0.85)),
        (200, 2, 30, (0.8, 0.85)),
    ],
)
def test_the_choice_follows_from_the_exchanges_of_a_fragment(
    outer_steps: int, groups: int, every: int, expected: tuple[float, float]
) -> None:
    choice = choose_outer(outer_steps=outer_steps, groups=groups, every=every, peers=4)
    assert (choice.optimizer, choice.lr, choice.momentum) == ("nesterov", *expected)
    assert f"{outer_steps // groups} outer steps of each fragment, H {every}, 4 peers" in choice.why


def test_the_choice_is_part_of_the_configuration_that_peers_get_and_is_made_once() -> None:
    config = RunConfig.from_mapping({"sync": {"outer_steps": 50, "every": 30}, "outer": {"preset": "auto"}})
    assert (config.outer.optimizer, config.outer.lr, config.outer.momentum) == ("nesterov", 0.7, 0.6)
    assert config.outer.chosen.startswith("nesterov 0.7 / 0.6: 50 outer steps")
    text = config.to_json()
    assert RunConfig.from_json(text) == config
    forged = text.replace('"lr": 0.7', '"lr": 0.3')
    assert RunConfig.from_json(forged).outer.lr == 0.3, "peers compute with what the run says, and choose nothing themselves"
    assert '"preset"' not in RunConfig().to_json() and '"chosen"' not in RunConfig().to_json()


@pytest.mark.parametrize("key", ["optimizer", "lr", "momentum"])
def test_what_auto_chooses_cannot_be_written_beside_it(key: str) -> None:
    value = "sgd" if key == "optimizer" else 0.5
    with pytest.raises(ConfigError, match=rf'outer.{key} has no effect with outer.preset = "auto", which chooses them'):
        RunConfig.from_mapping({"outer": {"preset": "auto", key: value}})
    with pytest.raises(ConfigError, match=r"outer\.chosen = .*is written by outer\.preset"):
        RunConfig.from_mapping({"outer": {"chosen": "me"}})


def test_a_new_runs_template_gives_way_to_auto() -> None:
    settings = ["outer.preset=auto", "sync.outer_steps=30"]
    text = without_ineffective(with_settings(template(), settings), settings)
    config = RunConfig.from_text(text.encode(), "run.toml")
    assert (config.outer.optimizer, config.outer.lr, config.outer.momentum) == ("nesterov", 0.7, 0.6)


@pytest.mark.parametrize(
    ("tables", "preset"),
    [
        ({}, "auto"),
        ({"outer": {}}, "auto"),
        ({"outer": {"direction": "rda"}}, "auto"),
        ({"outer": {"preset": "manual"}}, "manual"),
        ({"outer": {"optimizer": "sgd"}}, "manual"),
        ({"outer": {"lr": 0.8}}, "manual"),
        ({"outer": {"momentum": 0.85}}, "manual"),
        ({"outer": {"momentum_warmup": 5}}, "manual"),
        ({"outer": {"correct": "heloco"}}, "manual"),
        ({"outer": {"algorithm": "gossip"}}, "manual"),
        ({"rounds": {"merging": "arrivals", "max_staleness": 8}}, "manual"),
    ],
)
def test_the_choice_is_the_default_where_nothing_is_written_of_the_optimizer(
    tables: dict[str, dict[str, object]], preset: str
) -> None:
    config = RunConfig.from_mapping({"sync": {"outer_steps": 50, "every": 30}, **tables})
    assert (config.outer.preset, bool(config.outer.chosen)) == (preset, preset == "auto")
    assert RunConfig.from_json(config.to_json()) == config


def test_what_is_not_a_table_is_said_as_ever() -> None:
    for tables in ({"outer": 3}, {"rounds": []}):
        with pytest.raises(ConfigError, match="table"):
            RunConfig.from_mapping(tables)
