"""A peer's two sets of parameters: the outer ones (fp32, CPU, at a committed outer step) and the local ones in the model.

In a replica of several ranks every method that changes or hashes something is called by all of them together, and what one
cannot do, none does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from edit.codecs import codec
from edit.codecs.base import Adder, add_weighted, new_vector, parts
from edit.codecs.error_feedback import Vector
from edit.errors import RemoteProtocolError
from edit.fragments.digest import FragmentHash, combine, fragment_hash
from edit.records import EncodedTensor, Here, RolledBack, Snapshot
from edit.replica.device_copies import Transfers
from edit.replica.flat import (
    DevicePseudoGradient,
    LocalVector,
    PseudoGradient,
    as_held,
    flatten,
    flatten_there,
    is_finite,
    load_fragment,
    on_gpu,
    pseudo_gradient,
)
from edit.replica.layout import Layout
from edit.replica.module_hooks import ParameterModules, reshard
from edit.replica.ranks import ALONE, Ranks

__all__ = ["Outer", "Replica"]

Progress = Callable[[int], Tensor | float | None]
"""Of one fragment, asked before theta moves: what a move keeps of the local parameters, which become theta plus this vector, or
plus this share of local - theta, with the new theta; None: nothing. What is, at any rank, not finite is not kept.
"""


@dataclass(frozen=True, slots=True)
class Outer:
    """theta at an outer step."""

    outer_step: int
    # Of the whole of theta: what a commit says, or what theta really has.
    digest: str
    # By fragment, what this rank holds, flat fp32.
    fragments: tuple[Tensor, ...]
    # By fragment, of the whole fragment.
    hashes: tuple[bytes, ...]


class Replica:
    """One model under training, or this rank's part of it.

    Where a run has several aggregators: of the model only the fragments of one (part: as in `edit.replica.layout.Layout`).
    Parameters are found by name, so one without a gradient keeps its place (T21). Raises ConfigError as Layout.
    """

    def __init__(self, model: nn.Module, ranks: Ranks = ALONE, buffers: str = "local", part: tuple[int, int] = (0, 1)) -> None:
        reshard(model)  # or the names would stand for gathered copies of the parameters
        self.layout = Layout(model, ranks, buffers, part)
        self.modules = ParameterModules(model, self.layout.tensors)
        self.schema = self.layout.schema
        self.transfers = Transfers(tensor for tensors in self.layout.tensors for tensor in tensors)
        self._ids = range(len(self.schema.fragments))
        self._outer = Outer(0, "", (), ())
        # By fragment: whether others may hold theta's vector, so that no move writes into it.
        self._kept = [False] * len(self._ids)
        self._undone = [0] * len(self._ids)  # writes to the local parameters, by fragment, that `restore` has undone
        self._versions = [0] * len(self._ids)  # of the local parameters when `load_outer` replaced them
        # Called with a fragment before its local parameters are written.
        self.on_write: Callable[[int], object] | None = None

    @property
    def outer(self) -> Outer:
        """theta as of now, to keep: its vectors stay as they are, and the next move puts others in their place."""
        self._kept = [True] * len(self._ids)
        return self._outer

    @property
    def outer_step(self) -> int:
        """theta's outer step."""
        return self._outer.outer_step

    @property
    def digest(self) -> str:
        """The digest at theta's outer step; see `Outer`."""
        return self._outer.digest

    @property
    def hashes(self) -> Sequence[bytes]:
        """The hash of each whole fragment of theta."""
        return self._outer.hashes

    def theta(self, fragment_id: int) -> Tensor:
        """Return what this rank holds of one fragment of theta, flat fp32, to read until the next move."""
        return self._outer.fragments[fragment_id]

    def parameters(self, fragment_id: int) -> Sequence[Tensor]:
        """Return the fragment's parameters in schema order, as the model has them."""
        return self.layout.tensors[fragment_id]

    # Reading.

    def local_fragment(self, fragment_id: int) -> Tensor:
        """Return the held part of one local fragment, a flat fp32 copy."""
        with self.transfers.beside():
            return flatten(self.layout.locals(fragment_id))

    def local(self) -> list[Tensor]:
        """Return the held part of all local fragments, flat fp32 copies."""
        return [self.local_fragment(i) for i in self._ids]

    def founding(self) -> list[Tensor]:
        """Return all local fragments, whole, at rank 0; at the others an empty list."""
        return self.layout.at_first_rank(self.local_fragment)

    def local_hashes(self) -> list[bytes]:
        """Return the hash of each whole local fragment, at every rank; all ranks call it together."""
        found = dict[int, bytes]()
        for some in _batches(list(self._ids), self.layout.ranks.size):
            found |= self._hashes({i: self.local_fragment(i) for i in some})
        return [found[i] for i in self._ids]

    def version(self, fragment_id: int) -> int:
        """Return a number that grows with every write to the local parameters of one fragment that may have changed them."""
        return sum(part._version for part in self.layout.locals(fragment_id)) - self._undone[fragment_id]

    def pseudo_gradient(self, fragment_id: int, local: Tensor | None = None) -> Tensor:
        """Return theta - local of the held part of one fragment; `local`: as it was then, None for now."""
        theta, locals_ = self._outer.fragments[fragment_id], self.layout.locals(fragment_id)
        if local is not None:
            return as_held(theta, locals_).sub_(local)
        with self.transfers.beside():
            return pseudo_gradient(theta, locals_)

    def own_pseudo_gradient(self, fragment_id: int, local: Tensor | None = None, *, anywhere: bool = False) -> Vector:
        """Return the owned part of `pseudo_gradient`: computed when it is read, where that can be. Until theta or, without
        `local`, the local parameters move.

        anywhere: it may be on the GPU of the parameters; read it within `transfers.beside`.
        """
        layout, parameters = self.layout, self.layout.locals(fragment_id)
        if layout.owned[fragment_id].numel == layout.held[fragment_id].numel:
            if LocalVector.readable(parameters):
                return PseudoGradient(self._outer.fragments[fragment_id], LocalVector(parameters), local)
            if anywhere and on_gpu(parameters) is not None:
                return DevicePseudoGradient(self._outer.fragments[fragment_id], parameters, local)
        return layout.own(fragment_id, self.pseudo_gradient(fragment_id, local))

    def progress(self, fragment_id: int) -> Tensor:
        """Return local - theta of one fragment: what a replay puts onto other outer parameters."""
        return self.pseudo_gradient(fragment_id).neg_()

    def progress_since(self, fragment_id: int, *origins: Tensor) -> Tensor:
        """Return local less the origins of one fragment, for earlier local parameters; it may be on their GPU."""
        parameters = self.layout.locals(fragment_id)
        with self.transfers.beside():
            device = on_gpu(parameters)
            progress = flatten(parameters) if device is None else flatten_there(parameters, device)
            for origin in origins:
                progress.sub_(origin.to(progress.device, non_blocking=True))
        return progress

    def outer_state_dict(self) -> dict[str, Tensor]:
        """Return theta by tensor name, fp32 copies in full shape, at rank 0; at the others nothing."""
        state: dict[str, Tensor] = {}
        for theta, fragment in zip(
            self.layout.at_first_rank(self._outer.fragments.__getitem__), self.schema.fragments, strict=False
        ):
            parts = torch.split(theta, [tensor.numel for tensor in fragment.tensors])
            state.update(
                (tensor.name, part.view(tensor.shape).clone()) for tensor, part in zip(fragment.tensors, parts, strict=True)
            )
        return state

    # Checking.

    def refuse_changes(self) -> None:
        """Raise ConfigError, at every rank, for a parameter that became trainable, or was replaced, after this was made."""

        def look() -> None:
            self.modules.refuse_unfrozen()
            self.modules.refuse_replaced(self.layout.named)

        self.layout.ranks.together(look)

    def warn_frozen(self) -> None:
        """At each contribution: warn once, at the first rank, of what was frozen after this was made, and stays so."""
        if self.layout.ranks.leads:
            self.modules.warn_frozen()

    def refuse_replaced(self) -> None:
        """Raise ConfigError, at every rank, when the model no longer has what is exchanged (see `ParameterModules`)."""
        self.layout.ranks.together(lambda: self.modules.refuse_replaced(self.layout.named))

    def verified(self, snapshot: Snapshot) -> Outer:
        """Return the snapshot, as it is, if it fits this model and its digest. Raises RemoteProtocolError, at every rank."""
        self.layout.ranks.together(lambda: self._check_fits(snapshot))
        outer = self.outer_of(snapshot.outer_step, snapshot.digest, snapshot.fragments)
        if combine(outer.hashes) != snapshot.digest:
            raise RemoteProtocolError(f"the snapshot of outer step {snapshot.outer_step} does not match its digest")
        return outer

    def outer_of(self, outer_step: int, digest: str, fragments: Sequence[Tensor]) -> Outer:
        """Return these fragments with the hashes that they really have. The digest is not compared with them."""
        hashes = self._hashes(dict(enumerate(fragments)))
        return Outer(outer_step, digest, tuple(self._keep(part) for part in fragments), tuple(hashes[i] for i in self._ids))

    def _check_fits(self, snapshot: Snapshot) -> None:
        if [part.numel() for part in snapshot.fragments] != [shard.numel for shard in self.layout.held]:
            raise RemoteProtocolError(f"the snapshot of outer step {snapshot.outer_step} does not fit the model's fragments")

    def hashes_after(self, steps: Mapping[int, Here | RolledBack]) -> tuple[bytes, ...]:
        """Return the fragments' hashes of theta - decode(step), for the fragments given. Changes nothing, and keeps nothing.

        Raises RemoteProtocolError, at every rank, when a step does not fit its fragment.
        """
        coming = {i: step.payload for i, step in sorted(steps.items()) if isinstance(step, Here)}
        hashes = dict(enumerate(self._outer.hashes))
        if self.layout.ranks.size == 1:
            hashes |= {i: self._hash_after(i, encoded) for i, encoded in coming.items()}
            return tuple(hashes[i] for i in self._ids)
        for some in _batches(list(coming), self.layout.ranks.size):
            after = self.layout.ranks.together(lambda some=some: {i: self._after(i, coming[i]) for i in some})  # type: ignore[misc]
            hashes |= self._hashes(after)
        return tuple(hashes[i] for i in self._ids)

    def _hash_after(self, fragment_id: int, encoded: EncodedTensor) -> bytes:
        hashed = FragmentHash(parallel=on_gpu(self.layout.locals(fragment_id)) is not None)
        for _, after in self.transfers.each_beside(self._parts_after(fragment_id, encoded)):
            hashed.update(after)
        return hashed.digest()

    def _parts_after(
        self,
        fragment_id: int,
        encoded: EncodedTensor,
        into: Tensor | None = None,
        before: Callable[[slice], object] = lambda part: None,
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield each part of the held vector, and theta - decode(encoded) of it, fp32 on the CPU; see `Transfers.each_beside`.

        into: where that is written, perhaps theta itself; None: scratch, valid until the next. before: called with each part
        before anything of it is read. Computed on the GPU where the parameters are on one.
        """
        theta, device = self._outer.fragments[fragment_id], on_gpu(self.layout.locals(fragment_id))
        scratch = torch.empty(0, dtype=torch.float32, device="cpu")
        for part, subtract in self._subtracting(fragment_id, encoded, device):
            before(part)
            numel = part.stop - part.start
            if into is None and numel > scratch.numel():
                scratch = torch.empty(numel, dtype=torch.float32, device="cpu", pin_memory=self.transfers.pinned)
            after = scratch[:numel] if into is None else into[part]
            if device is not None:
                there = torch.empty(numel, dtype=torch.float32, device=device).copy_(theta[part], non_blocking=True)
                subtract(part, there)
                after.copy_(there, non_blocking=True)
            else:
                if into is not theta:
                    after.copy_(theta[part])
                subtract(part, after)
            yield part, after

    def _after(self, fragment_id: int, encoded: EncodedTensor) -> Tensor:
        """Return theta - decode(encoded), new memory."""
        after = self._new_like(self._outer.fragments[fragment_id])
        for _ in self.transfers.each_beside(self._parts_after(fragment_id, encoded, after)):
            pass
        return after

    def _new_like(self, theta: Tensor) -> Tensor:
        return torch.empty_like(theta, pin_memory=True) if self.transfers.pinned else new_vector(theta.numel())

    def _subtracting(
        self, fragment_id: int, encoded: EncodedTensor, device: torch.device | None
    ) -> Iterator[tuple[slice, Adder]]:
        """Yield each part of the held vector, and what subtracts that part of an update from a vector on `device` (None: the
        CPU); both raise RemoteProtocolError."""
        held, decoder = self.layout.held[fragment_id], codec(encoded.codec)

        def subtract(part: slice, out: Tensor) -> None:
            with _of_update(fragment_id):
                subtract_part(part, out)

        with _of_update(fragment_id):
            if decoder.granule > 1 and not held.is_whole:
                step = decoder.decode_shard(encoded, held).to(device=device)
                yield slice(0, held.numel), lambda part, out: add_weighted(step, -1.0, out, step)
                return
            decoder.check_shard(encoded, held)
            subtract_part = decoder.adder(encoded, -1.0, device)
        for part in parts(held.numel, device):
            yield part, subtract

    def _keep(self, vector: Tensor) -> Tensor:
        return vector.pin_memory() if self.transfers.pinned else vector

    def _hashes(self, fragments: dict[int, Tensor]) -> dict[int, bytes]:
        """Return the hash of each whole fragment; takes the held vectors out of `fragments`.

        The ranks put R fragments together, one each, and hash them side by side.
        """
        ranks, found = self.layout.ranks, dict[int, bytes]()
        for some in _batches(sorted(fragments), ranks.size):
            whole = [self.layout.gather(i, fragments.pop(i), to=to) for to, i in enumerate(some)]
            mine = {i: fragment_hash(one) for i, one in zip(some, whole, strict=True) if one is not None}
            for hashes in ranks.collect(mine):
                found |= hashes
        return found

    # Moving.

    def start(self, snapshot: Snapshot) -> None:
        """Take the run's outer parameters as theta and as the local parameters (T19). Raises RemoteProtocolError."""
        self.move(self.verified(snapshot), lambda _: None)

    def resume(self, outer: Outer) -> None:
        """Take `outer` as theta and leave the local parameters as they are."""
        self._take(outer)

    def move(self, target: Outer, progress: Progress) -> None:
        """Make `target` theta; each local fragment becomes what `progress` says."""
        for i in self._ids:
            self._load(i, target.fragments[i], progress(i))
        self._take(target)

    def reload(self, progress: Progress, fragments: Iterable[int] | None = None) -> None:
        """Make the local parameters of these fragments (None: all) what `progress` says; theta stays."""
        for i in self._ids if fragments is None else fragments:
            self._load(i, self._outer.fragments[i], progress(i))

    def _take(self, outer: Outer) -> None:
        self._outer, self._kept = outer, [True] * len(self._ids)  # a run in this process hands out vectors of its own

    def apply_fragment(
        self,
        fragment_id: int,
        step: Here | RolledBack,
        progress: Progress,
        hashed: bytes | None = None,
        before: Iterable[slice] = (),
    ) -> None:
        """Take theta <- theta - decode(step) of one fragment; the local one becomes what `progress` says.

        The outer step and the digest stay as they are until `applied`. hashed: as `hashes_after` told it, which was given the
        same step; None: raises as that.
        before: what reads theta and the local parameters as they were; it yields each part that it has done with, and is
        iterated to its end. So a part is in the cache when it moves.
        """
        kept, before = progress(fragment_id), iter(before)
        if isinstance(step, Here):
            if hashed is None:
                hashed = self.hashes_after({fragment_id: step})[fragment_id]
            local = self._local_to_write(fragment_id) if kept is None else None
            self._advance(fragment_id, step.payload, hashed, before, local)
        else:
            local = None
        for _ in before:
            pass
        if local is None:
            self._load(fragment_id, self._outer.fragments[fragment_id], kept)

    def _before_write(self, fragment_id: int) -> None:
        self.modules.before_write(fragment_id)
        if self.on_write is not None:
            self.on_write(fragment_id)

    def _local_to_write(self, fragment_id: int) -> LocalVector | None:
        self._before_write(fragment_id)
        parameters = self.layout.locals(fragment_id)
        return LocalVector(parameters) if LocalVector.readable(parameters) else None

    def _advance(
        self, fragment_id: int, encoded: EncodedTensor, hashed: bytes, before: Iterator[slice], local: LocalVector | None
    ) -> None:
        """Subtract a decoded update, which is known to be good, from theta; write theta into `local`, part by part."""
        fragments, hashes = list(self._outer.fragments), list(self._outer.hashes)
        theta = fragments[fragment_id]
        after = self._new_like(theta) if self._kept[fragment_id] else theta

        def read(part: slice) -> None:
            next((done for done in before if done.stop >= part.stop), None)

        for part, moved in self.transfers.each_beside(self._parts_after(fragment_id, encoded, after, read)):
            if local is not None:
                with self.transfers.beside():
                    local.write(part, moved)
        fragments[fragment_id], hashes[fragment_id], self._kept[fragment_id] = after, hashed, False
        self._outer = dataclasses.replace(self._outer, fragments=tuple(fragments), hashes=tuple(hashes))

    def applied(self, outer_step: int) -> None:
        """Advance to `outer_step`, with the digest that theta really has: all its fragments are applied."""
        self._outer = dataclasses.replace(self._outer, outer_step=outer_step, digest=combine(self._outer.hashes))

    def _load(self, fragment_id: int, theta: Tensor, moved: Tensor | float | None) -> None:
        target = theta
        share, moved = (moved, self.progress_since(fragment_id, theta)) if isinstance(moved, float) else (None, moved)
        with self.transfers.beside():
            if moved is not None and share is not None:
                moved.mul_(share)
            finite = moved is not None and is_finite(moved)
        if moved is not None and self.layout.ranks.all([finite])[0]:
            with self.transfers.beside():
                target = moved.add_(theta.to(moved.device, non_blocking=True))
        self.load_local(fragment_id, target)

    def load_local(self, fragment_id: int, vector: Tensor) -> None:
        """Write a held vector into the local parameters of one fragment."""
        self._before_write(fragment_id)
        with self.transfers.beside():
            load_fragment(vector, self.layout.locals(fragment_id))

    def load_outer(self) -> list[list[Tensor]]:
        """Put theta into the model; returns exact copies of the local parameters, in their own dtype, for `restore`."""
        kept = [[part.clone() for part in self.layout.locals(i)] for i in self._ids]
        self._versions = [self.version(i) for i in self._ids]
        for i, theta in enumerate(self._outer.fragments):
            self.load_local(i, theta)
        return kept

    @torch.no_grad()
    def restore(self, kept: Sequence[Sequence[Tensor]]) -> None:
        """Undo `load_outer`, to the bit."""
        for i, copies in enumerate(kept):
            self.modules.before_write(i)
            for local, copy in zip(self.layout.locals(i), copies, strict=True):
                local.copy_(copy)
            self._undone[i] += self.version(i) - self._versions[i]


@contextmanager
def _of_update(fragment_id: int) -> Iterator[None]:
    try:
        yield
    except RemoteProtocolError as error:
        raise RemoteProtocolError(f"update of fragment {fragment_id}: {error}") from error


def _batches(items: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (items[start : start + size] for start in range(0, len(items), size))
