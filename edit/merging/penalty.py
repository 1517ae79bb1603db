"""The EDiT penalty on scalars: whose contribution is anomalous, and how much weight the others have.

The verdicts, the moving statistics behind them and the weights of Cheng et al., arXiv 2412.07210, section 3.3. Pure functions
of floats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from edit.config.run import PenaltyConfig
from edit.records import Verdict

__all__ = ["NormStatistics", "freshness", "judge", "observe", "verdicts", "weights"]

_SIGMA_FLOOR = 1e-3  # of the mean. Equal norms have sigma 0; without a floor their rounding errors would be anomalies
_IDLE_NEEDS = 3  # finite norms in a round before a median can call one of them idle


@dataclass(frozen=True, slots=True)
class NormStatistics:
    """Bias-corrected moving mean and variance of one peer's norms in one fragment."""

    mean: float = 0.0
    variance: float = 0.0
    # Norms behind them: those with verdict OK.
    count: int = 0

    @property
    def sigma(self) -> float:
        """Standard deviation, at least a thousandth of the mean."""
        return max(math.sqrt(self.variance), _SIGMA_FLOOR * self.mean)


def judge(norm: float, statistics: NormStatistics, config: PenaltyConfig) -> Verdict:
    """Judge a norm by the statistics from before it. One-sided: a small norm is no anomaly.

    NONFINITE: NaN or Inf. ANOMALOUS: after W norms, more than delta sigma above the mean. With the penalty off only NONFINITE.
    """
    if not math.isfinite(norm):
        return Verdict.NONFINITE
    if config.enabled and statistics.count >= config.observations and norm - statistics.mean > config.delta * statistics.sigma:
        return Verdict.ANOMALOUS
    return Verdict.OK


def observe(norm: float, statistics: NormStatistics, config: PenaltyConfig) -> NormStatistics:
    """Return the statistics after a norm with verdict OK.

    The EMA with rate alpha, corrected for its start: with rate_n = alpha / (1 - (1 - alpha)^n) the first norm IS the mean.
    mu <- mu + rate_n (G - mu); sigma^2 <- (1 - rate_n) sigma^2 + rate_n (G - mu_new)^2.
    """
    count = statistics.count + 1
    rate = config.alpha / -math.expm1(count * math.log1p(-config.alpha)) if config.alpha < 1 else 1.0
    mean = statistics.mean + rate * (norm - statistics.mean)
    deviation = norm - mean
    return NormStatistics(mean, (1 - rate) * statistics.variance + rate * deviation * deviation, count)


def verdicts(norms: Mapping[str, float], before: Mapping[str, NormStatistics], config: PenaltyConfig) -> dict[str, Verdict]:
    """Judge every peer in one fragment of one round, by its own history (`judge`) and by the round.

    norms, before: by peer_id. IDLE: of at least three finite norms, one below idle_ratio times their median: a free rider.
    """
    judged = {peer_id: judge(norm, before.get(peer_id, NormStatistics()), config) for peer_id, norm in norms.items()}
    finite = [norm for norm in norms.values() if math.isfinite(norm)]
    if not config.enabled or len(finite) < _IDLE_NEEDS:
        return judged
    least = config.idle_ratio * median(finite)
    return {
        peer_id: Verdict.IDLE if verdict is Verdict.OK and norms[peer_id] < least else verdict
        for peer_id, verdict in judged.items()
    }


def weights(
    verdicts: Sequence[Verdict],
    norms: Sequence[float],
    inner_steps: Sequence[int],
    tokens: Sequence[int],
    config: PenaltyConfig,
    staleness: Sequence[int] = (),
    damped: bool = False,
) -> list[float]:
    """Return each contribution's weight, by position; 0 unless its verdict is OK.

    The weights sum to 1, or are all 0 when no verdict is OK.

    Penalty on: softmax of -G/T over the OK ones, where G is the norm as `config.norm` says. Off: uniform, or by tokens.
    staleness: in outer steps, empty when all are 0: weights are multiplied by `freshness`, then normalised again.
    damped: the exponent is `config.damping` and they are not normalised again, so a contribution that comes alone counts less
    the older it is (arXiv 1903.03934, algorithm 1).
    """
    good = [i for i, verdict in enumerate(verdicts) if verdict is Verdict.OK]
    raw = _softmax(good, norms, inner_steps, config) if config.enabled else _shares(good, inner_steps, tokens, config)
    exponent = config.damping if damped else config.staleness
    fresh = [freshness(staleness[i], exponent) if staleness else 1.0 for i in good]
    total = sum(raw) if damped else sum(share * factor for share, factor in zip(raw, fresh, strict=True))
    shares = [0.0] * len(verdicts)
    for i, share, factor in zip(good, raw, fresh, strict=True):
        shares[i] = share * factor / total
    return shares


def freshness(staleness: int, exponent: float) -> float:
    """Return (1 + s) ** -a: 1 for a contribution that is not stale (arXiv 1903.03934, section 5.2, the polynomial form)."""
    return float((1 + staleness) ** -exponent)


def _softmax(good: Sequence[int], norms: Sequence[float], inner_steps: Sequence[int], config: PenaltyConfig) -> list[float]:
    """Return exp(-(G - G_min) / T), unnormalised: the largest is 1, so the sum cannot underflow."""
    if not good:
        return []
    middle = median([norms[i] for i in good])
    values = [_entering(norms[i], inner_steps[i], middle, config.norm) for i in good]
    least = min(values)
    return [math.exp(-(value - least) / config.temperature) for value in values]


def _entering(norm: float, inner_steps: int, middle: float, rule: str) -> float:
    """Return the G that enters the softmax. middle: the median of the norms with verdict OK."""
    if rule == "per_sqrt_step":
        return norm / math.sqrt(max(inner_steps, 1))
    if rule == "relative":
        return norm / middle if middle > 0 else 0.0  # most norms are 0: uniform
    return norm


def _shares(good: Sequence[int], inner_steps: Sequence[int], tokens: Sequence[int], config: PenaltyConfig) -> list[float]:
    """Return uniform weights, or by tokens, or by tokens^2 / inner steps (arXiv 2604.21428); uniform when all counts are 0."""
    counted = [float(max(tokens[i], 0)) for i in good]
    if config.weighting == "tokens2_per_step":
        counted = [count * count / max(inner_steps[i], 1) for i, count in zip(good, counted, strict=True)]
    return counted if config.weighting != "uniform" and sum(counted) > 0 else [1.0] * len(good)
