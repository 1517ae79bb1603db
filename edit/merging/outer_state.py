"""The outer state of a run: theta, the outer optimizer's state, the residuals and the norm statistics, per fragment.

It changes in one way only: reduce (pure) -> record (pure) -> stage (pure) -> commit, which applies the records of all due
fragments in place. What is recorded is what the outer optimizer is given: D' = decode(encode(D + what the records before left
out)). So the same records and injections in the same order give the same bits, which is what a journal replays.

stage goes through a fragment and computes what the commit will publish of it: so that is known before the commit, and a step
that is not finite leaves its fragment as it was. The commit goes through it again, and writes. What was not staged, and cannot
overflow by the largest magnitudes before it, is gone through once.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from edit.codecs import PIECE, codec
from edit.codecs.base import new_buffer, new_vector, parts
from edit.codecs.error_feedback import codec_of
from edit.codecs.residuals import Residual, owing
from edit.config.codec import CodecChoice, CodecSpec
from edit.config.in_force import outer_in_force
from edit.config.plugins import is_entry
from edit.config.run import RunConfig
from edit.config.validation import require
from edit.errors import ConfigError, LocalProtocolError, StorageError
from edit.fragments.digest import FragmentHash, combine, fragment_hash
from edit.fragments.groups import fragments_due
from edit.fragments.schema import FragmentSpec, Schema
from edit.kernels import fast
from edit.merging.average import Average
from edit.merging.heloco import Momentum
from edit.merging.injection import Injected, Injection
from edit.merging.masked import JudgedClaims, MaskedSum, judge_claims, merge_sum, reference_of
from edit.merging.merge import Measured, Merged, MergeRule
from edit.merging.mergers import merger
from edit.merging.outer_optimizers import OuterOptimizer, Slots, outer_optimizer
from edit.merging.penalty import NormStatistics
from edit.merging.private import Clipped, Noise, clip_contributions, merge_private
from edit.merging.robust_merger import Chosen, Gathered, RobustMerger
from edit.merging.trust import Trust
from edit.records import Commit, EncodedTensor, FragmentCommit, PeerVerdict
from edit.trust.mask_grid import BLOCK, first_exponent, grid_exponents, largest
from edit.trust.mask_plan import FragmentPlan

__all__ = ["Each", "MergeRecord", "OuterState", "Staged"]

# With lr at most _MAX_LR, eps at least _MIN_EPS and no magnitude above _SAFE, a step stays below 1e16, and its square, which
# some codecs take, within fp32.
_SAFE = 2.0**20
_MAX_LR = 1e3
_MIN_EPS = 1e-6
_INFINITY = 0x7F800000  # the bits of fp32's
_FIRST_BOUND = 10.0  # of an element of the first masked contributions, where penalty.clip gives none


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeRecord:
    """One fragment of one round, merged, as the journal keeps it: with the outer state before, it determines the one after."""

    # The run advances from this outer step.
    outer_step: int
    fragment_id: int
    # Encoded: D after the clip, plus what the records before left out. None is a rollback.
    payload: EncodedTensor | None
    # What this one leaves out, once it is applied; None: nothing.
    residual: Residual | None
    # One per contributor, in peer_id order.
    verdicts: tuple[PeerVerdict, ...]
    # After this round, of its contributors only.
    statistics: Mapping[str, NormStatistics]
    # ||D|| before the clip, and the clip's factor.
    merged_norm: float
    clip: float
    # The largest magnitude in the decoded payload; None: it is not known to decode.
    largest: float | None = None


@dataclass(frozen=True, slots=True)
class Staged:
    """The outer step of one fragment, computed and not applied."""

    # What is published: the encoded step; None: the fragment is rolled back.
    payload: EncodedTensor | None
    # Of theta after it.
    theta_hash: bytes
    # Whether the record's payload is in it; else what is injected moves theta alone.
    merges: bool
    # As `_Fragment.largest`, after it.
    largest: float


@dataclass(slots=True)
class _Fragment:
    """One fragment of the outer state. A commit writes into it."""

    # The outer parameters: flat fp32, shape [numel].
    theta: Tensor
    # `edit.fragments.digest.fragment_hash` of theta.
    theta_hash: bytes
    # The outer optimizer's state by name.
    slots: dict[str, Tensor]
    # What the downlink's codec left out so far; None counts as zero.
    residual: Residual | None
    # What the records' codec left out so far.
    unrecorded: Residual | None
    # Of the norms of the contributions, by peer_id.
    statistics: Mapping[str, NormStatistics]
    # D' of the last record that was not a rollback, in bf16; only with a robust rule, which compares with it, and with masks,
    # whose grid follows it.
    last: Tensor | None = None
    # With masks: `edit.merging.masked.reference_of` the last record that was not a rollback; 0: none was.
    reference: float = 0.0
    # Of theta over outer steps; None: nobody asked for one.
    average: Average | None = None
    # Neither theta nor a slot nor the residual has a larger magnitude; infinity: it was not measured.
    largest: float = math.inf


Each = Callable[[Callable[[MergeRecord], FragmentCommit], Iterable[MergeRecord]], Iterable[FragmentCommit]]
"""`map`, or what calls for several records at a time; the results come in order."""


class OuterState:
    """theta and all that moves it.

    theta: one flat fp32 CPU tensor per fragment of `schema`, taken over and written into. slots: the outer optimizer's state of
    each, likewise; None: as before its first step. config: its sections penalty, outer, average, privacy,
    codec (all but up), rounds.merging and the groups of sync matter. Raises LocalProtocolError when theta does not fit the
    schema, ConfigError when there are more groups than fragments, with outer.algorithm = "gossip", and for buffers with masks
    or noise.
    """

    def __init__(
        self,
        schema: Schema,
        config: RunConfig,
        theta: Sequence[Tensor],
        slots: Sequence[dict[str, Tensor]] | None = None,
    ) -> None:
        if [tuple(part.shape) for part in theta] != [(fragment.numel,) for fragment in schema.fragments]:
            raise LocalProtocolError("theta does not fit the schema's fragments")
        if any(part.dtype != torch.float32 or part.device.type != "cpu" for part in theta):
            raise LocalProtocolError("theta must be fp32 on the CPU")
        rule = "these are the outer parameters that all peers share; with gossip there are none (edit.merging.gossip)"
        require(config.outer.algorithm == "mean", "outer.algorithm", config.outer.algorithm, rule)
        fragments_due(0, len(schema.fragments), config.sync.groups, config.sync.pattern)
        rule = "must be false for a model whose buffers are averaged: they fit no grid"
        buffers = any(fragment.buffers for fragment in schema.fragments)
        require(not config.secagg.enabled or not buffers, "secagg.enabled", True, rule)
        rule = "must not be organisation for a model whose buffers are averaged: noise has no place in them"
        require(not config.privacy.of_organisations or not buffers, "privacy.level", config.privacy.level, rule)
        self.schema = schema
        self.config = config
        self._codecs = tuple(codec_of(fragment, config.codec.downlink) for fragment in schema.fragments)
        self._recorders = tuple(codec_of(f, CodecChoice(config.codec.record_of(f.name))) for f in schema.fragments)
        # In which residuals are written; what replays records of an older format sets its own.
        self.residual_form = config.codec.down_residual
        self._merger = merger(config)
        self._outer_step = 0  # see `_turn_to`
        self._injected: Injected | None = None
        self._trust: Mapping[str, Trust] = {}
        self._lent: list[weakref.ref[np.ndarray] | None] = [None for _ in schema.fragments]
        self._optimizer = outer_optimizer(config.outer)  # with the settings in force at this outer step
        self._lr = config.outer.lr
        slots = slots if slots is not None else [_slots(self._optimizer, fragment) for fragment in schema.fragments]
        self._fragments = [
            _Fragment(part, fragment_hash(part), own, None, None, {})
            for part, own in zip((part.detach().contiguous() for part in theta), slots, strict=True)
        ]
        self._turn_to(0)
        if config.average.kind != "none":
            for fragment in self._fragments:
                fragment.average = Average(config.average, fragment.theta.numel())

    @property
    def outer_step(self) -> int:
        """The number of commits so far."""
        return self._outer_step

    def _turn_to(self, outer_step: int) -> None:
        """Go on from an outer step: what is planned for it, a function of its number and the settings, is in force."""
        config, self._outer_step = self.config, outer_step
        if config.outer.changes:
            outer = outer_in_force(config.outer, config.sync, outer_step)
            self._optimizer, self._lr = outer_optimizer(outer), outer.lr
        if config.sync.is_first_with_another(outer_step):
            for i in self.due:  # norms of so many inner steps more or less say nothing about what is to come
                self._fragments[i].statistics = {}
        if outer_step // config.sync.groups in config.outer.momentum_restarts:
            for i in self.due:
                for slot in self._fragments[i].slots.values():  # of nesterov and co2, the momentum
                    slot.zero_()

    @property
    def injected(self) -> Injected | None:
        """What of a run above is in theta; None: nothing."""
        return self._injected

    @property
    def trust(self) -> Mapping[str, Trust]:
        """What scorers have said of peers, by peer_id, as the next outer step is merged with."""
        return self._trust

    @property
    def due(self) -> tuple[int, ...]:
        """The fragments that the next outer step exchanges, ascending."""
        sync = self.config.sync
        return fragments_due(self._outer_step, len(self._fragments), sync.groups, sync.pattern)

    @property
    def theta(self) -> list[Tensor]:
        """The outer parameters, one tensor per fragment; only to be read.

        They stay as they are for as long as anybody holds them, or a view of them: a commit first copies such a fragment.
        """
        return [self._lend(i) for i in range(len(self._fragments))]

    def _lend(self, i: int) -> Tensor:
        """Return a tensor that shares theta's memory, of an array that lives for as long as any tensor of that memory does."""
        lent = self._lent[i]
        array = lent() if lent is not None else None
        if array is None:
            array = self._fragments[i].theta.numpy()[:]
            self._lent[i] = weakref.ref(array)
        return torch.from_numpy(array)

    @property
    def averaged(self) -> list[Tensor]:
        """The average that the section [average] keeps of theta, one tensor per fragment, in memory of its own.

        Raises ConfigError when it keeps none.
        """
        means = [each.average.of(each.theta) for each in self._fragments if each.average is not None]
        rule = "keeps no average; set it to ema or last, and outer steps count from then on"
        require(self.config.average.kind != "none", "average.kind", self.config.average.kind, rule)
        return means

    @property
    def digest(self) -> str:
        """`edit.fragments.digest.digest` of theta. Cheap: the fragments' hashes are kept."""
        return combine(fragment.theta_hash for fragment in self._fragments)

    @property
    def fragment_hashes(self) -> tuple[bytes, ...]:
        """`edit.fragments.digest.fragment_hash` of each fragment."""
        return tuple(fragment.theta_hash for fragment in self._fragments)

    def forget_unrecorded(self) -> None:
        """Let go of what the records' codec has left out so far. theta, the optimizer's state and the statistics stay."""
        for fragment in self._fragments:
            fragment.unrecorded = None

    def reduce(self, fragment_id: int, contributions: Sequence[Measured]) -> Merged:
        """Merge the contributions to one fragment. Changes nothing. Raises as `edit.merging.mergers.Merger.merge`.

        Raises LocalProtocolError where privacy.level = "organisation" or robust.scope = "model": `reduce_private` or
        `reduce_chosen` is to be used.
        """
        if self.config.privacy.of_organisations:
            raise LocalProtocolError("a merge without noise in a run with differential privacy of organisations")
        if self.config.robust.of_model:
            raise LocalProtocolError("a merge of one fragment by itself in a run that weighs contributions by all of them")
        fragment, statistics = self.schema.fragments[fragment_id], self._fragments[fragment_id].statistics
        return self._merger.merge(fragment, contributions, statistics, self._rule(fragment_id))

    def choose(self, contributions: Mapping[int, Sequence[Measured]], rejected: Collection[str] = ()) -> Chosen:
        """Weigh the contributions to the next outer step as a whole, where robust.scope = "model". Changes nothing.

        contributions: by fragment, of all that are due; rejected: see `RobustMerger.choose`, which says what is raised.
        """
        spec, kept = self.schema.fragments, self._fragments
        gathered = {i: Gathered(spec[i], each, kept[i].statistics, self._rule(i)) for i, each in contributions.items()}
        return self._robust.choose(gathered, rejected)

    def reduce_chosen(self, fragment_id: int, contributions: Sequence[Measured], chosen: Chosen) -> Merged:
        """Merge the contributions to one fragment as `choose` has weighed them. Changes nothing. Raises as `merge_chosen`."""
        return self._robust.merge_chosen(self.schema.fragments[fragment_id], contributions, chosen, self._rule(fragment_id))

    @property
    def _robust(self) -> RobustMerger:
        assert isinstance(self._merger, RobustMerger)
        return self._merger

    def plan(self, fragment_id: int) -> FragmentPlan:
        """Return the grid of a masked contribution to the next outer step: of 32 bits until something was merged."""
        secagg, fragment = self.config.secagg, self._fragments[fragment_id]
        if fragment.last is None or not bool(fragment.last.any()):
            bits, bound = 32, self.config.penalty.clip or _FIRST_BOUND
            limit = largest(bits, secagg.max_peers)
            exponents = np.full(-(-fragment.theta.numel() // BLOCK), first_exponent(bound, limit), np.int8)
        else:
            bits, limit = secagg.bits, largest(secagg.bits, secagg.max_peers)
            exponents = grid_exponents(fragment.last.float().numpy(), bits, limit)
        return FragmentPlan(
            fragment_id=fragment_id, bits=bits, limit=limit, exponents=exponents.tobytes(), reference=fragment.reference
        )

    def judge_claims(self, claims: Mapping[int, Sequence[Measured]]) -> JudgedClaims:
        """Judge what complete peers say of masked contributions, before their sum is opened. claims: by fragment."""
        return judge_claims(claims, {i: self._fragments[i].statistics for i in claims}, self.config.penalty)

    def reduce_sum(
        self,
        plan: FragmentPlan,
        total: MaskedSum,
        contributions: Sequence[Measured],
        judged: JudgedClaims,
        survivors: Collection[str],
    ) -> Merged:
        """Merge an opened sum of masked contributions to one fragment. Changes nothing. Raises as `merge_sum`."""
        fragment = self.schema.fragments[plan.fragment_id]
        return merge_sum(fragment, plan, total, contributions, judged, survivors, self.config.penalty)

    def clip(self, contributions: Mapping[int, Sequence[Measured]], rejected: Collection[str] = ()) -> Clipped:
        """Return by how much each contribution to the next outer step is shortened; see `clip_contributions`."""
        numel = max(fragment.numel for fragment in self.schema.fragments)
        return clip_contributions(contributions, self.config.privacy.clip, self.config.denominator, rejected, numel=numel)

    def reduce_private(self, fragment_id: int, contributions: Sequence[Measured], clipped: Clipped, noise: Noise) -> Merged:
        """Merge the contributions to one fragment, with noise. Changes nothing. Raises as `merge_private`."""
        privacy, fragment = self.config.privacy, self.schema.fragments[fragment_id]
        deviation = privacy.noise_multiplier * privacy.clip
        return merge_private(fragment, contributions, clipped, deviation, self.config.denominator, noise)

    def _rule(self, fragment_id: int) -> MergeRule:
        outer, spec = self.config.outer, self.schema.fragments[fragment_id]
        if spec.buffers:
            return MergeRule()
        momentum = None
        if outer.correct == "heloco":
            vector = self._fragments[fragment_id].slots["momentum"]
            momentum = Momentum(vector, outer.momentum, [tensor.numel for tensor in spec.tensors])
        direction = "mean" if spec.name.startswith("embedding") else outer.direction  # rows of rare words have no direction
        damped, last = self.config.rounds.merging == "arrivals", self._fragments[fragment_id].last
        return MergeRule(direction, momentum, damped, self._outer_step, last, self._trust)

    def record(self, merged: Merged) -> MergeRecord:
        """Encode what was merged of one fragment, to be journalled and committed. Changes nothing, `merged` included.

        With a lossless codec the payload shares D's memory. A D that is not finite once it is encoded is a rollback.
        """
        payload, residual, largest = None, None, 0.0
        if merged.merged is not None:
            payload, residual, largest = self._recorded(merged.fragment_id, merged.merged)
            if not math.isfinite(largest):
                payload = residual = None
        return MergeRecord(
            outer_step=self._outer_step,
            fragment_id=merged.fragment_id,
            payload=payload,
            residual=residual,
            verdicts=merged.verdicts,
            statistics=merged.statistics,
            merged_norm=merged.merged_norm,
            clip=merged.clip,
            largest=largest,
        )

    def _recorded(self, fragment_id: int, mean: Tensor) -> tuple[EncodedTensor, Residual | None, float]:
        """Return the encoded D', what it leaves out and its largest magnitude.

        Where each element is rounded by itself (bf16), nothing is kept of it: the error is a small share of each element, and
        the next round's contributions are computed from what became of it.
        """
        numel = self.schema.fragments[fragment_id].numel
        if mean.shape != (numel,) or mean.dtype != torch.float32:
            raise LocalProtocolError(f"a merge of fragment {fragment_id} must be a flat fp32 tensor of {numel} elements")
        encoder, owed = self._recorders[fragment_id], self._fragments[fragment_id].unrecorded
        if encoder.lossless and owed is None:
            return EncodedTensor(encoder.name, numel, mean.numpy().view(np.uint8).data), None, _largest(mean)
        data, largest = new_buffer(encoder.encoded_size(numel)), 0.0
        scratch = torch.empty(min(PIECE, numel), dtype=torch.float32, device="cpu")
        decoded = encoder.pieces(data, numel)
        residual = Residual(numel, self.residual_form) if encoder.granule > 1 else None
        for part in parts(numel):
            total = owing(mean[part], owed.read(part) if owed is not None else None, 1.0, scratch[: part.stop - part.start])
            encoder.encode_part(total, data, numel, part.start)
            piece = next(decoded)
            largest = max(largest, _largest(piece))
            if residual is not None:
                residual.write(part, total.sub_(piece))
        return EncodedTensor(encoder.name, numel, data), residual, largest

    def stage(self, record: MergeRecord, injection: Injection | None = None) -> Staged:
        """Compute what the commit of this record will publish, and the hash that theta will have. Changes nothing.

        A step that would make theta or the optimizer's state non-finite (it overflows fp32 or the codec) is a rollback; what is
        injected is then applied alone. Raises RemoteProtocolError for a payload that cannot be decoded.
        """
        i, injected, replaces = _injected(record, injection)
        for mean in (None,) if replaces else (record.payload, None):
            if mean is not None or injected is not None:
                staged = self._go_through(i, mean, injected, replaces=replaces, in_place=False)
                if staged is not None:
                    return staged
        return Staged(None, self._fragments[i].theta_hash, merges=False, largest=self._fragments[i].largest)

    def _go_through(
        self, i: int, mean: EncodedTensor | None, injected: Tensor | None, *, replaces: bool, in_place: bool
    ) -> Staged | None:
        """Return the optimizer's step of `mean`, less what is injected; None: something would not be finite.

        in_place: also take it; the fragment is of no more use when this returns None.
        """
        spec, fragment, encoder = self.schema.fragments[i], self._fragments[i], self._codecs[i]
        numel, owed = spec.numel, None if replaces else fragment.residual
        data = new_buffer(encoder.encoded_size(numel))
        scratch = torch.empty(min(PIECE, numel), dtype=torch.float32, device="cpu")
        decoded, hashed = encoder.pieces(data, numel), FragmentHash()
        if in_place:
            self._begin_to_write(i, owed)
        largest = fragment.largest if mean is None or spec.buffers else 0.0  # the slots stay
        for part, total, slots in self._steps(i, mean, injected, owed, replaces=replaces):
            encoder.encode_part(total, data, numel, part.start)
            step, theta = next(decoded), fragment.theta[part]
            theta = torch.sub(theta, step, out=theta if in_place else scratch[: step.numel()])
            hashed.update(theta)
            seen = [theta, *slots.values()]
            if self._keeps_residual(i):
                seen.append(total.sub_(step))
            if in_place:
                _write(fragment, part, total, slots)
            if (now := max(map(_largest, seen))) == math.inf:
                return None
            largest = max(largest, now)
        return Staged(EncodedTensor(encoder.name, numel, data), hashed.digest(), merges=mean is not None, largest=largest)

    def update_bytes(self, fragment_id: int) -> int:
        """Return the size of a fragment's encoded step, unless it is rolled back."""
        return self._codecs[fragment_id].encoded_size(self.schema.fragments[fragment_id].numel)

    def _keeps_last(self, i: int) -> bool:
        compares = self.config.robust.enabled or self.config.secagg.enabled
        return compares and not self.schema.fragments[i].buffers

    def _keeps_residual(self, i: int) -> bool:
        return not self._codecs[i].lossless and self.config.codec.down_decay != 0

    def commit(
        self,
        round_id: int,
        reason: str,
        records: list[MergeRecord],
        injection: Injection | None = None,
        staged: Mapping[int, Staged] | None = None,
        trust: Mapping[str, Trust] | None = None,
        each: Each = map,
    ) -> Commit:
        """Apply the records of the fragments that are due, all of them, and advance; return what is to be published.

        records: emptied on the way, so that their memory is free. staged: what `stage` returned for some of them at this outer
        step and with this injection, by fragment. trust: what scorers have said of peers until then, which the outer steps
        after it are merged with; None: what they had said before. each: calls what applies one record with each of
        them.

        Raises LocalProtocolError unless there is one record for each of `due`, made at this outer step, RemoteProtocolError for
        a payload that cannot be decoded; then nothing has changed. Any later error is a bug that leaves the state half changed.
        """
        records[:] = sorted(self.check(records), key=lambda record: record.fragment_id)
        known = staged or {}

        def taken() -> Iterator[MergeRecord]:
            while records:
                yield records.pop(0)

        def advanced(record: MergeRecord) -> FragmentCommit:
            step = self._advance(record, injection, known.get(record.fragment_id))
            return FragmentCommit(
                fragment_id=record.fragment_id,
                payload=step.payload,
                verdicts=record.verdicts,
                merged_norm=record.merged_norm,
                clip=record.clip,
            )

        fragments = tuple(each(advanced, taken()))
        self._turn_to(self._outer_step + 1)
        if injection is not None:
            self._injected = injection.brings
        if trust is not None:
            self._trust = trust
        return Commit(outer_step=self._outer_step, round_id=round_id, digest=self.digest, reason=reason, fragments=fragments)

    def stage_plugins(
        self, records: Sequence[MergeRecord], injection: Injection | None, staged: Mapping[int, Staged]
    ) -> Mapping[int, Staged]:
        """Return `staged` with all of the commit that a plug-in computes, so that it fails before the commit is durable.

        Without a plug-in, `staged`. Raises PluginError.
        """
        if self._optimizer.bounded and not any(is_entry(CodecSpec.parse(each.name).name) for each in self._codecs):
            return staged
        return self.stage_all(records, injection, staged)

    def stage_all(
        self, records: Sequence[MergeRecord], injection: Injection | None, staged: Mapping[int, Staged]
    ) -> dict[int, Staged]:
        """Return what `stage` returns for every record, by fragment. staged: what it has returned for some already."""
        return {record.fragment_id: staged.get(record.fragment_id) or self.stage(record, injection) for record in records}

    def digest_after(self, staged: Mapping[int, Staged]) -> str:
        """Return the digest of theta after a commit. staged: of every fragment that is due."""
        each = enumerate(self._fragments)
        return combine(staged[i].theta_hash if i in staged else fragment.theta_hash for i, fragment in each)

    @property
    def recorded_as(self) -> tuple[str, ...]:
        """The codec of each fragment's records."""
        return tuple(recorder.name for recorder in self._recorders)

    def check(self, records: Sequence[MergeRecord]) -> tuple[MergeRecord, ...]:
        """Return the records, whose payloads are known to decode. Raises as `commit`, which checks the same."""
        if tuple(sorted(record.fragment_id for record in records)) != self.due:
            raise LocalProtocolError(
                f"the commit of outer step {self._outer_step + 1} needs fragments {list(self.due)}, each once"
            )
        return tuple(map(self._checked, records))

    def _checked(self, record: MergeRecord) -> MergeRecord:
        i, payload = record.fragment_id, record.payload
        if record.outer_step != self._outer_step:
            raise LocalProtocolError(f"a fragment was recorded at another outer step than {self._outer_step}")
        if payload is not None and payload.numel != (numel := self.schema.fragments[i].numel):
            raise LocalProtocolError(f"fragment {i}: a record of {payload.numel} elements, not {numel}")
        if payload is None or record.largest is not None:
            return record
        return replace(record, largest=max(map(_largest, codec(payload.codec).decode_pieces(payload)), default=0.0))

    def _advance(self, record: MergeRecord, injection: Injection | None, staged: Staged | None) -> Staged:
        """Apply one record in place; return what is to be published of it."""
        i, injected, replaces = _injected(record, injection)
        fragment, mean = self._fragments[i], None if replaces else record.payload
        before = fragment.average.before(fragment.theta) if fragment.average is not None else None
        if staged is None and (mean is not None or injected is not None) and self._is_safe(i, mean, record.largest, injected):
            staged = self._go_through(i, mean, injected, replaces=replaces, in_place=True)
            if staged is None:
                raise LocalProtocolError(f"fragment {i} overflowed, which the magnitudes before ruled out")
        else:
            staged = staged if staged is not None else self.stage(record, injection)
            if staged.payload is not None:
                self._apply(i, staged.payload, mean if staged.merges else None, injected, replaces=replaces)
        fragment.theta_hash, fragment.largest = staged.theta_hash, staged.largest
        if fragment.average is not None and staged.payload is not None:
            fragment.average.take(before, fragment.theta)
        fragment.statistics = {**fragment.statistics, **record.statistics}
        if staged.merges:
            fragment.unrecorded = record.residual
            if self._keeps_last(i) and record.payload is not None:
                fragment.last = _in_bf16(record.payload)
            if self.config.secagg.enabled:
                fragment.reference = reference_of(record.verdicts)
        return staged

    def _is_safe(self, i: int, mean: EncodedTensor | None, largest: float | None, injected: Tensor | None) -> bool:
        """Whether no step of these can overflow, whatever the optimizer. largest: of `mean`."""
        outer, known = self.config.outer, self._fragments[i].largest
        if (
            not self._optimizer.bounded
            or self._lr > _MAX_LR
            or outer.eps < _MIN_EPS
            or self._codecs[i].name == "fp16"
            or known > _SAFE
        ):
            return False
        of_mean = 0.0 if mean is None else math.inf if largest is None else largest
        return of_mean <= _SAFE and (injected is None or _largest(injected) <= _SAFE)

    def _apply(
        self, i: int, payload: EncodedTensor, mean: EncodedTensor | None, injected: Tensor | None, *, replaces: bool
    ) -> None:
        """Take a step that was staged as `payload`, in place."""
        fragment = self._fragments[i]
        owed = None if replaces else fragment.residual
        self._begin_to_write(i, owed)
        decoded = codec(payload.codec).decode_pieces(payload)
        for part, total, slots in self._steps(i, mean, injected, owed, replaces=replaces):
            step = next(decoded)
            fragment.theta[part].sub_(step)
            if fragment.residual is not None:
                total.sub_(step)
            _write(fragment, part, total, slots)

    def _begin_to_write(self, i: int, owed: Residual | None) -> None:
        """Make theta and the residual of fragment i such that a step may write into them. owed: the residual that it reads."""
        self._keep_lent(i)
        numel, keeps = self.schema.fragments[i].numel, self._keeps_residual(i)
        self._fragments[i].residual = _to_write(owed, numel, self.residual_form) if keeps else None

    def _keep_lent(self, i: int) -> None:
        """Leave theta of fragment i to those who hold it, if anybody does, and go on with a copy."""
        lent, self._lent[i] = self._lent[i], None
        if lent is not None and lent() is not None:
            theta = self._fragments[i].theta
            self._fragments[i].theta = new_vector(theta.numel()).copy_(theta)

    def _steps(
        self, i: int, mean: EncodedTensor | None, injected: Tensor | None, owed: Residual | None, *, replaces: bool
    ) -> Iterator[tuple[slice, Tensor, Slots]]:
        """Yield of each part what is to be encoded and subtracted from theta, which is scratch, and the slots that change.

        The parts are pieces that stay in the cache from one operation to the next.
        """
        spec, fragment = self.schema.fragments[i], self._fragments[i]
        numel, decay = spec.numel, self.config.codec.down_decay
        scratch = torch.empty(min(PIECE, numel), dtype=torch.float32, device="cpu")
        before = {name: slot.clone() if slot.numel() == 1 else slot for name, slot in fragment.slots.items()}
        for part, piece in zip(parts(numel), _decoded(mean)):  # noqa: B905 (without a mean, as many as there are parts)
            theta = fragment.theta[part]
            change, slots = self._change(spec, theta, before, part, piece, injected, replaces=replaces)
            residual = owed.read(part) if owed is not None else None
            yield part, owing(change, residual, decay, scratch[: theta.numel()]), slots

    def _change(
        self,
        spec: FragmentSpec,
        theta: Tensor,
        slots: Slots,
        part: slice,
        mean: Tensor | None,
        injected: Tensor | None,
        *,
        replaces: bool,
    ) -> tuple[Tensor, Slots]:
        """Return, of one part of a fragment, what is to be subtracted from theta, and the slots that change.

        An injection bypasses the optimizer. Buffers become the mean.
        """
        beside = injected[part] if injected is not None else None
        if mean is None:
            assert beside is not None  # there is one of the two
            return (theta - beside if replaces else torch.neg(beside)), {}
        change, moved = mean, dict[str, Tensor]()
        if not spec.buffers:
            now = {name: slot if slot.numel() == 1 else slot[part] for name, slot in slots.items()}
            change, moved = self._optimizer.step(now, mean)
        return (change if beside is None else change - beside), moved

    def to_tensors(self) -> dict[str, Tensor]:
        """Return every tensor of the state by name: `theta.I`, `outer.I.SLOT`, `residual.I`, `unrecorded.I`, `last.I`,
        `average.I`, `average.I.J`.

        Shared, not copied: the next commit writes into them. `residual` and `unrecorded` are
        `edit.codecs.residuals.Residual.tensor`; `last` is bf16.
        """
        tensors: dict[str, Tensor] = {}
        for i, fragment in enumerate(self._fragments):
            tensors[f"theta.{i}"] = fragment.theta
            tensors |= {f"outer.{i}.{name}": slot for name, slot in fragment.slots.items()}
            for name, residual in (("residual", fragment.residual), ("unrecorded", fragment.unrecorded)):
                if residual is not None:
                    tensors[f"{name}.{i}"] = residual.tensor
            if fragment.last is not None:
                tensors[f"last.{i}"] = fragment.last
            if fragment.average is not None:
                tensors |= fragment.average.to_tensors(i)
        return tensors

    def metadata(self) -> dict[str, Any]:
        """Return the rest of the state, JSON-able; floats survive JSON to the bit."""
        averaged = [each.average.steps for each in self._fragments if each.average is not None]
        return {
            **({"averaged": averaged} if averaged else {}),
            **({"trust": {peer_id: each.to_json() for peer_id, each in self._trust.items()}} if self._trust else {}),
            **({"references": [each.reference for each in self._fragments]} if self.config.secagg.enabled else {}),
            "outer_step": self._outer_step,
            "digest": self.digest,
            "schema_hash": self.schema.schema_hash,
            "optimizer": self.config.outer.optimizer,
            "injected": self._injected.to_json() if self._injected is not None else None,
            "statistics": [
                {peer_id: statistics.to_json() for peer_id, statistics in sorted(fragment.statistics.items())}
                for fragment in self._fragments
            ],
        }

    @classmethod
    def restore(cls, schema: Schema, config: RunConfig, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> Self:
        """Rebuild the state that gave `tensors` and `metadata`, to the bit.

        Raises StorageError when they are damaged or incomplete, ConfigError when they belong to another optimizer or model.
        """
        _check_belongs(schema, config, metadata)
        theta, slots, optimizer = [], [], outer_optimizer(config.outer)
        for i, fragment in enumerate(schema.fragments):
            with torch.device("meta"):  # names and sizes
                expected = _slots(optimizer, fragment)
            theta.append(_take(tensors, f"theta.{i}", fragment.numel))
            slots.append({name: _take(tensors, f"outer.{i}.{name}", slot.numel()) for name, slot in expected.items()})
        state = cls(schema, config, theta, slots)
        for i, part in enumerate(state._fragments):
            _restore(i, part, tensors, metadata)
            if state._keeps_last(i) and (last := tensors.get(f"last.{i}")) is not None:
                if last.shape != part.theta.shape or last.dtype != torch.bfloat16:
                    raise StorageError(f"checkpoint: last.{i} is not {part.theta.numel()} bf16 elements")
                part.last = last
        try:
            state._turn_to(int(metadata["outer_step"]))
            state._injected = Injected.from_json(metadata["injected"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise StorageError(f"checkpoint: outer_step or injected is damaged ({error!r})") from error
        if state.digest != metadata.get("digest"):
            raise StorageError("checkpoint: theta does not match its digest")
        state._restore_averages(tensors, metadata)
        state._restore_references(metadata)
        state._restore_trust(metadata)
        return state

    def _restore_trust(self, metadata: Mapping[str, Any]) -> None:
        """Go on with what scorers have said; without it, nothing is known. Raises StorageError."""
        if not self.config.robust.scored:
            return
        try:
            self._trust = {peer_id: Trust.from_json(written) for peer_id, written in metadata.get("trust", {}).items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise StorageError(f"checkpoint: the trust in peers is damaged ({error})") from error

    def _restore_references(self, metadata: Mapping[str, Any]) -> None:
        """Go on with the references of masked rounds; without them, none is known. Raises StorageError."""
        found = metadata.get("references")
        if found is None or not self.config.secagg.enabled:
            return
        fits = isinstance(found, list) and len(found) == len(self._fragments)
        if not fits or not all(isinstance(each, float) and 0 <= each < math.inf for each in found):
            raise StorageError(f"checkpoint: references is not a list of {len(self._fragments)} norms")
        for fragment, each in zip(self._fragments, found, strict=True):
            fragment.reference = each

    def _restore_averages(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        """Go on with the averages of a checkpoint; begin anew where it has none. Raises StorageError."""
        counts = metadata.get("averaged")
        if counts is None or self.config.average.kind == "none":
            return
        if not isinstance(counts, list) or len(counts) != len(self._fragments):
            raise StorageError(f"checkpoint: averaged is not a list of {len(self._fragments)} numbers of outer steps")
        for i, (fragment, steps) in enumerate(zip(self._fragments, counts, strict=True)):
            assert fragment.average is not None  # the kind is not none
            if type(steps) is not int or not 0 <= steps <= self._outer_step:
                raise StorageError(f"checkpoint: the average of fragment {i} is of {steps!r:.80} outer steps")
            fragment.average.restore(i, tensors, steps)


def _slots(optimizer: OuterOptimizer, fragment: FragmentSpec) -> dict[str, Tensor]:
    """Buffers have no outer optimizer."""
    return {} if fragment.buffers else optimizer.slots(fragment.numel)


def _in_bf16(payload: EncodedTensor) -> Tensor:
    """Return what is encoded, rounded to bf16."""
    vector = new_vector(payload.numel, torch.bfloat16)
    for part, piece in zip(parts(payload.numel), codec(payload.codec).decode_pieces(payload), strict=True):
        vector[part].copy_(piece)
    return vector


def _largest(tensor: Tensor) -> float:
    """Return the largest magnitude in a flat fp32 tensor; infinity when an element is not finite, 0 when there is none."""
    if tensor.numel() == 0:
        return 0.0
    if (kernels := fast(tensor)) is not None:
        bits = kernels.largest(tensor.numpy().view(np.int32))
        return float(np.int32(bits).view(np.float32)) if bits < _INFINITY else math.inf
    low, high = torch.aminmax(tensor)  # NaN comes through
    largest = max(-low.item(), high.item())
    return largest if math.isfinite(largest) else math.inf


def _injected(record: MergeRecord, injection: Injection | None) -> tuple[int, Tensor | None, bool]:
    """Return the record's fragment, what is injected into it, and whether that replaces theta."""
    injected = injection.fragments.get(record.fragment_id) if injection is not None else None
    return record.fragment_id, injected, injection is not None and injected is not None and injection.replaces


def _decoded(payload: EncodedTensor | None) -> Iterator[Tensor | None]:
    """Yield the pieces of what is encoded; None for ever when there is nothing."""
    return repeat(None) if payload is None else codec(payload.codec).decode_pieces(payload)


def _write(fragment: _Fragment, part: slice, residual: Tensor, slots: Slots) -> None:
    """Write one part of what a step changes beside theta. residual: where the fragment keeps one."""
    if fragment.residual is not None:
        fragment.residual.write(part, residual)
    for name, slot in slots.items():
        (fragment.slots[name] if slot.numel() == 1 else fragment.slots[name][part]).copy_(slot)


def _to_write(owed: Residual | None, numel: int, form: str) -> Residual:
    """Return where the residual after this step is written: into the one before it, part by part, or into a new one."""
    return owed if owed is not None and owed.form == form else Residual(numel, form)


def _check_belongs(schema: Schema, config: RunConfig, metadata: Mapping[str, Any]) -> None:
    if metadata.get("schema_hash") != schema.schema_hash:
        raise ConfigError("the checkpoint belongs to another model (schema_hash)")
    if metadata.get("optimizer") != config.outer.optimizer:
        raise ConfigError(
            f'outer.optimizer = "{config.outer.optimizer}", but the checkpoint was written with "{metadata.get("optimizer")}"; '
            "set it back, or begin a new run"
        )


def _take(tensors: Mapping[str, Tensor], name: str, numel: int) -> Tensor:
    tensor = tensors.get(name)
    if tensor is None or tensor.shape != (numel,) or tensor.dtype != torch.float32:
        raise StorageError(f"checkpoint: {name} is missing or not {numel} fp32 elements")
    return tensor


def _restore(i: int, fragment: _Fragment, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Give a fragment its residuals and statistics. Raises StorageError."""
    fragment.residual = _residual(tensors, f"residual.{i}", fragment.theta.numel())
    fragment.unrecorded = _residual(tensors, f"unrecorded.{i}", fragment.theta.numel())
    try:
        written = metadata["statistics"][i]
        fragment.statistics = {peer_id: NormStatistics.from_json(of_peer, strict=False) for peer_id, of_peer in written.items()}
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise StorageError(f"checkpoint: the norm statistics of fragment {i} are damaged ({error})") from error


def _residual(tensors: Mapping[str, Tensor], name: str, numel: int) -> Residual | None:
    """Return a residual in the form that it was stored in. Raises StorageError."""
    if (tensor := tensors.get(name)) is None:
        return None
    try:
        return Residual.of(tensor, numel)
    except StorageError as error:
        raise StorageError(f"checkpoint: {name}: {error}") from error
