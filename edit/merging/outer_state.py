"""The outer state of a run: theta, the outer optimizer's state, the downlink's residual and the norm statistics, per fragment.

It changes in one way only: reduce (pure) -> stage (pure) -> commit (all due fragments at once). Tensors are replaced, never
written into, so a reader of old ones is not disturbed. The same Merged values and injections in the same order give the same
bits, which is what a journal replays.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from edit.codecs.base import parts
from edit.codecs.error_feedback import codec_of
from edit.codecs.residuals import owing
from edit.config.run import RunConfig
from edit.errors import ConfigError, LocalProtocolError, StorageError
from edit.fragments.digest import FragmentHash, combine, fragment_hash
from edit.fragments.groups import fragments_due
from edit.fragments.schema import FragmentSpec, Schema
from edit.merging.heloco import Momentum
from edit.merging.injection import Injected, Injection
from edit.merging.merge import Measured, Merged, MergeRule
from edit.merging.mergers import merger
from edit.merging.outer_optimizers import Slots, initial_slots, outer_step
from edit.merging.penalty import NormStatistics
from edit.records import Commit, EncodedTensor, FragmentCommit

__all__ = ["FragmentState", "OuterState", "Staged"]

# Of one part of a fragment: the step that theta is to take, and the optimizer's state after it; None: that does not change.
_Step = Callable[[slice], tuple[Tensor, Slots | None]]


@dataclass(frozen=True, slots=True)
class FragmentState:
    """One fragment of the outer state."""

    # The outer parameters: flat fp32, shape [numel].
    theta: Tensor
    # `edit.fragments.digest.fragment_hash` of theta.
    theta_hash: bytes
    # The outer optimizer's state by name.
    slots: Slots
    # What the downlink's codec left out so far: flat fp32, shape [numel]; None counts as zero.
    residual: Tensor | None
    # Of the norms of the contributions, by peer_id.
    statistics: Mapping[str, NormStatistics]


@dataclass(frozen=True, slots=True)
class Staged:
    """What one fragment becomes when the run advances from `outer_step`."""

    outer_step: int
    merged: Merged
    after: FragmentState
    # The encoded outer step; None for a rollback.
    payload: EncodedTensor | None
    # What of a run above is in theta afterwards; None: nothing new.
    brings: Injected | None = None


class OuterState:
    """theta and all that moves it.

    theta: one flat fp32 CPU tensor per fragment of `schema`, taken over, not copied. config: its sections penalty, outer,
    codec.down, rounds.merging and the groups of sync matter. Raises LocalProtocolError when theta does not fit the schema,
    ConfigError when there are more groups than fragments.
    """

    def __init__(self, schema: Schema, config: RunConfig, theta: Sequence[Tensor]) -> None:
        if [tuple(part.shape) for part in theta] != [(fragment.numel,) for fragment in schema.fragments]:
            raise LocalProtocolError("theta does not fit the schema's fragments")
        if any(part.dtype != torch.float32 or part.device.type != "cpu" for part in theta):
            raise LocalProtocolError("theta must be fp32 on the CPU")
        fragments_due(0, len(schema.fragments), config.sync.groups, config.sync.pattern)
        self.schema = schema
        self.config = config
        self._codecs = tuple(codec_of(fragment, config.codec.downlink) for fragment in schema.fragments)
        self._merger = merger(config)
        self._outer_step = 0
        self._injected: Injected | None = None
        self._fragments = [
            FragmentState(part, fragment_hash(part), _slots(config, fragment), None, {})
            for fragment, part in zip(schema.fragments, (part.detach().contiguous() for part in theta), strict=True)
        ]

    @property
    def outer_step(self) -> int:
        """The number of commits so far."""
        return self._outer_step

    @property
    def injected(self) -> Injected | None:
        """What of a run above is in theta; None: nothing."""
        return self._injected

    @property
    def due(self) -> tuple[int, ...]:
        """The fragments that the next outer step exchanges, ascending."""
        sync = self.config.sync
        return fragments_due(self._outer_step, len(self._fragments), sync.groups, sync.pattern)

    @property
    def theta(self) -> list[Tensor]:
        """The outer parameters, one tensor per fragment. Do not write into them; a commit replaces them."""
        return [fragment.theta for fragment in self._fragments]

    @property
    def digest(self) -> str:
        """`edit.fragments.digest.digest` of theta. Cheap: the fragments' hashes are kept."""
        return combine(fragment.theta_hash for fragment in self._fragments)

    @property
    def fragment_hashes(self) -> tuple[bytes, ...]:
        """`edit.fragments.digest.fragment_hash` of each fragment."""
        return tuple(fragment.theta_hash for fragment in self._fragments)

    def reduce(self, fragment_id: int, contributions: Sequence[Measured]) -> Merged:
        """Merge the contributions to one fragment. Changes nothing. Raises as `edit.merging.mergers.Merger.merge`."""
        fragment, statistics = self.schema.fragments[fragment_id], self._fragments[fragment_id].statistics
        return self._merger.merge(fragment, contributions, statistics, self._rule(fragment_id))

    def _rule(self, fragment_id: int) -> MergeRule:
        outer, spec = self.config.outer, self.schema.fragments[fragment_id]
        if spec.buffers:
            return MergeRule()
        momentum = None
        if outer.correct == "heloco":
            vector = self._fragments[fragment_id].slots["momentum"]
            momentum = Momentum(vector, outer.momentum, [tensor.numel for tensor in spec.tensors])
        direction = "mean" if spec.name.startswith("embedding") else outer.direction  # rows of rare words have no direction
        return MergeRule(direction, momentum, damped=self.config.rounds.merging == "arrivals")

    def stage(self, merged: Merged, injection: Injection | None = None) -> Staged:
        """Compute the outer step of one fragment, encoded for the downlink. Changes nothing, `merged` included.

        A step that would make theta or the optimizer's state non-finite (it overflows fp32 or the codec) is a rollback; what
        is injected is then applied alone. injection: the same for all fragments of the commit.
        """
        before, fragment = self._fragments[merged.fragment_id], self.schema.fragments[merged.fragment_id]
        statistics = {**before.statistics, **merged.statistics}
        brings = injection.brings if injection is not None else None
        for step, residual in self._steps(merged, before, injection):
            if (stepped := self._stepped(before, fragment, step, residual)) is not None:
                payload, after = stepped
                after = dataclasses.replace(after, statistics=statistics)
                return Staged(self._outer_step, merged, after, payload, brings)
        return Staged(self._outer_step, merged, dataclasses.replace(before, statistics=statistics), None, brings)

    def _steps(
        self, merged: Merged, before: FragmentState, injection: Injection | None
    ) -> Iterator[tuple[_Step, Tensor | None]]:
        """Yield (step, residual before it), in order of preference. An injection bypasses the optimizer."""
        injected = injection.fragments.get(merged.fragment_id) if injection is not None else None
        if injection is not None and injected is not None and injection.replaces:
            yield lambda part: (before.theta[part] - injected[part], None), None
            return
        mean = merged.merged
        if mean is not None:
            buffers = self.schema.fragments[merged.fragment_id].buffers  # become the mean

            def step(part: slice) -> tuple[Tensor, Slots | None]:
                slots = {name: slot if slot.numel() == 1 else slot[part] for name, slot in before.slots.items()}
                change, moved = (mean[part], None) if buffers else outer_step(self.config.outer, slots, mean[part])
                return (change if injected is None else change - injected[part]), moved

            yield step, before.residual
        if injected is not None:
            yield lambda part: (torch.neg(injected[part]), None), before.residual

    def _stepped(
        self, before: FragmentState, fragment: FragmentSpec, step: _Step, residual: Tensor | None
    ) -> tuple[EncodedTensor, FragmentState] | None:
        """Return the encoded step and the state after it; None when something of it is not finite.

        Goes through the fragment in pieces that stay in the cache from one operation to the next: once up to the encoded step,
        and once from there, through its residual and theta, to the hash.
        """
        encoder, decay = self._codecs[fragment.fragment_id], self.config.codec.down_decay
        total, slots = torch.empty(fragment.numel), dict(before.slots)
        for part in parts(fragment.numel):
            change, moved = step(part)
            owing(change, residual if residual is None else residual[part], decay, total[part])
            for name, piece in (moved or {}).items():
                if not _is_finite(piece):
                    return None
                if slots[name] is before.slots[name]:
                    slots[name] = torch.empty_like(slots[name])
                (slots[name] if slots[name].numel() == 1 else slots[name][part]).copy_(piece)
        payload = encoder.encode(total, fragment)
        theta, hashed, keeps = torch.empty(fragment.numel), FragmentHash(), not encoder.lossless and decay != 0
        for part, piece in zip(parts(fragment.numel), encoder.decode_pieces(payload), strict=True):
            if not _is_finite(torch.sub(before.theta[part], piece, out=theta[part])):
                return None
            hashed.update(theta[part])
            if keeps:
                total[part].sub_(piece)
        return payload, FragmentState(theta, hashed.digest(), slots, total if keeps else None, before.statistics)

    def digest_after(self, staged: Sequence[Staged]) -> str:
        """Return the digest that theta will have when these are committed. Cheap, as `digest`."""
        hashes = {one.merged.fragment_id: one.after.theta_hash for one in staged}
        return combine(hashes.get(i, fragment.theta_hash) for i, fragment in enumerate(self._fragments))

    def commit(self, round_id: int, reason: str, staged: Sequence[Staged]) -> Commit:
        """Adopt the staged states of the fragments that are due, all at once, and advance; returns the record to publish.

        Raises LocalProtocolError unless there is one Staged for each of `due`, staged at this outer step and with the same
        injection; then nothing changes.
        """
        ordered = sorted(staged, key=lambda one: one.merged.fragment_id)
        if tuple(one.merged.fragment_id for one in ordered) != self.due:
            raise LocalProtocolError(
                f"the commit of outer step {self._outer_step + 1} needs fragments {list(self.due)}, each once"
            )
        if any(one.outer_step != self._outer_step for one in ordered):
            raise LocalProtocolError(f"a fragment was staged at another outer step than {self._outer_step}")
        brings = ordered[0].brings
        if any(one.brings != brings for one in ordered):
            raise LocalProtocolError("the fragments of a commit were staged with different injections")
        for one in ordered:
            self._fragments[one.merged.fragment_id] = one.after
        self._outer_step += 1
        self._injected = brings or self._injected
        return Commit(
            outer_step=self._outer_step,
            round_id=round_id,
            digest=self.digest,
            reason=reason,
            fragments=tuple(
                FragmentCommit(
                    fragment_id=one.merged.fragment_id,
                    payload=one.payload,
                    verdicts=one.merged.verdicts,
                    merged_norm=one.merged.merged_norm,
                    clip=one.merged.clip,
                )
                for one in ordered
            ),
        )

    def to_tensors(self) -> dict[str, Tensor]:
        """Return every tensor of the state by name: `theta.I`, `outer.I.SLOT`, `residual.I`. Shared, not copied."""
        tensors: dict[str, Tensor] = {}
        for i, fragment in enumerate(self._fragments):
            tensors[f"theta.{i}"] = fragment.theta
            tensors |= {f"outer.{i}.{name}": slot for name, slot in fragment.slots.items()}
            if fragment.residual is not None:
                tensors[f"residual.{i}"] = fragment.residual
        return tensors

    def metadata(self) -> dict[str, Any]:
        """Return the rest of the state, JSON-able; floats survive JSON to the bit."""
        return {
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
        state = cls(schema, config, [_take(tensors, f"theta.{i}", f.numel) for i, f in enumerate(schema.fragments)])
        state._fragments = [_restored(i, fragment, tensors, metadata) for i, fragment in enumerate(state._fragments)]
        try:
            state._outer_step = int(metadata["outer_step"])
            state._injected = Injected.from_json(metadata["injected"])
        except (KeyError, TypeError, ValueError) as error:
            raise StorageError(f"checkpoint: outer_step or injected is damaged ({error!r})") from error
        if state.digest != metadata.get("digest"):
            raise StorageError("checkpoint: theta does not match its digest")
        return state


def _slots(config: RunConfig, fragment: FragmentSpec) -> Slots:
    """Buffers have no outer optimizer."""
    return {} if fragment.buffers else initial_slots(config.outer, fragment.numel)


def _is_finite(tensor: Tensor) -> bool:
    low, high = torch.aminmax(tensor)  # NaN comes through
    return math.isfinite(low.item()) and math.isfinite(high.item())


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


def _restored(i: int, fresh: FragmentState, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> FragmentState:
    numel = fresh.theta.numel()
    slots = {name: _take(tensors, f"outer.{i}.{name}", slot.numel()) for name, slot in fresh.slots.items()}
    residual = _take(tensors, f"residual.{i}", numel) if f"residual.{i}" in tensors else None
    try:
        written = metadata["statistics"][i]
        statistics = {peer_id: NormStatistics.from_json(of_peer) for peer_id, of_peer in written.items()}
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise StorageError(f"checkpoint: the norm statistics of fragment {i} are damaged ({error})") from error
    return FragmentState(fresh.theta, fresh.theta_hash, slots, residual, statistics)
