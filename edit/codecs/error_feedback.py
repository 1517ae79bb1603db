"""Error feedback: what a codec rounds away is added to the next vector (Karimireddy et al., arXiv 1901.09847).

u = delta + e; q = encode(u); e <- u - decode(q), adopted only when the round commits. Owns: the residual and its staging.
Must not know: rounds, verdicts, carriers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from edit.codecs import Codec, codec
from edit.errors import LocalProtocolError, StorageError
from edit.records import EncodedTensor

__all__ = ["ErrorFeedback", "with_feedback"]


def with_feedback(encoder: Codec, delta: Tensor, residual: Tensor | None) -> tuple[EncodedTensor, Tensor | None]:
    """(q, e') of u = delta + e. Pure. residual: None counts as zero; e' is None for a lossless codec.

    A non-finite delta gives a non-finite q, which a merger refuses, so its e' is never adopted.
    """
    total = delta.clone() if residual is None else torch.add(delta, residual)
    data = encoder.encode(total)
    if encoder.lossless:
        return EncodedTensor(encoder.name, total.numel(), data), None
    encoder.decode_add(data, total, -1.0)  # exactly total - decode(data)
    return EncodedTensor(encoder.name, total.numel(), data), total


class ErrorFeedback:
    """The residuals of one sender, one per fragment; zero at first, none at all for a lossless codec.

    numels: elements per fragment. Until `commit` the residual stays what it was; staging again replaces what was staged.
    """

    def __init__(self, codec_name: str, numels: Sequence[int]) -> None:
        self._codec = codec(codec_name)
        self._numels = tuple(numels)
        self._residuals: dict[int, Tensor] = {}
        self._staged: dict[int, Tensor | None] = {}

    def stage(self, i: int, delta: Tensor) -> EncodedTensor:
        """Encode fragment i's delta (flat fp32, not changed) plus its residual."""
        self._check(i, delta.numel())
        encoded, self._staged[i] = with_feedback(self._codec, delta, self._residuals.get(i))
        return encoded

    def commit(self, i: int) -> None:
        """The staged vector was merged: adopt what it lacked. Raises LocalProtocolError when nothing is staged."""
        if i not in self._staged:
            raise LocalProtocolError(f"fragment {i}: commit of a residual without a staged one")
        residual = self._staged.pop(i)
        if residual is not None:
            self._residuals[i] = residual

    def rollback(self, i: int) -> None:
        """The staged vector was not merged: forget it. Nothing staged is fine."""
        self._staged.pop(i, None)

    def residuals(self) -> dict[int, Tensor]:
        """The committed residuals by fragment; a fragment without one is left out."""
        return dict(sorted(self._residuals.items()))

    def load(self, residuals: Mapping[int, Tensor]) -> None:
        """Replace the residuals by those that `residuals` returned. Nothing stays staged.

        Raises StorageError when one does not fit its fragment; then nothing changes.
        """
        for i, residual in residuals.items():
            if not 0 <= i < len(self._numels) or residual.shape != (self._numels[i],) or residual.dtype != torch.float32:
                raise StorageError(f"residual.{i} {list(residual.shape)} {residual.dtype} does not fit this model's fragments")
        self._residuals = {} if self._codec.lossless else {i: residual.clone() for i, residual in residuals.items()}
        self._staged = {}

    def _check(self, i: int, numel: int) -> None:
        if not 0 <= i < len(self._numels) or self._numels[i] != numel:
            raise LocalProtocolError(f"no fragment {i} of {numel} elements; the fragments have {list(self._numels)}")
