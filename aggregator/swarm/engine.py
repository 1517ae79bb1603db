"""An owner's engine: the coordinator's run for one part of the model, under one grant.

Peers attend and contribute as at a coordinator; only the commit differs (`engine_store`). Who is evicted, and whether the run
is paused, the record says: an engine has none of the operator's calls but Status and Watch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from aggregator.control.run import Run
from aggregator.metrics import MetricsLog
from aggregator.resources import Clock, Resources
from aggregator.run_feed import EventLog, RunEnded, RunEvent, RunFeed, Subscriber
from aggregator.security.members import Members
from aggregator.services.authorization import Authorizer
from aggregator.services.control import ControlService
from aggregator.services.data import DataService
from aggregator.storage.operator_flags import OperatorFlags
from aggregator.storage.store import Store
from aggregator.storage.upload_buffer import UploadBuffer
from aggregator.worker_thread import Background
from edit.config.run import RunConfig
from edit.council.record import Phase
from edit.durable_files import make_folder
from edit.errors import StorageError
from edit.merging.outer_state import OuterState
from editpb import control_pb2_grpc
from editpb.transport.chunk_frames import data_handlers, handlers_of
from editpb.transport.send_limit import UNLIMITED, SendLimit

__all__ = ["Engine", "first_round_id"]

ROUNDS_PER_GRANT = 1_000_000  # ids of rounds of one grant
AWAITS_S = 0.5  # whoever contributed to the outer step before comes back within that, once it has heard of the new owner
_CONTROL = ("Attend", "Status", "Watch")


def first_round_id(grant: int) -> int:
    """Return the id of the first round under a grant: later grants have greater ones."""
    return grant * ROUNDS_PER_GRANT + 1


class Engine:
    """See above. `start` it, and `close` it once its store has ended.

    Args:
        outer: the part's state, which only the engine moves from now on.
        folder: for what it writes; nothing of it is needed again.
        gone: the members that there is no connection to: the first round does not wait for them.
        files: the host's file thread.
        limit_of: returns what bounds the bytes that a caller is sent.
        ended: is told when the last outer step is taken, or was before.
        fail: is told of a bug, after which the host must end.
        only: the one peer that may attend; '': all of the run.
        subscribers: are told what happens in its rounds.
        draining: the run drains already: without its peers it ends where it is, so it waits a lease for them.
    """

    def __init__(
        self,
        run_id: str,
        part: int,
        grant: int,
        config: RunConfig,
        outer: OuterState,
        store: Store,
        folder: Path,
        members: Members,
        gone: Set[str],
        files: Executor,
        clock: Clock,
        ended: Callable[[], None],
        fail: Callable[[BaseException], None],
        limit_of: Callable[[Any], SendLimit] = lambda _: UNLIMITED,
        only: str = "",
        subscribers: Sequence[Subscriber] = (),
        draining: bool = False,
    ) -> None:
        make_folder(folder, 0o700)
        orders = folder / "orders.json"
        try:
            orders.unlink(missing_ok=True)  # of an earlier grant
        except OSError as error:
            raise StorageError(f"{orders}: cannot be removed ({error.strerror})") from error
        feed = RunFeed(clock.unix)
        feed.subscribe(EventLog().on_event)
        feed.subscribe(MetricsLog(folder / "metrics.jsonl", files).on_event)
        for subscriber in subscribers:
            feed.subscribe(subscriber)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=f"torch {part}")
        self._background = Background(self._worker, fail)
        self.grant, self._part, self._ended, self.phase = grant, part, ended, Phase.RUNNING
        resources = Resources(
            store=store,
            uploads=UploadBuffer(config.storage.buffer_bytes, folder / "spill", files),
            members=members,
            orders=OperatorFlags(orders),
            background=self._background,
            feed=feed,
            clock=clock,
        )
        last = store.update(outer.outer_step)
        contributors = {verdict.peer_id for fragment in last.fragments for verdict in fragment.verdicts} if last else set()
        awaited = contributors - gone, config.membership.lease_s if draining else AWAITS_S
        self.run = Run(run_id, config, resources, first_round_id=first_round_id(grant), awaited=awaited, outer=outer)
        authorizer = Authorizer(run_id, members, clock.unix, only)
        feed.subscribe(authorizer.on_event)
        feed.subscribe(self._on_event)
        control = handlers_of(control_pb2_grpc.add_ControlServicer_to_server, ControlService(self.run, authorizer))
        self.handlers: Mapping[str, Any] = {  # by the method's path
            **{f"/editpb.Control/{method}": control[method] for method in _CONTROL},
            **{
                f"/editpb.Data/{name}": each
                for name, each in data_handlers(DataService(self.run, authorizer, limit_of)).items()
            },
        }

    def _on_event(self, event: RunEvent, unix: float) -> None:
        if isinstance(event, RunEnded):
            self._ended()

    async def start(self) -> None:
        """Open rounds."""
        await self._background.in_worker(torch.set_num_threads, torch.get_num_threads())
        await self.run.start()
        if self.run.finished:  # the owner before may have gone before all agreed that it had ended
            self._ended()

    def follow(self, phase: Phase, last_step: int = 0) -> None:
        """Pause, resume or drain the run, as the record says. last_step: see `Record`."""
        if phase is self.phase:
            return
        before, self.phase = self.phase, phase
        match phase:
            case Phase.RUNNING:
                self.run.resume()
            case Phase.PAUSED:
                self.run.pause()
            case Phase.DRAINING:
                self.run.drain(last_step)
            case Phase.FINISHED if before is not Phase.DRAINING and not self.run.finished:
                self.run.drain()  # it began after the run had ended, and has peers that are still to hear of it

    async def close(self) -> None:
        """End all streams and rounds. The store refuses what is proposed already."""
        self.run.attendances.end()
        await self.run.close(checkpoint=False)
        self._background.end(f"this member no longer serves part {self._part}")
        await asyncio.to_thread(self._worker.shutdown)  # a merge may take long
