"""With more threads what is merged of one round may end while another one writes: no round is in two segments, none is cut."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from edit.codecs import blocks
from edit.fragments.shards import Box, Shard
from edit.merging.merge import Measured
from edit.merging.outer_state import Merged
from edit.rounds import events
from editpb.data_messages import update_manifest_to_pb
from editpb.messages import UpdateRequest
from tests.support.encoded import encode
from tests.support.loops import until
from tests.support.rounds import Rounds, open_rounds
from tests.support.served import SCHEMA, TOML, WAIT_S

ONES = [torch.ones(fragment.numel) for fragment in SCHEMA.fragments]
SMALL, LARGE = range(len(ONES))
ARRIVALS = TOML[: TOML.index("start_peers")] + 'merging = "arrivals"\nmax_staleness = 4\n' + TOML[TOML.index("[storage]") :]


class Held:
    """The first merge of the large fragment takes until it is released."""

    def __init__(self, really: Callable[[int, Sequence[Measured]], Merged]) -> None:
        self._really, self._calls = really, 0
        self.begun, self.released = threading.Event(), threading.Event()

    def __call__(self, fragment_id: int, contributions: Sequence[Measured]) -> Merged:
        merged = self._really(fragment_id, contributions)
        if fragment_id == LARGE:
            self._calls += 1
            if self._calls == 1:
                self.begun.set()
                assert self.released.wait(WAIT_S)
        return merged


async def contribute(rounds: Rounds, fragment_id: int) -> None:
    delta = ONES[fragment_id]
    shard = rounds.runner.offer(rounds.header("a", fragment_id, delta))
    await rounds.runner.receive(shard, 0, bytes(encode("fp32", delta).data))
    await rounds.runner.arrived(shard)


def test_a_merge_that_ends_after_its_round_leaves_what_the_next_round_has_written(tmp_path: Path) -> None:
    async def scenario() -> Rounds:
        async with open_rounds(tmp_path) as rounds:
            with ThreadPoolExecutor(2) as pool:
                rounds.background.compute_with(pool)
                held = rounds.outer.reduce = Held(rounds.outer.reduce)  # type: ignore[method-assign, assignment]
                rounds.ready("a")
                await contribute(rounds, LARGE)
                await asyncio.to_thread(held.begun.wait, WAIT_S)
                rounds.runner.feed(events.Pause())
                rounds.runner.feed(events.Resume())
                rounds.ready("a")
                await contribute(rounds, SMALL)
                current: Any = rounds.runner._round
                await until(lambda: SMALL in current.records)
                held.released.set()
                await until(lambda: not rounds.background._computing)
                await contribute(rounds, LARGE)
                await rounds.closed(2)
        return rounds

    rounds = asyncio.run(scenario())
    assert rounds.outer.outer_step == 1 and rounds.recovered().digest == rounds.outer.digest


def test_the_segment_of_a_checkpoint_is_begun_before_the_next_round_writes(tmp_path: Path) -> None:
    """With arrivals the next round is merged the moment a commit is known: a checkpoint that began it then would split it."""
    known: list[list[str]] = []

    async def scenario() -> Rounds:
        async with open_rounds(tmp_path, toml=ARRIVALS.replace("checkpoint_every = 3", "checkpoint_every = 2")) as rounds:
            feed = rounds.runner.feed

            def watched(event: events.Event) -> events.Refused | None:
                if isinstance(event, events.CommitSucceeded):
                    known.append(sorted(path.name for path in rounds.folder.outer.glob("*.journal")))
                return feed(event)

            rounds.runner.feed = watched  # type: ignore[method-assign]
            for round_id in (1, 2, 3):
                await rounds.contribute("a", ONES)
                await rounds.closed(round_id)
        return rounds

    rounds = asyncio.run(scenario())
    first, second = "step-00000000.journal", "step-00000002.journal"
    assert known == [[first], [first, second], [first, second]]
    assert rounds.recovered().digest == rounds.outer.digest


def test_where_a_rank_s_pieces_lie_is_counted_once_and_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[str] = []
    ranges = blocks._ranges

    def noted(shard: Shard, granule: int) -> tuple[torch.Tensor, torch.Tensor]:
        counted.append(threading.current_thread().name)
        return ranges(shard, granule)

    monkeypatch.setattr(blocks, "_ranges", noted)

    async def scenario() -> None:
        async with open_rounds(tmp_path, toml=TOML.replace('down = "fp32"', 'down = "int8"')) as rounds:
            await rounds.contribute("a", ONES)
            await rounds.closed(1)
            large = SCHEMA.fragments[LARGE]
            shards = (Shard(SCHEMA.fragments[SMALL]), Shard(large, [Box(0, (10,), (20,))]))
            wanted = UpdateRequest(rounds.folder.run_id, 1, shards)
            await rounds.published.measure(wanted)
            await rounds.published.measure(UpdateRequest(rounds.folder.run_id, 1, None))
            commit = rounds.published.update(1)
            found = update_manifest_to_pb(commit, shards)
            payloads = ((one.fragment_id, one.payload) for one in commit.fragments if one.payload is not None)
            sent = [i async for i, _, _ in rounds.published.payloads(payloads, wanted, asyncio.Semaphore(1))]
            assert (found.fragments[LARGE].numel, sent) == (256, [SMALL, LARGE])

    asyncio.run(scenario())
    assert [name for name in counted if not name.startswith("requests")] == counted[1:]
    assert threading.main_thread().name not in counted
