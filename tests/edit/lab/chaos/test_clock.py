"""The wall clock jumps by days: no round and no lease depends on it.

A chaos run cannot make it jump for one process, so here a coordinator is given one that does. (Duplicated and reordered chunks,
which a chaos run cannot make over TLS and TCP either, are in the tests of the coordinator's upload buffer.)
"""

import asyncio
import itertools
import json
import time
from pathlib import Path

import pytest
import torch

from editpb.messages import RunPhase
from tests.support.served import SCHEMA, TOML, found_run, held_clock, new_folder, served

DAY_S = 86_400.0


@pytest.mark.parametrize("jump_s", [DAY_S, -DAY_S])
def test_rounds_and_leases_do_not_see_a_jump_of_the_wall_clock(tmp_path: Path, jump_s: float) -> None:
    jumps = itertools.count(1)
    clock = held_clock(lambda: time.time() + jump_s * next(jumps))

    async def scenario() -> None:
        folder = new_folder(tmp_path / "run", start=2, quorum=2, toml=TOML)
        async with served(folder, clock) as run, run.peer("a") as a, run.peer("b") as b:
            await found_run(a, b)
            for step in range(3):
                view = await a.view(lambda v, step=step: v.outer_step == step and v.phase is RunPhase.COLLECTING)
                for peer in (a, b):
                    await peer.contribute(view.round_id, step, [torch.ones(fragment.numel) for fragment in SCHEMA.fragments])
                for peer in (a, b):
                    await peer.view(lambda v, step=step: v.outer_step == step + 1)
                    await peer.report(step + 1)
            for peer in (a, b):
                await peer.goodbye()
        lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
        rounds = [line for line in lines if line["kind"] == "round" and line["committed"]]
        assert [line["outer_step"] for line in rounds] == [1, 2, 3]
        assert all(line["missing"] == [] for line in rounds)
        assert abs(rounds[-1]["t"] - time.time()) > DAY_S / 2  # the clock really was another one
        assert all(line["state"] != "lost" for line in lines if line["kind"] == "member")

    asyncio.run(scenario())
