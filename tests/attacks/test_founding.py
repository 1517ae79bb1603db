"""Who founds a run: a silent or lying founder, one of another model, one that goes away while its parameters are written."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from aggregator.control.founding import STALL_S
from aggregator.control.status import run_status
from aggregator.resources import Clock
from aggregator.storage import checkpoint
from aggregator.storage.journal import Journal
from aggregator.storage.store import Store, load_outer
from edit.fragments.digest import digest
from edit.fragments.gpt import gpt_schema
from editpb import data_pb2
from editpb.data_messages import found_header_to_pb
from editpb.messages import Expel, FoundHeader
from editpb.transport.chunks import make_chunks
from tests.support.loops import WAIT_S, on_a_loop, until
from tests.support.served import SCHEMA, TOML, BarePeer, Served, found_run, new_folder, served, theta


class Ahead:
    """A clock that a test sets forward."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @property
    def clock(self) -> Clock:
        return Clock(monotonic=lambda: self.seconds)


async def asked(peer: BarePeer) -> None:
    await peer.attend()
    await peer.view(lambda view: view.found)


async def begin(peer: BarePeer, run: Served) -> grpc.aio.StreamUnaryCall:
    """A transfer of which the first half is in, and no more comes."""
    call = peer.data.Found()
    message = found_header_to_pb(FoundHeader(run_id=peer.run_id, schema_hash=SCHEMA.schema_hash, digest=digest(theta())))
    await call.write(data_pb2.FoundPart(header=message))
    (chunk,) = make_chunks(theta()[0].numpy().tobytes())
    await call.write(data_pb2.FoundPart(chunk=data_pb2.FragmentChunk(fragment_id=0, chunk=chunk)))
    await until(lambda: received(run) == 4 * SCHEMA.fragments[0].numel)
    return call


def received(run: Served) -> int:
    turn = run.coordinator.run.founding.turn
    return turn.received_bytes if turn is not None else 0


@pytest.mark.parametrize("begun", [False, True], ids=["nothing is sent", "half is sent"])
@on_a_loop
async def test_a_silent_founder_hands_over_to_the_next_peer(tmp_path: Path, begun: bool) -> None:
    ahead = Ahead()
    folder = new_folder(tmp_path / "run", start=2)
    async with served(folder, ahead.clock) as run, run.peer("silent") as silent, run.peer("honest") as honest:
        await asked(silent)
        await honest.attend()
        call = await begin(silent, run) if begun else None
        said = run_status(run.coordinator.run).waiting_for
        assert said.startswith("silent, asked for the initial parameters 0 s ago")  # both are here
        ahead.seconds = STALL_S
        async with asyncio.timeout(WAIT_S):
            await honest.view(lambda view: view.found)
        if call is not None:
            async with asyncio.timeout(WAIT_S):
                assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION
                assert "silent brought nothing new" in await call.details()
        await honest.found(theta(1))
        assert run.coordinator.run.rounds.published.digest == digest(theta(1))
        assert run_status(run.coordinator.run).waiting_for == "peers that are here: 0 of 2 are ready"
        for peer in (silent, honest):
            await peer.report(0)
        await honest.view(lambda view: view.round_id > 0)
        assert run_status(run.coordinator.run).waiting_for == "honest, silent (0 in, quorum 1)"


@on_a_loop
async def test_a_founder_of_bad_bytes_hands_over_at_once(tmp_path: Path) -> None:
    async with served(new_folder(tmp_path / "run")) as run, run.peer("bad") as bad, run.peer("honest") as honest:
        await asked(bad)
        await honest.attend()
        wrong = theta()
        wrong[1][7] = float("nan")
        with pytest.raises(grpc.aio.AioRpcError, match="the founder's parameters are not finite: "):
            await bad.found(wrong)
        await honest.view(lambda view: view.found)
        await honest.found(theta(1))


@on_a_loop
async def test_a_founder_of_another_model_than_the_built_in_one_is_refused(tmp_path: Path) -> None:
    builtin = TOML.replace('name = "entry:mine"', "layers = 1\nheads = 2\nwidth = 16\nvocabulary = 32")
    schema = gpt_schema(layers=1, width=16, vocabulary=32)
    async with served(new_folder(tmp_path / "run", toml=builtin)) as run, run.peer("liar") as liar:
        await liar.open_stream()
        refused = await liar.receive(Expel)
        assert isinstance(refused, Expel) and not refused.evicted
        assert refused.reason == (
            "another model: tensor embedding.weight of the run stands where the peer has layer0.weight "
            '(run.toml says builtin:gpt; a model of your own is "entry:NAME")'
        )
        async with run.peer("honest", schema) as honest:
            await found_run(honest)


@on_a_loop
async def test_a_model_that_does_not_fit_into_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aggregator.control.schemas.physical_memory_bytes", lambda: 8 * SCHEMA.numel - 1)
    async with served(new_folder(tmp_path / "run")) as run, run.peer("huge") as huge:
        await huge.open_stream()
        refused = await huge.receive(Expel)
        assert isinstance(refused, Expel) and "a model of 305 parameters needs" in refused.reason


@on_a_loop
async def test_a_founder_that_begins_again_and_again_holds_one_transfer(tmp_path: Path) -> None:
    async with served(new_folder(tmp_path / "run")) as run, run.peer("again") as again:
        await asked(again)
        calls = [await begin(again, run) for _ in range(5)]
        async with asyncio.timeout(WAIT_S):
            for call in calls[:-1]:
                assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION
                assert await call.details() == "a newer transfer of the initial parameters has begun"
        assert not calls[-1].done()


@on_a_loop
async def test_a_founder_that_goes_away_while_its_parameters_are_written_has_founded_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go_on, written = threading.Event(), threading.Event(), Store.found

    def held(store: Store, outer: object) -> None:
        writing.set()
        go_on.wait()
        written(store, outer)  # type: ignore[arg-type]

    monkeypatch.setattr(Store, "found", held)
    folder = new_folder(tmp_path / "run")
    async with served(folder) as run, run.peer("b") as b:
        async with run.peer("a") as a:
            await asked(a)
            await b.attend()
            call = asyncio.create_task(a.found(theta(0)))
            await until(writing.is_set)
            call.cancel()
            await asyncio.wait([call])
        await until(lambda: run.coordinator.run.attendances.get("a") is None)
        turn = run.coordinator.run.founding.turn
        assert turn is not None and turn.transfer is not None and not turn.transfer.open
        go_on.set()
        await b.view(lambda view: view.digest == digest(theta(0)))
        with pytest.raises(grpc.aio.AioRpcError, match="the run has parameters already"):
            await b.found(theta(1))
        assert load_outer(folder).digest == run.coordinator.run.rounds.published.digest == digest(theta(0))


class Killed(BaseException):
    """What SIGKILL is to a process."""


def _before(work: Callable[..., object]) -> Callable[..., object]:
    def killed(*_: object, **__: object) -> None:
        raise Killed

    return killed


def _after(work: Callable[..., object]) -> Callable[..., object]:
    def killed(*arguments: object, **named: object) -> None:
        work(*arguments, **named)
        raise Killed

    return killed


@pytest.mark.parametrize("when", [_before, _after])
@pytest.mark.parametrize("write", ["checkpoint", "journal"])
@on_a_loop
async def test_after_a_kill_while_the_run_is_founded_disk_and_run_are_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: str, when: Callable[[Callable[..., object]], Callable[..., object]]
) -> None:
    """The parameters are on disk whole, and then they are the run's, or another peer founds it."""
    folder = new_folder(tmp_path / "run")
    with monkeypatch.context() as patched:
        module, name = (checkpoint, "save") if write == "checkpoint" else (Journal, "create")
        patched.setattr(module, name, when(getattr(module, name)))
        async with served(folder, kill=True) as run, run.peer("a") as a:
            await asked(a)
            call = asyncio.create_task(a.found(theta(0)))
            await until(lambda: run.coordinator.background.failure is not None)
            call.cancel()
            await asyncio.wait([call])
            assert not run.coordinator.run.founded
    whole = (write, when) != ("checkpoint", _before)
    async with served(folder, kill=True) as run, run.peer("b") as b:
        assert run.coordinator.run.founded is whole
        if not whole:
            await asked(b)
            await b.found(theta(1))
        assert load_outer(folder).digest == run.coordinator.run.rounds.published.digest == digest(theta(0 if whole else 1))


@on_a_loop
async def test_a_founding_that_the_disk_refuses_leaves_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = new_folder(tmp_path / "run")
    async with served(folder, kill=True) as run, run.peer("a") as a, run.peer("b") as b:
        await asked(a)
        run.disk.full = True
        with pytest.raises(grpc.aio.AioRpcError):
            await a.found(theta(0))
        assert not list(folder.outer.glob("step-*"))
        run.disk.full = False
        await b.attend()
        await a.goodbye()
        await b.view(lambda view: view.found)
        await b.found(theta(1))
        assert load_outer(folder).digest == run.coordinator.run.rounds.published.digest == digest(theta(1))
