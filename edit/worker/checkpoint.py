"""A worker's own state for a checkpoint, and going on from one.

Tensors go by kind and by name, each laid out as the parameter of that name is (a DTensor with its mesh and placements, fp32 on
the CPU; but see below), so another number of ranks can load them. The rest is under "scalars", JSON-able.

- "outer": theta. "residual": what a lossy codec still owes, in the dtype of `codec.up_residual`. Always there (residual: once
  something was committed). With int8 "residual_int8" instead: of each fragment the encoded vector of what a rank owns, under
  `FRAGMENT.rankRANK`, uint8. Scalars say who owned what, so that another number of ranks decodes what it needs.
- "sent_from": the local parameters at sending, while a contribution is pending and training has gone on; "sent": its
  pseudo-gradient; "last_step", "last_sent": of the last commit. The latter three with mode "eager" only.

How a peer goes on is decided in `edit.worker.catch_up`.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from edit.codecs.error_feedback import codec_of
from edit.codecs.residuals import Residual
from edit.errors import ConfigError, LocalProtocolError, RemoteProtocolError, StorageError
from edit.fragments.digest import combine
from edit.fragments.groups import fragments_due
from edit.fragments.schema import FragmentSpec
from edit.fragments.shards import Box, Shard, partition_fault
from edit.records import DescribedSnapshot, Lacking, Snapshot
from edit.replica.layout import Layout, local_of
from edit.replica.replica import Outer, Replica
from edit.trust.mask_plan import FragmentPlan
from edit.worker.apply import ShareExchange
from edit.worker.catch_up import NotOfThisRun, ResumeExactly, ResumeForward, resume, updates_suffice
from edit.worker.config import WorkerConfig
from edit.worker.contribution import SentTensors
from edit.worker.exchange import Pending
from edit.worker.masked import GridStaging
from edit.worker.schedule import Work

__all__ = [
    "KINDS",
    "OF_RANKS",
    "Checkpoint",
    "KnownParameters",
    "go_on",
    "kinds_needed",
    "refuse_other_run",
    "skeleton",
    "start",
    "state_of",
]

_INT8 = "residual_int8"
KINDS = ("outer", "residual", _INT8, "sent_from", "sent", "last_step", "last_sent")
OF_RANKS = (_INT8,)  # the kinds whose tensors belong to a rank; `skeleton` has those that this rank needs
_MOST_EXPONENTS = 1 << 30  # of one fragment
_T = TypeVar("_T")
_Vectors = Mapping[int, Tensor]  # by fragment, held vectors


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A worker's state, read and found to fit the model. vectors: by kind and fragment, this rank's held vectors; outer: None
    where only the scalars were read. whole: whether nothing that was saved is left out, of the model neither."""

    replica: Replica
    outer: Outer | None
    vectors: Mapping[str, _Vectors]
    scalars: Mapping[str, Any]
    # By fragment, for `ErrorFeedback.load`.
    residuals: _Vectors = field(default_factory=dict)
    whole: bool = False

    @classmethod
    def read(cls, replica: Replica, state: Mapping[str, Any], *, forward: bool = False) -> Checkpoint:
        """forward: it is not whole, whatever is in it. Raises StorageError, at every rank, when the state is damaged or of
        another model."""
        if state.keys() == {"scalars"}:
            return cls(replica, None, {}, replica.layout.ranks.together(lambda: _scalars(replica.layout, state)))
        vectors, residuals, scalars, whole = replica.layout.ranks.together(lambda: _read(replica.layout, state))
        outer = replica.outer_of(int(scalars["outer_step"]), str(scalars["digest"]), list(vectors["outer"].values()))
        if combine(outer.hashes) != scalars["holds"]:
            raise StorageError("checkpoint: the outer parameters do not match their digest")
        return cls(replica, outer, vectors, scalars, residuals, whole and not forward)


# Saving.


def state_of(share: ShareExchange) -> dict[str, Any]:
    """Return the state of an entered worker's exchange with one aggregator."""
    replica, exchange, sent = share.replica, share.exchange, share.sent
    layout, outer = replica.layout, replica.outer
    residuals = share.feedback.residuals()
    some = sorted({i for ids in layout.ranks.collect(sorted(residuals)) for i in ids})
    form = share.feedback.form
    last, weights = share.estimator.state() if share.estimator is not None else ({}, {})
    vectors: dict[str, _Vectors] = {
        "outer": dict(enumerate(outer.fragments)),
        "residual": {} if form == "int8" else {i: _held_residual(share, i, residuals.get(i)) for i in some},
        "sent_from": sent.sent_from,
        "sent": sent.deltas,
        "last_step": {},
        "last_sent": {},
        **last,
    }
    scalars: dict[str, Any] = {
        "schema_hash": replica.schema.schema_hash,
        "outer_step": outer.outer_step,
        "digest": outer.digest,
        "holds": combine(outer.hashes),
        "fragments": {kind: sorted(parts) for kind, parts in vectors.items()},
        "finished": exchange.finished,
        "began": exchange.began,
        "weights": {},
        **weights,
        "pending": _pending_scalars(exchange.pending),
        **exchange.schedule.state(),
    }
    state: dict[str, Any] = {kind: _named(layout, parts) for kind, parts in vectors.items() if parts}
    if form == "bf16":
        scalars["residual_form"] = form
    if share.grid is not None and exchange.pending is not None:
        scalars["grid"] = [_grid_scalars(plan, share.grid.norms.get(i)) for i, plan in sorted(share.grid.plans.items())]
    if exchange.pending is not None and (scales := share.feedback.scales):
        scalars["scales"] = sorted(scales.items())
    if form == "int8" and some:
        scalars["fragments"][_INT8] = some
        scalars["owned"] = [
            [[[b.tensor, b.offsets, b.sizes] for b in boxes] for boxes in owned] for owned in layout.owned_by_rank
        ]
        state[_INT8] = {_of_rank(layout, i, layout.ranks.rank): residual.tensor for i, residual in residuals.items()}
    return state | {"scalars": scalars}


def skeleton(replica: Replica, kinds: Collection[str], scalars: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Tensors of these kinds to load into, those that the saved state has. scalars: its.

    Raises ConfigError for a kind that does not exist, StorageError for damaged scalars.
    """
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise ConfigError(f"no tensors of kind {unknown[0]!r} are kept; known: {', '.join(KINDS)}")
    layout, every = replica.layout, range(len(replica.layout.held))
    saved = {
        kind: _checked(lambda kind=kind: [i for i in map(int, scalars["fragments"].get(kind, ())) if i in every])  # type: ignore[misc]
        for kind in kinds
    }
    residual = torch.bfloat16 if scalars.get("residual_form") == "bf16" else torch.float32
    dtypes = {kind: residual if kind == "residual" else torch.float32 for kind in kinds}
    empty = {
        kind: _named(layout, {i: torch.empty(layout.held[i].numel, dtype=dtypes[kind], device="cpu") for i in saved[kind]})
        for kind in kinds
        if kind != _INT8
    }
    if _INT8 in kinds:
        owners = _owners(layout, scalars) if saved[_INT8] else []  # of several shares, one may have none
        empty[_INT8] = {
            _of_rank(layout, i, rank): Residual(shard.numel, "int8").tensor
            for i in saved[_INT8]
            for rank, shard in owners[i].items()
        }
    return empty


def _held_residual(share: ShareExchange, i: int, residual: Residual | None) -> Tensor:
    """The held vector of a residual that some rank has; what a rank does not own it is told by the owner."""
    layout = share.replica.layout
    own = residual or Residual(layout.owned[i].numel, share.feedback.form)
    return own.tensor if layout.ranks.size == 1 else layout.disown(i, own.tensor.float()).to(own.tensor.dtype)


def _of_rank(layout: Layout, i: int, rank: int) -> str:
    return f"{layout.schema.fragments[i].name}.rank{rank}"


def _owners(layout: Layout, scalars: Mapping[str, Any]) -> list[dict[int, Shard]]:
    """By fragment: what each rank that saved the state owned of it, if something of that is this rank's now.

    Raises StorageError unless the scalars say that every element was owned once.
    """

    def read() -> list[list[tuple[Box, ...]]]:
        return [[tuple(Box(b[0], tuple(b[1]), tuple(b[2])) for b in boxes) for boxes in rank] for rank in scalars["owned"]]

    by_rank, owners = _checked(read), []
    for i, fragment in enumerate(layout.schema.fragments):
        saved = _checked(lambda i=i: [fragments[i] for fragments in by_rank])  # type: ignore[misc]
        if fault := _checked(lambda f=fragment, s=saved: partition_fault(f, s)):  # type: ignore[misc]
            raise StorageError(f"checkpoint: the worker's scalars are damaged (owned: {fault})")
        mine = layout.owned[i].boxes
        shards = {rank: Shard(fragment, boxes) for rank, boxes in enumerate(saved)}
        owners.append({rank: shard for rank, shard in shards.items() if any(a.overlaps(b) for a in shard.boxes for b in mine)})
    return owners


def _pending_scalars(pending: Pending | None) -> dict[str, Any] | None:
    if pending is None:
        return None
    return {
        "outer_step": pending.outer_step,
        "began": pending.began,
        "fragments": list(pending.fragments),
        "work": [pending.work.inner_steps, pending.work.tokens],
        "applied": sorted(pending.applied),
        "outcome_overdue": pending.outcome_overdue,
    }


def _grid_scalars(plan: FragmentPlan, norm: float | None) -> list[Any]:
    exponents = base64.b85encode(zlib.compress(plan.exponents)).decode()
    return [plan.fragment_id, plan.bits, plan.limit, exponents, plan.reference, norm]


def _load_grid(grid: GridStaging, written: Sequence[Any]) -> None:
    """Go on with the grid of the pending contribution. Raises RemoteProtocolError when it does not fit the model."""
    plans, norms = [], {}
    for i, bits, limit, packed, reference, norm in written:
        unpacked = zlib.decompressobj().decompress(base64.b85decode(packed), _MOST_EXPONENTS)
        plans.append(FragmentPlan(fragment_id=i, bits=bits, limit=limit, exponents=unpacked, reference=reference))
        if norm is not None:
            norms[int(i)] = float(norm)
    grid.load(plans, norms)


def _named(layout: Layout, vectors: _Vectors) -> dict[str, Tensor]:
    """By tensor name, views of held vectors; every rank names the same tensors."""
    named: dict[str, Tensor] = {}
    for i, vector in vectors.items():
        boxes, tensors = layout.held[i].boxes, layout.tensors[i]
        pieces = dict(zip([box.tensor for box in boxes], torch.split(vector, [box.numel for box in boxes]), strict=True))
        for position, (spec, tensor) in enumerate(zip(layout.schema.fragments[i].tensors, tensors, strict=True)):
            named[spec.name] = _like(tensor, pieces.get(position, vector[:0]))
    return named


def _like(tensor: Tensor, piece: Tensor) -> Tensor:
    """A rank's piece in the form of the tensor: plain, or a DTensor that stays on the CPU whatever its mesh is of."""
    shaped = piece.view(local_of(tensor).shape)
    if not isinstance(tensor, DTensor):
        return shaped
    meta = TensorMeta(tensor.shape, tensor.stride(), piece.dtype)
    spec = DTensorSpec(tensor.device_mesh, tensor.placements, tensor_meta=meta)
    return DTensor(shaped, spec, requires_grad=False)  # type: ignore[no-untyped-call]


# Loading.


def _scalars(layout: Layout, state: Mapping[str, Any]) -> Mapping[str, Any]:
    scalars = state.get("scalars")
    if not isinstance(scalars, Mapping):
        raise StorageError("checkpoint: the worker's scalars are missing")
    if scalars.get("schema_hash") != layout.schema.schema_hash:
        raise StorageError("checkpoint: it is of another model (schema_hash)")
    if {"outer_step", "digest", "holds", "fragments"} - set(scalars):
        raise StorageError("checkpoint: the worker's scalars are incomplete")
    return scalars


def _read(
    layout: Layout, state: Mapping[str, Any]
) -> tuple[dict[str, dict[int, Tensor]], dict[int, Tensor], Mapping[str, Any], bool]:
    """Return the held vectors by kind and fragment, the owned residuals by fragment, the scalars, and whether that is all."""
    scalars = _scalars(layout, state)
    fragments = _checked(lambda: {str(kind): [int(i) for i in ids] for kind, ids in scalars["fragments"].items()})
    if fragments.get("outer") != list(range(len(layout.held))):
        raise StorageError("checkpoint: the worker's scalars are incomplete")
    whole = state.keys() != {"scalars", "outer"} or not any(ids for kind, ids in fragments.items() if kind != "outer")
    if not whole:
        fragments = {"outer": fragments["outer"]}
    vectors = {
        kind: {i: _vector(layout, i, kind, state.get(kind, {})) for i in ids if 0 <= i < len(layout.held)}
        for kind, ids in fragments.items()
        if kind != _INT8
    }
    residuals = {i: layout.own(i, vector) for i, vector in vectors.get("residual", {}).items() if layout.owned[i].numel}
    if fragments.get(_INT8):
        owners, saved = _owners(layout, scalars), state.get(_INT8, {})
        residuals = {i: _int8_residual(layout, i, owners[i], saved) for i in fragments[_INT8] if layout.owned[i].numel}
    return vectors, residuals, scalars, whole


def _int8_residual(layout: Layout, i: int, owners: Mapping[int, Shard], saved: Mapping[str, Tensor]) -> Tensor:
    """The owned residual of one fragment: as it was saved, or, where another rank owned some of it, decoded."""
    mine, names = layout.owned[i], {rank: _of_rank(layout, i, rank) for rank in owners}
    if missing := sorted(set(names.values()) - set(saved)):
        raise StorageError(f"checkpoint: {_INT8} of {missing[0]} is missing")
    if [shard.boxes for shard in owners.values()] == [mine.boxes]:
        return saved[next(iter(names.values()))]
    whole = torch.empty(mine.fragment.numel, dtype=torch.float32, device="cpu")
    for rank, shard in owners.items():
        shard.put(Residual.of(saved[names[rank]], shard.numel, "fp32").tensor, whole)
    return mine.take(whole)


def _vector(layout: Layout, i: int, kind: str, named: Mapping[str, Tensor]) -> Tensor:
    """The held vector of one fragment, a copy."""
    pieces = []
    specs, tensors = layout.schema.fragments[i].tensors, layout.tensors[i]
    for box in layout.held[i].boxes:
        name, stored = specs[box.tensor].name, named.get(specs[box.tensor].name)
        expected = tuple(tensors[box.tensor].shape)
        fits = stored is not None and (stored.dtype == torch.float32 or (kind, stored.dtype) == ("residual", torch.bfloat16))
        if stored is None or tuple(stored.shape) != expected or not fits:
            found = "is missing" if stored is None else f"{list(stored.shape)} {stored.dtype} does not fit the model's"
            raise StorageError(f"checkpoint: {kind} of {name} {found} ({list(expected)}, fp32)")
        local = local_of(stored)
        if tuple(local.shape) != box.sizes:
            raise StorageError(f"checkpoint: {kind} of {name} is laid out as {list(local.shape)}, not {list(box.sizes)}")
        pieces.append(local.detach().to("cpu").reshape(-1))
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.float32, device="cpu")


def _checked(read: Callable[[], _T]) -> _T:
    try:
        return read()
    except (KeyError, TypeError, ValueError, AttributeError, zlib.error, LocalProtocolError, RemoteProtocolError) as error:
        raise StorageError(f"checkpoint: the worker's scalars are damaged ({error!r})") from error


def start(share: ShareExchange, run: Snapshot) -> None:
    """Train from the run's outer parameters, and the commits that followed; no work stands behind a difference to them."""
    _start(share, share.replica.verified(run))


def _start(share: ShareExchange, outer: Outer) -> None:
    share.replica.move(outer, lambda _: None)
    share.exchange.outer_step = outer.outer_step
    share.exchange.schedule.abandoned()
    share.run(share.exchange.catch_up())
    share.replica.reload(lambda _: None)  # buffers stay where they are on a commit, but these are nobody's own


def kinds_needed(
    config: WorkerConfig, scalars: Mapping[str, Any], run_step: int, fragments: Sequence[FragmentSpec]
) -> frozenset[str]:
    """Which tensors a state with these scalars is gone on from with, where the run has reached `run_step`, by their kind.

    All KINDS: exactly. "outer": forward, by updates. None: forward, with parameters of the run. fragments: of the model.
    Raises StorageError when the scalars are damaged.
    """
    saved_step = _checked(lambda: int(scalars["outer_step"]))
    match resume(
        saved_step,
        run_step,
        strict=config.sync.strict,
        max_staleness=config.rounds.max_staleness,
        updates_do=_updates_do(config, scalars, saved_step, run_step, fragments),
    ):
        case ResumeForward(by_updates):
            return frozenset({"outer"}) if by_updates else frozenset()
        case _:
            return frozenset(KINDS)


def _updates_do(
    config: WorkerConfig, scalars: Mapping[str, Any], saved_step: int, run_step: int, fragments: Sequence[FragmentSpec]
) -> bool:
    """Whether the updates from a saved theta to the run's are kept and fewer bytes than the parameters in fp32."""
    if _partly_applied(scalars):
        return False
    sync, sizes = config.sync, [codec_of(each, config.codec.downlink).encoded_size(each.numel) for each in fragments]
    return updates_suffice(
        saved_step,
        run_step,
        kept_updates=config.kept_updates,
        update_bytes=lambda step: sum(sizes[i] for i in fragments_due(step, len(sizes), sync.groups, sync.pattern)),
        all_bytes=4 * sum(each.numel for each in fragments),
    )


def _partly_applied(scalars: Mapping[str, Any]) -> bool:
    """Whether the saved theta is between two outer steps, and so its digest."""
    return bool(_checked(lambda: (scalars.get("pending") or {}).get("applied")))


class KnownParameters:
    """What a peer has of the snapshot that it begins with, so that it need not be fetched.

    From a checkpoint that is gone on from exactly or by updates, it begins with the checkpoint's outer parameters, whatever
    those of the run are by now. Without one, and before the first outer step, the model that it built may be the one that the
    run was founded with: its own, or the same pretrained or seeded one.
    """

    def __init__(self, share: ShareExchange, checkpoint: Checkpoint | None) -> None:
        self._config, self._replica, self._checkpoint = share.config, share.replica, checkpoint
        self._vectors: dict[int, Callable[[], Tensor]] = {}  # by fragment, this rank's held vector
        # Whether the peer goes on from the checkpoint by updates. A carrier that brought everything unasked leaves it False.
        self.by_updates = False

    def lacks(self, run: DescribedSnapshot) -> Lacking:
        """See `edit.records.Lacks`."""
        replica, self._vectors, self.by_updates = self._replica, {}, False
        every = frozenset(range(len(run.hashes)))
        if self._checkpoint is None:
            if run.outer_step == 0:
                same = (
                    i for i, (own, theirs) in enumerate(zip(replica.local_hashes(), run.hashes, strict=True)) if own == theirs
                )
                self._vectors = {i: partial(replica.local_fragment, i) for i in same}
        else:
            way, outer = _way(self._config, self._checkpoint, run), self._checkpoint.outer
            if not isinstance(way, ResumeForward) or way.by_updates:
                self._vectors = {i: partial(_kept, outer, i) for i in every}
            if isinstance(way, ResumeForward) and way.by_updates and outer is not None:
                self.by_updates = True
                return Lacking((), outer.outer_step)
        return Lacking(every - self._vectors.keys())

    def complete(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with what this peer had of it."""
        fragments = list(snapshot.fragments)
        for i, vector in self._vectors.items():
            if not fragments[i].numel():
                fragments[i] = vector()
        return replace(snapshot, fragments=tuple(fragments))


def _kept(outer: Outer | None, i: int) -> Tensor:
    return outer.fragments[i] if outer is not None else torch.empty(0, dtype=torch.float32, device="cpu")


def _way(
    config: WorkerConfig, checkpoint: Checkpoint, run: Snapshot | DescribedSnapshot
) -> ResumeExactly | ResumeForward | NotOfThisRun:
    """Return how this peer goes on from the checkpoint in the run."""
    scalars, fragments = checkpoint.scalars, checkpoint.replica.schema.fragments
    saved_step, run_step = int(scalars["outer_step"]), max(run.outer_step, run.run_outer_step)
    comparable = saved_step == run.outer_step and not _partly_applied(scalars)
    return resume(
        saved_step,
        run_step,
        strict=config.sync.strict,
        max_staleness=config.rounds.max_staleness,
        same_digest=not comparable or str(scalars["digest"]) == run.digest,
        updates_do=checkpoint.outer is not None and _updates_do(config, scalars, saved_step, run_step, fragments),
    )


def refuse_other_run(share: ShareExchange, checkpoint: Checkpoint, run: Snapshot) -> None:
    """Raise ConfigError when the checkpoint is newer than the run or of another run. run: the snapshot that was taken."""
    if isinstance(way := _way(share.config, checkpoint, run), NotOfThisRun):
        raise ConfigError(way.reason)


def go_on(share: ShareExchange, checkpoint: Checkpoint, run: Snapshot, *, by_updates: bool = False) -> bool:
    """Continue from the checkpoint; return whether exactly. The model holds the local parameters that were saved with it, if
    they matter.

    run: the snapshot that was taken. It may be older than the run, and than the checkpoint, when others still read it.
    by_updates: `KnownParameters.by_updates`: what is forward is by updates, and the snapshot not whole.

    Raises ConfigError, and changes nothing, as `refuse_other_run`.
    """
    refuse_other_run(share, checkpoint, run)
    scalars, exchange, way = checkpoint.scalars, share.exchange, _way(share.config, checkpoint, run)
    exchange.schedule.load(scalars)
    if isinstance(way, ResumeForward):
        if by_updates and checkpoint.outer is not None:
            _start(share, checkpoint.outer)
        else:
            start(share, run)
        return False
    if checkpoint.outer is None or not checkpoint.whole:
        run_step = max(run.outer_step, run.run_outer_step)
        raise StorageError(f"checkpoint: without its tensors it cannot be gone on from at outer step {run_step}")
    share.replica.resume(checkpoint.outer)
    exchange.outer_step = outer_step = checkpoint.outer.outer_step
    exchange.began = _checked(lambda: min(int(scalars.get("began", outer_step)), outer_step))  # an older checkpoint lacks it
    if share.config.sync.dylu:  # H as this peer was told it; an older checkpoint lacks it
        most = exchange.schedule.every
        exchange.schedule.adopt(_checked(lambda: min(max(1, int(scalars.get("every", most))), most)))
    share.feedback.load(checkpoint.residuals)
    if (estimator := share.estimator) is not None:
        _checked(lambda: estimator.load(checkpoint.vectors, scalars))
    pending = _pending(checkpoint)
    if pending is not None:
        for i, scale in _checked(lambda: [(int(each[0]), float(each[1])) for each in scalars.get("scales", ())]):
            _checked(partial(share.feedback.rescale, i, scale))
        vectors = checkpoint.vectors
        share.sent = SentTensors(sent_from=dict(vectors.get("sent_from", {})), deltas=dict(vectors.get("sent", {})))
        if (grid := share.grid) is not None:
            _checked(lambda: _load_grid(grid, scalars["grid"]))
    share.run(exchange.restore(pending))
    return True


def _pending(checkpoint: Checkpoint) -> Pending | None:
    kept = checkpoint.scalars.get("pending")
    if kept is None:
        return None
    return _checked(
        lambda: Pending(
            outer_step=int(kept["outer_step"]),
            began=int(kept["began"]),
            fragments=tuple(int(i) for i in kept["fragments"]),
            work=Work(*(int(count) for count in kept["work"])),
            applied={int(i) for i in kept["applied"]},
            outcome_overdue=bool(kept["outcome_overdue"]),
        )
    )
