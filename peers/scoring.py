"""`edit-peer score`: what each contribution to an outer step does to the loss on data of one's own, told to the coordinator.

After a commit to outer step s the scorer, which has theta of s - 1, reads what was merged, one peer at a time, and measures
`edit.merging.trust.score_of` on a batch that theta's digest draws. Then it takes the update to s. Scores that come after the
next commit are late and count for nothing; the run waits for nobody. A scorer keeps nothing: started again, it takes a snapshot
and goes on with the next outer step.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from edit import plugins
from edit.codecs import decode
from edit.config.run import RunConfig, SyncConfig
from edit.errors import ConfigError, OutdatedError, RemoteProtocolError, TransportError
from edit.fragments.digest import digest
from edit.fragments.groups import fragments_due
from edit.fragments.schema import Schema
from edit.fragments.shards import Shard
from edit.merging.merge import Measured, ShardPayload, decoded
from edit.merging.trust import score_of
from edit.records import Snapshot
from edit.replica.layout import exchanged
from editpb.messages import ContributionHeader, ScoreReport
from editpb.signed_scores import ScoreSigner
from peers.carriers.hub.assemblies import UpdateAssembly
from peers.carriers.hub.channels import Channels
from peers.carriers.hub.collective import read_configuration
from peers.carriers.hub.data_calls import DataCalls
from peers.carriers.io_thread import IoThread
from peers.carriers.run_connection import Traffic
from peers.daemon import stopping
from peers.identity.peer_folder import Enrolment, PeerFolder
from peers.identity.renewal import Renewal
from peers.models.registry import build
from peers.training.data import Tokens, open_tokens
from peers.watching import reached

__all__ = ["HeldOut", "Scorer", "score_run"]

_BATCH = 16  # windows at a time
_AGAIN_S = 3.0  # after the connection was lost, and while others read an older snapshot
_log = logging.getLogger("peers")


class Losses(Protocol):
    """What measures the loss of outer parameters."""

    def draw(self, digest: str) -> None: ...
    def loss(self, fragments: Sequence[Tensor]) -> float: ...


class HeldOut:
    """The loss of outer parameters on windows of held-out data.

    Args:
        model: of the run; it is given the parameters.
        schema: of the run's parameters.
        windows: how many of `context` tokens are drawn.

    Raises ConfigError for a schema of another model.
    """

    def __init__(self, model: nn.Module, schema: Schema, tokens: Tokens, context: int, windows: int) -> None:
        own, self._named = exchanged(model, "average" if any(each.buffers for each in schema.fragments) else "local")
        if difference := schema.first_difference(own):
            raise ConfigError(f"the run's parameters are of another model than [model] and this software make: {difference}")
        self._model, self._schema, self._tokens = model.eval(), schema, tokens
        self._context, self._windows = context, windows
        self._rows: Tensor | None = None

    def draw(self, digest: str) -> None:
        """Draw the windows by theta's digest: each draw is the same for whoever has the same data."""
        seed = int.from_bytes(hashlib.sha256(b"edit-score-v1" + digest.encode()).digest()[:16])
        starts = np.random.default_rng(seed).integers(0, len(self._tokens) - self._context, self._windows)
        self._rows = self._tokens.windows(np.sort(starts), self._context + 1)

    @torch.no_grad()
    def loss(self, fragments: Sequence[Tensor]) -> float:
        """Return the mean loss in nats per token of outer parameters: flat fp32, one tensor per fragment, on what was drawn."""
        assert self._rows is not None
        for flat, fragment in zip(fragments, self._schema.fragments, strict=True):
            for part, spec in zip(torch.split(flat, [each.numel for each in fragment.tensors]), fragment.tensors, strict=True):
                self._named[spec.name].copy_(part.view(spec.shape))
        device = next(self._model.parameters()).device
        total = 0.0
        for rows in torch.split(self._rows, _BATCH):
            rows = rows.to(device)
            total += float(self._model(rows[:, :-1], rows[:, 1:])) * len(rows)
        return total / len(self._rows)


class Scorer:
    """Scores one outer step after the other. Used on an event loop; losses are measured in a thread beside it.

    Args:
        sync: of the run.
        sign: signs what it says, in a run whose contributions are signed.
    """

    def __init__(
        self,
        calls: DataCalls,
        held_out: Losses,
        schema: Schema,
        sync: SyncConfig,
        sign: Callable[[ScoreReport], ScoreReport] = lambda report: report,
    ) -> None:
        self._calls, self._held_out, self._schema, self._sync, self._sign = calls, held_out, schema, sync, sign
        self._whole = [Shard(each) for each in schema.fragments]
        self._theta: Snapshot | None = None
        self._before: float | None = None  # its loss, once it is measured

    async def take(self) -> int:
        """Take a snapshot of the outer parameters; return its outer step, which may be one before the last."""
        manifest = await self._calls.describe(self._schema, _always)
        self._theta, self._before = await self._calls.snapshot(manifest, self._whole, _always), None
        return self._theta.outer_step

    async def advance(self) -> int:
        """Take the update to the next outer step; return that. Raises GoneError: it is kept no longer, RemoteProtocolError."""
        theta = self._theta
        assert theta is not None
        due = fragments_due(theta.outer_step, len(self._whole), self._sync.groups, self._sync.pattern)
        assembly = UpdateAssembly(self._schema, theta.outer_step + 1, due, self._whole)
        await self._calls.update(assembly, _always, lambda: None)
        commit = assembly.finish()

        def applied() -> tuple[Tensor, ...]:
            fragments = list(theta.fragments)
            for part in commit.fragments:
                if part.payload is not None:
                    fragments[part.fragment_id] = fragments[part.fragment_id] - decode(part.payload)
            if digest(fragments) != commit.digest:
                raise RemoteProtocolError(f"the update to outer step {commit.outer_step} does not lead to its digest")
            return tuple(fragments)

        self._theta = Snapshot(commit.outer_step, commit.digest, await asyncio.to_thread(applied))
        self._before = None
        return commit.outer_step

    async def prepare(self) -> float:
        """Return the loss of the outer parameters; draw what it is measured on."""
        assert self._theta is not None
        if self._before is None:
            self._held_out.draw(self._theta.digest)
            self._before = await asyncio.to_thread(self._held_out.loss, self._theta.fragments)
        return self._before

    async def score(self) -> dict[str, float]:
        """Score what the commit after theta's has merged, and say so. Raises OutdatedError: it is not the last one any more."""
        theta, before = self._theta, await self.prepare()
        assert theta is not None
        step = theta.outer_step + 1
        if not 0 < before < math.inf:
            _log.warning("outer step %d: the held-out loss of the outer parameters is %s; nothing is scored", step, before)
            return {}
        headers = await self._calls.contributions(step, self._schema, _always)
        found: dict[str, float] = {}
        for peer_id, of_peer in itertools.groupby(sorted(headers, key=_peer), key=_peer):
            if (value := await self._of_peer(theta, before, list(of_peer))) is not None:
                found[peer_id] = value
        await self._calls.score(step, found, _always, sign=self._sign)
        said = ", ".join(f"{peer_id} {value:+.4f}" for peer_id, value in found.items())
        _log.info("outer step %d: held-out loss %.4f; %s", step, before, said or "nothing to score")
        return found

    async def _of_peer(self, theta: Snapshot, before: float, headers: Sequence[ContributionHeader]) -> float | None:
        """Return the score of one peer; None: nothing can be said of what it sent."""
        shards: dict[int, list[ShardPayload]] = {}
        for header in headers:
            payload = await self._calls.contribution(header, theta.outer_step + 1, _always)
            spec = self._schema.fragments[header.fragment_id]
            shards.setdefault(header.fragment_id, []).append(ShardPayload(Shard(spec, header.boxes), payload))

        def measured() -> float | None:
            whole = {
                i: decoded(self._schema.fragments[i], Measured(headers[0].peer_id, 1, 1, 0.0, tuple(parts)))
                for i, parts in shards.items()
            }
            return score_of(theta.fragments, before, whole, self._held_out.loss)

        try:
            return await asyncio.to_thread(measured)
        except RemoteProtocolError as error:
            _log.warning("outer step %d: what %s sent is not scored: %s", theta.outer_step + 1, headers[0].peer_id, error)
            return None


def _peer(header: ContributionHeader) -> str:
    return header.peer_id


def _always() -> bool:
    return True


class _Newest:
    """The last committed outer step, as a task that watches the run knows it."""

    def __init__(self) -> None:
        self.outer_step, self.finished = 0, False
        self.changed = asyncio.Event()

    async def watch(self, folder: PeerFolder) -> None:
        """Follow the run's status, over all breaks, until it has finished."""
        turn = itertools.count()
        while not self.finished:
            with contextlib.suppress(TransportError, StopAsyncIteration):
                async with aclosing(reached(folder, turn)) as told:
                    async for status in told:
                        self.outer_step, self.finished = status.outer_step, status.phase == "finished"
                        self.changed.set()
                        if self.finished:
                            return
            await asyncio.sleep(_AGAIN_S)


async def follow(scorer: Scorer, newest: _Newest) -> None:
    """Score every outer step that can be scored in time, until the run has finished."""
    have = -1  # the outer step of the parameters that are here
    while not newest.finished:
        newest.changed.clear()
        try:
            if have < 0:
                have = await scorer.take()
            elif newest.outer_step > have + 1:
                have = await scorer.advance()  # too late to be scored
            elif newest.outer_step == have + 1:
                try:
                    await scorer.score()
                except OutdatedError as error:
                    _log.info("outer step %d is not scored: %s", have + 1, error)
                have = await scorer.advance()
            else:
                await scorer.prepare()
                await newest.changed.wait()
        except (OutdatedError, RemoteProtocolError) as error:
            _log.info("%s; a snapshot is taken", error)
            have = -1
            await asyncio.sleep(_AGAIN_S)
        except TransportError as error:
            _log.info("%s; trying again", error)
            await asyncio.sleep(_AGAIN_S)


def score_run(
    home: Path,
    data: Path,
    *,
    field: str | None,
    windows: int,
    device: torch.device,
    allowed: Iterable[str],
    folder: Path | None,
) -> None:
    """Score the run that this folder's member is a scorer of, until it has finished.

    Raises ConfigError, RefusedError, EvictedError, KeyboardInterrupt.
    """
    peer = PeerFolder(home)
    enrolled = peer.load(time.time())
    if enrolled.identity.role != "scorer":
        raise ConfigError(f"{home}: enrolled as {enrolled.identity.role}; scoring needs an invitation with role scorer")
    with IoThread() as io, stopping(io):
        config, _ = read_configuration(io, Channels(enrolled.endpoints, enrolled.credentials), enrolled.identity)
    rule = 'is not "loss": there is nothing to score in this run'
    if not config.robust.scored:
        raise ConfigError(f"robust.trust = {config.robust.trust!r}: {rule}")
    plugins.admit(config, frozenset(allowed), ("codecs", "models"))
    model = build(config.model, config.seed, frozenset(allowed), folder=folder).to(device)
    tokens = open_tokens(data, context=config.model.context, vocabulary=config.model.vocabulary, field=field)
    asyncio.run(_score(peer, enrolled, config, model, tokens, windows))


async def _score(
    folder: PeerFolder, enrolled: Enrolment, config: RunConfig, model: nn.Module, tokens: Tokens, windows: int
) -> None:
    channels = Channels(enrolled.endpoints, enrolled.credentials)
    calls, newest = DataCalls(channels, enrolled.run_id, Traffic()), _Newest()
    beside = [asyncio.create_task(newest.watch(folder)), asyncio.create_task(Renewal(folder, enrolled, channels).keep())]
    try:
        schema = await _schema_of(calls)
        held_out = HeldOut(model, schema, tokens, config.model.context, windows)
        sign = ScoreSigner(folder.key(), enrolled.identity.peer_id)
        scoring = asyncio.create_task(follow(Scorer(calls, held_out, schema, config.sync, sign), newest))
        beside.append(scoring)
        done, _ = await asyncio.wait(beside, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        await channels.close()


async def _schema_of(calls: DataCalls) -> Schema:
    """Return the schema of the run's parameters; wait until it has some."""
    while True:
        try:
            return (await calls.describe(None, _always)).schema
        except (OutdatedError, TransportError) as error:
            _log.info("%s; trying again", error)
            await asyncio.sleep(_AGAIN_S)
