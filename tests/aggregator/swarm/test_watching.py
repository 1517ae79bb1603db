"""The whole swarm as one status: all parts in one row, who leads, owners that change, hosts that do not answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from aggregator.past import Past
from aggregator.swarm import operate
from aggregator.swarm.commands import app
from aggregator.swarm.host_folder import Settings
from aggregator.swarm.watching import SwarmWatch, status_with_settings, whole_status
from edit.config.run import RunConfig
from edit.council.record import Phase
from edit.errors import TransportError
from edit.view.explain import leaving
from edit.view.status import draining
from edit.web.page import render_page
from editpb.run_status import RunStatus
from tests.aggregator.swarm.test_operating import equip, in_thread, scenario
from tests.support.council.hosts import SIZES, Hosts, hosts, schema_of
from tests.support.loops import run_held
from tests.support.served import TOML

ONES = [torch.ones(size) for size in SIZES]
PARTS = 2


@pytest.fixture(autouse=True)
def model_of_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hosts of the test have random vectors in place of a model."""
    ids = [(range(i * len(SIZES), (i + 1) * len(SIZES)), schema_of(i)) for i in range(PARTS)]
    monkeypatch.setattr(Settings, "schemas", lambda self, config: tuple(ids))


async def first_that(statuses: AsyncIterator[RunStatus], condition: Callable[[RunStatus], object]) -> RunStatus:
    """Return the first status that is so. The loop's time stands still, so the statuses' pauses are let pass by hand."""
    last = None
    for _ in range(200):
        last = await anext(statuses)
        if condition(last):
            return last
    raise AssertionError(last)


def test_all_parts_are_one_run_with_its_council(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        folder = equip(swarm, "b")
        for part in range(PARTS):
            await swarm.contribute(part, ONES)
        await swarm.until(lambda: all(set(swarm.steps(part).values()) == {1} for part in range(PARTS)))
        async with aclosing(SwarmWatch(folder, every_s=0.0).statuses()) as statuses:
            told = await first_that(statuses, lambda status: status.rounds and status.council.leader == "a")
            (round_,) = told.rounds
            assert (round_.outer_step, round_.number, round_.committed) == (1, 1, True)
            assert [each.fragment_id for each in round_.fragments] == list(range(PARTS * len(SIZES)))
            assert told.outer_step == 1 and told.tokens == 10 and told.run_id == swarm.run_id
            assert [part.owner for part in told.council.parts] == [part.owner for part in swarm.record.parts]
            assert {one.peer_id for one in told.council.members} == {"a", "b", "c"} and not told.council.lost
            assert "sync.every" in {setting.name for setting in told.settings}
            page = render_page(told)
            assert "a leads" in page and "3 of 3 here, 2 needed" in page
        written = await in_thread(whole_status, folder)
        assert [report.outer_step for report in written.rounds] == [1]
        asked = await in_thread(CliRunner().invoke, app, ["configured", str(folder)])
        told = RunStatus.from_json(json.loads(asked.stdout))
        assert [part.owner for part in told.council.parts] == [part.owner for part in swarm.record.parts]
        sent = next(each for each in leaving(told, "peer", ()) if each.what.startswith("contributions"))
        assert f"now {swarm.record.parts[0].owner} (part" in sent.to and "in 1 committed rounds" in sent.size

    scenario(tmp_path, body, parts=PARTS)


def test_what_is_remembered_of_a_part_does_not_take_the_place_of_what_its_owner_says(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        folder = equip(swarm, "b")
        for part in range(PARTS):
            await swarm.contribute(part, ONES)
        await swarm.until(lambda: all(set(swarm.steps(part).values()) == {1} for part in range(PARTS)))
        watching = SwarmWatch(folder, every_s=0.0)
        old = Past().alone(swarm.run_id, RunConfig(), "the swarm")  # it owned both for a while
        watching.remember([old] * PARTS)
        async with aclosing(watching.statuses()) as statuses:
            assert [report.outer_step for report in (await anext(statuses)).rounds] == [1]

    scenario(tmp_path, body, parts=PARTS)


def test_a_drain_is_said_to_end_at_the_last_outer_step_at_most(tmp_path: Path) -> None:
    """One part has taken it: by the record all would end at the one after."""

    async def body() -> None:
        toml = TOML.replace("outer_steps = 100", "outer_steps = 2")
        async with hosts(tmp_path, parts=PARTS, toml=toml) as swarm:
            await swarm.grow("a")

            def outer_step(number: int) -> int:
                return swarm.owner(number).parts[number].engine.run.rounds.machine.outer_step

            for number, step in ((0, 1), (0, 2), (1, 1)):
                await swarm.until(lambda number=number: swarm.owner(number) is not None)
                await swarm.contribute(number, ONES)
                await swarm.until(lambda number=number, step=step: outer_step(number) == step)
            folder = equip(swarm, "a", authority=True)
            await in_thread(operate.drain, folder)
            assert swarm.record.phase is Phase.DRAINING and swarm.record.last_step == 3
            told = await in_thread(whole_status, folder)
            assert (told.last_step, told.outer_steps) == (2, 2) and draining(told) == "draining to outer step 2"

    run_held(body())


def test_without_any_host_it_says_what_the_folder_has_kept(tmp_path: Path) -> None:
    async def body(swarm: Hosts) -> None:
        for part in range(PARTS):
            await swarm.contribute(part, ONES)
        await swarm.until(lambda: all(set(swarm.steps(part).values()) == {1} for part in range(PARTS)))
        owners = [part.owner for part in swarm.record.parts]
        folder = equip(swarm, owners[0])
        for peer_id in "cba":
            await swarm.stop(peer_id)
        told = await in_thread(whole_status, folder)
        assert told.phase == "stopped" and "no member answers" in told.reason and told.council is None
        assert told.outer_step == 1, owners
        assert (told.tokens, told.waiting_for) == (10, "the swarm, of which no host answers")
        other = equip(swarm, next(peer_id for peer_id in "abc" if peer_id not in owners))
        told = await in_thread(whole_status, other)
        assert (told.phase, told.outer_step, told.rounds) == ("stopped", 1, ()), "who never owned a part knows how far it is"
        with pytest.MonkeyPatch.context() as observer:
            observer.setattr("aggregator.swarm.member_folder.MemberFolder.saved", lambda self: None)
            with pytest.raises(TransportError, match="no member"):
                await in_thread(whole_status, folder)
            told = await in_thread(status_with_settings, folder)
            assert (told.run_id, told.rounds, told.council) == (swarm.run_id, (), None)
            assert "sync.every" in {setting.name for setting in told.settings}
        report = ["report", str(folder), "--out", str(tmp_path / "two.html"), "--beside", str(folder)]
        written = await in_thread(CliRunner().invoke, app, report)
        assert written.exit_code == 0, written.exception
        assert f'"run {swarm.run_id}"' in (tmp_path / "two.html").read_text(encoding="utf-8")
        with pytest.raises(TransportError, match="no member answers"):
            await asyncio.wait_for(anext(SwarmWatch(folder).statuses()), 30)

    scenario(tmp_path, body, parts=PARTS)
