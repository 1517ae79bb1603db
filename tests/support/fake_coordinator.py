"""An in-process coordinator that speaks the real protocol and does what a test's script says.

It keeps a view, an outer state and the published updates; it merges only when told to. Faults are counters that a test sets:
each broken or damaged answer counts one down. Runs on a loop of its own; the test's thread reads and changes it under the lock.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import TracebackType

import grpc
from torch import Tensor

from edit.config.run import RunConfig
from edit.fragments.schema import Schema
from edit.fragments.shards import Shard, partition_fault
from edit.merging.merge import Measured, ShardPayload, measure
from edit.merging.norms import whole_norm
from edit.merging.outer_state import OuterState
from edit.records import Commit, EncodedTensor
from editpb import control_pb2_grpc, data_pb2_grpc
from editpb.messages import (
    ContributionHeader,
    Expel,
    Heartbeat,
    Hello,
    RunPhase,
    View,
)
from peers.carriers.io_thread import IoThread
from tests.support.fake_control import RUN_ID, FakeControl
from tests.support.fake_data import AHEAD, FakeData, Slot

__all__ = ["AHEAD", "FIRST_ROUND", "RUN_ID", "FakeCoordinator", "Slot"]

FIRST_ROUND = 1_000_001
OTHERS = 1  # what the contributions of other peers name


class FakeCoordinator:
    """Context manager. `script`: called under the lock, on the loop, when a peer has delivered every fragment of a round."""

    def __init__(self, config: RunConfig, schema: Schema, theta: Sequence[Tensor] | None, *, peer_id: str = "a") -> None:
        self.io = IoThread("fake-coordinator")
        self.config = config
        self.schema = schema
        self.peer_id = peer_id
        self.state = None if theta is None else OuterState(schema, config, theta)
        phase = RunPhase.FOUNDING if theta is None else RunPhase.COLLECTING
        self.view = View(
            sequence=1, phase=phase, round_id=0 if theta is None else FIRST_ROUND, digest=self._digest(), found=theta is None
        )
        self.script: Callable[[FakeCoordinator], None] = lambda fake: None
        self.on_heartbeat: Callable[[FakeCoordinator, Heartbeat], None] = lambda fake, beat: None
        self.updates: dict[int, Commit] = {}
        self.hellos: list[Hello] = []
        self.heartbeats: list[Heartbeat] = []
        self.goodbyes: list[str] = []
        self.founded: list[Tensor] = []
        self.expel: Expel | None = None
        self.received: defaultdict[Slot, bytearray] = defaultdict(bytearray)
        self.offered: dict[Slot, ContributionHeader] = {}
        self.headers: dict[Slot, ContributionHeader] = {}  # of those that are complete
        self.merged: set[int] = set()  # rounds that contributions named which are merged
        self.starts: list[int] = []  # offsets at which streams of contributions and snapshots began
        self.break_contribution_after: list[int] = []  # bytes after which the next streams break
        self.break_snapshot_after: list[int] = []
        self.refuse_contributions: list[tuple[grpc.StatusCode, str]] = []
        self.refuse_attendance: list[tuple[grpc.StatusCode, str]] = []
        self.damage_updates = 0
        self.damage_snapshots = 0
        self.lose_snapshots = 0
        self.refuse_update: Callable[[Sequence[Shard] | None], tuple[grpc.StatusCode, str] | None] = lambda shards: None
        self.broken_gates: set[int] = set()
        self.asked_for: list[Sequence[Shard] | None] = []  # in each FetchUpdate from the first byte on
        self.update_offsets: list[int] = []  # at which each FetchUpdate began
        self.founding: dict[str, list[bytearray]] = {}  # what is here of a founder's parameters, by their digest
        self.break_founding_after: list[int] = []
        self.founding_starts: list[int] = []  # bytes that were here when each call of a founder began
        self.break_update_after: list[int] = []
        self._gates: dict[int, asyncio.Event] = {}
        self.calls: defaultdict[str, int] = defaultdict(int)
        self.port = 0
        self._credentials: grpc.ServerCredentials | None = None
        self._server: grpc.aio.Server | None = None
        self._changed: set[asyncio.Event] = set()

    def __enter__(self) -> FakeCoordinator:
        self.io.__enter__()
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
        self.io.__exit__(kind, error, trace)

    # ---- what a test's thread does ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Listen on 127.0.0.1, on the same port as before when it was stopped."""
        self.port = self.io.call(self._start(), timeout=10)

    def stop(self) -> None:
        """Stop at once, as a killed process would."""
        self.io.call(self._stop(), timeout=10)

    def show(self, **changes: object) -> None:
        """Change the view and send it to whoever attends."""
        self.io.change(lambda: self.change_view(**changes))

    def await_(self, look: Callable[[FakeCoordinator], object]) -> None:
        """Wait until `look(self)` is true. Fails the test after ten seconds."""
        assert self.io.wait(lambda: look(self) or None, timeout=10) is not None, "the fake coordinator waited in vain"

    def hold_update(self, fragment_id: int) -> None:
        """Updates stop before this fragment (AHEAD: what is asked ahead of a commit is not answered) until it is released;
        `await_held` waits for the first that has.
        """
        self._gates[fragment_id] = asyncio.Event()

    def await_held(self) -> None:
        """Wait until an update has stopped where it is held."""
        self.await_(lambda fake: fake.calls["held"])

    def release_update(self, fragment_id: int, *, broken: bool = False) -> None:
        """Let the held updates go on, or their streams break."""
        if broken:
            self.broken_gates.add(fragment_id)
        self.io.post(self._gates.pop(fragment_id).set)

    async def gate(self, fragment_id: int) -> bool:
        """Wait while this fragment is held (loop's thread); returns whether the stream shall break here, once."""
        if fragment_id in self._gates:
            gate = self._gates[fragment_id]
            self.io.change(lambda: self.calls.update(held=self.calls["held"] + 1))
            try:
                await gate.wait()
            except asyncio.CancelledError:
                self.io.change(lambda: self.calls.update(abandoned=self.calls["abandoned"] + 1))
                raise
        broken = fragment_id in self.broken_gates
        self.broken_gates.discard(fragment_id)
        return broken

    # ---- what scripts do (under the lock) --------------------------------------------------------------------------------

    def commit(self, reason: str = "all in", named: int = 0) -> None:
        """Merge the contributions that name the open round (or `named`) for real, publish, open the next round."""
        state, round_id = self.state, self.view.round_id
        assert state is not None
        records = [state.record(state.reduce(i, [self._measured(named or round_id, i)])) for i in state.due]
        self.merged.add(named or round_id)
        done = state.commit(round_id, reason, records)
        self.updates[done.outer_step] = done
        self.change_view(
            outer_step=done.outer_step,
            digest=done.digest,
            round_id=round_id + 1,
            oldest_update=min(self.updates),
            last_round_id=round_id,
            last_committed=True,
            last_reason=reason,
        )

    def abort(self, reason: str) -> None:
        """Lose the open round and open the next one."""
        round_id = self.view.round_id
        self.change_view(round_id=round_id + 1, last_round_id=round_id, last_committed=False, last_reason=reason)

    def lose(self, round_id: int) -> None:
        """Forget what has come of the contributions that name this round."""
        for slot in [slot for slot in self.received if slot[0] == round_id]:
            del self.received[slot]
            self.headers.pop(slot, None)
            self.offered.pop(slot, None)

    def other_peer_commits(self, payloads: Sequence[EncodedTensor]) -> None:
        """A commit of peer b's contribution alone, of these fragments."""
        for i, payload in enumerate(payloads):
            self.headers[OTHERS, i, 0] = ContributionHeader(
                run_id=RUN_ID,
                round_id=OTHERS,
                outer_step=self.view.outer_step,
                peer_id="b",
                fragment_id=i,
                schema_hash=self.schema.schema_hash,
                inner_steps=5,
                tokens=50,
                codec=payload.codec,
                numel=payload.numel,
                total_bytes=len(payload.data),
            )
            self.received[OTHERS, i, 0] = bytearray(payload.data)
        self.commit(named=OTHERS)

    # ---- inside ----------------------------------------------------------------------------------------------------------

    def refusal(self, header: ContributionHeader) -> str:
        """Why this contribution is late, or ''."""
        newest, steps = self.view.round_id, self.view.outer_step - header.outer_step
        if self.config.rounds.max_staleness == 0:
            return "" if header.round_id == newest and steps == 0 else f"round {header.round_id} is closed"
        taken = header.round_id <= newest and steps <= self.config.rounds.max_staleness
        return "" if taken and header.round_id not in self.merged else "it is too late for this contribution"

    def _digest(self) -> str:
        return "" if self.state is None else self.state.digest

    def change_view(self, **changes: object) -> None:
        """Change the view and send it (under the lock; `show` is for a test's thread)."""
        self.view = dataclasses.replace(self.view, **{"sequence": self.view.sequence + 1, **changes})  # type: ignore[arg-type]
        self.io.post(self._wake)

    def _wake(self) -> None:
        for event in self._changed:
            event.set()

    def _parts(self, round_id: int, fragment_id: int) -> list[tuple[ContributionHeader, Shard, EncodedTensor]]:
        """By rank, of the newest attempt."""
        fragment = self.schema.fragments[fragment_id]
        slots = [slot for slot in sorted(self.headers) if slot[:2] == (round_id, fragment_id)]
        newest = max((self.headers[slot].attempt for slot in slots), default=0)
        return [
            (header, Shard(fragment, header.boxes), EncodedTensor(header.codec, header.numel, self.received[slot]))
            for slot in slots
            if (header := self.headers[slot]).attempt == newest
        ]

    def _measured(self, round_id: int, fragment_id: int) -> Measured:
        parts = self._parts(round_id, fragment_id)
        header = parts[0][0]
        return Measured(
            peer_id=header.peer_id,
            inner_steps=header.inner_steps,
            tokens=header.tokens,
            norm=whole_norm(measure(payload) for _, _, payload in parts),
            payload=tuple(ShardPayload(shard, payload) for _, shard, payload in parts),
        )

    async def _start(self) -> int:
        server = grpc.aio.server()
        control_pb2_grpc.add_ControlServicer_to_server(FakeControl(self), server)
        data_pb2_grpc.add_DataServicer_to_server(FakeData(self), server)
        port = server.add_insecure_port(f"127.0.0.1:{self.port}")
        await server.start()
        self._server = server
        return int(port)

    async def _stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    def complete(self, round_id: int) -> bool:
        """Whether every due fragment of a round is in, all parts of one attempt."""
        assert self.state is not None
        return all(
            partition_fault(self.schema.fragments[i], [shard.boxes for _, shard, _ in self._parts(round_id, i)]) is None
            for i in self.state.due
        )
