"""The simulated run against closed formulas, and against the rules that the real machine keeps."""

import dataclasses
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edit.codecs import codec
from edit.config.algorithm import RoundsConfig
from edit.config.run import CODECS, RunConfig
from edit.errors import ConfigError, LocalProtocolError
from edit.lab.simulation.accounting import Accounting, Share
from edit.lab.simulation.event_queue import EventQueue
from edit.lab.simulation.link import HubLink
from edit.lab.simulation.outcome import Outcome
from edit.lab.simulation.scenario import _NOT_SIMULATED, SHARED, Scenario
from edit.lab.simulation.simulate import Simulation, simulate
from edit.rounds import events
from tests.support.exhaustive import examples

FLEET = ("peers=6", "sync.every=20", "sync.outer_steps=40", "size.parameters=10e6", "codec.up=int8", "codec.down=bf16")


def run(*settings: str) -> Outcome:
    return simulate(Scenario.read(None, [*FLEET, *settings]))


def exchange_s(scenario: Scenario) -> float:
    """Header and view one latency each, asking and abort_on_error one each, and the bytes both ways."""
    link = scenario.link
    return 4 * link.latency_s + 8e-6 * (scenario.up_bytes / link.up_mbit + scenario.down_bytes / link.down_mbit)


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    noisy = (
        "compute.sigma=0.3",
        "compute.jitter=0.1",
        "faults.failures_per_hour=3",
        "faults.leaves_per_hour=1",
        "link.sigma=0.5",
    )
    first = run(*noisy, "seed=7")
    assert first == run(*noisy, "seed=7")
    assert first.seconds != run(*noisy, "seed=8").seconds
    assert first.failures > 0 and first.leaves > 0 and first.returns > 0


def test_blocking_goodput_is_the_closed_formula() -> None:
    scenario = Scenario.read(None, [*FLEET, "link.up_mbit=50"])
    training, exchange = 20 * scenario.compute.step_s, exchange_s(scenario)
    outcome = simulate(scenario)
    assert exchange == pytest.approx(4 * 0.02 + 10_156_250 * 8 / 50e6 + 20e6 * 8 / 1e9)
    assert outcome.goodput == pytest.approx(training / (training + exchange), rel=2e-3)
    assert outcome.utilisation == pytest.approx(outcome.goodput, rel=2e-3)
    longer = run("link.up_mbit=50", "sync.outer_steps=60")
    assert longer.seconds - outcome.seconds == pytest.approx(20 * (training + exchange))
    assert (outcome.commits, outcome.aborts, outcome.participation, outcome.late) == (40, 0, 1.0, 0)
    assert outcome.staleness == {"0": 40 * 6}


def test_a_class_that_dies_is_away_for_as_long_as_it_says() -> None:
    """One of six dies within the second phase and is back within the fourth; what it misses has five contributors."""
    fleet = ("sync.every=20", "compute.step_s=1", "rounds.quorum=3", "membership.heartbeat_s=1", "membership.lease_s=3")
    untouched, hit = (run(*fleet, f"classes=[{{share=0.1667{dies}}}]") for dies in ("", ",dies_s=30,after_s=40"))
    assert (untouched.failures, hit.failures, hit.returns) == (0, 1, 1)
    assert hit.commits == untouched.commits == 40
    made = [sum(each.staleness.values()) for each in (untouched, hit)]
    assert made[0] - made[1] in (2, 3)


def test_a_view_is_seen_when_it_arrives_whatever_the_rounding() -> None:
    """(published + latency) - latency is less than published now and then: whoever looks again then, has missed it."""
    fleet = ("peers=3", "rounds.quorum=3", "sync.outer_steps=8", "sync.mode=delayed", "sync.delay=1", "compute.jitter=0.05")
    assert sum(run(*fleet, f"seed={seed}").aborts for seed in range(150)) == 0


def test_delayed_hides_an_exchange_that_fits_into_the_delay_and_no_more() -> None:
    scenario = Scenario.read(None, [*FLEET, "link.up_mbit=50", "sync.mode=delayed", "sync.delay=3"])
    assert exchange_s(scenario) < 3 * scenario.compute.step_s
    hidden = simulate(scenario)
    assert hidden.utilisation == pytest.approx(1.0, abs=1e-3)
    assert hidden.goodput == pytest.approx(1.0, abs=4e-3)  # the last exchange has no training to hide behind
    assert set(hidden.staleness) == {"0", "1"}
    cut = dataclasses.replace(
        scenario, run=dataclasses.replace(scenario.run, sync=dataclasses.replace(scenario.run.sync, delay=1))
    )
    assert simulate(cut).utilisation == pytest.approx(20 / (20 + exchange_s(scenario) - 1), rel=2e-3)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_groups_of_fragments_count_every_step_once_for_every_fragment(groups: int) -> None:
    outcome = run("size.fragments=4", f"sync.groups={groups}", "compute.sigma=0.1", "link.latency_s=0")
    assert outcome.commits == 40
    assert outcome.steps_counted <= outcome.steps_trained
    owed = 6 * 20 * (groups - 1) / groups  # what the other groups had not sent when the run ended
    assert outcome.steps_trained - outcome.steps_counted <= owed + 1e-9
    assert outcome.bytes_up == 40 * 6 * (4 // groups) * Scenario.read(None, [*FLEET, "size.fragments=4"]).up_bytes


def test_a_peer_that_vanishes_is_dropped_at_the_end_of_its_lease() -> None:
    scenario = Scenario.read(None, [*FLEET, "faults.repair_s=1e7", "faults.silent=1", "membership.lease_s=9"])
    simulation = Simulation(scenario)
    lost: list[float] = []
    feed = simulation.coordinator._feed

    def watch(event: events.Event) -> bool:
        if isinstance(event, events.MemberLost):
            lost.append(simulation.queue.now)
        return feed(event)

    simulation.coordinator._feed = watch  # type: ignore[method-assign]
    simulation.queue.at(50.0, lambda: simulation.peers[0]._end(polite=False))
    outcome = simulation.run()
    assert len(lost) == 1 and 50 + 9 - scenario.run.membership.heartbeat_s <= lost[0] <= 50 + 9 + 0.5
    assert outcome.finished and outcome.commits == 40
    assert outcome.contributors == pytest.approx((2 * 6 + 38 * 5) / 40)
    assert simulation.coordinator.membership.members["peer-000000"].reason.startswith("no heartbeat for 9")


def test_a_broken_stream_is_noticed_at_once_and_the_peer_comes_back_with_a_snapshot() -> None:
    simulation = Simulation(Scenario.read(None, [*FLEET, "faults.repair_s=30"]))
    simulation.queue.at(50.0, lambda: simulation.peers[0]._end(polite=False))
    outcome = simulation.run()
    assert (outcome.failures, outcome.returns, outcome.snapshots) == (1, 1, 1)
    assert outcome.commits == 40 and outcome.aborts == 0
    assert 38 * 6 <= outcome.contributors * 40 < 40 * 6


def test_what_a_checkpoint_holds_is_not_lost() -> None:
    def with_checkpoints_every(steps: int) -> float:
        simulation = Simulation(Scenario.read(None, [*FLEET, "faults.repair_s=0", f"faults.checkpoint_steps={steps}"]))
        for at in range(1, 30):
            simulation.queue.at(25.0 * at + 0.5, lambda: simulation.peers[0]._end(polite=False))
        outcome = simulation.run()
        assert outcome.steps_counted <= outcome.steps_trained
        return outcome.steps_trained - outcome.steps_counted

    assert with_checkpoints_every(1) < with_checkpoints_every(10) < with_checkpoints_every(0)


@pytest.mark.parametrize(
    ("keeps", "away_s", "lost", "snapshots", "updates"),
    [
        ("sync.strict=false", 3.0, 0, 0, 0),
        ("sync.strict=false", 45.0, 4, 1, -2),
        ("codec.down=int4", 45.0, 4, 0, 0),
        ("codec.down=int4", 105.0, 4, 1, -5),
        ("rounds.max_staleness=1", 45.0, 0, 0, 0),
        ("rounds.max_staleness=1", 105.0, 0, 1, -6),
    ],
)
def test_a_peer_that_returns_to_a_run_that_is_further_goes_on_as_a_real_one(
    keeps: str, away_s: float, lost: int, snapshots: int, updates: int
) -> None:
    """From its checkpoint where the run is strict, carries contributions or has not moved; else forward, by updates where these
    are kept and fewer bytes than the parameters. What it has is not fetched."""
    scenario = Scenario.read(None, [*FLEET, "faults.checkpoint_steps=1", keeps])
    simulation = Simulation(scenario)
    peer, queue = simulation.peers[0], simulation.queue
    queue.at(45.0, lambda: peer.die(away_s))
    outcome = simulation.run()
    assert (outcome.failures, outcome.returns, outcome.snapshots) == (1, 1, snapshots)
    assert outcome.steps_trained - outcome.steps_counted == lost
    fetched = outcome.bytes_down - snapshots * scenario.snapshot_bytes
    assert fetched == (39 * 6 + updates) * scenario.down_bytes  # the run has ended before the last one is fetched


def test_a_peer_that_returns_before_the_first_outer_step_fetches_nothing() -> None:
    simulation = Simulation(Scenario.read(None, FLEET))
    simulation.queue.at(5.0, lambda: simulation.peers[0].die(3.0))
    outcome = simulation.run()
    assert (outcome.returns, outcome.snapshots) == (1, 0) and outcome.commits == 40


def test_a_tenfold_slower_peer_holds_nobody_up_beyond_the_ceiling_and_its_work_still_counts() -> None:
    slow = ("classes=[{share=0.1667,slower=10.0}]", "rounds.quorum=5", "rounds.grace_s=1", "rounds.floor_s=1")
    waiting, going_on = run(*slow), run(*slow, "rounds.ceiling_s=25")
    assert waiting.seconds > 40 * 200 and waiting.participation == 1.0
    assert going_on.seconds < 40 * 26
    assert going_on.goodput > 0.75 > 0.2 > waiting.goodput
    assert 5 / 6 <= going_on.participation < 0.9
    assert sum(count for age, count in going_on.staleness.items() if int(age) > 5) >= 3  # the slow one's, all its steps in one
    grace = run(*slow, "rounds.wait=slack")  # as far as the ceiling is
    assert grace.seconds < 40 * 22 and grace.goodput > 0.95


SLOW_LINK = ("peers=4", "size.fragments=4", "link.up_mbit=100", "link.down_mbit=5000", "classes=[{share=0.25,bandwidth=0.02}]")
NO_PATIENCE = ("rounds.quorum=3", "rounds.grace_s=1", "rounds.floor_s=1", "rounds.ceiling_s=45")


def test_a_contribution_that_comes_too_late_is_made_anew_or_carried_over_as_the_run_says() -> None:
    anew, carried = (run(*SLOW_LINK, *NO_PATIENCE, f"rounds.max_staleness={steps}") for steps in (0, 2))
    assert anew.steps_trained - anew.steps_counted >= 10 * 20
    assert set(carried.staleness) == {"0", "1"} and carried.late == 0
    assert carried.steps_trained - carried.steps_counted <= 20  # of the contribution that was on its way at the end
    assert anew.participation < 1.0 and anew.goodput > 0.5  # after a few rounds that cost the ceiling nobody waits for it


def test_what_is_carried_for_too_long_is_refused_and_nothing_counts_twice() -> None:
    hopeless = run(*SLOW_LINK, *NO_PATIENCE, "rounds.max_staleness=1", "sync.every=2", "rounds.ceiling_s=3")
    assert hopeless.finished and hopeless.stuck == 0
    assert hopeless.participation == 0.75 and set(hopeless.staleness) == {"0"}


def test_every_arrival_is_a_commit_where_each_is_merged() -> None:
    outcome = run("rounds.merging=arrivals", "rounds.max_staleness=64", "classes=[{share=0.1667,slower=4.0}]")
    assert outcome.commits == 40 and outcome.contributors < 3 and outcome.aborts == 0  # who arrives meanwhile is merged next
    assert max(map(int, outcome.staleness)) >= 5 and outcome.stuck == 0 and outcome.goodput > 0.95


@pytest.mark.parametrize(
    "setting",
    [
        "sync.schedule=time",
        "sync.dylu=true",
        "sync.tokens=5",
        "storage.buffer_bytes=0",
        "storage.checkpoint_every=1",
        "storage.keep_checkpoints=9",
        "membership.consent=true",
        "membership.share_losses=true",
        "codec.up_residual=int8",
        "codec.up_decay=0.5",
        "penalty.temperature=5.0",
        "penalty.clip=1.0",
    ],
)
def test_a_setting_that_is_not_simulated_is_an_error(setting: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting.partition('=')[0]} is not simulated"):
        Scenario.read(None, [setting, *(["merge=true"] if setting.startswith("penalty") else [])])


def test_neither_a_share_of_the_local_parameters_nor_plug_ins_are_simulated() -> None:
    with pytest.raises(ConfigError, match=r'sync\.mix = "lerp" is not simulated'):
        Scenario.read(None, ["sync.mode=delayed", "sync.mix=lerp"])
    with pytest.raises(ConfigError, match=r"codec\.up = 'entry:own': plug-ins are not simulated"):
        Scenario.read(None, ["codec.up=entry:own"])


def test_every_setting_of_the_tables_is_simulated_or_known_not_to_be() -> None:
    """A new one has to be put in its place."""
    verdicts = {"enabled", "detector", "alpha", "delta", "observations", "step_power", "relearn", "max_ratio", "idle_ratio"}
    simulated = {
        "sync": {"every", "milestones", "outer_steps", "groups", "pattern", "mode", "delay", "mix", "strict"},
        "rounds": {each.name for each in dataclasses.fields(RoundsConfig)},
        "membership": {"heartbeat_s", "lease_s"},
        "storage": {"keep_updates"},
        "codec": {"up", "down"},
        "penalty": verdicts,
    }
    for section, config in ((section, getattr(RunConfig(), section)) for section in SHARED):
        assert {each.name for each in dataclasses.fields(config)} == simulated[section] | set(_NOT_SIMULATED[section])


def test_the_aggregators_link_is_shared() -> None:
    alone, shared = run("hub.gbit_s=1000"), run("hub.gbit_s=0.2")
    assert alone.goodput > 1.1 * shared.goodput
    hub = HubLink(10.0)
    assert [hub.carry(20, 5.0), hub.carry(20, 5.0), hub.carry(20, 30.0)] == [7.0, 9.0, 32.0]


def test_merging_for_real_rejects_the_damaged_and_their_steps_do_not_count() -> None:
    merged = "merge=true", "penalty.delta=9.0"
    sound, damaged = run(*merged), run(*merged, "damaged=0.1")
    assert sound.steps_counted == 40 * 6 * 20 and sound.rejected == 0
    assert 0.03 < damaged.rejected / (40 * 6) < 0.2
    assert damaged.steps_counted == (40 * 6 - damaged.rejected) * 20


def test_what_was_done_since_a_refused_contribution_does_not_count() -> None:
    """Nor does it with a real peer: the local parameters are theta again."""
    overlapping = ("peers=2", "sync.mode=delayed", "sync.delay=10", "merge=true", "size.fragments=2")

    def lost(refused: Mapping[int, Mapping[int, frozenset[str]]]) -> float:
        simulation = Simulation(Scenario.read(None, [*FLEET, *overlapping]))
        coordinator = simulation.coordinator
        merger = SimpleNamespace(rejected=lambda i, _: refused.get(coordinator.machine.outer_step, {}).get(i, frozenset()))
        coordinator._merger = merger  # type: ignore[assignment]
        outcome = simulation.run()
        return outcome.steps_trained - outcome.steps_counted

    both = {i: frozenset({"peer-000000"}) for i in range(2)}
    assert lost({}) == 0
    assert lost({7: both}) == 20 + 10
    assert lost({7: both, 8: both}) == 20 + 10 + 10 + 10
    assert lost({7: {0: both[0]}}) == 20 / 2, "the other fragment was merged: the peer goes on from there"


def test_what_is_replaced_by_the_update_does_not_count() -> None:
    replay, replace = (run("sync.mode=delayed", "sync.delay=10", f"sync.mix={mix}") for mix in ("replay", "replace"))
    assert (replay.steps_trained, replay.steps_counted) == (40 * 6 * 20, 40 * 6 * 20)
    assert (replace.steps_trained, replace.steps_counted) == (40 * 6 * 20, 6 * (20 + 39 * 10))
    assert replace.staleness == {"0": 40 * 6} and replay.staleness == {"0": 6, "1": 39 * 6}


def test_a_peer_that_was_refused_goes_on_where_all_that_it_did_since_is_dropped() -> None:
    """The exchange takes as long as the training between two: nothing is left when the next contribution is due."""
    outcome = run("sync.mode=delayed", "sync.delay=20", "merge=true", "damaged=0.3")
    assert outcome.finished and outcome.rejected > 0
    assert outcome.steps_trained - outcome.steps_counted > 15 * outcome.rejected


def test_a_step_that_counts_twice_is_a_bug() -> None:
    accounting = Accounting()
    accounting.count(0, {"a": Share(0, 10, 3)}, frozenset(), lambda based: 5 - based)
    accounting.count(1, {"a": Share(5, 10, 0)}, {"a"}, lambda based: 5 - based)
    with pytest.raises(LocalProtocolError, match="count twice"):
        accounting.count(0, {"a": Share(9, 20, 0)}, frozenset(), lambda based: 0)
    assert (accounting.fragment_steps, accounting.rejected, accounting.staleness) == (10, 1, {2: 1, 5: 1})


def test_time_never_goes_back() -> None:
    queue, seen = EventQueue(), []
    queue.all_at(2.0, [lambda: seen.append("b"), lambda: seen.append("c")])
    queue.at(2.0, lambda: seen.append("d"))
    queue.at(1.0, lambda: seen.append("a"))
    queue.at(6.0, lambda: seen.append("e"))
    assert queue.run(5.0, 2) and seen == ["a", "b", "c"]
    assert not queue.run(5.0, 2)
    assert seen == ["a", "b", "c", "d"] and queue.events == 4
    queue.at(6.0, queue.end)
    queue.at(6.0, lambda: seen.append("f"))
    assert not queue.run(7.0, 9) and seen[-1] == "e"
    assert not queue.run(7.0, 9) and seen[-1] == "f"
    with pytest.raises(LocalProtocolError, match="nothing can happen"):
        queue.at(1.0, lambda: None)
    with pytest.raises(LocalProtocolError, match="nothing can happen at inf"):
        queue.at(float("inf"), lambda: None)


delays = st.one_of(st.floats(0.0, 3.0), st.sampled_from((0.0, 0.25, 0.5, 1.0, 1e9)))


@given(st.lists(st.tuples(delays, st.lists(delays, max_size=3)), max_size=20), st.integers(1, 5))
def test_whatever_is_put_down_when_happens_in_the_order_of_time_and_then_of_putting_down(
    planned: list[tuple[float, list[float]]], at_once: int
) -> None:
    queue, put, seen = EventQueue(), list[float](), list[tuple[float, int]]()

    def put_down(when: float, after: list[float]) -> None:
        number = len(put)
        put.append(when)
        queue.at(when, lambda: happens(number, after))

    def happens(number: int, after: list[float]) -> None:
        seen.append((queue.now, number))
        for delay in after:
            put_down(queue.now + delay, [])

    for when, after in planned:
        put_down(when, after)
    while queue.run(2e9, at_once):
        pass
    assert seen == sorted((when, number) for number, when in enumerate(put))


@pytest.mark.parametrize("text", [*CODECS, "topk:k=128"])
def test_the_sizes_are_those_of_the_codecs(text: str) -> None:
    scenario = Scenario.from_mapping({"codec": {"up": text}, "size": {"parameters": 1e6, "fragments": 7}})
    assert scenario.up_bytes == codec(text).encoded_size(142_858)


scenarios = st.fixed_dictionaries(
    {
        "peers": st.integers(1, 9),
        "seed": st.integers(0, 1000),
        "hours": st.just(3.0),
        "compute": st.fixed_dictionaries(
            {
                "sigma": st.sampled_from((0.0, 0.5)),
                "jitter": st.sampled_from((0.0, 0.3)),
                "stalls_per_hour": st.sampled_from((0.0, 20.0)),
            }
        ),
        "faults": st.fixed_dictionaries(
            {
                "failures_per_hour": st.sampled_from((0.0, 5.0, 60.0)),
                "silent": st.sampled_from((0.0, 0.5, 1.0)),
                "repair_s": st.sampled_from((0.0, 5.0, 100.0)),
                "checkpoint_steps": st.sampled_from((0, 3)),
                "leaves_per_hour": st.sampled_from((0.0, 5.0)),
                "away_s": st.just(200.0),
            }
        ),
        "link": st.fixed_dictionaries({"up_mbit": st.sampled_from((5.0, 1000.0)), "latency_s": st.sampled_from((0.0, 0.3))}),
        "size": st.fixed_dictionaries({"parameters": st.just(1e6), "fragments": st.just(2)}),
        "hub": st.fixed_dictionaries({"merge_s": st.sampled_from((0.0, 0.5)), "commit_s": st.sampled_from((0.0, 2.0))}),
        "classes": st.sampled_from(((), ({"share": 0.3, "slower": 10.0, "bandwidth": 0.1},))),
        "rounds": st.fixed_dictionaries(
            {
                "quorum": st.integers(1, 4),
                "floor_s": st.sampled_from((1.0, 5.0)),
                "ceiling_s": st.sampled_from((15.0, 120.0)),
                "grace_s": st.sampled_from((0.0, 2.0)),
                "max_staleness": st.sampled_from((0, 0, 1, 4)),
                "merging": st.sampled_from(("rounds", "rounds", "arrivals")),
            }
        ),
        "mode": st.sampled_from(("blocking", "delayed")),
        "groups": st.sampled_from((1, 2)),
    }
)


@settings(max_examples=examples(60), deadline=None)
@given(scenarios)
def test_whatever_happens_the_run_keeps_its_rules(drawn: dict[str, object]) -> None:
    mode, groups, rounds = drawn.pop("mode"), drawn.pop("groups"), drawn["rounds"]
    assert isinstance(rounds, dict) and isinstance(drawn["peers"], int)
    rounds["quorum"] = min(rounds["quorum"], drawn["peers"])
    if rounds["merging"] == "arrivals":  # which takes whatever comes, one by one
        groups, drawn["rounds"] = 1, (rounds := {"merging": "arrivals", "max_staleness": 8})
    elif rounds["max_staleness"]:
        groups = 1
    sync = {"every": 10, "outer_steps": 12, "mode": mode} | ({"groups": groups} if groups == 2 else {})
    simulation = Simulation(Scenario.from_mapping({**drawn, "sync": sync | ({"delay": 2} if mode == "delayed" else {})}))
    coordinator, queue = simulation.coordinator, simulation.queue
    carry_out, go_on = coordinator._carry_out, queue.run
    committed: list[int] = []
    times = [0.0]

    def watch(effect: events.Effect) -> None:
        if isinstance(effect, events.Reduce):
            assert len(effect.peers) >= rounds.get("quorum", 1)
        if isinstance(effect, events.RoundClosed) and effect.committed:
            committed.append(effect.outer_step)
        carry_out(effect)

    def one_event(until: float, count: int) -> bool:
        happened = go_on(until, 1)
        times.append(simulation.queue.now)
        return happened

    coordinator._carry_out = watch  # type: ignore[method-assign]
    queue.run = one_event  # type: ignore[method-assign]
    outcome = simulation.run()
    assert committed == list(range(1, len(committed) + 1)) and outcome.commits == len(committed)
    assert times == sorted(times)
    assert outcome.steps_counted <= outcome.steps_trained
    assert 0 <= outcome.utilisation <= 1 + 1e-9
    assert outcome.goodput <= 1 + 1e-9 or simulation.scenario.compute.jitter  # a phase may be faster than the peer's median
    if outcome.finished:
        assert outcome.stuck == 0 and not any(peer.alive for peer in simulation.peers)
