"""The operator's drain of a run with several aggregators: all end at one outer step, whatever they do while they are asked."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aggregator import operator_client
from aggregator.operator_client import drain_every
from edit.config.run import RoundsConfig
from edit.errors import StorageError, TransportError
from edit.rounds.events import Arrived, CommitSucceeded, Drain, MemberReady, Pause, Reduced
from edit.rounds.machine import RoundMachine
from editpb import control_pb2 as pb
from tests.support.served import new_folder


class Hub:
    """Aggregators, each the machine of its rounds, with one peer that contributes to all of them.

    away: those that do not answer. between: is called before each that is asked to drain.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *steps: int, between: Callable[[Hub], None] = lambda hub: None) -> None:
        self.machines = [
            RoundMachine(RoundsConfig(), due=lambda step: (0,), outer_step=step, outer_steps=1000, first_round_id=1)
            for step in steps
        ]
        for machine, step in zip(self.machines, steps, strict=True):
            machine.handle(MemberReady("a", step), 0.0)
        self.away = set[int]()
        self.old = set[int]()  # those of a version that does not say where they end
        self.full = set[int]()  # those that cannot write the order down
        self._between = between
        monkeypatch.setattr(operator_client, "further_addresses", lambda folder: [f"host:{n}" for n in range(1, len(steps))])
        monkeypatch.setattr(operator_client, "ask_operator", lambda folder, call: self._ask(0, call))
        monkeypatch.setattr(
            operator_client, "_ask", lambda connection, call, who: self._ask(int(who.removesuffix(")")[-1]), call)
        )
        monkeypatch.setattr(operator_client, "read_status", self._status)

    def commit(self) -> None:
        """Bring all open rounds to their end."""
        for machine in self.machines:
            if number := machine.round_id:
                for event in (Arrived("a", number, 0), Reduced(number, 0), CommitSucceeded(number)):
                    machine.handle(event, 1.0)

    def ends(self) -> list[int]:
        """Let the run go on to its end, and return where each has ended."""
        for _ in range(20):
            self.commit()
        assert all(machine.phase.value == "finished" for machine in self.machines)
        return [machine.outer_step for machine in self.machines]

    async def _ask(self, number: int, call: Callable[[Any], Awaitable[Any]]) -> Any:
        if number in self.away:
            raise TransportError(f"aggregator {number} does not answer")
        machine = self.machines[number]

        async def drain(request: pb.DrainRequest, **_: float) -> pb.DrainReply:
            if number in self.full:
                raise StorageError("orders.json: cannot be written (No space left on device)")
            self._between(self)
            machine.handle(Drain(0 if number in self.old else request.outer_step), 1.0)
            ends = machine.outer_step if machine.last_step is None else machine.last_step
            return pb.DrainReply() if number in self.old else pb.DrainReply(outer_step=ends)

        return await call(SimpleNamespace(machine=machine, Drain=drain))

    @staticmethod
    async def _status(stub: Any) -> Any:
        machine: RoundMachine = stub.machine
        phase, last_step = machine.phase.value, machine.last_step or 0
        return SimpleNamespace(outer_step=machine.outer_step, phase=phase, draining=machine.draining, last_step=last_step)


def drained(hub: Hub, tmp_path: Path) -> operator_client.Answers[int | None]:
    return asyncio.run(drain_every(new_folder(tmp_path / "run")))


@pytest.mark.parametrize("steps", [(5, 5), (5, 2, 9), (0, 3)])
@pytest.mark.parametrize("moves", [None, 0, 1])
def test_all_end_at_one_outer_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, steps: tuple[int, ...], moves: int | None
) -> None:
    """moves: when so many have been asked, a round of each comes to its end."""
    asked = itertools.count()
    hub = Hub(monkeypatch, *steps, between=lambda hub: hub.commit() if next(asked) == moves else None)
    said = drained(hub, tmp_path)
    ends = hub.ends()
    assert len(set(ends)) == 1 and ends[0] >= max(steps) + 2 and not said.failures
    assert set(said.said.values()) == {ends[0]}


def test_repeating_it_moves_no_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub, folder = Hub(monkeypatch, 5, 4), new_folder(tmp_path / "run")
    said = asyncio.run(drain_every(folder)).said
    for _ in range(5):
        hub.commit()
        assert asyncio.run(drain_every(folder)).said == said
    assert hub.ends() == [said[0], said[1]]


def test_where_the_coordinator_refuses_nobody_drains(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = Hub(monkeypatch, 5, 5, 5)
    hub.full = {0}
    with pytest.raises(StorageError, match="No space left on device"):
        drained(hub, tmp_path)
    assert not any(machine.draining for machine in hub.machines)


def test_a_coordinator_that_hangs_does_not_let_the_others_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It has taken the order, and its answer is lost after the call's whole time."""
    hub = Hub(monkeypatch, 5, 5, 5)
    ask, others = hub._ask, asyncio.Event()

    async def lost(number: int, call: Callable[[Any], Awaitable[Any]]) -> Any:
        said = await ask(number, call)
        if number and hub.machines[number].draining:
            others.set()
        if not number and hub.machines[0].draining:
            await others.wait()
            for _ in range(4):
                hub.commit()
            raise TransportError("the coordinator does not answer")
        return said

    monkeypatch.setattr(operator_client, "_AHEAD_S", 0.0)
    monkeypatch.setattr(hub, "_ask", lost)
    assert len(drained(hub, tmp_path).failures) == 1
    assert len(set(hub.ends())) == 1


def test_a_paused_run_ends_where_the_furthest_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = Hub(monkeypatch, 5, 4)
    for machine in hub.machines:
        machine.handle(Pause(), 0.5)
    assert drained(hub, tmp_path).said == {0: 5, 1: 5} and hub.ends() == [5, 5]


def test_one_that_is_away_or_old_changes_nothing_for_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = Hub(monkeypatch, 5, 7, 3, 6)
    hub.away, hub.old = {1}, {3}
    said = drained(hub, tmp_path)
    assert said.said == {0: 8, 2: 8, 3: None} and len(said.failures) == 1
    with pytest.raises(TransportError, match=r"aggregator 1 .*does not answer"):
        said.check()
    hub.machines[1].handle(Drain(), 2.0)
    assert hub.ends() == [8, 8, 8, 7]
