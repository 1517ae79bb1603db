from __future__ import annotations

import tomllib

import pytest

from aggregator.run_template import template
from edit.config.presets import PRESETS, preset, with_preset
from edit.config.run import RunConfig
from edit.errors import ConfigError

OF_A_RUN = [name for name, one in PRESETS.items() if not one.only_harness and not one.only_swarm]


@pytest.mark.parametrize("name", OF_A_RUN)
def test_a_new_run_has_the_presets_settings_and_no_key_without_effect(name: str) -> None:
    text = with_preset(template(2), name)
    config = RunConfig.from_text(text.encode(), "run.toml")
    for section, keys in PRESETS[name].settings.items():
        for key, value in keys.items():
            found = (
                config.sync.stretches[-1][1] if (section, key) == ("sync", "every") else getattr(getattr(config, section), key)
            )
            assert found == value
    assert config.rounds.start_peers == 2
    assert "# Outer learning rate" in text, "comments stay"


def test_keys_that_a_preset_makes_ineffective_become_comments() -> None:
    text = with_preset(template(), "fedavg")
    assert "momentum" not in tomllib.loads(text)["outer"]
    assert "\n#momentum = 0.85" in text


@pytest.mark.parametrize("name", [name for name, one in PRESETS.items() if one.only_harness])
def test_what_no_run_can_have_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ConfigError, match=f"preset {name}: edit-lab compare has it"):
        with_preset(template(), name)


def test_what_only_a_swarm_can_have_says_so() -> None:
    with pytest.raises(ConfigError, match=r"preset noloco: edit-coordinator cannot run it, a swarm can: edit-peer swarm start"):
        with_preset(template(), "noloco")


@pytest.mark.parametrize("name", OF_A_RUN)
def test_a_preset_written_again_changes_nothing(name: str) -> None:
    text = with_preset(template(2), name, ["sync.outer_steps=156"])
    assert with_preset(text, name, ["sync.outer_steps=156"]) == text


def test_a_preset_with_outer_settings_takes_the_place_of_auto() -> None:
    text = with_preset("[outer]\npreset = 'auto'\n", "diloco")
    outer = RunConfig.from_text(text.encode(), "run.toml").outer
    assert (outer.preset, outer.lr, outer.momentum) == ("manual", 0.7, 0.9)
    assert RunConfig.from_text(with_preset("", "diloco", ["outer.preset=auto"]).encode(), "run.toml").outer.preset == "auto"


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"preset diloko: there is none; did you mean diloco\?"):
        preset("diloko")
    with pytest.raises(ConfigError, match=r"preset zzz: there is none; known are data-parallel, "):
        preset("zzz")


def test_every_preset_says_what_it_does_and_where_it_comes_from() -> None:
    for name, one in PRESETS.items():
        assert one.summary and "arXiv" in one.source, name
        assert one.trains in ("exchange", "data-parallel", "one-replica", "gpa", "demo")


def test_settings_beside_a_preset_win_and_its_own_keys_give_way() -> None:
    text = with_preset(template(), "diloco", ["outer.optimizer=sgd", "sync.every=50"])
    config = RunConfig.from_text(text.encode(), "run.toml")
    assert (config.outer.optimizer, config.sync.every) == ("sgd", 50)
    with pytest.raises(ConfigError, match=r"outer\.momentum has no effect"):
        RunConfig.from_text(
            with_preset(template(), "diloco", ["outer.optimizer=sgd", "outer.momentum=0.5"]).encode(), "run.toml"
        )


@pytest.mark.parametrize(
    ("name", "settings", "stretches"),
    [
        ("muloco-warmup", ["sync.outer_steps=156"], [(120, 1), (36, 30)]),
        ("muloco-warmup", ["sync.outer_steps=111", "sync.every=100"], [(102, 1), (9, 100)]),
        ("muloco-warmup", ["sync.outer_steps=2"], [(1, 1), (1, 30)]),
        ("post-local-sgd", [], [(934, 1), (66, 128)]),
    ],
)
def test_a_warm_up_is_a_tenth_of_the_inner_steps_one_after_each_outer_step(
    name: str, settings: list[str], stretches: list[tuple[int, int]]
) -> None:
    config = RunConfig.from_text(with_preset(template(), name, settings).encode(), "run.toml")
    assert config.sync.stretches == stretches and config.outer.mean_steps == stretches[0][0]


def test_who_changes_h_herself_has_no_other_warm_up() -> None:
    text = with_preset(template(), "muloco-warmup", ["sync.milestones=[[10, 60]]"])
    config = RunConfig.from_text(text.encode(), "run.toml")
    assert (config.sync.every, config.sync.milestones, config.outer.mean_steps) == (30, ((10, 60),), 0)
    text = with_preset(template(), "muloco-warmup", ["outer.mean_steps=5"])
    assert RunConfig.from_text(text.encode(), "run.toml").sync.stretches == [(1000, 30)]


@pytest.mark.parametrize("setting", ["sync.every=1", "sync.every=true", "sync.outer_steps=1", "sync.outer_steps=x"])
def test_where_no_warm_up_fits_is_an_error(setting: str) -> None:
    with pytest.raises(
        ConfigError, match=r"sync\.every = .*, sync\.outer_steps = .*: must be whole numbers above 1 with this preset"
    ):
        with_preset(template(), "muloco-warmup", [setting])


def test_co2_star_has_the_outer_step_of_co2_without_its_delay() -> None:
    late, star = (RunConfig.from_text(with_preset(template(), name).encode(), "run.toml") for name in ("co2", "co2-star"))
    assert star.outer == late.outer and star.outer.optimizer == "co2"
    assert (late.sync.overlap, star.sync.overlap) == (late.sync.every, 0)
