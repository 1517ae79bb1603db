"""The schedule follows from the seed; every rule of the chaos run is one that a wrong history breaks."""

import io
import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from edit.errors import ConfigError
from edit.lab import procfs
from edit.lab.chaos.command import _show
from edit.lab.chaos.disk import BoundedFiles
from edit.lab.chaos.exact import ExactChaos
from edit.lab.chaos.faults import Fault, Kind, draw_schedule, kinds_for
from edit.lab.chaos.harness import Chaos, Report, RuleBroken
from edit.lab.chaos.history import Files, History, Incident, Memory, Recovered
from edit.lab.chaos.invariants import Bounds, Violation, broken, broken_at_end, journal_differs, may_not_start
from edit.lab.chaos.options import ChaosOptions
from edit.lab.chaos.outcome import as_json, tables
from edit.lab.chaos.swarm import SwarmChaos
from edit.lab.demo.output_folder import DemoFolder
from edit.lab.processes import COORDINATOR

PEERS = ("a", "b", "c")
BOUNDS = Bounds(advance_s=10.0, return_s=30.0)


# ---- the schedule -----------------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_schedule_and_another_another() -> None:
    assert draw_schedule(7, 300, PEERS) == draw_schedule(7, 300, PEERS)
    assert draw_schedule(7, 300, PEERS) != draw_schedule(8, 300, PEERS)


@pytest.mark.parametrize("seed", range(20))
def test_a_schedule_ends_in_time_has_every_kind_and_one_fault_per_target_at_a_time(seed: int) -> None:
    schedule = draw_schedule(seed, 400, PEERS, sharded="c")
    assert {fault.kind for fault in schedule} == {*kinds_for(sharded=True)}
    assert all(fault.at_s >= 0 and fault.ends_s <= 400 for fault in schedule)
    assert [fault.at_s for fault in schedule] == sorted(fault.at_s for fault in schedule)
    free_at: dict[str, float] = {}
    for fault in schedule:
        assert fault.at_s > free_at.get(fault.target, 0.0) - 1e-6  # written down to the hundredth
        assert (fault.target == COORDINATOR) == fault.kind.of_coordinator
        assert fault.kind is not Kind.KILL_RANK or fault.target == "c"
        free_at[fault.target] = fault.ends_s + 4.0


def test_without_a_replica_of_several_ranks_no_rank_is_killed() -> None:
    assert Kind.KILL_RANK not in kinds_for(sharded=False)
    assert all(fault.kind is not Kind.KILL_RANK for fault in draw_schedule(1, 2000, PEERS))


def test_so_many_kills_and_nothing_else() -> None:
    schedule = ChaosOptions(peers=3, sharded=True, kills=200, gap_s=3.0).schedule()
    assert len(schedule) == 200 and all(fault.kind.kills and fault.lasts_s <= 0.5 for fault in schedule)
    assert {fault.target for fault in schedule} == {COORDINATOR, "peer-0", "peer-1", "sharded"}
    assert [fault.number for fault in schedule] == list(range(1, 201))


def test_impossible_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one kind"):
        draw_schedule(0, 60, PEERS, kinds=())
    for wrong, message in (({"seed": -1}, "--seed"), ({"seconds": 1.0}, "--minutes"), ({"peers": 0}, "--peers")):
        with pytest.raises(ConfigError, match=message):
            ChaosOptions(**wrong)
    for with_masks, message in (({"swarm": True, "peers": 5}, "--swarm"), ({"hostile": 1, "peers": 5}, "--hostile"), ({}, "4")):
        with pytest.raises(ConfigError, match=message):
            ChaosOptions(masked=True, **with_masks)


def test_the_run_of_a_chaos_is_a_valid_one() -> None:
    from edit.config.run import RunConfig

    config = RunConfig.from_mapping(ChaosOptions(peers=3, sharded=True).run())
    assert (config.rounds.start_peers, config.rounds.ceiling_s) == (3, 10.0)
    assert ChaosOptions(peers=3, sharded=True).peer_ids == ("peer-0", "peer-1", "sharded")
    masked = RunConfig.from_mapping(ChaosOptions(peers=4, masked=True).run())
    assert masked.secagg.enabled and masked.rounds.quorum == masked.secagg.min_peers == 3


# ---- histories --------------------------------------------------------------------------------------------------------------


def committed(step: int, t: float | None = None, weights: tuple[float, ...] = (0.3, 0.3, 0.4), digest: str = "") -> dict:
    verdicts = {name: ["ok", 1.0, weight] for name, weight in zip(PEERS, weights, strict=True)}
    parts = [{"fragment_id": 0, "merged_norm": 1.0, "clip": 1.0, "peers": verdicts}]
    line = {"kind": "round", "t": float(step) if t is None else t, "round_id": 1_000_000 + step, "outer_step": step}
    return {**line, "seconds": 0.5, "committed": True, "digest": digest or f"d{step}", "verdicts": parts}


def outer(step: int, t: float | None = None, digest: str = "") -> dict:
    return {"kind": "outer", "t": step + 0.5 if t is None else t, "outer_step": step, "digest": digest or f"d{step}"}


def good(steps: int = 20) -> History:
    history = History(PEERS, 64)
    for name in (*PEERS, COORDINATOR):
        history.started(name)
    for step in range(1, steps + 1):
        history.take(COORDINATOR, committed(step))
        for name in PEERS:
            history.take(name, outer(step))
            history.take(name, {"kind": "step", "t": float(step), "step": 10 * step, "outer_step": step})
    history.tokens = 3 * 10 * 64 * steps
    return history


def incident_in(history: History, kind: Kind, began: float, ended: float | None, target: str = "a") -> None:
    fault = Fault(number=1, at_s=began, kind=kind, target=COORDINATOR if kind.of_coordinator else target, lasts_s=1.0)
    history.incidents.append(Incident(fault, began, ended))


def rules(history: History, now: float = 20.0) -> list[str]:
    return [violation.rule for violation in broken_at_end(history, BOUNDS, now)]


def test_a_good_history_breaks_nothing() -> None:
    history = good()
    incident_in(history, Kind.KILL_PEER, 3.2, 4.1)
    incident_in(history, Kind.KILL_COORDINATOR, 8.2, 8.9)
    assert rules(history) == []
    assert (history.inner_steps_made, history.inner_steps_counted, history.participation) == (600, 600, 3.0)


def test_an_outer_step_committed_twice() -> None:
    history = good()
    history.take(COORDINATOR, committed(20, t=21.0))
    assert rules(history) == ["every outer step is committed once"]


def test_an_outer_step_that_goes_back_after_a_restart() -> None:
    history = good()
    history.take(COORDINATOR, committed(18, t=21.0))
    assert "every outer step is committed once" in rules(history)


def test_a_step_left_out() -> None:
    history = good()
    history.take(COORDINATOR, committed(22, t=22.0))
    assert rules(history) == ["no commit is lost"]
    history.recovered.append(Recovered(21.0, 21, "d21"))  # died between the journal and its line
    assert rules(history) == []


def test_a_full_disk_may_swallow_lines() -> None:
    history = good()
    history.take(COORDINATOR, committed(23, t=23.0))
    incident_in(history, Kind.FULL_DISK, 20.5, 22.0)
    assert rules(history, 23.0) == []


@pytest.mark.parametrize(
    ("kind", "ended", "since", "may"),
    [
        (Kind.FULL_DISK, None, 21.0, True),
        (Kind.FULL_DISK, 22.0, 21.0, True),  # it met the full disk, and its end is noticed after the repair
        (Kind.FULL_DISK, 22.0, 22.5, False),
        (Kind.KILL_PEER, None, 21.0, False),
    ],
)
def test_nobody_can_start_on_a_full_disk(kind: Kind, ended: float | None, since: float, may: bool) -> None:
    history = good()
    incident_in(history, kind, 20.5, ended)
    assert may_not_start(history.incidents, since) is may


def test_a_folder_that_lost_a_commit() -> None:
    history = good()
    history.recovered.append(Recovered(20.5, 19, "d19"))
    assert rules(history) == ["no commit is lost"]
    history.recovered[:] = [Recovered(20.5, 20, "other")]
    assert rules(history) == ["no commit is lost"]


def test_a_journal_of_other_commits() -> None:
    history = good()
    assert list(journal_differs(history, {19: 1_000_019, 20: 1_000_020}, 21.0)) == []
    assert [v.rule for v in journal_differs(history, {20: 2_000_001}, 21.0)] == [
        "the journal and metrics.jsonl have the same commits"
    ]
    assert [v.rule for v in journal_differs(history, {19: 1_000_019}, 21.0)] == ["no commit is lost"]


@pytest.mark.parametrize("step", [5, 20])
def test_a_peer_with_another_digest_than_the_committed_one(step: int) -> None:
    history = good()
    history.take("b", outer(step, t=20.9, digest="wrong"))
    assert "digests are equal" in rules(history)
    first = next(violation for violation in broken(history, BOUNDS, 20.0) if violation.rule == "digests are equal")
    assert first.who == ("b", COORDINATOR) and "wrong" in first.text


def test_a_heartbeat_with_another_digest() -> None:
    history = good()
    line = {"kind": "peer", "t": 20.1, "peer_id": "c", "outer_step": 20, "digest": "wrong"}
    history.take(COORDINATOR, line)
    assert rules(history) == ["digests are equal"]
    history = good()
    history.take(COORDINATOR, {**line, "digest": ""})  # not joined yet
    assert rules(history) == []


def test_peers_that_agree_on_a_step_nobody_committed() -> None:
    history = good()
    history.take("a", outer(21))
    assert list(broken(history, BOUNDS, 21.0)) == []  # its line may be on the way
    assert rules(history) == ["digests are equal"]
    history.take("b", outer(21, digest="wrong"))
    assert [violation.rule for violation in broken(history, BOUNDS, 21.0)] == ["digests are equal"]


def test_a_peer_that_goes_back() -> None:
    history = good()
    history.take("a", outer(17, t=23.0))
    assert rules(history) == ["the outer step never decreases"]
    history = good()
    history.started("a")  # a new process begins where its checkpoint is
    history.take("a", outer(17, t=23.0))
    assert rules(history) == []


def test_a_late_word_of_an_earlier_life_is_no_step_back() -> None:
    history = good()
    history.started("a")
    history.take(COORDINATOR, {"kind": "peer", "t": 21.0, "peer_id": "a", "outer_step": 20, "digest": "d20"})
    history.take("a", outer(17, t=23.0))
    assert rules(history) == []


def test_a_run_that_stands_still_after_a_repair() -> None:
    history = good()
    incident_in(history, Kind.CUT, 20.5, 22.0)
    assert rules(history, 31.9) == []
    assert rules(history, 32.1) == ["the run advances after a repair"]
    incident_in(history, Kind.STOP_COORDINATOR, 25.0, None)
    assert rules(history, 60.0) == []  # nobody can expect a commit
    history.incidents[-1].ended = 60.0
    assert rules(history, 69.0) == []
    assert set(rules(history, 71.0)) == {"the run advances after a repair"}


def test_a_commit_that_came_too_late() -> None:
    history = good()
    incident_in(history, Kind.SLOW, 20.1, 20.2)
    history.take(COORDINATOR, committed(21, t=35.0))
    assert rules(history, 36.0) == ["the run advances after a repair"]


def test_a_killed_peer_that_never_counts_again() -> None:
    history = good()
    incident_in(history, Kind.KILL_PEER, 20.2, 20.4)
    for step in range(21, 60):
        history.take(COORDINATOR, committed(step, weights=(0.0, 0.5, 0.5)))
    assert rules(history, 50.0) == []
    assert rules(history, 51.0) == ["a killed peer contributes again"]
    history.take(COORDINATOR, committed(60))
    assert rules(history, 60.0) == ["a killed peer contributes again"]  # too late is too late


def test_what_a_killed_peer_had_sent_before_does_not_count_as_its_return() -> None:
    history = good()
    incident_in(history, Kind.KILL_PEER, 20.8, 20.9)
    history.take(COORDINATOR, committed(21))  # its round was opened at 20.5
    (incident,) = history.incidents
    assert history.returned(incident) is None
    history.take(COORDINATOR, committed(22, weights=(0.0, 0.5, 0.5)))
    history.take(COORDINATOR, committed(23))
    assert history.returned(incident) is history.commits[-1]


def test_a_coordinator_that_grows() -> None:
    history = good()
    history.memory = [Memory(float(i), 100) for i in range(90)]
    assert rules(history) == []
    history.memory[-1] = replace(history.memory[-1], bytes=131)
    assert rules(history) == ["memory is flat"]


# ---- with hostile members ---------------------------------------------------------------------------------------------------


def attacked(steps: int = 20) -> History:
    history = good(steps)
    history.hostile = ("h",)
    return history


def test_an_honest_peer_that_is_in_no_commit_beside_hostile_ones() -> None:
    history = attacked()
    for step in range(21, 60):
        history.take(COORDINATOR, committed(step, weights=(0.0, 0.5, 0.5)))
    assert rules(history, 50.0) == []
    assert rules(history, 50.1) == ["honest peers are in the commits"]
    incident_in(history, Kind.CUT, 21.0, 35.0)  # it was disturbed
    assert rules(history, 59.0) == []


def test_a_run_without_commits_beside_hostile_members() -> None:
    assert rules(attacked(), 49.9) == []
    assert set(rules(attacked(), 50.1)) == {"honest peers are in the commits"}


def test_an_honest_peer_that_is_refused() -> None:
    history = attacked()
    refused = {**committed(21, t=21.0), "committed": False, "reason": "too few: 1 of quorum 2 (missing: c; refused: b, h)"}
    history.take(COORDINATOR, refused)
    assert rules(history) == ["no honest peer is refused or shut out"]
    history.accusations.clear()
    history.take(COORDINATOR, {**refused, "reason": "all 2 contributors in (refused: h)"})
    assert rules(history) == []


@pytest.mark.parametrize(("who", "state", "broken_rules"), [("b", "evicted", 1), ("b", "lost", 0), ("h", "evicted", 0)])
def test_an_honest_peer_that_is_shut_out(who: str, state: str, broken_rules: int) -> None:
    history = attacked()
    history.take(COORDINATOR, {"kind": "member", "t": 20.5, "peer_id": who, "state": state, "reason": "because"})
    assert rules(history) == ["no honest peer is refused or shut out"] * broken_rules


def test_a_coordinator_that_answers_no_operator() -> None:
    history = attacked()
    history.answered = 20.0
    assert rules(history, 30.0) == []
    assert rules(history, 30.1) == ["the operator is answered"]
    incident_in(history, Kind.STOP_COORDINATOR, 21.0, 30.1)
    history.take(COORDINATOR, committed(21, t=31.0))
    assert rules(history, 40.0) == []


def test_a_theta_that_is_not_finite() -> None:
    history = attacked()
    history.recovered.append(Recovered(20.5, 20, "d20", finite=False))
    assert rules(history) == ["theta stays finite"]


def test_a_log_and_a_folder_that_grow() -> None:
    history = attacked()
    history.files = [Files(float(i), 8000 * i, 10_000_000) for i in range(200)]  # 2000 bytes a second for each member
    assert rules(history) == []
    history.files = [*history.files[:-1], Files(199.0, 8000 * 199 + 1, 10_000_000)]
    assert rules(history) == ["the log grows slowly"]
    history.files = [Files(0.0, 0, 41_000_000)]
    assert rules(history) == ["the coordinator's folder stays small"]


def test_attacks_may_cost_memory_while_they_last_but_not_more_than_that() -> None:
    history = attacked()
    history.memory = [Memory(float(i), 300_000_000) for i in range(90)]
    history.memory[-1] = replace(history.memory[-1], bytes=490_000_000)
    assert rules(history) == []
    history.memory[-1] = replace(history.memory[-1], bytes=491_000_000)
    assert rules(history) == ["memory is flat"]


def test_a_run_with_hostile_members_needs_none_of_them() -> None:
    from edit.config.run import RunConfig

    config = RunConfig.from_mapping(ChaosOptions(peers=3, hostile=2).run())
    assert config.rounds.quorum == config.rounds.start_peers == 3
    assert config.penalty.enabled and config.penalty.detector == "level"
    with pytest.raises(ConfigError, match="--hostile 3: must be fewer"):
        ChaosOptions(peers=3, hostile=3)


def test_a_run_that_ends_with_a_fork_has_an_audit_log_and_a_peer_on_each_side() -> None:
    from edit.config.run import RunConfig

    assert RunConfig.from_mapping(ChaosOptions(forked=True).run()).audit.enabled
    for beside in ({"swarm": True}, {"masked": True, "peers": 4}, {"hostile": 1}):
        with pytest.raises(ConfigError, match="--forked: cannot be combined"):
            ChaosOptions(forked=True, **beside)
    with pytest.raises(ConfigError, match="--peers 2: must be at least 3 with --forked"):
        ChaosOptions(forked=True, peers=2, sharded=True)


# ---- counting ---------------------------------------------------------------------------------------------------------------


def test_steps_of_killed_processes_are_counted_as_lost_rather_than_not() -> None:
    history = good(2)
    history.was_killed("a")
    history.started("a")
    history.take("a", {"kind": "step", "t": 9.0, "step": 20, "outer_step": 2})
    assert history.inner_steps_made == 20 + 9 + 10 + 20 + 20
    assert history.inner_steps_counted == 2 * 3 * 10


def test_more_steps_merged_than_can_have_been_made() -> None:
    history = good(2)
    most = 3 * (20 + 9)  # the three have written lines at steps 10 and 20
    history.tokens = most * 64
    assert rules(history) == []
    history.tokens += 64
    assert rules(history) == ["no work is merged twice"]
    history.started("a")  # a life without a line
    assert rules(history) == []
    history.tokens += 9 * 64
    assert rules(history) == ["no work is merged twice"]


def test_steps_made_once_more_by_ranks_that_torchrun_has_restarted_are_made_too() -> None:
    history = good(2)
    for step in (10, 20, 30):
        history.take("a", {"kind": "step", "t": 9.0, "step": step, "outer_step": 2})
    assert history.inner_steps_at_most == 3 * (20 + 9) + 30 + 9


def test_what_hostile_members_claim_is_not_held_against_the_steps_of_the_others() -> None:
    history = good(2)
    history.hostile = ("hostile-0",)
    history.tokens = 10_000 * 64
    assert "no work is merged twice" not in rules(history)


def test_lost_rounds_are_counted_and_change_nothing() -> None:
    history = good()
    history.take(COORDINATOR, {**committed(21), "committed": False})
    assert (history.aborted, len(history.commits)) == (1, 20)
    assert rules(history) == []


# ---- what is reported -------------------------------------------------------------------------------------------------------


def test_the_report_in_numbers_and_in_words() -> None:
    options = ChaosOptions(faults=())
    history = good()
    incident_in(history, Kind.KILL_PEER, 3.2, 4.1)
    history.memory = [Memory(float(i), 100_000_000) for i in range(9)]
    report = Report(options, options.schedule(), history, "a disk", seconds=20.0, ended={"a": 0})
    values = json.loads(json.dumps(as_json(report)))
    assert (values["commits"], values["aborted"], values["goodput"], values["violation"]) == (20, 0, 1.0, None)
    kill = values["faults"]["kill_peer"]
    assert kill["count"] == 1
    assert kill["next_commit_s"]["max"] == pytest.approx(0.8)
    assert kill["contributes_again_s"]["max"] == pytest.approx(0.9)
    output = io.StringIO()
    Console(file=output, width=160).print(tables(report))
    assert "SIGKILL of a peer" in output.getvalue() and "100.0%, at least" in output.getvalue()


def test_a_report_of_nothing() -> None:
    options = ChaosOptions(faults=())
    report = Report(options, (), History(PEERS, 64), "a disk")
    assert as_json(report)["goodput"] is None
    Console(file=io.StringIO()).print(tables(report))


@pytest.mark.parametrize("violation", [None, Violation("the outer step advances", 9.0, "it stood")])
def test_a_result_that_cannot_be_written_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], violation: Violation | None
) -> None:
    """And a broken rule is told."""
    options = ChaosOptions(faults=(), out=tmp_path / "none")
    report = Report(options, (), History(PEERS, 64), "a disk", violation=violation)
    said = "cannot write .*chaos.json" if violation is None else "rule broken: .*it stood"
    with pytest.raises(ConfigError if violation is None else RuleBroken, match=said):
        _show(report, as_json(report), tables(report), json_only=True)
    assert json.loads(capsys.readouterr().out)["commits"] == 0


# ---- processes --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen(
        [sys.executable, "-c", f"print(flush=True); {code}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"CHAOS_TEST": "marked"},
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.communicate(b"\n", timeout=30)


needs_proc = pytest.mark.skipif(not procfs.available(), reason="no /proc")


@needs_proc
def test_processes_are_found_by_their_mark_and_measured(sleeper: subprocess.Popen[bytes]) -> None:
    assert sleeper.pid in procfs.marked("CHAOS_TEST=marked")
    assert procfs.marked("CHAOS_TEST=other") == []
    assert (procfs.resident_bytes(sleeper.pid) or 0) > 1_000_000
    assert set(procfs.descendants(sleeper.pid)) <= set(procfs.marked("CHAOS_TEST=marked"))
    assert "input()" in procfs.command_line(sleeper.pid)


@needs_proc
def test_nobody_has_the_number_of_a_process_that_never_was() -> None:
    gone = 1 << 22
    assert procfs.descendants(gone + 1) == []
    assert procfs.resident_bytes(gone + 1) is None
    assert procfs.command_line(gone + 1) == ""


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="no prlimit")
def test_bounded_files_are_bounded_and_freed_again(sleeper: subprocess.Popen[bytes]) -> None:
    disk, before = BoundedFiles(1000), resource.prlimit(sleeper.pid, resource.RLIMIT_FSIZE)
    disk.fill(sleeper.pid)
    assert resource.prlimit(sleeper.pid, resource.RLIMIT_FSIZE)[0] == 1000
    disk.free(sleeper.pid)
    assert resource.prlimit(sleeper.pid, resource.RLIMIT_FSIZE)[0] == before[1]


@pytest.mark.parametrize("kind", [Chaos, SwarmChaos, ExactChaos])
def test_a_chaos_does_not_take_the_folder_of_another_that_runs(tmp_path, kind):
    options = ChaosOptions(out=tmp_path / "chaos", swarm=kind is SwarmChaos, exact=kind is ExactChaos)
    with DemoFolder(options.out, "chaos").claim(), pytest.raises(ConfigError, match="another `edit-lab chaos` is at work"):
        kind(options, lambda _: None).run()


def test_the_number_of_kills_has_two_bounds() -> None:
    for kills in (-3, 10_001):
        with pytest.raises(ConfigError, match=f"--kills {kills}: must be between 0 and 10000"):
            ChaosOptions(kills=kills)


def test_what_cannot_begin_mounts_nothing_and_wipes_nothing(tmp_path):
    out = tmp_path / "chaos"
    with pytest.raises(ConfigError, match="at least one kind"):
        Chaos(ChaosOptions(kinds=(), out=out), lambda _: None)
    assert not out.exists() and str(out) not in Path("/proc/mounts").read_text()
    Chaos(ChaosOptions(out=out), lambda _: None)  # Ctrl-C may come before `run`
    assert str(out) not in Path("/proc/mounts").read_text()
