"""The average of one fragment's outer parameters over outer steps, kept beside them: nothing that is trained depends on it.

It counts the outer steps that moved the fragment; the initial parameters are not among them. Every operation is a separate,
correctly rounded multiplication or addition, so the same outer steps give the same bits. A mean of finite parameters is finite.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from edit.codecs import PIECE
from edit.codecs.base import parts
from edit.config.average import AverageConfig
from edit.errors import StorageError
from edit.merging.portable_math import moving_rate

__all__ = ["Average"]


class Average:
    """The average of one fragment.

    Args:
        config: of a kind other than `none`.
        numel: elements of the fragment.
    """

    def __init__(self, config: AverageConfig, numel: int) -> None:
        self._config, self._numel = config, numel
        # The outer steps that are in it, and those that have left it.
        self.steps = 0
        self._mean: Tensor | None = None  # of `ema`: flat fp32, shape [numel]
        self._earlier: list[Tensor] = []  # of `last`: theta at the outer steps before the last one, oldest first

    def before(self, theta: Tensor) -> Tensor | None:
        """Return what `take` needs of theta as it is before an outer step writes into it; None: nothing."""
        return theta.clone() if self._config.kind == "last" and self.steps > 0 else None

    def take(self, before: Tensor | None, theta: Tensor) -> None:
        """Count an outer step that moved the fragment to theta, which is only read. before: of `before`."""
        self.steps += 1
        if self._config.kind == "last":
            self._earlier = [*self._earlier, *([] if before is None else [before])][1 - self._config.last :]
            return
        if self._mean is None:
            self.steps, self._mean = 1, theta.clone()
            return
        # a <- (1 - r) a + r theta, r = (1 - d) / (1 - d ** t): the weights d ** age, normalised
        rate = moving_rate(1 - self._config.decay, self.steps)
        scratch = torch.empty(min(PIECE, self._numel), dtype=torch.float32, device="cpu")
        for part in parts(self._numel):
            piece = theta[part]
            self._mean[part].mul_(1 - rate).add_(torch.mul(piece, rate, out=scratch[: piece.numel()]))

    def of(self, theta: Tensor) -> Tensor:
        """Return the average, flat fp32 in memory of its own. theta: as it is now, which is the average before any step."""
        if self._config.kind == "ema":
            return (self._mean if self._mean is not None else theta).clone()
        counted = [*self._earlier, theta]
        mean, share = torch.mul(counted[0], 1 / len(counted)), 1 / len(counted)
        for each in counted[1:]:  # each is divided first, so that no sum overflows
            mean.add_(torch.mul(each, share))
        return mean

    def to_tensors(self, i: int) -> dict[str, Tensor]:
        """Return its tensors by name, of fragment i: `average.I` of `ema`, `average.I.J` of `last`. Shared, not copied."""
        if self._config.kind == "ema":
            return {} if self._mean is None else {f"average.{i}": self._mean}
        return {f"average.{i}.{j}": each for j, each in enumerate(self._earlier)}

    def restore(self, i: int, tensors: Mapping[str, Tensor], steps: int) -> None:
        """Take what `to_tensors` and `steps` were.

        What another kind of average left is passed over: the average begins anew. Raises StorageError for tensors that do not
        fit the fragment.
        """
        if self._config.kind == "ema":
            if (mean := tensors.get(f"average.{i}")) is not None and steps > 0:
                self._mean, self.steps = self._fits(f"average.{i}", mean), steps
            return
        names = [name for j in range(16) if (name := f"average.{i}.{j}") in tensors]
        self._earlier = [self._fits(name, tensors[name]) for name in names][1 - self._config.last :]
        self.steps = steps

    def _fits(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.shape != (self._numel,) or tensor.dtype != torch.float32:
            raise StorageError(f"checkpoint: {name} is not {self._numel} fp32 elements")
        return tensor
