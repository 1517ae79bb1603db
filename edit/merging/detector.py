"""The detector "level": which norms of a round are anomalous or idle, by each peer's own history and by the round.

The paper's detector (arXiv 2412.07210, section 3.3; `edit.merging.penalty`) judges raw norms and learns accepted ones only, so
that a lasting rise is rejected for ever. This one judges the level x = log norm - p log steps; what all peers share is no
anomaly, because with three or more contributions the level is taken relative to the round's median; and a level that is held is
learned. Pure functions of floats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median, median_low
from typing import Any, Self

from edit.config.run import PenaltyConfig
from edit.records import Verdict

__all__ = ["NormStatistics", "by_levels", "surprise"]

_SIGMA_FLOOR = 0.05  # in log units: a rise of a few per cent is never an anomaly, however steady a peer was
_AGREE = math.log(2)  # rejected levels that differ by at most this factor are one level
# Relative to the median of M, a level has longer tails than a normal value: delta is 1 + 0.25 / M times as large.
_TAIL = 0.25
_MEDIAN_NEEDS = 3  # contributions before a median says what is usual: of two, nobody knows which one is odd


@dataclass(frozen=True, slots=True)
class NormStatistics:
    """Bias-corrected moving mean and variance of one peer's norms (detector "edit") or levels ("level") in one fragment."""

    mean: float = 0.0
    variance: float = 0.0
    # Norms or levels behind them: those that were learned.
    count: int = 0
    # The last levels in a row that these statistics found anomalous, at most `penalty.relearn`.
    rejected: tuple[float, ...] = ()
    # The same of levels relative to the round's median; None before the first round that has one.
    relative: NormStatistics | None = None

    def to_json(self) -> list[object]:
        """Return the statistics as JSON values: floats survive to the bit, infinity (which JSON lacks) is text."""
        relative = self.relative.to_json() if self.relative is not None else None
        mean, variance = (value if math.isfinite(value) else str(value) for value in (self.mean, self.variance))
        return [mean, variance, self.count, list(self.rejected), relative]

    @classmethod
    def from_json(cls, written: Any) -> Self:
        """Read what `to_json` returned. Raises TypeError or ValueError for anything else."""
        mean, variance, count, rejected, relative = written
        inner = cls.from_json(relative) if relative is not None else None
        return cls(float(mean), float(variance), int(count), tuple(float(level) for level in rejected), inner)


_NONE = NormStatistics()


def by_levels(
    norms: Mapping[str, float], inner_steps: Mapping[str, int], before: Mapping[str, NormStatistics], config: PenaltyConfig
) -> tuple[dict[str, Verdict], dict[str, NormStatistics]]:
    """Judge every peer of one round in one fragment; return the verdicts, and the statistics after them. By peer_id.

    NONFINITE: NaN or Inf. ANOMALOUS: by the round (max_ratio) or by its history, see `_judge`. IDLE: see `_idle`. A zero has no
    level: it is never anomalous, and never learned.
    """
    levels = _levels(norms, inner_steps, config)
    middle = median(levels.values()) if len(levels) >= _MEDIAN_NEEDS else None
    of_few = replace(config, delta=config.delta * (1 + _TAIL / len(levels))) if middle is not None else config
    verdicts = {peer: Verdict.OK if math.isfinite(norm) else Verdict.NONFINITE for peer, norm in norms.items()}
    after = {peer: before.get(peer, _NONE) for peer in norms}
    for peer, level in levels.items():
        anomalous, after[peer] = _judge(level, middle, before.get(peer, _NONE), config, of_few)
        verdicts[peer] = Verdict.ANOMALOUS if anomalous else Verdict.OK
    for peer in _idle(norms, levels, verdicts, before, config):
        verdicts[peer], after[peer] = Verdict.IDLE, before.get(peer, _NONE)
    return verdicts, after


def _levels(norms: Mapping[str, float], inner_steps: Mapping[str, int], config: PenaltyConfig) -> dict[str, float]:
    """Return x = log norm - p log steps of every norm that is finite and not zero.

    Steps are what the peer says: more than max_ratio times the round's (lower) median do not lower its level any further.
    """
    usual = config.max_ratio * max(1, median_low(inner_steps.values())) if inner_steps else 1.0
    return {
        peer: math.log(norm) - config.step_power * math.log(min(max(inner_steps[peer], 1), usual))
        for peer, norm in norms.items()
        if math.isfinite(norm) and norm > 0
    }


def _judge(
    level: float, middle: float | None, before: NormStatistics, config: PenaltyConfig, of_few: PenaltyConfig
) -> tuple[bool, NormStatistics]:
    """Return whether a level is anomalous, by the statistics from before it, and the statistics after it.

    Further than max_ratio above the round's median: anomalous from the first round on, and without a trace. Otherwise by the
    history of levels relative to the median, once there are W of them, or else by the history of levels. The other history
    is kept as well, because the number of contributors may change from round to round. of_few: the delta of relative levels.
    """
    relative = before.relative or _NONE
    alone = replace(before, relative=None)
    if middle is None:
        anomalous = surprise(level, alone, config) > 0
        return anomalous, replace(_after(level, alone, anomalous, config), relative=before.relative)
    distance = level - middle
    if distance > math.log(config.max_ratio):
        return True, before
    by_round = relative.count >= config.observations
    anomalous = surprise(distance, relative, of_few) > 0 if by_round else surprise(level, alone, config) > 0
    known = _after(level, alone, anomalous, config)
    return anomalous, replace(known, relative=_after(distance, relative, anomalous, of_few))


def surprise(level: float, statistics: NormStatistics, config: PenaltyConfig) -> float:
    """Return how far a level lies above what its history allows; above 0 it is anomalous. -inf before W levels.

    Allowed is mean + delta sigma sqrt(1 + 1/n) (1 + (delta^2 + 1) / (4 (n - 1))): the limit of a prediction from n normal
    values (Hahn 1969), with the first term of Student's quantile for few of them (Fisher and Cornish 1960; Abramowitz and
    Stegun 26.7.5). n is the effective number of values behind a moving mean, (sum w)^2 / sum w^2 (Kish 1965); sigma the
    unbiased standard deviation. One-sided: a small norm is no anomaly.
    """
    if statistics.count < config.observations:
        return -math.inf
    left = (1 - config.alpha) ** statistics.count
    n = (2 - config.alpha) / config.alpha * (1 - left) / (1 + left)
    freedom = max(n - 1, 1.0)
    sigma = max(math.sqrt(statistics.variance * n / freedom), _SIGMA_FLOOR)
    few = math.sqrt(1 + 1 / n) * (1 + (config.delta**2 + 1) / (4 * freedom))
    return level - statistics.mean - config.delta * sigma * few


def _after(level: float, statistics: NormStatistics, anomalous: bool, config: PenaltyConfig) -> NormStatistics:
    """Return the statistics after a level whose contribution was found anomalous, or not.

    What they reject themselves is not learned but kept in a row; `relearn` in a row that agree are a level that is held, and
    the statistics start anew from them. (The last of these was still rejected: a verdict is always by what was known before.)
    What they would accept is learned if it was accepted.
    """
    if surprise(level, statistics, config) <= 0:
        return statistics if anomalous else _learned(level, statistics, config)
    row = (*statistics.rejected, level)[-config.relearn :]
    if len(row) < config.relearn or max(row) - min(row) > _AGREE:
        return replace(statistics, rejected=row)
    fresh = _NONE
    for held in row:
        fresh = _learned(held, fresh, config)
    return fresh


def _learned(level: float, statistics: NormStatistics, config: PenaltyConfig) -> NormStatistics:
    """Return the weighted mean and variance with one more level (West 1979), of weights (1 - alpha)^age."""
    count = statistics.count + 1
    rate = config.alpha / -math.expm1(count * math.log1p(-config.alpha)) if config.alpha < 1 else 1.0
    change = level - statistics.mean
    variance = (1 - rate) * (statistics.variance + rate * change * change)
    return NormStatistics(statistics.mean + rate * change, variance, count)


def _idle(
    norms: Mapping[str, float],
    levels: Mapping[str, float],
    verdicts: Mapping[str, Verdict],
    before: Mapping[str, NormStatistics],
    config: PenaltyConfig,
) -> list[str]:
    """Return the free riders: who sent zeros, or less than idle_ratio times the largest accepted norm, while another did not.

    Of two, the larger may as well be the odd one: the smaller is idle only if it is also far below its own history, or if the
    larger was accepted by W levels of its own.
    """
    accepted = {peer: norms[peer] for peer, verdict in verdicts.items() if verdict is Verdict.OK}
    if config.idle_ratio == 0 or not any(accepted.values()):
        return []
    largest = max(accepted, key=lambda peer: accepted[peer])
    sure = len(levels) >= _MEDIAN_NEEDS or before.get(largest, _NONE).count >= config.observations

    def far_below(peer: str) -> bool:
        own = before.get(peer, _NONE)
        return own.count >= config.observations and levels[peer] < own.mean + math.log(config.idle_ratio)

    return [
        peer
        for peer, norm in accepted.items()
        if norm == 0 or (norm < config.idle_ratio * accepted[largest] and (sure or far_below(peer)))
    ]
