"""The peer's shell of a masked round: shares keys while training goes on, and helps to open the sum.

`MaskingSession` runs on the loop's thread, at rank 0: `edit.trust.masking.MaskClient` decides, one task per round carries its
effects out. Keys live in memory for one round. What this peer revealed for is on its disk before it reveals.

The main thread takes a round's masks once, at all ranks: a second vector under the same masks would show the difference of the
two. `masked` puts them on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import grpc
import torch

from edit.codecs import codec
from edit.codecs.grid import lanes_in, words_in
from edit.errors import EditError, RemoteProtocolError, StorageError, TransportError
from edit.fragments.shards import Shard
from edit.records import EncodedTensor, round_number
from edit.trust.mask_plan import FragmentPlan, plan_digest
from edit.trust.mask_roster import Roster, RoundName, roster_pin
from edit.trust.masking import (
    AskConfirm,
    AskReveal,
    Complaint,
    Confirm,
    Ended,
    MaskClient,
    Masks,
    PeerEffect,
    PeerEvent,
    Reveal,
    SaveRevealed,
    Shares,
    ShowInbox,
    ShowRoster,
    StartMasking,
)
from edit.trust.revealed_sets import RevealedSets
from edit.trust.signatures import Signer
from editpb import masking_pb2 as pb
from editpb import masking_pb2_grpc
from editpb.mask_messages import Closed, Done, PeerMessage, plan_from_pb, reply_from_pb, request_to_pb
from editpb.receipts import SeenMasks
from editpb.transport.status import from_rpc
from peers.carriers.hub.channels import Channels
from peers.carriers.io_thread import IoThread

__all__ = ["MaskFolder", "MaskingCalls", "MaskingSession", "ReadyRound", "masked"]

_CALL_S = 60.0  # longer than the coordinator keeps a call that waits
_FIRST_DELAY_S, _LAST_DELAY_S = 0.1, 2.0
_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class MaskFolder:
    """What masked rounds need of this peer's site."""

    # The file that says which masked sums this peer helped to open.
    revealed: Path
    # Hashes of the keys of the members that this peer's operator knows, by name, the present key last; None: whom the
    # coordinator names is believed.
    members: Mapping[str, tuple[str, ...]] | None = None

    @property
    def pinned(self) -> Mapping[str, str] | None:
        """The present key of each member: keys are shared with no other. As `MaskingSession`'s members."""
        return {name: keys[-1] for name, keys in self.members.items()} if self.members is not None else None


@dataclass(frozen=True, slots=True)
class ReadyRound:
    """A round that this peer can mask for."""

    round_id: int
    outer_step: int
    plans: tuple[FragmentPlan, ...]
    masks: Masks


class _WrongShares(RemoteProtocolError):
    """A dealer's box lacks its shares."""

    def __init__(self, reason: str, complaint: Complaint) -> None:
        super().__init__(reason)
        self.complaint = complaint


class Calls(Protocol):
    """The two calls of masking.proto. Each raises an EditError."""

    async def plan(self, round_id: int, fragment_id: int) -> FragmentPlan: ...
    async def tell(self, round_id: int, said: PeerMessage) -> pb.MaskReply: ...


class MaskingCalls:
    """The calls, over the data plane's channel to the aggregator."""

    def __init__(self, channels: Channels, run_id: str) -> None:
        self._channels, self._run_id = channels, run_id

    async def plan(self, round_id: int, fragment_id: int) -> FragmentPlan:
        """Return the plan of one fragment."""
        request = pb.MaskPlanRequest(run_id=self._run_id, round_id=round_id, fragment_id=fragment_id)
        try:
            return plan_from_pb(await self._stub().Plan(request, timeout=_CALL_S))
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from error

    async def tell(self, round_id: int, said: PeerMessage) -> pb.MaskReply:
        """Return what follows from what this peer says."""
        try:
            reply: pb.MaskReply = await self._stub().Tell(request_to_pb(self._run_id, round_id, said), timeout=_CALL_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from error
        return reply

    def _stub(self) -> masking_pb2_grpc.MaskingStub:
        return self._channels.bound(masking_pb2_grpc.MaskingStub(self._channels.beside()))


class MaskingSession:
    """This peer's part in the masked rounds of its run.

    Args:
        io: the I/O thread.
        calls: to the aggregator.
        peer_id: of this peer.
        signer: signs with its certificate's key.
        run_id, config_digest: the run, and its configuration as this peer has it.
        min_peers, quorum: how many a sum has at least; a difference of sums has `min_peers`.
        file: which sums this peer helped to open; it is read, and written before each reveal.
        members: `key_hash` of the public keys that this peer's operator pinned, by peer; None: whom the coordinator names is
            believed.
        draw: returns that many bytes from a cryptographic source.
        saw: told of each round what this peer was shown and what it has signed; receipts of the audit log are held to it.

    Raises StorageError when the file is damaged.
    """

    def __init__(
        self,
        io: IoThread,
        calls: Calls,
        peer_id: str,
        *,
        signer: Signer,
        run_id: str,
        config_digest: str,
        min_peers: int,
        quorum: int,
        file: Path,
        members: Mapping[str, str] | None = None,
        draw: Callable[[int], bytes] = secrets.token_bytes,
        saw: Callable[[int, SeenMasks], object] = lambda round_id, seen: None,
    ) -> None:
        self._io, self._calls, self._peer_id = io, calls, peer_id
        self._signer, self._run_id, self._config_digest = signer, run_id, config_digest
        self._min_peers, self._quorum = min_peers, quorum
        self._file, self._members, self._draw = file, members, draw
        self._saw = saw
        self._revealed = RevealedSets.read(file)
        self._told = ""  # the pin of the roster that the log has
        self._round_id = 0  # that is followed
        self._task: asyncio.Task[None] | None = None
        self._ready: ReadyRound | None = None
        self.trouble = ""  # why this peer has no part in the round that it follows, or ''

    def follow(self, round_id: int, outer_step: int, due: Sequence[int]) -> None:
        """Take part in this round, if it is another one than before (loop's thread). round_id: 0 when none is open.

        due: the fragments that it exchanges.
        """
        if round_id == self._round_id:
            return
        if self._task is not None:
            self._task.cancel()
        self._round_id, self._task, self._ready, self.trouble = round_id, None, None, ""
        if round_id:
            self._task = self._io.start(self._take_part(round_id, outer_step, tuple(due)))

    def ready(self, outer_step: int) -> ReadyRound | None:
        """Return the round that this peer can mask for, computed against `outer_step`; None: there is none yet."""
        ready = self._ready
        return ready if ready is not None and ready.outer_step == outer_step else None

    def taken(self, ready: ReadyRound) -> None:
        """The masks of this round are used (loop's thread, in `IoThread.change`): nobody gets them again.

        Those of a newer round, which may have come since the main thread looked, stay.
        """
        if self._ready is ready:
            self._ready = None

    def opened(self, outer_step: int) -> bool:
        """See `RevealedSets.opened`."""
        return self._revealed.opened(outer_step)

    async def _take_part(self, round_id: int, outer_step: int, due: tuple[int, ...]) -> None:
        try:
            await self._play(round_id, outer_step, due)
        except StorageError as error:
            _log.error("round %d: %s; this peer helps to open no sum", round_number(round_id), error)
            self._leave(round_id, str(error))
        except _WrongShares as error:
            _log.warning("round %d goes on without this peer's keys: %s", round_number(round_id), error)
            self._leave(round_id, str(error))
            complaint = error.complaint
            with contextlib.suppress(EditError):  # an earlier version of the coordinator takes no complaint
                await self._again(lambda: self._calls.tell(round_id, complaint))
        except EditError as error:
            level = logging.WARNING if isinstance(error, RemoteProtocolError) else logging.INFO
            _log.log(level, "round %d goes on without this peer's keys: %s", round_number(round_id), error)
            self._leave(round_id, str(error))

    def _leave(self, round_id: int, reason: str) -> None:
        def leave() -> None:
            if self._round_id == round_id:
                self._ready, self.trouble = None, reason

        self._io.change(leave)

    async def _play(self, round_id: int, outer_step: int, due: tuple[int, ...]) -> None:
        plans = tuple([await self._again(lambda i=i: self._calls.plan(round_id, i)) for i in due])  # type: ignore[misc]
        if [plan.fragment_id for plan in plans] != list(due):
            raise RemoteProtocolError("the plan of the round is of other fragments than were asked for")
        name = RoundName(
            run_id=self._run_id,
            config_digest=self._config_digest,
            round_id=str(round_id),
            outer_step=outer_step,
            plan=plan_digest(plans),
        )
        client = MaskClient(
            self._peer_id,
            signer=self._signer,
            of_round=name,
            min_peers=self._min_peers,
            quorum=self._quorum,
            revealed=self._revealed,
            draw=self._draw,
            members=self._members,
        )
        roster = await self._ask(round_id, name, client.advert, Roster)
        (shares,) = _effects(client, ShowRoster(roster=roster))
        self._tell_roster(roster)
        self._saw(round_id, SeenMasks(roster.hash))
        assert isinstance(shares, Shares)
        inbox = await self._ask(round_id, name, shares, ShowInbox)
        (start,) = _effects(client, inbox)
        assert isinstance(start, StartMasking)
        masks = start.masks

        def show() -> None:
            if self._round_id == round_id:
                self._ready = ReadyRound(round_id, outer_step, plans, masks)

        self._io.change(show)
        asked = await self._ask(round_id, name, Closed(), AskConfirm)
        (confirm,) = _effects(client, asked)
        assert isinstance(confirm, Confirm)
        self._saw(round_id, SeenMasks(roster.hash, (inbox.sharers, asked.survivors)))
        signatures = await self._ask(round_id, name, confirm, AskReveal)
        save, reveal = _effects(client, signatures)
        assert isinstance(save, SaveRevealed) and isinstance(reveal, Reveal)
        await asyncio.to_thread(save.sets.write, self._file)
        self._revealed = save.sets
        await self._ask(round_id, name, reveal, Done)

    def _tell_roster(self, roster: Roster) -> None:
        """Say in the log whose keys are shared, when they are others than before: what members compare over another channel."""
        pin = roster_pin((advert.peer_id, advert.public_key) for advert in roster.adverts)
        if pin != self._told:
            self._told = pin
            _log.info("masks with %s; roster %s", ", ".join(roster.peers), pin)

    async def _ask(self, round_id: int, name: RoundName, said: PeerMessage, kind: type[_T]) -> _T:
        """Say this until there is an answer. Raises StaleError when the round is over, RemoteProtocolError for another one."""
        while True:
            message = await self._again(lambda: self._calls.tell(round_id, said))
            reply = reply_from_pb(message, name, self._peer_id)
            if isinstance(reply, kind):
                return reply
            if reply is not None:
                raise RemoteProtocolError(f"the coordinator answers {type(said).__name__} with {type(reply).__name__}")

    async def _again(self, call: Callable[[], Awaitable[_T]]) -> _T:
        """Call until the link carries it; the round's end cancels that."""
        delay = _FIRST_DELAY_S
        while True:
            try:
                return await call()
            except TransportError as error:
                _log.debug("a call of a masked round: %s; trying again", error)
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LAST_DELAY_S)


def _effects(client: MaskClient, event: PeerEvent) -> list[PeerEffect]:
    """Return what the client says to an event. Raises RemoteProtocolError when it ends the round for this peer."""
    effects = client.handle(event)
    match effects:
        case [Complaint() as complaint, Ended(reason=reason)]:
            raise _WrongShares(reason, complaint)
        case [Ended(reason=reason)]:
            raise RemoteProtocolError(reason)
    return effects


def masked(masks: Masks, payload: EncodedTensor, shard: Shard, bits: int) -> EncodedTensor:
    """Return what this rank sends of a fragment: its words and lanes with all masks added, in memory of its own."""
    fragment, words = shard.fragment, words_in(payload.data, bits).copy()
    own, lanes = words[: payload.numel], lanes_in(words.data, bits)
    if shard.span is not None:
        masks.apply(own, fragment.fragment_id, shard.span[0])
    else:
        whole = torch.zeros(fragment.numel, dtype=getattr(torch, f"int{bits}"), device="cpu")
        masks.apply(whole.numpy().view(words.dtype), fragment.fragment_id, 0)
        own += shard.take(whole).numpy().view(words.dtype)
    if any(run.start == 0 for run in shard.runs):
        masks.apply(lanes, fragment.fragment_id, fragment.numel)
    return EncodedTensor(codec(f"masked{bits}").name, payload.numel, words.data.cast("B"))
