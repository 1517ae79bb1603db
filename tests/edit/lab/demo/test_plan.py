import tomllib
from pathlib import Path

import pytest

from edit.errors import ConfigError
from edit.lab.demo.faults import ActionKind, FaultAction, FaultSchedule
from edit.lab.demo.plan import LEADER, OWNER, DemoOptions, FaultPlan, plan_faults, plan_run
from edit.lab.run_toml import to_toml


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"peers": 0}, "--peers 0"),
        ({"peers": 17}, "--peers 17"),
        ({"seed": -1}, "--seed -1"),
        ({"steps": 5, "faults": False}, "--steps 5"),
        ({"steps": 90}, "--no-faults"),
        ({"peers": 6, "hostile": True}, "--peers 6: at least 7 with --hostile"),
        ({"peers": 7, "hostile": True, "swarm": True}, "--hostile: not with --swarm"),
    ],
)
def test_options_out_of_bounds_name_themselves(options, named):
    with pytest.raises(ConfigError, match=named):
        DemoOptions(**options)


@pytest.mark.parametrize("options", [DemoOptions(), DemoOptions(quick=True), DemoOptions(peers=1, steps=10, faults=False)])
def test_run_toml_says_exactly_what_was_planned(options):
    settings = plan_run(options, plan_faults(options), "127.0.0.1:1", "127.0.0.1:2")
    parsed = tomllib.loads(to_toml(settings))
    assert parsed["server"].pop("advertise") == list(settings["server"]["advertise"])
    assert {k: v for k, v in parsed.items() if k != "server"} == {k: v for k, v in settings.items() if k != "server"}
    assert parsed["sync"]["every"] * parsed["sync"]["outer_steps"] <= options.inner_steps


def test_strings_with_quotes_survive_toml():
    text = to_toml({"name": "demo", "model": {"name": "hf:llama", "options": {"a": 'x"y', "b": "c\\d"}}})
    assert tomllib.loads(text) == {"name": "demo", "model": {"name": "hf:llama", "options": {"a": 'x"y', "b": "c\\d"}}}


def test_tables_of_tables_survive_toml():
    codecs = {"up": "topk:k=9", "fragments": {'a"*': {"up": "int8"}, "b.1": {"down": "bf16", "up": "fp32"}}}
    assert tomllib.loads(to_toml({"codec": codecs})) == {"codec": codecs}


def test_a_setting_that_the_run_would_refuse_is_refused_here():
    with pytest.raises(ConfigError, match=r"sync\.evry"):
        to_toml({"sync": {"evry": 3}})


@pytest.mark.parametrize("options", [DemoOptions(), DemoOptions(quick=True)])
def test_the_show_fits_into_the_run_in_order(options):
    faults = plan_faults(options)
    assert 0 < faults.nan_at < faults.huge_at < options.outer_steps - 1
    assert 0 < faults.kill_at < (faults.coordinator_kill_at or options.outer_steps) <= options.outer_steps
    assert bool(faults.coordinator_kill_at) != options.quick
    assert len({faults.slow, faults.killed, faults.damaged, "peer-0"}) == 4
    settings = plan_run(options, faults, "127.0.0.1:1", "127.0.0.1:2")
    assert settings["penalty"]["observations"] <= faults.huge_at - 1  # else the huge one is not yet judged


def test_the_lone_peer_makes_no_fewer_steps_than_peers_that_wait_for_a_killed_coordinator():
    assert DemoOptions(steps=600).lone_steps == 660
    assert DemoOptions(steps=600, faults=False).lone_steps == 600
    assert DemoOptions(steps=125).lone_steps == 120


def test_fewer_peers_mean_fewer_parts():
    assert plan_faults(DemoOptions(peers=2)).killed is None
    assert plan_faults(DemoOptions(peers=2)).slow == "peer-1"
    assert plan_faults(DemoOptions(faults=False, out=Path("x"))) == FaultPlan()


PLAN = FaultPlan(killed="peer-2", kill_at=4, coordinator_kill_at=5)


def test_a_killed_peer_is_missed_before_it_comes_back_and_the_coordinator_waits_for_its_turn():
    schedule = FaultSchedule(PLAN, away_s=3, patience_s=30, coordinator_away_s=1)
    all_train, without = ("peer-1", "peer-2"), ("peer-1",)
    transcript = [
        ((3, all_train, 0.0), ()),
        ((4, all_train, 1.0), (FaultAction(ActionKind.KILL, "peer-2"),)),
        ((4, without, 9.0), ()),  # nothing was committed without it
        ((5, without, 9.1), (FaultAction(ActionKind.RESTART, "peer-2"),)),
        ((5, without, 9.2), ()),
        ((6, without, 12.0), ()),  # it is not yet back
        ((6, all_train, 13.0), ()),
        ((6, all_train, 13.2), (FaultAction(ActionKind.KILL, "coordinator"),)),
        ((6, all_train, 13.9), ()),
        ((6, all_train, 14.3), (FaultAction(ActionKind.RESTART, "coordinator"),)),
        ((7, all_train, 15.0), ()),
    ]
    for arguments, actions in transcript:
        assert schedule.due(*arguments) == actions, arguments
    assert schedule.over


def test_a_peer_comes_back_early_only_after_its_time_away_and_late_even_without_a_commit():
    quick, stuck = (FaultSchedule(PLAN, away_s=3, patience_s=30) for _ in range(2))
    assert quick.due(4, (), 0.0) == stuck.due(4, (), 0.0) == (FaultAction(ActionKind.KILL, "peer-2"),)
    assert quick.due(6, (), 2.9) == ()
    assert quick.due(6, (), 3.0) == (FaultAction(ActionKind.RESTART, "peer-2"),)
    assert stuck.due(4, (), 30.0) == (FaultAction(ActionKind.RESTART, "peer-2"),)
    assert stuck.due(9, (), 59.0) == ()
    assert stuck.due(9, (), 60.0) == ()  # gives up waiting for it
    assert stuck.due(9, (), 60.1) == (FaultAction(ActionKind.KILL, "coordinator"),)


@pytest.mark.parametrize("options", [DemoOptions(swarm=True), DemoOptions(swarm=True, quick=True)])
def test_a_swarm_has_no_coordinator_and_loses_its_leader_and_an_owner_early(options):
    faults = plan_faults(options)
    assert 0 < faults.leader_stop_at < faults.owner_kill_at <= options.outer_steps / 2  # there is time to come back
    assert faults.owner_kill_at < faults.nan_at < faults.huge_at < options.outer_steps - 1
    assert (faults.killed, faults.kill_at, faults.coordinator_kill_at) == (None, 0, 0)
    settings = plan_run(options, faults, "", "")
    assert settings["swarm"]["parts"] == 4 and "server" not in settings
    to_toml(settings)


def test_two_members_lose_none():
    faults = plan_faults(DemoOptions(swarm=True, peers=2))
    assert (faults.leader_stop_at, faults.owner_kill_at) == (0, 0)


def test_the_leader_is_stopped_and_an_owner_killed_once_it_is_known_who_that_is():
    schedule = FaultSchedule(FaultPlan(leader_stop_at=2, owner_kill_at=3), away_s=3, patience_s=30)
    everybody, roles = ("a", "b", "c"), {LEADER: "b", OWNER: "a"}
    transcript = [
        ((2, everybody, 0.0, None), ()),
        ((2, everybody, 1.0, {LEADER: "", OWNER: ""}), ()),  # nobody leads
        ((2, everybody, 2.0, roles), (FaultAction(ActionKind.STOP, "b"),)),
        ((3, ("a", "c"), 4.9, {LEADER: "c", OWNER: "a"}), ()),
        ((3, ("a", "c"), 5.0, {LEADER: "c", OWNER: "a"}), (FaultAction(ActionKind.CONTINUE, "b"),)),
        ((3, ("a", "c"), 6.0, {LEADER: "c", OWNER: "a"}), ()),  # it does not train yet
        ((3, everybody, 7.0, {LEADER: "c", OWNER: "a"}), ()),
        ((3, everybody, 8.0, {LEADER: "c", OWNER: "a"}), (FaultAction(ActionKind.KILL, "a"),)),
        ((4, ("b", "c"), 11.0, {LEADER: "c", OWNER: "b"}), (FaultAction(ActionKind.RESTART, "a"),)),
        ((4, everybody, 12.0, roles), ()),
    ]
    for arguments, actions in transcript:
        assert schedule.due(*arguments) == actions, arguments
    assert schedule.over


def test_no_plan_no_show():
    schedule = FaultSchedule(FaultPlan())
    assert schedule.over
    assert schedule.due(100, (), 1.0) == ()
