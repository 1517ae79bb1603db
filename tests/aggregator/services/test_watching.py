"""Watch of a real coordinator: who may, what each sees, and that nobody who watches costs the run or the others anything."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from aggregator.control.status import run_status
from aggregator.run_feed import PeerReported
from aggregator.services.status_replies import StatusReplies
from aggregator.services.watching import (
    CURVES_S,
    LEAST_EVERY_S,
    MAX_OF_MEMBER,
    MAX_WATCHERS,
    MOST_EVERY_S,
    Watchers,
    until_tick,
)
from edit.errors import BusyError, EvictedError, RefusedError, RemoteProtocolError, TransportError
from editpb import control_pb2 as pb
from editpb import control_pb2_grpc
from editpb.control_messages import peer_message_to_pb
from editpb.identity import Identity
from editpb.messages import Heartbeat, PeerState
from editpb.run_status import RunStatus
from editpb.status_messages import status_from_pb, status_to_pb
from editpb.transport.watch import watch
from tests.support.loops import on_a_loop, pass_time, run_held, until
from tests.support.served import TOML, BarePeer, Served, found_run, new_folder, served, theta

OPERATOR = Identity("run", "operator", "op")


@contextlib.asynccontextmanager
async def watching(at: Served, name: str, role: str) -> AsyncIterator[AsyncIterator[RunStatus]]:
    async with (
        at.channel(name, role) as channel,
        contextlib.aclosing(watch(control_pb2_grpc.ControlStub(channel), "the coordinator", 0.2)) as statuses,
    ):
        yield statuses


async def first_that(statuses: AsyncIterator[RunStatus], condition: object) -> RunStatus:
    async with asyncio.timeout(30):
        async for status in statuses:
            if condition(status):
                return status
    raise AssertionError("the stream ended")


def steps_of(status: RunStatus) -> list[int]:
    return [report.outer_step for report in status.rounds]


async def commit(peer: BarePeer, outer_step: int, at: Served) -> None:
    """Take one outer step alone; returns when its round is reported."""
    view = await peer.view(lambda v: v.outer_step == outer_step and v.round_id)
    await peer.contribute(view.round_id, outer_step, theta(outer_step + 1))
    await peer.view(lambda v: v.outer_step == outer_step + 1)
    rounds = at.coordinator.run.recent_rounds
    while not rounds or rounds[-1].outer_step <= outer_step:  # noqa: ASYNC110 (also where time stands still)
        await asyncio.sleep(0)


@pytest.mark.parametrize("role", ["observer", "operator", "peer", "region"])
def test_every_member_may_watch_and_gets_whole_statuses_as_the_run_goes_on(tmp_path: Path, role: str) -> None:
    @on_a_loop
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as at, at.peer("a") as a, watching(at, "eve", role) as statuses:
            assert (await anext(statuses)).phase == "founding"
            await found_run(a)
            await commit(a, 0, at)
            seen = await first_that(statuses, lambda status: steps_of(status) == [1])
            await commit(a, 1, at)
            later = await first_that(statuses, lambda status: steps_of(status) == [1, 2])
            assert (seen.outer_step, later.outer_step) == (1, 2)
            assert seen.settings == later.settings != ()
            assert [event.number for event in later.events] == [*range(1, len(later.events) + 1)] != []

    scenario()


@on_a_loop
async def test_a_stranger_and_who_was_evicted_may_not_watch(tmp_path: Path) -> None:
    async with served(new_folder(tmp_path / "run")) as at:
        async with watching(at, "server", "coordinator") as statuses:
            with pytest.raises(RefusedError, match="role coordinator may not do this"):
                await anext(statuses)
        async with watching(at, "eve", "observer") as statuses:
            await anext(statuses)
            at.coordinator.run.evict("eve", "talks")
            with pytest.raises(EvictedError, match="talks"):
                await first_that(statuses, lambda status: False)


@on_a_loop
async def test_a_coordinator_that_ends_is_an_error_of_the_line(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        async with served(new_folder(tmp_path / "run")) as at:
            statuses = await stack.enter_async_context(watching(at, "eve", "observer"))
            await anext(statuses)
        with pytest.raises(TransportError, match="the coordinator does not answer"):
            await first_that(statuses, lambda status: False)


@pytest.mark.parametrize("shared", [False, True])
def test_losses_of_others_are_shown_only_where_the_run_says_so(tmp_path: Path, shared: bool) -> None:
    toml = TOML + f"\n[membership]\nshare_losses = {str(shared).lower()}\n"

    async def seen_by(at: Served, name: str, role: str) -> dict[str, object]:
        async with watching(at, name, role) as statuses:
            status = await anext(statuses)
        async with at.channel(f"{name}-2", "observer") as channel:
            asked = status_from_pb(await control_pb2_grpc.ControlStub(channel).Status(pb.StatusRequest()))
        if role == "observer":
            assert [one.loss for one in asked.members] == pytest.approx([one.loss for one in status.members], nan_ok=True)
        told = {one.peer_id: one.loss for one in status.members if one.role == "peer" and math.isfinite(one.loss) and one.loss}
        metrics = {one.peer_id: one.metrics["accuracy"] for one in status.members if one.metrics}
        assert metrics == told
        return {**told, "curves": [one.peer_id for one in status.curves if one.kind == "loss"]}

    @on_a_loop
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run", toml=toml)) as at, at.peer("a") as a, at.peer("b") as b:
            await found_run(a)
            await b.attend()
            run = at.coordinator.run
            members = run.attendances.membership.members
            for peer, loss in ((a, 2.25), (b, 3.5)):
                beat = Heartbeat(state=PeerState.TRAINING, inner_steps=3, loss=loss, metrics={"accuracy": loss})
                await peer._call.write(peer_message_to_pb(beat))
                await until(lambda name=peer.peer_id: (last := members[name].heartbeat) is not None and last.inner_steps == 3)
                run.feed.publish(PeerReported(peer.peer_id, beat))  # no time passes here, so the stream's own is too soon
            everything = {"a": 2.25, "b": 3.5, "curves": ["a", "b"]}
            assert await seen_by(at, "op", "operator") == everything
            assert await seen_by(at, "eve", "observer") == (everything if shared else {"curves": []})
            call = control_pb2_grpc.ControlStub(b.channel).Watch(pb.WatchRequest())
            own = status_from_pb(await call.read()).members
            call.cancel()
            assert [one.loss for one in own if one.peer_id == "b"] == [3.5]
            assert [math.isnan(one.loss) for one in own if one.peer_id == "a"] == [not shared]

    scenario()


def test_who_reads_slowly_gets_all_that_happened_in_one_message_and_no_message_waits_for_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as at, at.peer("a") as a:
            await found_run(a)
            run = at.coordinator.run
            watchers = Watchers(run, StatusReplies(run))
            messages = watchers.statuses(1.0, lambda: OPERATOR)
            whole = status_from_pb(await anext(messages))
            for step in range(3):
                await commit(a, step, at)
            waiting = asyncio.ensure_future(anext(messages))
            await asyncio.sleep(0)
            assert not waiting.done()
            pass_time(1.0)
            news = status_from_pb(await waiting)
            assert steps_of(news) == [1, 2, 3]
            assert news.settings == news.curves == ()
            assert whole.updated(news).settings == whole.settings != ()
            waiting = asyncio.ensure_future(anext(messages))
            await asyncio.sleep(0)
            pass_time(CURVES_S)
            later = status_from_pb(await waiting)
            assert later.rounds == () and later.curves != ()
            assert whole.updated(news).updated(later).rounds == (*whole.rounds, *news.rounds)
            await messages.aclose()

    run_held(scenario())


@on_a_loop
async def test_a_member_watches_so_often_and_no_oftener_and_operators_always_find_room(tmp_path: Path) -> None:
    async with served(new_folder(tmp_path / "run")) as at:
        watchers = Watchers(at.coordinator.run, StatusReplies(at.coordinator.run))
        with contextlib.ExitStack() as places:
            for _ in range(MAX_OF_MEMBER):
                places.enter_context(watchers.place(Identity("run", "observer", "eve")))
            with (
                pytest.raises(BusyError, match=f"eve watches {MAX_OF_MEMBER} times"),
                watchers.place(Identity("run", "observer", "eve")),
            ):
                raise AssertionError
            for number in range(MAX_WATCHERS - MAX_OF_MEMBER):
                places.enter_context(watchers.place(Identity("run", "peer", f"peer-{number}")))
            with pytest.raises(BusyError, match="others watch"), watchers.place(Identity("run", "peer", "one-more")):
                raise AssertionError
            with watchers.place(OPERATOR):
                assert len(watchers) == MAX_WATCHERS + 1
        assert len(watchers) == 0
        for seconds in (-1.0, math.nan, math.inf):
            with pytest.raises(RemoteProtocolError, match="not a number of seconds"):
                await anext(watchers.statuses(seconds, lambda: OPERATOR))


@on_a_loop
async def test_a_status_that_is_too_large_loses_its_oldest_rounds_first(tmp_path: Path) -> None:
    async with served(new_folder(tmp_path / "run")) as at, at.peer("a") as a:
        await found_run(a)
        for step in range(4):
            await commit(a, step, at)
        async with at.channel("op", "operator") as channel:
            status = status_from_pb(await control_pb2_grpc.ControlStub(channel).Status(pb.StatusRequest()))
        reply = StatusReplies(at.coordinator.run).reply
    whole = reply(status)
    assert whole == status_to_pb(status) and len(whole.rounds) == 4
    smaller = reply(status, whole.ByteSize() - 1)
    assert [report.outer_step for report in smaller.rounds] == [2, 3, 4] and len(smaller.curves) == len(whole.curves)
    assert not reply(status, 100).rounds and not reply(status, 100).curves


def test_all_who_watch_at_one_pace_get_one_message_and_each_what_it_may_see(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as at, at.peer("a") as a:
            await found_run(a)
            run = at.coordinator.run
            run.feed.publish(PeerReported("a", Heartbeat(state=PeerState.TRAINING, outer_step=0, inner_steps=3, loss=2.5)))
            watchers = Watchers(run, StatusReplies(run))
            names = {"eve": "observer", "ada": "observer", "a": "peer", "op": "operator"}
            streams = {
                name: watchers.statuses(1.0, lambda name=name, role=role: Identity("run", role, name))
                for name, role in names.items()
            }
            first = {name: await anext(stream) for name, stream in streams.items()}
            await commit(a, 0, at)
            waiting = {name: asyncio.ensure_future(anext(stream)) for name, stream in streams.items()}
            await asyncio.sleep(0)
            pass_time(1.0)
            second = {name: await one for name, one in waiting.items()}
            for told in (first, second):
                assert told["eve"] is told["ada"]
                assert len({id(each) for each in told.values()}) == 3
            seen = {name: status_from_pb(first[name]).updated(status_from_pb(second[name])) for name in names}
            assert all(steps_of(each) == [1] and each.settings for each in seen.values())
            assert {name: [one.kind for one in each.curves].count("loss") for name, each in seen.items()} == {
                "eve": 0,
                "ada": 0,
                "a": 1,
                "op": 1,
            }
            for stream in streams.values():
                await stream.aclose()

    run_held(scenario())


def test_curves_come_only_where_they_have_changed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as at, at.peer("a") as a:
            await found_run(a)
            await commit(a, 0, at)
            run = at.coordinator.run
            messages = Watchers(run, StatusReplies(run)).statuses(CURVES_S, lambda: OPERATOR)
            told = [await anext(messages)]
            for step in (0, 1, 0):
                if step:
                    await commit(a, step, at)
                waiting = asyncio.ensure_future(anext(messages))
                await asyncio.sleep(0)
                pass_time(CURVES_S)
                told.append(await waiting)
            assert [bool(each.curves) for each in told] == [True, False, True, False]
            await messages.aclose()

    run_held(scenario())


def test_who_says_so_gets_only_the_new_points_of_curves(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as at, at.peer("a") as a:
            await found_run(a)
            await commit(a, 0, at)
            run = at.coordinator.run
            replies = StatusReplies(run)
            streams = [Watchers(run, replies).statuses(CURVES_S, lambda: OPERATOR, curves_kept=kept) for kept in (True, False)]
            had = [status_from_pb(await anext(stream)) for stream in streams]
            for step in (1, 2):
                await commit(a, step, at)
                waiting = [asyncio.ensure_future(anext(stream)) for stream in streams]
                await asyncio.sleep(0)
                pass_time(CURVES_S)
                news = [await each for each in waiting]
                assert [{len(one.x) for one in each.curves} for each in news] == [{1}, {step + 1}]
                had = [status.updated(status_from_pb(each)) for status, each in zip(had, news, strict=True)]
                assert had[0].curves == had[1].curves == run.history.curves()
            for stream in streams:
                await stream.aclose()

    run_held(scenario())


def test_a_watcher_whose_curves_had_no_room_gets_them_whole_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with served(new_folder(tmp_path / "run")) as at, at.peer("a") as a:
            await found_run(a)
            await commit(a, 0, at)
            replies = StatusReplies(at.coordinator.run)
            reply = replies.reply
            monkeypatch.setattr(replies, "reply", lambda status: reply(status, 100))
            _, seen = replies.watched(OPERATOR, None, curves_kept=True)
            monkeypatch.undo()
            told, _ = replies.watched(OPERATOR, seen, curves_kept=True)
            whole = reply(run_status(at.coordinator.run))
            assert [(one.kept, len(one.x)) for one in told.curves] == [(0, 1)] * len(whole.curves)

    run_held(scenario())


@pytest.mark.parametrize("pause", [LEAST_EVERY_S, 0.3, 1.0, 7.7, MOST_EVERY_S])
def test_watchers_of_one_pace_are_due_at_the_same_times(pause: float) -> None:
    now, begun = 12345.678, (12345.678, 12345.9, 12346.0, 12349.99)
    due = [each + until_tick(each, pause) for each in begun]
    assert all(each / pause == pytest.approx(round(each / pause), abs=1e-6) for each in due)
    for _ in range(5):
        later = now + until_tick(now, pause)
        assert 0.1 * pause - 1e-6 <= later - now <= 1.1 * pause + 1e-6
        for early in (0.0, -1e-9, 1e-6):  # a timer is never exact
            assert until_tick(later + early, pause) == pytest.approx(pause, abs=1e-5)
        now = later


@on_a_loop
async def test_grpc_is_told_why_a_watcher_is_refused(tmp_path: Path) -> None:
    async with served(new_folder(tmp_path / "run")) as at, at.channel("eve", "observer") as channel:
        call = control_pb2_grpc.ControlStub(channel).Watch(pb.WatchRequest(every_s=-1.0))
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
