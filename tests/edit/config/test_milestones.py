"""H that changes during the run: what the settings may be, and what follows from them for an outer step."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edit.config.algorithm import SyncConfig
from edit.config.in_force import in_force, rate_factor
from edit.config.run import RunConfig
from edit.errors import ConfigError

WARM: dict[str, Any] = {"every": 1, "outer_steps": 10, "milestones": [[3, 8], [5, 4]]}


def configured(sync: dict[str, Any] = WARM, **sections: object) -> RunConfig:
    return RunConfig.from_mapping({"sync": sync, **sections})


def test_each_outer_step_has_the_h_of_the_last_milestone() -> None:
    sync = configured().sync
    assert [sync.every_at(step) for step in range(10)] == [1, 1, 1, 8, 8, 4, 4, 4, 4, 4]
    for step in range(11):
        assert sync.inner_steps_before(step) == sum(sync.every_at(before) for before in range(step)), step
    for first in range(10):
        for last in range(first, 10):
            assert sync.least_interval(first, last) == min(sync.every_at(step) for step in range(first, last + 1))
    assert sync.usual_every() == 4
    assert sum(outer_steps for outer_steps, _ in sync.stretches) == sync.outer_steps
    assert SyncConfig(every=6, outer_steps=8, milestones=((4, 2),)).usual_every() == 2, "the smaller of two"
    assert [SyncConfig(every=1, outer_steps=9, milestones=((6, 5),)).usual_every(first) for first in (0, 3, 4, 7)] == [
        1,
        1,
        5,
        5,
    ]


def test_with_groups_an_outer_step_has_its_share() -> None:
    sync = configured({"every": 4, "groups": 2, "outer_steps": 8, "milestones": [[4, 8]]}).sync
    assert [sync.interval_at(step) for step in (0, 3, 4, 7)] == [2, 2, 4, 4]
    assert sync.inner_steps_before(8) == 4 * 2 + 4 * 4
    assert [step for step in range(8) if sync.is_first_with_another(step)] == [4, 5], "each group once"


def test_peers_get_them_and_without_them_the_configuration_is_as_before() -> None:
    config = configured(outer={"mean_steps": 3, "correlation": 0.4})
    assert RunConfig.from_json(config.to_json()) == config
    plain = json.loads(RunConfig().to_json())
    assert "milestones" not in plain["sync"] and not {"mean_steps", "correlation"} & plain["outer"].keys()


@pytest.mark.parametrize(
    ("mapping", "says"),
    [
        ({"milestones": [[0, 8]]}, r"sync\.milestones = '\[0, 8\]': must name outer steps that rise, from 1"),
        ({"milestones": [[3, 8], [3, 4]]}, r"sync\.milestones = '\[3, 4\]': must name outer steps that rise"),
        ({"milestones": [[1000, 8]]}, r"sync\.milestones .*below sync\.outer_steps \(1000\)"),
        ({"milestones": [[3, 0]]}, r"sync\.milestones .*H must be between 1 and"),
        ({"milestones": [[3, 128]]}, r"sync\.milestones .*H is 128 before, so it has no effect"),
        ({"milestones": [[3, 8], [4, 8]]}, r"sync\.milestones .*H is 8 before"),
        ({"milestones": [3, 8]}, r"sync\.milestones: must be a list of lists of 2 whole numbers"),
        ({"milestones": [[3, 8, 1]]}, r"sync\.milestones: must be a list of lists of 2 whole numbers"),
        ({"milestones": [[3, True]]}, r"sync\.milestones: must be a list of lists of 2 whole numbers"),
        ({"milestones": [[3, 7]], "groups": 2}, r"sync\.milestones .*multiple of sync\.groups \(2\)"),
        ({"milestones": [[3, 8]], "groups": 2}, r"sync\.milestones .*and so must the outer step"),
        ({"milestones": [[3, 8]], "mode": "delayed", "delay": 9}, r"sync\.milestones .*sync\.delay \(9\) must not exceed"),
        ({"milestones": [[3, 8]], "schedule": "time"}, r'sync\.milestones .*must be absent with sync\.schedule = "time"'),
        ({"milestones": [[3, 8]], "dylu": True}, r"sync\.dylu = True: cannot be kept with sync\.milestones"),
        ({"milestones": [[3, 8]], "mode": "eager"}, r"sync\.mode .*must not be eager with sync\.milestones"),
    ],
)
def test_what_cannot_be_is_an_error_that_names_both_keys(mapping: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        configured(mapping)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"rounds": {"max_staleness": 1}}, r"rounds\.max_staleness .*must be 0 with sync\.milestones"),
        ({"outer": {"algorithm": "gossip"}}, r"outer\.algorithm .*must be mean with sync\.milestones"),
        ({"outer": {"mean_steps": 10}}, r"outer\.mean_steps .*must be below sync\.outer_steps \(10\)"),
        ({"outer": {"mean_steps": 3, "momentum_warmup": 2}}, r"momentum_warmup .*must be 0 with outer\.mean_steps"),
        ({"outer": {"mean_steps": 3, "correct": "heloco"}}, r'mean_steps .*must be 0 with outer\.correct = "heloco"'),
        ({"outer": {"mean_steps": 3, "optimizer": "co2"}}, r'mean_steps has no effect with outer\.optimizer = "co2"'),
        ({"outer": {"correlation": 0.5, "optimizer": "sgd"}}, r'correlation has no effect with outer\.optimizer = "sgd"'),
    ],
)
def test_so_is_what_the_other_sections_rule_out(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        configured(**sections)


def test_the_rate_follows_h_only_where_h_changes() -> None:
    with pytest.raises(ConfigError, match=r"outer\.correlation .*must be 0 without sync\.milestones"):
        configured({"every": 8}, outer={"correlation": 0.5})


def test_auto_chooses_by_the_h_of_most_outer_steps() -> None:
    long = {"every": 128, "outer_steps": 1000, "milestones": [[400, 8]]}
    assert configured(long, outer={"preset": "auto"}).outer.momentum == 0.6, "a large momentum hurts with H 8"
    assert configured({**long, "milestones": [[600, 8]]}, outer={"preset": "auto"}).outer.momentum == 0.85


def test_steps_that_take_the_mean_have_no_part_in_the_h_of_most_outer_steps() -> None:
    warm = {"every": 1, "outer_steps": 1000, "milestones": [[769, 128]]}
    assert configured(warm, outer={"preset": "auto", "mean_steps": 769}).outer.momentum == 0.85
    config = configured(warm, outer={"lr": 0.9, "momentum": 0.4, "mean_steps": 769, "correlation": 0.5})
    assert in_force(config, 769).lr == 0.9


def test_what_is_in_force_at_each_outer_step() -> None:
    config = configured(outer={"lr": 0.7, "momentum": 0.6, "mean_steps": 3, "correlation": 0.4}, inner={"accumulation": 2})
    warm, grown, usual = (in_force(config, step) for step in (2, 3, 5))
    assert (warm.every, warm.batch, warm.lr, warm.momentum) == (1, 8, 1.0, 0.0)
    assert (usual.every, usual.lr, usual.momentum) == (4, 0.7, 0.6)
    # twice the H of most outer steps: rho / (1 - rho) is twice 0.4 / 0.6, so rho is 4 / 7
    assert grown.lr == pytest.approx(0.7 * (1 + 0.6 / (1 - 0.6 * 0.4)) / (1 + 0.6 / (1 - 0.6 * 4 / 7)))
    assert (grown.every, grown.momentum) == (8, 0.6)
    assert in_force(configured(outer={"optimizer": "sgd", "lr": 1.0}), 0).momentum == 0.0
    assert in_force(config, 2, (10, 10 * 16 * 128)).batch == 8, "it stays, whatever a user's own loop counts"
    growing = configured(inner={"accumulation": 2, "batch_growth": 4})
    assert in_force(growing, 2, (10, 10 * 16 * 128)).batch == 16 and in_force(growing, 2).batch == 0


def test_the_rate_falls_where_successive_steps_agree_more() -> None:
    factors = [rate_factor(0.9, 0.3, ratio) for ratio in (0.25, 0.5, 1.0, 2.0, 4.0)]
    assert factors == sorted(factors, reverse=True) and factors[2] == 1.0
    assert rate_factor(0.0, 0.3, 4.0) == 1.0, "without momentum a step is nu D whatever H is"
