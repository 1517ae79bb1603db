"""The status of a real run: read without changing anything, whatever the run is doing."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path

import pytest

from aggregator.control.run import Run
from aggregator.control.status import run_status
from edit.view.status import _phase
from editpb.messages import RunPhase
from editpb.run_status import MemberStatus, RunStatus
from editpb.transport.chunks import make_chunks
from tests.support.encoded import encode
from tests.support.served import SCHEMA, found_run, new_folder, served, theta


def still(run: Run) -> RunStatus:
    """The status of now, read twice; reading it publishes nothing and sends no view."""
    events: list[object] = []
    run.feed.subscribe(lambda event, unix: events.append(event))
    sequence = run._sequence
    for attendance in run.attendances:
        attendance.changed.clear()
    first, second = run_status(run), run_status(run)
    assert (first.phase, first.round_id, first.reason) == (second.phase, second.round_id, second.reason)
    before, after = ([repr(replace(one, silent_s=0.0)) for one in each.members] for each in (first, second))
    assert before == after  # as text: a loss may be NaN, which equals nothing
    assert events == [] and run._sequence == sequence
    assert not any(attendance.changed.is_set() for attendance in run.attendances)
    return second


def test_the_status_of_a_run_from_its_founding_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run", start=1)) as site, site.peer("a") as a, site.peer("b"):
            run = site.coordinator.run
            before = still(run)
            assert (before.phase, before.outer_step, before.parameters, before.digest) == ("founding", 0, 0, "")
            assert (before.expected, before.deadline_in_s, before.rounds, before.round_id) == ((), None, (), 0)
            assert [(one.peer_id, one.state, one.reason) for one in before.members] == [
                ("a", "invited", "has not attended since the coordinator started"),
                ("b", "invited", "has not attended since the coordinator started"),
            ]
            assert all(math.isnan(one.loss) for one in before.members)
            view = await found_run(a)
            open_round = still(run)
            assert (open_round.phase, open_round.round_id) == ("collecting", view.round_id)
            assert open_round.parameters == SCHEMA.numel
            assert (open_round.expected, open_round.arrived) == (("a",), ())
            assert open_round.deadline_in_s is not None and 0 < open_round.deadline_in_s <= 1000
            data = bytes(encode("fp32", theta(1)[0]).data)
            await a.send(a.header(view.round_id, 0, 0, len(data)), make_chunks(data))
            sent = still(run).members[0]
            assert (sent.state, sent.phase, sent.upload_bytes) == ("training", "upload", len(data))
            assert sent.upload_total_bytes > len(data)
            await a.contribute(view.round_id, 0, theta(1))
            after = await a.view(lambda v: v.outer_step == 1)
            committed = still(run)
            assert (committed.outer_step, committed.digest) == (1, after.digest)
            assert committed.tokens == 10
            (closed,) = committed.rounds
            assert (closed.round_id, closed.committed, closed.digest) == (view.round_id, True, after.digest)
            assert [verdict.peer_id for fragment in closed.fragments for verdict in fragment.verdicts] == ["a", "a"]
            assert run_status(run, rounds_after=view.round_id).rounds == ()
            assert committed.members[0].contributions == 1
            assert (committed.members[0].verdict, committed.members[0].verdict_reason) == ("ok", "merged")
            assert closed.t > 1.7e9 and committed.t >= closed.t and closed.number == 1
            assert {one.kind for one in committed.curves} >= {"norm", "bytes_in", "bytes_out", "round_s"}
            settings = {one.name: one for one in committed.settings}
            assert settings["sync.outer_steps"].changed and not settings["seed"].changed and "server.listen" not in settings
            assert run_status(run, brief=True).settings == () == run_status(run, brief=True).curves
            assert run_status(run, events_after=committed.events[-1].number).events == ()
            run.drain()
            await a.view(lambda v: v.phase is RunPhase.FINISHED or v.draining)
            monkeypatch.setattr(run.history, "eta_s", lambda outer_steps, *_: float(outer_steps))
            drained = still(run)
            assert drained.draining and drained.last_step == 2 == drained.eta_s

    asyncio.run(scenario())


def test_the_status_says_at_once_what_a_later_change_would_tell_the_peers(tmp_path: Path) -> None:
    """An evicted member is one less that can make a quorum; nobody has to ask before the peers are told."""

    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run", quorum=2)) as site, site.peer("a") as a, site.peer("b") as b:
            await found_run(a, b)
            run = site.coordinator.run
            assert still(run).reason == ""
            run.evict("b", "key lost")
            reason = "rounds.quorum = 2, but only 1 peer has joined the run; invite more, or lower it in run.toml"
            assert (await a.view(lambda v: v.reason != "")).reason == reason == still(run).reason

    asyncio.run(scenario())


def test_the_table_says_whom_rounds_do_not_wait_for() -> None:
    member = MemberStatus(peer_id="a", role="peer", state="training", reason="", phase="compute")
    assert _phase(member) == "compute"
    assert _phase(replace(member, optional=True)) == "compute, optional"
    assert _phase(replace(member, quarantined_s=59.6)) == "quarantined for 60 s"
