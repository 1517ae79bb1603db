"""Error feedback: what a codec rounds away is added to the next vector (Karimireddy et al., arXiv 1901.09847).

u = delta + decay e; q = encode(u); e <- u - decode(q), adopted only when the round commits. A decay below 1 forgets old errors
(SparseLoCo, arXiv 2508.15706, takes 0.95 for its contributions), 0 is no feedback.

Step ahead (Xu et al., arXiv 2008.05823): the local parameters become theta - decay e, and e becomes 0. So training goes on from
where the peer would be had all been sent, and the next delta, theta less the local parameters, has decay e in it.

Rescaled by s (`rescale`): u = s (delta + decay e) in all of the above, until that is committed or rolled back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from edit.codecs import Codec, CodecSpec, codec
from edit.codecs.base import device_buffer, fetched, parts
from edit.codecs.residuals import Residual, owing
from edit.config.codec import LOCAL, CodecChoice
from edit.errors import LocalProtocolError, StorageError
from edit.fragments.schema import FragmentSpec
from edit.fragments.shards import Shard
from edit.records import EncodedTensor

__all__ = ["ErrorFeedback", "Vector", "codec_of"]


class Vector(Protocol):
    """A flat fp32 vector that is read by the parts of `edit.codecs.base.parts` on its device, in order: a tensor, or one that
    computes a part when it is read; then that is valid until the next one is. Parts are not written.

    On a GPU everything that is done with it is queued on the current stream; wait for that before a part counts as read, and
    what was computed from it as written.
    """

    @property
    def device(self) -> torch.device: ...
    def numel(self) -> int: ...
    def __getitem__(self, part: slice, /) -> Tensor: ...


def codec_of(fragment: FragmentSpec, choice: CodecChoice) -> Codec:
    """Return the codec of one fragment: the one that is chosen for it, but fp32 for buffers.

    Buffers are few, and a rounding error of a small variance beside a large one would make it negative.
    """
    return codec("fp32" if fragment.buffers else choice.of_fragment(fragment.name))


class ErrorFeedback:
    """The residuals of one sender, one per fragment; zero at first, none at all for a lossless codec.

    choice: of the codecs, or one for all fragments; shards: what this sender contributes of each fragment; changing: the codecs
    are those of `use`, and each keeps a residual. A residual changes
    only on `commit`; staging again replaces what was staged. Of a staged vector only its encoded form is kept, which the caller
    has too; so the residual is computed on `commit`, in place, from the same delta.
    """

    def __init__(self, choice: CodecChoice | CodecSpec | str, shards: Sequence[Shard], *, changing: bool = False) -> None:
        if not isinstance(choice, CodecChoice):
            choice = CodecChoice(CodecSpec.parse(choice) if isinstance(choice, str) else choice)
        self._shards = tuple(shards)
        self._codecs = [codec_of(shard.fragment, choice) for shard in self._shards]
        self._changing = changing
        self._decay = choice.decay
        self._steps_ahead = choice.residual == LOCAL
        # In which residuals are kept; where the local parameters take them, until they do.
        self.form = "fp32" if self._steps_ahead else choice.residual
        self._residuals: dict[int, Residual] = {}
        self._staged: dict[int, EncodedTensor | Residual] = {}  # encoded, or what `keep` made of it
        self._scales: dict[int, float] = {}  # s of `rescale`

    def keeps(self, i: int) -> bool:
        """Return whether fragment i has a residual: its codec is lossy, and feedback is not turned off."""
        return (self._changing or not self._codecs[i].lossless) and self._decay > 0

    def use(self, i: int, encoder: Codec) -> None:
        """Encode fragment i with this codec from now on; what is staged of it is decoded with it, too."""
        self._codecs[i] = encoder

    def owed(self, i: int, delta: Vector) -> Iterator[Tensor]:
        """Yield u = delta + decay e of fragment i as `stage` encodes it, a part at a time, valid until the next one."""
        residual, scale, numel = self._residuals.get(i), self._scales.get(i), delta.numel()
        total, device = torch.empty(0, dtype=torch.float32, device=delta.device), delta.device
        for part in parts(numel, device):
            u = delta[part]
            if total.numel() == 0 and not (residual is None and scale is None):
                total = torch.empty_like(u)
            if residual is not None:
                u = owing(u, residual.read(part, device), self._decay, total[: u.numel()])
            yield u if scale is None else torch.mul(u, scale, out=total[: u.numel()])

    def rescale(self, i: int, scale: float) -> None:
        """Multiply u of fragment i, as it is staged next, by `scale`, 0 to 1; what that takes away is in no residual."""
        if not 0 <= scale <= 1:
            raise LocalProtocolError(f"fragment {i}: a scale of {scale}, which is not from 0 to 1")
        self._scales.pop(i, None)
        if scale < 1:
            self._scales[i] = scale

    @property
    def scales(self) -> dict[int, float]:
        """What `rescale` was given of what is not committed yet, by fragment; one without is left out."""
        return dict(self._scales)

    def needs_delta(self, i: int) -> bool:
        """Return whether `commit` of the staged vector i takes its delta."""
        return self.keeps(i) and not isinstance(self._staged.get(i), Residual)

    def stage(self, i: int, delta: Vector) -> EncodedTensor:
        """Encode fragment i's delta (flat fp32, shape [shard.numel]) plus its residual.

        A delta that is not finite gives an encoded vector that is not finite. A merge refuses it, so it is never committed.
        """
        self._check(i, delta)
        encoder, numel, device = self._codecs[i], delta.numel(), delta.device
        data = device_buffer(encoder.encoded_size(numel), device)
        for part, u in zip(parts(numel, device), self.owed(i, delta), strict=True):
            encoder.encode_part(u, data, numel, part.start)
        self._staged[i] = encoded = EncodedTensor(encoder.name, numel, fetched(data))
        return encoded

    def keep(self, i: int, delta: Vector) -> None:
        """Compute the residual that `commit` would leave, in new memory: the staged delta will not be there any more."""
        self._check(i, delta)
        staged = self._staged[i]
        if self.keeps(i) and isinstance(staged, EncodedTensor):
            left = Residual(delta.numel(), self.form, pinned=delta.device.type == "cuda")
            for _ in self._left_out(i, delta, staged, self._residuals.get(i), left, self._scales.get(i)):
                pass
            self._staged[i] = left

    def commit(self, i: int, delta: Vector | None = None) -> None:
        """Adopt the residual of the staged vector: it was merged. Raises LocalProtocolError when nothing is staged.

        delta: as it was staged, to the bit; see `needs_delta`.
        """
        for _ in self.commit_parts(i, delta):
            pass

    def commit_parts(self, i: int, delta: Vector | None = None) -> Iterator[slice]:
        """Do as `commit`, but a part at a time: yields each once its delta is not needed any more. Iterate to the end.

        What `commit` raises is raised at once.
        """
        if i not in self._staged:
            raise LocalProtocolError(f"fragment {i}: commit of a residual without a staged one")
        staged = self._staged[i]
        written: Iterator[slice] = iter(())
        if isinstance(staged, Residual):
            self._residuals[i] = staged
        elif self.keeps(i):
            if delta is None:
                raise LocalProtocolError(f"fragment {i}: commit of a residual without its delta")
            self._check(i, delta)
            before = self._residuals.get(i)
            self._residuals[i] = before or Residual(delta.numel(), self.form, pinned=delta.device.type == "cuda")
            written = self._left_out(i, delta, staged, before, self._residuals[i], self._scales.get(i))
            if self._steps_ahead:  # all of it is asked for before anything moves
                written = iter(list(written))
        del self._staged[i]
        self._scales.pop(i, None)
        return written

    def _left_out(
        self,
        i: int,
        delta: Vector,
        encoded: EncodedTensor,
        before: Residual | None,
        out: Residual,
        scale: float | None,
    ) -> Iterator[slice]:
        """Write e' = u - decode(q) into `out`, yielding each part that is written. before: e, perhaps `out` itself."""
        device = delta.device
        in_place = out.form == "fp32" and device.type == "cpu"
        scratch, subtract = torch.empty(0, dtype=torch.float32, device=device), self._codecs[i].adder(encoded, -1.0, device)
        for part in parts(delta.numel(), device):
            now = delta[part]
            if scratch.numel() == 0 and not in_place:
                scratch = torch.empty_like(now)
            u = out.tensor[part] if in_place else scratch[: now.numel()]
            owing(now, None if before is None else before.read(part, device), self._decay, u)
            if scale is not None:
                u.mul_(scale)
            subtract(part, u)
            if not in_place:
                out.write(part, u)
            yield part

    def step_ahead(self, i: int) -> Tensor | None:
        """Return decay e of fragment i, new, and set e to 0: the local parameters take it. None unless the choice is LOCAL."""
        if not (self._steps_ahead and self.keeps(i)):
            return None
        residual = self._residuals.pop(i, None)
        if residual is None:
            return torch.zeros(self._shards[i].numel, dtype=torch.float32, device="cpu")
        return residual.tensor.mul_(self._decay)

    def rollback(self, i: int) -> None:
        """Forget the staged vector, if there is one: it was not merged."""
        self._staged.pop(i, None)
        self._scales.pop(i, None)

    def residuals(self) -> dict[int, Residual]:
        """Return the committed residuals by fragment; a fragment without one is left out. Commits write into them."""
        return dict(sorted(self._residuals.items()))

    def load(self, residuals: Mapping[int, Tensor]) -> None:
        """Replace the residuals by copies of these, each the `Residual.tensor` of a fragment's. Nothing stays staged.

        One of another form is rounded. Raises StorageError when one does not fit its fragment; then nothing changes.
        """
        loaded = {}
        for i, tensor in residuals.items():
            if not 0 <= i < len(self._shards):
                raise StorageError(f"residual.{i}: this model has {len(self._shards)} fragments")
            try:
                loaded[i] = Residual.of(tensor, self._shards[i].numel, self.form)
            except StorageError as error:
                raise StorageError(f"residual.{i}: {error}") from error
        self._residuals = {i: residual for i, residual in loaded.items() if self.keeps(i)}
        self._staged, self._scales = {}, {}

    def _check(self, i: int, delta: Vector) -> None:
        if not 0 <= i < len(self._shards) or delta.numel() != self._shards[i].numel:
            numels = [shard.numel for shard in self._shards]
            raise LocalProtocolError(f"no fragment {i} of {delta.numel()} elements; the fragments have {numels}")
