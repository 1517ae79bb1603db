"""Swaps with other hosts: `edit.rounds.swap` over one stream of Council.Swap, and when there is none.

Of a pair the one dials whose peer_id comes first, or who accepts no connections; the other waits for it. Who dials tries again
until both are at the same outer step and draw their pairs from the same version of the record. Each side knows how many bytes
the other has to send, and takes no more. All of it ends at the deadline, then the step is taken alone; at once where

    the partner has gone on, or does not train; it breaks the rules; the stream breaks; there has been no link to it for AWAY_S

Of the inner steps that a partner says as many count as `penalty.max_ratio` times this peer's own.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import grpc

from aggregator.swarm.gossip.phi import Met
from aggregator.swarm.links import Links
from edit.codecs import codec
from edit.codecs.error_feedback import codec_of
from edit.config.codec import CodecChoice, CodecSpec
from edit.config.run import RunConfig
from edit.council.record import Record, Stamp
from edit.errors import BusyError, EditError, GoneError, RefusedError, RemoteProtocolError, StaleError, TransportError
from edit.fragments.schema import Schema
from edit.merging.gossip import GossipState, Judged, Offer, pairs
from edit.merging.merge import Measured, measure
from edit.records import EncodedTensor, Verdict
from edit.rounds import swap
from editpb import council_pb2 as pb
from editpb.council_messages import SwapBegin, swap_begin_from_pb, swap_begin_to_pb
from editpb.limits import at_most, fail, one_line
from editpb.transport.chunk_frames import ReceivedChunk, update_frames
from editpb.transport.chunks import Reassembly
from editpb.transport.send_limit import UNLIMITED, SendLimit
from editpb.transport.status import from_rpc

__all__ = ["AWAY_S", "RETRY_S", "Swaps"]

_log = logging.getLogger(__name__)
RETRY_S = 0.2
PROBE_S = 1.0  # who waits asks so often whether the other has gone on
AWAY_S = 3.0
BEGIN_S = 10.0
END_S = 2.0  # for the last message to arrive

_T = TypeVar("_T")
Read = Callable[[], Awaitable[Any]]  # the next message; None: there is none
Write = Callable[[Any], Awaitable[object]]
_BROKEN = (grpc.aio.AioRpcError, grpc.aio.UsageError, grpc.aio.InternalError, asyncio.InvalidStateError)


@dataclass(eq=False, slots=True)
class _Step:
    """The step that this peer is about to take."""

    number: int  # of swaps before it
    own: Mapping[int, Offer]
    state: GossipState
    deadline: float
    partner: str = ""
    stamp: Stamp | None = None  # of the record that it was drawn from
    waits: bool = False  # for the partner to dial
    serving: asyncio.Task[Any] | None = None  # the swap that the partner dialled
    met: asyncio.Future[Met] | None = None  # what comes of that

    @property
    def begin(self) -> SwapBegin:
        """What is said of it first."""
        assert self.stamp is not None
        one = next(iter(self.own.values())).contribution
        return SwapBegin(self.stamp, self.number, one.inner_steps, one.tokens)


class Swaps:
    """See above. Used on the event loop.

    Args:
        record: the newest version of the record that is known here.
        trains: how many swaps this member has taken; None: it takes none now, having no peer that trains or being drained.
        do: runs a computation in a thread.
        limit: what bounds the bytes that are sent.
    """

    def __init__(
        self,
        peer_id: str,
        config: RunConfig,
        schema: Schema,
        links: Callable[[], Links],
        record: Callable[[], Record | None],
        trains: Callable[[], int | None],
        do: Callable[..., Awaitable[Any]],
        limit: SendLimit = UNLIMITED,
    ) -> None:
        self._peer_id, self._config, self._schema, self._limit = peer_id, config, schema, limit
        self._links, self._record, self._trains, self._do = links, record, trains, do
        self._step: _Step | None = None
        self._odd = set[str]()  # members that began a swap for which they were not drawn, as the log has said

    async def meet(self, number: int, own: Mapping[int, Offer], state: GossipState) -> Met:
        """Take this peer's contribution to its partner, if it has one, and return what came of it. state: only read."""
        deadline = asyncio.get_running_loop().time() + self._config.gossip.deadline_s
        step = self._step = _Step(number, own, state, deadline)
        why = "did not come"
        try:
            while True:
                record = self._record()
                partner = pairs(self._config.seed, number, record.members if record else ()).get(self._peer_id)
                if record is None or partner is None:
                    return Met("", "drawn without a partner")
                step.partner, step.stamp = partner, record.stamp
                try:
                    return await (self._dial(step) if self._dials(record, partner) else self._wait(step))
                except (GoneError, RemoteProtocolError, RefusedError) as error:
                    return _alone(partner, str(error))
                except (StaleError, TransportError, TimeoutError) as error:
                    why = str(error) or why
                links = self._links()
                if asyncio.get_running_loop().time() >= deadline:
                    return _alone(partner, why)
                if partner not in links.connected and links.since_s(partner) >= AWAY_S:
                    return _alone(partner, "is away")
                await asyncio.sleep(RETRY_S)
        except asyncio.CancelledError:
            if step.serving is not None:
                step.serving.cancel()
            raise
        finally:
            self._step = None

    def _dials(self, record: Record, partner: str) -> bool:
        reachable = record.members[partner].reachable
        own = record.members[self._peer_id].reachable if self._peer_id in record.members else False
        return reachable and (self._peer_id < partner or not own)

    async def _dial(self, step: _Step) -> Met:
        """Swap, over a stream from here. Raises EditError: it has not begun."""
        call = self._links().stub(step.partner).Swap()
        try:
            try:
                async with asyncio.timeout(BEGIN_S):
                    await call.write(swap_begin_to_pb(step.begin))
                    first = await call.read()
            except grpc.aio.AioRpcError as error:
                raise from_rpc(error) from None
            except asyncio.InvalidStateError:  # a write to a call that has ended
                raise await _ending(call) from None
            begin = self._begun(step, None if first is grpc.aio.EOF else first)

            async def read() -> Any:
                message = await call.read()
                return None if message is grpc.aio.EOF else message

            met = await self._converse(step, begin, read, call.write)
            if met.together:
                await _flush(call)
            return met
        finally:
            call.cancel()

    async def _wait(self, step: _Step) -> Met:
        """Let the partner dial for a while. Raises EditError, TimeoutError: it has not."""
        step.waits, step.met = True, asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait([step.met], timeout=PROBE_S)
            if step.serving is not None:
                return await step.met
        finally:
            step.waits = False
        if self._reachable(step.partner):
            await self._probe(step)
        raise TimeoutError

    def _reachable(self, partner: str) -> bool:
        record = self._record()
        return record is not None and partner in record.members and record.members[partner].reachable

    async def _probe(self, step: _Step) -> None:
        """Ask who is to dial whether it still may: raises GoneError if not, and what it says else."""
        call = self._links().stub(step.partner).Swap()
        try:
            async with asyncio.timeout(BEGIN_S):
                await call.write(swap_begin_to_pb(step.begin))
                await call.read()
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None
        except asyncio.InvalidStateError:
            raise await _ending(call) from None
        finally:
            call.cancel()

    async def serve(self, peer_id: str, messages: AsyncIterator[Any], write: Write) -> None:
        """Take a stream that another member opened. Raises EditError: why there is no swap."""

        async def read() -> Any:
            return await anext(messages, None)

        try:
            async with asyncio.timeout(BEGIN_S):
                first = await read()
        except TimeoutError:
            raise TransportError(f"{peer_id} does not begin") from None
        begin, taken, step = _begin_of(first), self._trains(), self._step
        if taken is None:
            raise GoneError(f"{self._peer_id} takes no swaps now")
        if begin.outer_step < taken:
            raise GoneError(f"{self._peer_id} has gone on, to {taken} swaps")
        if step is None or begin.outer_step != step.number:
            raise BusyError(f"{self._peer_id} is not there yet")
        if begin.record != step.stamp:
            raise StaleError(f"{self._peer_id} knows another version of the record")
        if peer_id != step.partner:
            if peer_id not in self._odd:  # all draw the same pairs from one version of the record
                self._odd.add(peer_id)
                _log.warning("%s began a swap for which it is not drawn; it is refused", peer_id)
            raise RefusedError(f"{peer_id} is not drawn with {self._peer_id}")
        if not step.waits or step.serving is not None or step.met is None:
            raise BusyError(f"{self._peer_id} dials itself, or has a swap under way")
        step.serving = asyncio.current_task()
        met = _alone(peer_id, "the stream broke")
        try:
            async with asyncio.timeout_at(step.deadline):  # for who reads nothing
                await write(swap_begin_to_pb(step.begin))
            met = await self._converse(step, begin, read, write)
        except TimeoutError:
            met = _alone(peer_id, "was too slow")
        except _BROKEN:
            pass
        finally:
            if not step.met.done():
                step.met.set_result(met)

    def _begun(self, step: _Step, first: Any) -> SwapBegin:
        begin = _begin_of(first)
        if (begin.outer_step, begin.record) != (step.number, step.stamp):
            raise RemoteProtocolError(f"{step.partner} begins a swap at outer step {begin.outer_step}, not {step.number}")
        return begin

    # -- one swap ----------------------------------------------------------------------------------------------------------

    async def _converse(self, step: _Step, begin: SwapBegin, read: Read, write: Write) -> Met:
        """Send and take offers until it is decided."""
        machine, offers, judged = swap.Swap(step.own.keys()), dict[int, Offer](), dict[int, Judged]()
        sending = asyncio.get_running_loop().create_task(self._send(step.own, write))
        taking = _Taking(self._config, self._schema, step, begin)
        decided: swap.Decided | None = None
        said = False  # Have is on its way: whoever fails from now on is in doubt
        try:
            async with asyncio.timeout_at(step.deadline):
                while decided is None:
                    events = deque([taking.take(await read())])
                    while events and (event := events.popleft()) is not None:
                        for effect in machine.handle(event):
                            match effect:
                                case swap.Judge():
                                    found = await self._do(_judge, step, taking.offers(), begin)
                                    offers, judged = found
                                    events.append(swap.Judged(frozenset(i for i, each in judged.items() if each.good)))
                                case swap.SendHave(good):
                                    await sending
                                    said = bool(good)
                                    await write(pb.SwapPart(have=pb.SwapHave(good=sorted(good))))
                                case swap.Decided():
                                    decided = effect
        except TimeoutError:
            return replace(_alone(step.partner, "was too slow"), in_doubt=said)
        except EditError as error:
            return replace(_alone(step.partner, str(error)), in_doubt=said)
        except _BROKEN:
            return replace(_alone(step.partner, "the stream broke"), in_doubt=said)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        if decided.reason:
            return replace(_alone(step.partner, decided.reason), in_doubt=decided.in_doubt)
        if not decided.together:
            return replace(_alone(step.partner, _fault(judged)), offers=offers, judged=judged)
        return Met(step.partner, f"paired with {step.partner}", decided.together, offers, judged)

    async def _send(self, own: Mapping[int, Offer], write: Write) -> None:
        for i, offer in own.items():
            assert isinstance(offer.contribution.payload, EncodedTensor)
            for number, encoded in ((2 * i, offer.contribution.payload), (2 * i + 1, offer.outer)):
                frames = update_frames(number, memoryview(encoded.data), chunk_bytes=lambda: self._limit.chunk_bytes)
                async for frame in self._limit.paced(frames):
                    await write(frame)


class _Taking:
    """What comes of the partner's offer. Its sizes are known: memory is taken for no more."""

    def __init__(self, config: RunConfig, schema: Schema, step: _Step, begin: SwapBegin) -> None:
        self._step, self._begin, self._buffers = step, begin, dict[int, tuple[str, int, Reassembly]]()
        for i in step.own:
            spec = schema.fragments[i]
            choices = config.codec.uplink, CodecChoice(CodecSpec.parse(config.gossip.codec))
            for number, choice in zip((2 * i, 2 * i + 1), choices, strict=True):
                name = codec_of(spec, choice).name
                size = codec(name).encoded_size(spec.numel)
                self._buffers[number] = name, spec.numel, Reassembly(f"{step.partner}, byte string {number}", size, size)

    def take(self, message: Any) -> swap.Event | None:
        """Take the next message. Raises RemoteProtocolError, TransportError."""
        if message is None:
            raise TransportError("the stream broke")
        if isinstance(message, ReceivedChunk):
            if message.fragment_id not in self._buffers:
                fail(f"a chunk of byte string {message.fragment_id}, which is not offered")
            self._buffers[message.fragment_id][2].take(message)
            i = message.fragment_id // 2
            whole = all(self._buffers[number][2].complete for number in (2 * i, 2 * i + 1))
            return swap.Came(i) if whole else None
        if message.WhichOneof("kind") != "have":
            fail("after its beginning a swap has chunks and one Have")
        at_most("fragments", message.have.good, len(self._step.own))
        return swap.Have(frozenset(message.have.good))

    def offers(self) -> dict[int, tuple[EncodedTensor, EncodedTensor]]:
        """Return both of each fragment, once all are whole."""
        encoded = {n: EncodedTensor(name, numel, buffer.finish()) for n, (name, numel, buffer) in self._buffers.items()}
        return {i: (encoded[2 * i], encoded[2 * i + 1]) for i in self._step.own}


def _judge(
    step: _Step, found: Mapping[int, tuple[EncodedTensor, EncodedTensor]], begin: SwapBegin
) -> tuple[dict[int, Offer], dict[int, Judged]]:
    """Measure and judge the partner's offer. Raises RemoteProtocolError for what cannot be decoded."""
    offers, judged, ratio = dict[int, Offer](), dict[int, Judged](), step.state.config.penalty.max_ratio
    for i, (contribution, outer) in found.items():
        own = step.own[i]
        believed = min(begin.inner_steps, int(ratio * max(own.contribution.inner_steps, 1)))
        offers[i] = Offer(Measured(step.partner, believed, begin.tokens, measure(contribution), contribution), outer)
        judged[i] = step.state.judge(i, own, offers[i])
    return offers, judged


def _begin_of(message: Any) -> SwapBegin:
    if message is None or isinstance(message, ReceivedChunk) or message.WhichOneof("kind") != "begin":
        fail("a swap begins with SwapBegin")
    return swap_begin_from_pb(message.begin)


def _alone(partner: str, why: str) -> Met:
    return Met(partner, one_line(f"alone: {partner}: {why}", 512))


def _fault(judged: Mapping[int, Judged]) -> str:
    """Return why no fragment is taken together, in words."""
    if found := {each.partner.verdict.value for each in judged.values() if each.partner.verdict is not Verdict.OK}:
        return f"what it sent is {', '.join(sorted(found))}"
    return "it or this peer found no contribution good"


async def _ending(call: Any) -> EditError:
    """Return why a call ended that nothing can be written to."""
    try:
        async with asyncio.timeout(END_S):
            code, details = await call.code(), await call.details()
    except TimeoutError:
        return TransportError("the connection broke")
    return from_rpc(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details))


async def _flush(call: Any) -> None:
    """Wait until the other side has heard the last message, or END_S."""
    try:
        async with asyncio.timeout(END_S):
            await call.done_writing()
            while await call.read() is not grpc.aio.EOF:
                pass
    except (TimeoutError, *_BROKEN):
        pass
