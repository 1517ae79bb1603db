"""Checks what the audit log says of this peer: the host beside it keeps the log, and is asked after each outer step.

A fault does not stop the peer, as it does in a run with a coordinator: the next owner may be honest, and one that lies must not
be able to make the others leave. It is logged, shown in the status of this peer's host, and kept in the peer's folder:

    receipt-fault-part-N-step-T.json    the entry of outer step T of part N, and what this peer knows
    receipts-part-N.jsonl               the entries of part N that fit (`editpb.seen_entries`): later ones must go on from these
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import grpc

from edit.durable_files import write_json
from edit.errors import EditError, RemoteProtocolError, StaleError, StorageError, TransportError
from edit.records import Commit
from edit.trust.merkle import MerkleTree, verify_consistency
from edit.trust.signatures import Signer, key_hash
from editpb import council_pb2 as pb
from editpb import council_pb2_grpc
from editpb.council_messages import LogDoubt, doubt_to_pb, goes_on_from_pb, logged_from_pb
from editpb.earlier_keys import earlier_keys
from editpb.identity import Identity
from editpb.limits import one_line
from editpb.messages import ContributionHeader, LoggedEntry
from editpb.part_receipts import ExpectedLog, LoggedCommit, check_logged
from editpb.receipts import Mine, ReceiptFault
from editpb.seen_entries import SeenEntry
from editpb.transport.status import from_rpc
from peers.carriers.hub.kept_receipts import base64_text
from peers.carriers.swarm.channels import PartChannels
from peers.carriers.swarm.seen_log import SeenLog

__all__ = ["FAULT_FORMAT", "PartReceipts", "ReceiptChecks", "fault_file"]

AGAIN_S = 2.0  # after which the host is asked again for what it did not have
ANSWER_S = 10.0
OTHERS_S = 5.0  # for each other member that is asked whether the log goes on
MOST_ASKED = 16  # of these
LAST_S = 5.0  # at the end of a run, for what is not checked yet
MOST_UNCHECKED = 64  # outer steps of a part; earlier ones are not checked
MOST_FAULTS = 16  # that one process keeps as files
FAULT_FORMAT = 1
_ROUNDS = 16  # the last ones of which is known what the owner has
_log = logging.getLogger(__name__)


def fault_file(home: Path, part: int, outer_step: int) -> Path:
    """Return where an entry that does not fit is kept."""
    return home / f"receipt-fault-part-{part}-step-{outer_step}.json"


@dataclass(frozen=True, slots=True)
class _Doubt:
    """What is wrong with an entry, and what is to be kept of it. logged: None: it is not kept."""

    said: LogDoubt
    logged: LoggedEntry | None
    seen: SeenEntry | None = None  # the last entry before it that this peer had seen


class PartReceipts:
    """What this peer has sent to a part, and the updates that it took. A `Follower`; on the loop's thread.

    Args:
        mine: who this peer is.
        kept: the entries that it has seen.
        alone: whether it has one rank: it knows of all its shards then whether the owner has them.
        woken: called when there is an update to be checked.
    """

    def __init__(
        self,
        run_id: str,
        part: int,
        config_digest: str,
        mine: Mine,
        kept: SeenLog,
        woken: Callable[[], object],
        *,
        alone: bool = True,
    ) -> None:
        self.part, self.mine, self.kept = part, mine, kept
        self.unchecked: list[Commit] = []  # ascending
        self.checked = 0  # entries that fit
        self._run_id, self._config_digest, self._woken, self._alone = run_id, config_digest, woken, alone
        self._schema_hash = ""
        self._whole: dict[int, frozenset[int]] = {}  # see `ExpectedLog`
        self._left_out = ""  # the owner that left this peer out last, and how it put it

    def signed(self, header: ContributionHeader) -> ContributionHeader:
        """See `Follower`."""
        self.mine, self._schema_hash = self.mine.with_signed(header), header.schema_hash
        return header

    def delivered(self, header: ContributionHeader) -> None:
        """See `Follower`."""
        self.mine = self.mine.with_delivered(header.round_id, header.fragment_id)
        if self._alone:
            whole = {**self._whole, header.round_id: self._whole.get(header.round_id, frozenset()) | {header.fragment_id}}
            self._whole = {each: whole[each] for each in sorted(whole)[-_ROUNDS:]}

    def took(self, commit: Commit) -> None:
        """See `Follower`."""
        if self.unchecked and commit.outer_step <= self.unchecked[-1].outer_step:
            return  # it was taken again, after a snapshot
        self.unchecked = [*self.unchecked, commit][-MOST_UNCHECKED:]
        self._woken()

    def check(self, logged: LoggedEntry) -> _Doubt | None:
        """Hold the entry of the first update that is not checked yet to what this peer knows; return what is wrong."""
        commit = self.unchecked.pop(0)
        step = commit.outer_step
        seen = self.kept.before(step)
        expected = ExpectedLog(
            run_id=self._run_id,
            part=self.part,
            config_digest=self._config_digest,
            schema_hash=self._schema_hash,
            commit=commit,
            seen=seen,
            again=self.kept.at(step),
            mine=self.mine,
            whole=self._whole,
        )
        try:
            found = check_logged(logged, expected)
        except ReceiptFault as error:
            self.kept.forget()
            return _Doubt(LogDoubt(self.part, step, one_line(str(error))), logged, seen)
        self.kept.add(found.seen)
        self.checked += 1
        doubt = self._doubted(step, found)
        if not found.linked and doubt is None:
            assert seen is not None
            why = f"nobody could show that it goes on from the {seen.size} entries that this peer has seen"
            return _Doubt(LogDoubt(self.part, step, why), None)
        return doubt

    def not_kept(self, why: str) -> None:
        """The first update that is not checked yet has no entry that this peer could see."""
        commit = self.unchecked.pop(0)
        _log.info("part %d: outer step %d is not compared with the audit log: %s", self.part, commit.outer_step, why)

    def _doubted(self, outer_step: int, found: LoggedCommit) -> _Doubt | None:
        """Return what is to be said of an owner that leaves this peer out; once, while it goes on doing so."""
        said = f"{found.owner}: {found.outcome.value}" if found.left_out else ""
        if said == self._left_out:
            return None
        self._left_out = said
        if not said:
            return None
        why = (
            f"{found.owner} said that it had all of the contribution of {self.mine.peer_id} to the round that it merged, and "
            f"signed that it {found.outcome.value}"
        )
        return _Doubt(LogDoubt(self.part, outer_step, why), None)


class ReceiptChecks:
    """Asks this peer's own host for the entries, part by part and in order. On the loop's thread.

    Args:
        identity: of this peer.
        channels: of a part; what they know of this peer's own host counts.
        signer: with this peer's key.
        home: its folder.
        parts, alone: how many there are; as for `PartReceipts`.

    Raises ConfigError where what is kept in the folder cannot be used.
    """

    def __init__(
        self,
        identity: Identity,
        channels: PartChannels,
        config_digest: str,
        signer: Signer,
        home: Path,
        parts: int,
        *,
        alone: bool = True,
    ) -> None:
        self._identity, self._channels, self._home = identity, channels, home
        self._woken = asyncio.Event()
        earlier = frozenset(map(key_hash, earlier_keys(home, identity)))
        mine, run_id, woken = Mine(identity.peer_id, signer.public_key, earlier=earlier), identity.run_id, self._woken.set
        kept = [SeenLog.open(home, part, identity, signer) for part in range(parts)]
        self.parts: Sequence[PartReceipts] = tuple(
            PartReceipts(run_id, part, config_digest, mine, each, woken, alone=alone) for part, each in enumerate(kept)
        )
        self._faults = 0  # files that were written
        self._task: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        self._channel: grpc.aio.Channel | None = None

    async def run(self) -> None:
        """Check what comes, until `stop`."""
        self._task = asyncio.current_task()
        try:
            while True:
                await self._woken.wait()
                self._woken.clear()
                if not await self._pass():
                    await asyncio.sleep(AGAIN_S)
                    self._woken.set()
        finally:
            await self._forget()

    def stop(self) -> None:
        """End `run`."""
        if self._task is not None:
            self._task.cancel()

    async def last(self) -> None:
        """Check what is left at the end of the run, within a few seconds."""
        try:
            async with asyncio.timeout(LAST_S):
                while not await self._pass():  # noqa: ASYNC110 - what is waited for happens at the host
                    await asyncio.sleep(AGAIN_S / 10)
        except TimeoutError:
            for part in self.parts:
                while part.unchecked:
                    part.not_kept("this peer's host has no entry of it yet")

    async def _pass(self) -> bool:
        """Check what can be checked now; return whether that is all."""
        async with self._turn:
            return all([await self._check(part) for part in self.parts])

    async def _check(self, part: PartReceipts) -> bool:
        while part.unchecked:
            commit = part.unchecked[0]
            try:
                logged = await self._ask(part, commit.outer_step)
            except (StaleError, TransportError):
                return False
            except EditError as error:
                if part.unchecked[0] is commit:
                    part.not_kept(str(error))
                continue
            if part.unchecked[0] is not commit:
                continue  # too many have come meanwhile, and this one is not checked any more
            if (seen := part.kept.before(commit.outer_step)) is not None and not logged.consistency:
                logged = await self._shown_by_others(part.part, commit.outer_step, seen, logged)
            doubt = part.check(logged)
            await part.kept.save()
            if doubt is not None:
                await self._say(doubt)
        return True

    async def _ask(self, part: PartReceipts, outer_step: int) -> LoggedEntry:
        seen = part.kept.before(outer_step)
        size = seen.size if seen is not None and seen.size < outer_step else 0
        asked = pb.LoggedRequest(part=part.part, outer_step=outer_step, seen=size)
        try:
            return logged_from_pb(await self._stub().Logged(asked, timeout=ANSWER_S))
        except grpc.aio.AioRpcError as error:
            await self._forget()
            raise from_rpc(error) from None

    async def _shown_by_others(self, part: int, outer_step: int, seen: SeenEntry, logged: LoggedEntry) -> LoggedEntry:
        """Return the entry with the proof that its log goes on from what was seen; without one where nobody gives it.

        This peer's own host cannot after a snapshot. Any other member may: the proof itself shows whether it is right.
        """
        if seen.size == outer_step:
            return logged
        try:
            root = MerkleTree.after(outer_step, logged.peaks).root()
        except ValueError:
            return logged  # it is checked next
        asked = pb.GoesOnRequest(part=part, old=seen.size, new=outer_step)
        for peer_id, address in [*self._channels.hosts.items()][:MOST_ASKED]:
            if peer_id == self._identity.peer_id:
                continue
            channel = self._channels.member(address, Identity(self._identity.run_id, "peer", peer_id).server_name)
            try:
                reply = await council_pb2_grpc.CouncilStub(channel).GoesOn(asked, timeout=OTHERS_S)
                proof = goes_on_from_pb(reply)
            except (grpc.aio.AioRpcError, RemoteProtocolError):
                continue
            finally:
                await self._channels.release(channel)
            if verify_consistency(seen.size, outer_step, proof, seen.root, root):
                return replace(logged, consistency=proof)
        return logged

    async def _say(self, doubt: _Doubt) -> None:
        said = doubt.said
        _log.error("the audit log of part %d, outer step %d: %s", said.part, said.outer_step, said.reason)
        if doubt.logged is not None and self._faults < MOST_FAULTS:
            self._faults += 1
            try:
                await asyncio.to_thread(self._keep, doubt, doubt.logged)
            except StorageError as error:
                _log.error("%s", error)
        try:
            await self._stub().Doubt(doubt_to_pb(said), timeout=ANSWER_S)
        except grpc.aio.AioRpcError as error:
            _log.info("this peer's host was not told of it: %s", error.details())
            await self._forget()

    def _keep(self, doubt: _Doubt, logged: LoggedEntry) -> None:
        said, seen = doubt.said, doubt.seen
        mine = self.parts[said.part].mine
        values: dict[str, object] = {
            "fault": said.reason,
            "run_id": self._identity.run_id,
            "part": said.part,
            "outer_step": said.outer_step,
            "entry": logged.entry.decode(errors="backslashreplace"),
            "peaks": [each.hex() for each in logged.peaks],
            "consistency": [each.hex() for each in logged.consistency],
            "seen": {"entries": seen.size, "root": seen.root.hex()} if seen is not None else None,
            "delivered": sorted({number for number, _ in mine.delivered}),
            "signatures": {
                str(round_id): {str(i): list(map(base64_text, given)) for i, given in signed.items()}
                for round_id, signed in mine.signatures.items()
            },
        }
        write_json(fault_file(self._home, said.part, said.outer_step), values, version=FAULT_FORMAT)

    def _stub(self) -> council_pb2_grpc.CouncilStub:
        if self._channel is None:
            own = self._channels.hosts[self._identity.peer_id]
            self._channel = self._channels.member(own, self._identity.server_name)
        return council_pb2_grpc.CouncilStub(self._channel)

    async def _forget(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await self._channels.release(channel)
