"""Error feedback: what a codec rounds away is added to the next vector (Karimireddy et al., arXiv 1901.09847).

u = delta + decay e; q = encode(u); e <- u - decode(q), adopted only when the round commits. A decay below 1 forgets old errors
(SparseLoCo, arXiv 2508.15706, takes 0.95 for its contributions).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from edit.codecs import Codec, CodecSpec, codec
from edit.codecs.base import parts
from edit.codecs.residuals import owing
from edit.config.codec import CodecChoice
from edit.errors import LocalProtocolError, StorageError
from edit.fragments.schema import FragmentSpec
from edit.fragments.shards import Shard
from edit.records import EncodedTensor

__all__ = ["ErrorFeedback", "codec_of", "with_feedback"]


def codec_of(fragment: FragmentSpec, choice: CodecChoice) -> Codec:
    """Return the codec of one fragment: the one that is chosen for it, but fp32 for buffers.

    Buffers are few, and a rounding error of a small variance beside a large one would make it negative.
    """
    return codec("fp32" if fragment.buffers else choice.of_fragment(fragment.name))


def with_feedback(
    encoder: Codec, delta: Tensor, residual: Tensor | None, fragment: FragmentSpec, decay: float = 1.0
) -> tuple[EncodedTensor, Tensor | None]:
    """Return (q, e') of u = delta + decay * e. Pure. residual: e, None counts as zero.

    e' is None for a lossless codec, and with decay 0, which is no feedback.

    A delta that is not finite gives a q that is not finite. A merge refuses it, so its e' is never adopted.
    """
    total = owing(delta, residual, decay, torch.empty_like(delta))
    encoded = encoder.encode(total, fragment)
    if encoder.lossless or decay == 0:
        return encoded, None
    for part, piece in zip(parts(total.numel()), encoder.decode_pieces(encoded), strict=True):
        total[part].sub_(piece)
    return encoded, total


class ErrorFeedback:
    """The residuals of one sender, one per fragment; zero at first, none at all for a lossless codec.

    choice: of the codecs, or one for all fragments; shards: what this sender contributes of each fragment. A residual changes
    only on `commit`; staging again replaces what was staged.
    """

    def __init__(self, choice: CodecChoice | CodecSpec | str, shards: Sequence[Shard]) -> None:
        if not isinstance(choice, CodecChoice):
            choice = CodecChoice(CodecSpec.parse(choice) if isinstance(choice, str) else choice)
        self._shards = tuple(shards)
        self._codecs = tuple(codec_of(shard.fragment, choice) for shard in self._shards)
        self._decay = choice.decay
        self._residuals: dict[int, Tensor] = {}
        self._staged: dict[int, Tensor | None] = {}

    def stage(self, i: int, delta: Tensor) -> EncodedTensor:
        """Encode fragment i's delta (flat fp32, shape [shard.numel], not changed) plus its residual."""
        if not self._fits(i, delta.shape):
            numels = [shard.numel for shard in self._shards]
            raise LocalProtocolError(f"no fragment {i} of {delta.numel()} elements; the fragments have {numels}")
        fragment = self._shards[i].fragment
        encoded, self._staged[i] = with_feedback(self._codecs[i], delta, self._residuals.get(i), fragment, self._decay)
        return encoded

    def commit(self, i: int) -> None:
        """Adopt the residual of the staged vector: it was merged. Raises LocalProtocolError when nothing is staged."""
        if i not in self._staged:
            raise LocalProtocolError(f"fragment {i}: commit of a residual without a staged one")
        residual = self._staged.pop(i)
        if residual is not None:
            self._residuals[i] = residual

    def rollback(self, i: int) -> None:
        """Forget the staged vector, if there is one: it was not merged."""
        self._staged.pop(i, None)

    def residuals(self) -> dict[int, Tensor]:
        """Return the committed residuals by fragment; a fragment without one is left out."""
        return dict(sorted(self._residuals.items()))

    def load(self, residuals: Mapping[int, Tensor]) -> None:
        """Replace the residuals by those that `residuals` returned. Nothing stays staged.

        Raises StorageError when one does not fit its fragment; then nothing changes.
        """
        for i, residual in residuals.items():
            if not self._fits(i, residual.shape) or residual.dtype != torch.float32:
                raise StorageError(f"residual.{i} {list(residual.shape)} {residual.dtype} does not fit this model's fragments")
        kept = {i: residual.clone() for i, residual in residuals.items() if not self._codecs[i].lossless}
        self._residuals = kept if self._decay > 0 else {}
        self._staged = {}

    def _fits(self, i: int, shape: tuple[int, ...]) -> bool:
        return 0 <= i < len(self._shards) and shape == (self._shards[i].numel,)
