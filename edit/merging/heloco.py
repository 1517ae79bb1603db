"""HeLoCo (arXiv 2606.00271): shrink what of a pseudo-gradient goes against the outer momentum, or turn it towards it.

Per tensor, with u and v the unit vectors of Delta and of the momentum, c = u . v and
conf = ||Delta|| / (||Delta|| + kappa ||m|| + eps):

- c >= c_ok: Delta stays.
- c < 0: Delta - beta c ||Delta|| v, beta = min(k_s (-c) conf, beta_max): its component against the momentum is shrunk.
- between: ||Delta|| times the unit vector of (1 - lambda) u + lambda v, lambda = min(k_d (1 - c) conf, 1): it is turned and
  keeps its length.

c_ok is the paper's; k_s = k_d = kappa = beta_max = 1 are ours. The paper's momentum is a mean, m <- mu m + (1 - mu) G, ours a
sum, so m = (1 - mu) momentum. A tensor without momentum (as before the first outer step), or of zeros, stays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edit.merging.norms import dot, norm

__all__ = ["Momentum", "correct"]

C_OK = 0.2
K_SHRINK = 1.0
BETA_MAX = 1.0
K_TURN = 1.0
KAPPA = 1.0
_EPS = 1e-12


@dataclass(frozen=True, slots=True)
class Momentum:
    """The outer momentum of one fragment."""

    # Flat fp32, shape [fragment.numel].
    vector: Tensor
    # mu.
    decay: float
    # Elements of each of the fragment's tensors, in order.
    numels: Sequence[int]


def correct(delta: Tensor, momentum: Momentum) -> None:
    """Correct a flat fp32 pseudo-gradient in place, tensor by tensor."""
    numels = list(momentum.numels)
    for tensor, reference in zip(torch.split(delta, numels), torch.split(momentum.vector, numels), strict=True):
        kept, added = _coefficients(tensor, reference, momentum.decay)
        if added:
            tensor.mul_(kept).add_(torch.mul(reference, added))


def _coefficients(delta: Tensor, momentum: Tensor, decay: float) -> tuple[float, float]:
    """Return (a, b) of a Delta + b momentum."""
    length, reference = norm(delta), norm(momentum)
    if not (length > 0 and 0 < reference < math.inf):
        return 1.0, 0.0
    c = dot(delta, momentum) / length / reference
    if c >= C_OK or not math.isfinite(c):  # not finite: the products overflowed
        return 1.0, 0.0
    c = max(c, -1.0)
    confidence = length / (length + KAPPA * (1 - decay) * reference + _EPS)
    if c < 0:
        return 1.0, -min(K_SHRINK * -c * confidence, BETA_MAX) * c * length / reference
    turn = min(K_TURN * (1 - c) * confidence, 1.0)
    turned = math.sqrt((1 - turn) * (1 - turn) + turn * turn + 2 * turn * (1 - turn) * c)  # ||(1 - lambda) u + lambda v||
    return (1 - turn) / max(turned, _EPS), turn * length / reference / max(turned, _EPS)
