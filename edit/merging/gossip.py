"""Gossip (NoLoCo): every peer has outer parameters of its own, and takes each outer step with one other peer.

Kolehmainen et al. 2025, arXiv 2506.10911, section 3.2, with groups of two (the paper's n). With phi_i the outer parameters of
peer i (its slow weights), d_i its momentum and Delta_i = phi_i - local_i (the paper's with the sign turned):

    d_i <- a d_i - b mean(Delta) + g (mean(phi) - phi_i);    phi_i <- phi_i + d_i

Both means are over the pair, of DECODED values, the peer's own included. Of two, mean(phi) - phi_i is half the difference, and
computed as that, so what one peer gains the other loses to the bit. The paper's equation 2 prints the second term so that it
would ascend; its authors' code (github.com/jkolehm/noloco, sparse_optimizer_c.py) has the sign above, and g = b. A peer without
a partner takes the step alone: Delta is its own, and the last term is 0.

With the penalty on, mean(Delta) is EDiT's: weighted and clipped as the section [penalty] says.

No peer is trusted: what a partner contributes is judged by EDiT's detector, by what this peer knows of it, and so is how far
apart the two are. Pairs that do not agree on each other's fragment take that fragment's step alone. Pure functions, and
`GossipState`, which changes only in `commit`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import torch
from blake3 import blake3
from torch import Tensor

from edit.codecs import PIECE, codec
from edit.codecs.base import new_buffer, parts, view
from edit.codecs.error_feedback import codec_of
from edit.config.codec import CodecChoice, CodecSpec
from edit.config.run import CodecConfig, OuterConfig, PenaltyConfig, RunConfig
from edit.errors import ConfigError, LocalProtocolError, RemoteProtocolError, StorageError
from edit.fragments.digest import FragmentHash, combine, fragment_hash
from edit.fragments.groups import fragments_due
from edit.fragments.schema import FragmentSpec, Schema
from edit.merging.detector import NormStatistics, by_levels
from edit.merging.merge import Measured, MergeRule, measure
from edit.merging.mergers import merger
from edit.merging.norms import difference_norm, norm, norm_of_encoded
from edit.merging.outer_state import MergeRecord, OuterState
from edit.merging.penalty import judge_round
from edit.merging.portable_math import power
from edit.records import Commit, EncodedTensor, FragmentCommit, PeerVerdict, Verdict

__all__ = ["GossipState", "Judged", "Offer", "Staged", "pairs", "settle", "settling"]

_DISTANCE = "distance"  # as a detector calls what is no peer's norm


def pairs(seed: int, outer_step: int, live: Iterable[str]) -> dict[str, str | None]:
    """Return each live peer's partner in the advance from `outer_step`; None: it is the odd one, and goes alone.

    The peers are sorted by BLAKE3(seed, outer step, peer_id), and neighbours are pairs: whoever knows who is live knows all.
    """

    def key(peer_id: str) -> bytes:
        return blake3(seed.to_bytes(8, "little") + outer_step.to_bytes(8, "little") + peer_id.encode()).digest()

    drawn = sorted(set(live), key=key)
    partner: dict[str, str | None] = dict.fromkeys(drawn)
    for one, other in zip(drawn[0::2], drawn[1::2], strict=False):
        partner[one], partner[other] = other, one
    return partner


@dataclass(frozen=True, slots=True)
class Offer:
    """What a peer brings to a swap, of one fragment."""

    # Its pseudo-gradient, with the norm that the receiver measured.
    contribution: Measured
    # Its outer parameters, encoded as `GossipState.offered`.
    outer: EncodedTensor

    @property
    def nbytes(self) -> int:
        """The bytes of both, where the contribution's are at hand."""
        payload = self.contribution.payload
        shards = [one.payload for one in payload] if isinstance(payload, tuple) else [payload]
        return sum(memoryview(one.data).nbytes for one in [self.outer, *shards] if isinstance(one, EncodedTensor))


@dataclass(frozen=True, slots=True)
class Judged:
    """What a peer found in the swap of one fragment. Both take the step together only if both found it good."""

    # What it says of the partner's part: OK where it is good.
    partner: PeerVerdict
    # What it says of its own contribution, beside the partner's.
    own: Verdict
    # ||phi_j - phi_i|| of the decoded vectors.
    distance: float
    # What is learned from it: of the partner's norms, and of the distances to all partners.
    statistics: NormStatistics | None
    distances: NormStatistics | None

    @property
    def good(self) -> bool:
        """Whether this peer takes the step with the partner, if the partner does."""
        return self.own is Verdict.OK and self.partner.verdict is Verdict.OK


@dataclass(frozen=True, slots=True)
class Staged:
    """The step of one fragment, computed and not taken."""

    # What the trainer is to apply, theta <- theta - s, fp32: s is -d. None: rolled back, nothing moves.
    commit: FragmentCommit
    theta_hash: bytes
    statistics: Mapping[str, NormStatistics]
    distances: NormStatistics | None
    # ||s||.
    moved: float

    def beside(self, partner: PeerVerdict) -> Staged:
        """Return the same step with what became of the partner among the verdicts."""
        verdicts = sorted((*self.commit.verdicts, partner), key=lambda one: one.peer_id)
        return replace(self, commit=replace(self.commit, verdicts=tuple(verdicts)))


@dataclass(slots=True)
class _Fragment:
    """One fragment at one peer."""

    # phi_i and d_i: flat fp32, shape [numel]. Buffers have no momentum.
    theta: Tensor
    momentum: Tensor
    theta_hash: bytes
    # Of the norms of the peers' contributions as this peer saw them, by peer_id; and of the distances to its partners.
    statistics: dict[str, NormStatistics] = field(default_factory=dict)
    distances: NormStatistics = field(default_factory=NormStatistics)
    # The sum of ||d_i|| since this fragment was equal at all peers: none that moved alike is further away than both together.
    path: float = 0.0
    # The last ||d_i||.
    moved: float = 0.0


class GossipState:
    """One peer's outer parameters and momentum, and what it knows of its partners.

    An outer step of each fragment: `judge` what the partner offers; `stage` the step, together if both peers judged it good,
    else alone; `commit` all. theta: one flat fp32 CPU tensor per fragment of `schema`, copied. config: its sections gossip,
    penalty, codec and the groups of sync matter. Raises LocalProtocolError when theta does not fit, ConfigError for too many
    groups.
    """

    def __init__(self, peer_id: str, schema: Schema, config: RunConfig, theta: Sequence[Tensor]) -> None:
        if [tuple(part.shape) for part in theta] != [(fragment.numel,) for fragment in schema.fragments]:
            raise LocalProtocolError("theta does not fit the schema's fragments")
        fragments_due(0, len(schema.fragments), config.sync.groups, config.sync.pattern)
        self.peer_id = peer_id
        self.schema = schema
        self.config = config
        self._merger = merger(config)
        self._codecs = tuple(codec_of(f, CodecChoice(CodecSpec.parse(config.gossip.codec))) for f in schema.fragments)
        self._outer_step = 0
        self._fragments = [
            _Fragment(
                part.clone(),
                torch.zeros(0 if spec.buffers else spec.numel, dtype=torch.float32, device="cpu"),
                fragment_hash(part),
            )
            for part, spec in zip(theta, schema.fragments, strict=True)
        ]

    @property
    def outer_step(self) -> int:
        """The number of commits so far."""
        return self._outer_step

    @property
    def steps_here(self) -> bool:
        """Whether this peer has taken a step since it began: at the run's begin, or where another peer was."""
        return any(bool(fragment.momentum.any()) for fragment in self._fragments)

    @property
    def due(self) -> tuple[int, ...]:
        """The fragments that the next outer step exchanges, ascending."""
        sync = self.config.sync
        return fragments_due(self._outer_step, len(self._fragments), sync.groups, sync.pattern)

    @property
    def theta(self) -> tuple[Tensor, ...]:
        """phi_i, one tensor per fragment; only to be read. They stay as they are: a commit makes others."""
        return tuple(fragment.theta for fragment in self._fragments)

    @property
    def digest(self) -> str:
        """`edit.fragments.digest.digest` of theta."""
        return combine(self.fragment_hashes)

    @property
    def fragment_hashes(self) -> tuple[bytes, ...]:
        """`edit.fragments.digest.fragment_hash` of each fragment."""
        return tuple(fragment.theta_hash for fragment in self._fragments)

    @property
    def path(self) -> tuple[float, ...]:
        """Of each fragment, the sum of the lengths of its steps since it was equal at all peers."""
        return tuple(fragment.path for fragment in self._fragments)

    def offered(self, i: int) -> EncodedTensor:
        """Return fragment i of phi as the partner of a swap gets it: `gossip.codec`, buffers fp32."""
        return self._codecs[i].encode(self._fragments[i].theta, self.schema.fragments[i])

    def judge(self, i: int, own: Offer, other: Offer) -> Judged:
        """Judge what the partner offers of fragment i, beside this peer's own offer. Changes nothing.

        With the penalty on: its norm, by the history that this peer has of it; the distance of the two phi (plus the length of
        this peer's last step, so that two that are equal have a level), by the detector "level" and the history of all
        distances. A distance above `max_ratio` times this peer's own path since all were equal is anomalous from the first
        swap on and never learned; with the detector "level" a norm above `max_ratio` times this peer's own (per steps), too.

        Raises RemoteProtocolError for what cannot be decoded, or is of another size.
        """
        spec, penalty = self.schema.fragments[i], self.config.penalty
        theirs = other.contribution
        if other.outer.codec != self._codecs[i].name or other.outer.numel != spec.numel:
            raise RemoteProtocolError(
                f"fragment {i} of peer {theirs.peer_id}: outer parameters of {other.outer.numel} elements in "
                f"{other.outer.codec}, not {spec.numel} in {self._codecs[i].name}"
            )
        distance = difference_norm(other.outer, own.outer)
        if spec.buffers or not penalty.enabled:
            finite = math.isfinite(theirs.norm) and math.isfinite(distance)
            verdict = Verdict.OK if finite else Verdict.NONFINITE
            of_own = Verdict.OK if math.isfinite(own.contribution.norm) else Verdict.NONFINITE
            return Judged(_said(theirs, verdict), of_own, distance, None, None)
        return self._judge_by_history(i, own, other, distance)

    def _judge_by_history(self, i: int, own: Offer, other: Offer, distance: float) -> Judged:
        fragment, penalty, known = self._fragments[i], self.config.penalty, self._fragments[i].statistics
        mine, theirs = own.contribution, other.contribution
        believed = min(theirs.inner_steps, int(penalty.max_ratio * max(mine.inner_steps, 1)))  # more would lower a level
        norms = {mine.peer_id: mine.norm, theirs.peer_id: theirs.norm}
        steps = {mine.peer_id: mine.inner_steps, theirs.peer_id: believed}
        before = {peer_id: known[peer_id] for peer_id in norms if peer_id in known}
        judged, after = judge_round(norms, steps, before, penalty)
        apart, distances = by_levels(
            {_DISTANCE: distance + fragment.moved}, {_DISTANCE: 1}, {_DISTANCE: fragment.distances}, penalty
        )
        statistics, learned = after.get(theirs.peer_id), distances.get(_DISTANCE)
        verdict = judged[theirs.peer_id] if judged[theirs.peer_id] is not Verdict.OK else apart[_DISTANCE]
        if verdict is not Verdict.NONFINITE:
            usual = penalty.max_ratio * _level(mine.norm, mine.inner_steps, penalty)
            if penalty.detector == "level" and _level(theirs.norm, believed, penalty) > usual > 0:
                verdict, statistics = Verdict.ANOMALOUS, None
            if distance > self._reach(i, own):
                verdict, learned = Verdict.ANOMALOUS, None
        return Judged(_said(theirs, verdict), judged[mine.peer_id], distance, statistics, learned)

    def _reach(self, i: int, own: Offer) -> float:
        """Return how far away a partner's phi may be: this peer's own path, and what its codec rounds, max_ratio times."""
        theta, rounded = self._fragments[i].theta, 0.0
        if not self._codecs[i].lossless:
            exact = EncodedTensor("fp32", theta.numel(), theta.numpy().data.cast("B"))
            rounded = difference_norm(own.outer, exact)
        return self.config.penalty.max_ratio * (self._fragments[i].path + rounded)

    def stage(self, i: int, own: Offer, other: Offer | None = None, judged: Judged | None = None) -> Staged:
        """Compute the step of fragment i: with `other` if that is given, else alone. Changes nothing.

        judged: what `judge` said of the partner, also where the step is then taken alone. A contribution of this peer's own
        that is bad by its own history, and a step that is not finite, roll the fragment back. Raises RemoteProtocolError as
        `edit.merging.mergers.Merger.merge`.
        """
        spec, fragment = self.schema.fragments[i], self._fragments[i]
        contributions = [own.contribution] if other is None else [own.contribution, other.contribution]
        merged = self._merger.merge(spec, contributions, fragment.statistics, MergeRule())
        statistics = dict(merged.statistics)
        payload, theta_hash, moved = None, fragment.theta_hash, 0.0
        if merged.merged is not None:
            taken = self._step(spec, fragment, merged.merged, own.outer, None if other is None else other.outer)
            if taken is not None:
                payload, theta_hash, moved = taken
        commit = FragmentCommit(
            fragment_id=i, payload=payload, verdicts=merged.verdicts, merged_norm=merged.merged_norm, clip=merged.clip
        )
        staged = Staged(commit, theta_hash, statistics, None if judged is None else judged.distances, moved)
        if judged is None or other is not None:
            return staged
        partner = judged.partner
        if judged.statistics is not None:
            statistics[partner.peer_id] = judged.statistics
        return staged.beside(replace(partner, verdict=Verdict.UNPAIRED) if partner.verdict is Verdict.OK else partner)

    def _step(
        self, spec: FragmentSpec, fragment: _Fragment, mean: Tensor, own: EncodedTensor, other: EncodedTensor | None
    ) -> tuple[EncodedTensor, bytes, float] | None:
        """Return s = -d, theta's hash after it, and ||s||; None where something would not be finite.

        Every operation is rounded by itself. Buffers become the mean of the pair's: a = 0, b = g = 1.
        """
        settings = self.config.gossip
        data, hashed = new_buffer(4 * spec.numel), FragmentHash()
        step = view(data, torch.float32, spec.numel, 0, bytearray())
        ours, theirs = (None if one is None else codec(one.codec).decode_pieces(one) for one in (own, other))
        scratch = torch.empty(min(PIECE, spec.numel), dtype=torch.float32, device="cpu")
        for part in parts(spec.numel):
            d, near = step[part], scratch[: part.stop - part.start]
            if spec.buffers:
                torch.neg(mean[part], out=d)
            else:
                torch.mul(fragment.momentum[part], settings.momentum, out=d).sub_(torch.mul(mean[part], settings.lr, out=near))
            if theirs is not None and ours is not None:
                torch.sub(next(theirs), next(ours), out=near).mul_(0.5)
                d.add_(near if spec.buffers else near.mul_(settings.mixing))
            torch.add(fragment.theta[part], d, out=near)
            hashed.update(near)
            d.neg_()
        if not math.isfinite(moved := norm(step)):  # with a finite ||d|| theta is finite, too: its square does not overflow
            return None
        return EncodedTensor("fp32", spec.numel, data), hashed.digest(), moved

    def commit(self, staged: Sequence[Staged], reason: str) -> Commit:
        """Take the steps of all fragments that are due, and advance. Raises LocalProtocolError unless there is one for each."""
        staged = sorted(staged, key=lambda one: one.commit.fragment_id)
        if tuple(one.commit.fragment_id for one in staged) != self.due:
            to = self._outer_step + 1
            raise LocalProtocolError(f"the commit of outer step {to} needs fragments {list(self.due)}, each once")
        for one in staged:
            fragment = self._fragments[one.commit.fragment_id]
            fragment.statistics |= one.statistics
            if one.distances is not None:
                fragment.distances = one.distances
            if one.commit.payload is None:
                continue
            before, fragment.theta = fragment.theta, torch.empty_like(fragment.theta)  # others may hold what it was
            for part, step in zip(parts(fragment.theta.numel()), _pieces(one.commit.payload), strict=True):
                torch.sub(before[part], step, out=fragment.theta[part])
                if fragment.momentum.numel():
                    torch.neg(step, out=fragment.momentum[part])
            fragment.theta_hash = one.theta_hash
            fragment.moved = one.moved
            fragment.path += one.moved
        self._outer_step += 1
        return Commit(
            outer_step=self._outer_step,
            round_id=self._outer_step,
            digest=self.digest,
            reason=reason,
            fragments=tuple(one.commit for one in staged),
        )

    def again(
        self, commit: FragmentCommit, statistics: Mapping[str, NormStatistics], distances: NormStatistics | None
    ) -> Staged:
        """Return a step that was taken from here before, as what is kept of it says. Raises RemoteProtocolError."""
        fragment, payload = self._fragments[commit.fragment_id], commit.payload
        if payload is None:
            return Staged(commit, fragment.theta_hash, statistics, distances, 0.0)
        hashed = FragmentHash()
        for part, step in zip(parts(fragment.theta.numel()), _pieces(payload), strict=True):
            hashed.update(fragment.theta[part] - step)
        return Staged(commit, hashed.digest(), statistics, distances, norm_of_encoded(payload))

    def take(self, theta: Sequence[Tensor]) -> None:
        """Put common outer parameters in the place of this peer's own (see `settle`); its momentum stays, d_i."""
        for fragment, part in zip(self._fragments, theta, strict=True):
            fragment.theta = part.clone()
            fragment.theta_hash, fragment.path = fragment_hash(part), 0.0

    def join(self, donor: GossipState) -> None:
        """Begin where another peer is: at its outer step, from its outer parameters, without momentum."""
        self.begin_at(donor.outer_step, donor.theta, [fragment.path for fragment in donor._fragments])

    def begin_at(self, outer_step: int, theta: Sequence[Tensor], path: Sequence[float]) -> None:
        """Begin at an outer step, from outer parameters that somebody else has, without momentum.

        path: of each fragment, how far those may be from other peers': the sum of ||d|| since all were equal.
        """
        self.take(theta)
        self._outer_step = outer_step
        for fragment, far in zip(self._fragments, path, strict=True):
            fragment.path = far
            fragment.momentum.zero_()

    def to_tensors(self) -> dict[str, Tensor]:
        """Return every tensor of the state by name: `theta.I`, `momentum.I`. Shared: the next commit writes into them."""
        tensors = {f"theta.{i}": fragment.theta for i, fragment in enumerate(self._fragments)}
        return tensors | {f"momentum.{i}": fragment.momentum for i, fragment in enumerate(self._fragments)}

    def metadata(self) -> dict[str, Any]:
        """Return the rest of the state, JSON-able; floats survive JSON to the bit."""
        return {
            "peer_id": self.peer_id,
            "outer_step": self._outer_step,
            "digest": self.digest,
            "schema_hash": self.schema.schema_hash,
            "fragments": [
                {
                    "statistics": {peer_id: known.to_json() for peer_id, known in sorted(fragment.statistics.items())},
                    "distances": fragment.distances.to_json(),
                    "path": fragment.path,
                    "moved": fragment.moved,
                }
                for fragment in self._fragments
            ],
        }

    @classmethod
    def restore(cls, schema: Schema, config: RunConfig, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> Self:
        """Rebuild the state that gave `tensors` and `metadata`, to the bit.

        Raises StorageError when they are damaged or incomplete, ConfigError when they belong to another model.
        """
        if metadata.get("schema_hash") != schema.schema_hash:
            raise ConfigError("the checkpoint belongs to another model (schema_hash)")
        theta = [_taken(tensors, f"theta.{i}", spec.numel) for i, spec in enumerate(schema.fragments)]
        try:
            state = cls(str(metadata["peer_id"]), schema, config, theta)
            state._outer_step = int(metadata["outer_step"])
            for i, (fragment, known) in enumerate(zip(state._fragments, metadata["fragments"], strict=True)):
                fragment.momentum.copy_(_taken(tensors, f"momentum.{i}", fragment.momentum.numel()))
                fragment.statistics = {
                    peer_id: NormStatistics.from_json(written, strict=False) for peer_id, written in known["statistics"].items()
                }
                fragment.distances = NormStatistics.from_json(known["distances"])
                fragment.path, fragment.moved = float(known["path"]), float(known["moved"])
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise StorageError(f"checkpoint: what is kept of the swaps is damaged ({error!r})") from error
        if state.digest != metadata.get("digest"):
            raise StorageError("checkpoint: theta does not match its digest")
        return state


def settling(config: RunConfig) -> RunConfig:
    """Return the settings of a settling: an ordinary round with uniform weights, nu 1 and mu 0, of all fragments, exact."""
    return replace(
        config,
        outer=OuterConfig(optimizer="sgd", lr=1.0),
        penalty=PenaltyConfig(enabled=False),
        codec=CodecConfig(up="fp32", down="fp32"),
        sync=replace(config.sync, groups=1),
    )


def settle(base: OuterState, theta: Mapping[str, Sequence[Tensor]]) -> list[MergeRecord]:
    """Return the round that makes one model of all peers' phi, by peer_id: its commit in `base` gives their mean.

    Changes nothing. base: the last model that was common to all, with the settings `settling`. The contributions are
    base - phi_i in fp32; one that is not finite does not count. Where none counts, base stays.
    """
    records, common = [], base.theta
    for i, spec in enumerate(base.schema.fragments):
        contributions = []
        for peer_id in sorted(theta):
            payload = partial(_apart, spec, common[i], theta[peer_id][i])  # in memory of its own only while it is read
            contributions.append(Measured(peer_id, 1, 1, measure(payload()), payload))
        records.append(base.record(base.reduce(i, contributions)))
    return records


def _apart(spec: FragmentSpec, common: Tensor, theta: Tensor) -> EncodedTensor:
    """Return common - theta in fp32."""
    return codec("fp32").encode(common - theta, spec)


def _taken(tensors: Mapping[str, Tensor], name: str, numel: int) -> Tensor:
    tensor = tensors.get(name)
    if tensor is None or tensor.shape != (numel,) or tensor.dtype != torch.float32:
        raise StorageError(f"checkpoint: {name} is missing or not {numel} fp32 elements")
    return tensor


def _said(contribution: Measured, verdict: Verdict) -> PeerVerdict:
    return PeerVerdict(peer_id=contribution.peer_id, verdict=verdict, norm=contribution.norm, weight=0.0)


def _level(size: float, inner_steps: int, penalty: PenaltyConfig) -> float:
    """Return a norm per steps, as the detector takes it: G / steps^p."""
    return size / power(max(inner_steps, 1), penalty.step_power)


def _pieces(payload: EncodedTensor) -> Iterable[Tensor]:
    return codec(payload.codec).decode_pieces(payload)
