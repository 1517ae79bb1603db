"""The detector "level": which norms of a round are anomalous or idle, by each peer's own history and by the round.

The paper's detector (arXiv 2412.07210, section 3.3; `edit.merging.penalty`) judges raw norms and learns accepted ones only, so
that a lasting rise is rejected for ever, and compares with a mean of long ago, so that norms that fall with the learning rate
hide spikes. This one judges the level x = log norm - p log steps; what all peers share is no anomaly, because with three or
more contributions the level is taken relative to the round's median; a level is compared with the better of two forecasts, one
of which follows a trend; and a level that is held is learned. Pure functions of floats.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median, median_low
from typing import Any, Self

from edit.config.run import PenaltyConfig
from edit.merging.portable_math import log, moving_rate, power
from edit.records import Verdict

__all__ = ["NormStatistics", "by_levels"]

_SIGMA_FLOOR = 0.05  # in log units: a rise of a few per cent is never an anomaly, however steady a peer was
_AGREE = log(2.0)  # rejected levels that differ by at most this factor are one level
_MEDIAN_NEEDS = 3  # contributions before a median says what is usual: of two, nobody knows which one is odd
_LAST = 3  # levels whose median is the forecast that follows a trend
_LATE = 0.1  # the least rate of that forecast's moving error
_LARGEST = 1e100  # of a norm or level that is read: those of fp32 are below 1e45, and squares of these are finite
_MOST_COUNT = 1 << 48  # of norms that are learned; as many as there may be outer steps
_MOST_REJECTED = 100  # as large as `penalty.relearn` may be
_MOST_OF_PLUGIN = 1000  # last or rejected levels that a plug-in may remember


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
    # The last learned levels, at most three, and the moving mean square of the distances between each level and the median of
    # the three before it.
    last: tuple[float, ...] = ()
    last_error: float = 0.0

    @property
    def next_count(self) -> int:
        """Return the count with one more; the largest that can be read stays, which only somebody who lies has written."""
        return min(self.count + 1, _MOST_COUNT)

    def to_json(self) -> list[object]:
        """Return the statistics as JSON values: floats survive to the bit."""
        relative = self.relative.to_json() if self.relative is not None else None
        return [self.mean, self.variance, self.count, list(self.rejected), relative, list(self.last), self.last_error]

    @property
    def of_detector(self) -> bool:
        """Whether a built-in detector can go on with them: a plug-in may have computed others."""
        try:
            self.from_json(self.to_json())
        except (TypeError, ValueError):
            return False
        return True

    @classmethod
    def from_json(cls, written: Any, *, strict: bool = True) -> Self:
        """Read what `to_json` returned. Raises TypeError or ValueError for anything else.

        Args:
            strict: also for what no built-in detector computes. Others may have written it. What is read so the detectors can
                go on with: no root of what is negative, no overflow. False: as a plug-in may give them, any numbers that a
                double is, up to 1000 last and 1000 rejected ones.
        """
        mean, variance, count, rejected, relative, last, last_error = written
        if relative is not None and not (isinstance(relative, list) and len(relative) == 7 and relative[4] is None):
            raise ValueError("relative statistics are none, or have such themselves")
        if not strict:
            if max(len(last), len(rejected)) > _MOST_OF_PLUGIN:
                raise ValueError(f"{len(last)} last and {len(rejected)} rejected levels; {_MOST_OF_PLUGIN} may be remembered")
            counted = _double(count)
            return cls(
                _double(mean),
                _double(variance),
                count if type(count) is int else counted,  # type: ignore[arg-type] # a plug-in's may be a fraction
                tuple(map(_double, rejected)),
                cls.from_json(relative, strict=False) if relative is not None else None,
                tuple(map(_double, last)),
                _double(last_error),
            )
        learned = _float(count, 0, _MOST_COUNT)
        if learned != int(learned) or len(last) > min(learned, _LAST) or len(rejected) > _MOST_REJECTED:
            raise ValueError(f"{len(last)} last and {len(rejected)} rejected levels after {count!r:.40}")
        return cls(
            _float(mean, -_LARGEST, _LARGEST),
            _float(variance, 0, _LARGEST * _LARGEST),
            int(learned),
            tuple(_float(level, -_LARGEST, _LARGEST) for level in rejected),
            cls.from_json(relative) if relative is not None else None,
            tuple(_float(level, -_LARGEST, _LARGEST) for level in last),
            _float(last_error, 0, _LARGEST * _LARGEST),
        )


def _double(value: Any) -> float:
    return _float(value, -sys.float_info.max, sys.float_info.max)


def _float(value: Any, low: float, high: float) -> float:
    """Return a number as a float. Raises TypeError or ValueError unless low <= number <= high."""
    if type(value) not in (int, float) or not low <= value <= high:
        raise ValueError(f"{value!r:.40} is not {low:g} to {high:g}")
    return float(value)


_NONE = NormStatistics()


@dataclass(frozen=True, slots=True)
class _Forecast:
    """What one peer's history says of its next level."""

    level: float
    # The mean square that the next level is expected to differ by, and the degrees of freedom that is known with.
    error: float
    freedom: float


def by_levels(
    norms: Mapping[str, float], inner_steps: Mapping[str, int], before: Mapping[str, NormStatistics], config: PenaltyConfig
) -> tuple[dict[str, Verdict], dict[str, NormStatistics]]:
    """Judge every peer of one round in one fragment; return the verdicts, and the statistics after them. By peer_id.

    NONFINITE: NaN or Inf. ANOMALOUS: further than max_ratio above the round's median, from the first round on and without a
    trace. Otherwise by the history of levels relative to the median, once there are W of them, or else by the history of
    levels; both are kept, because the number of contributors may change from round to round. IDLE: see `_idle`. A zero has no
    level: it is never anomalous, and never learned.
    """
    levels = _levels(norms, inner_steps, config)
    middle = median(levels.values()) if len(levels) >= _MEDIAN_NEEDS else None
    distances = {peer: level - middle for peer, level in levels.items()} if middle is not None else {}
    known = {peer: before.get(peer, _NONE) for peer in norms}
    relative = {peer: known[peer].relative or _NONE for peer in distances}
    odd = _odd(levels, known, config.delta, config)
    # Relative to the median of M, a level has longer tails than a normal value.
    odd_relative = _odd(distances, relative, config.delta * (1 + 1 / max(len(levels), 1) ** 2), config)
    verdicts = {peer: Verdict.OK if math.isfinite(norm) else Verdict.NONFINITE for peer, norm in norms.items()}
    after = dict(known)
    for peer, level in levels.items():
        own = known[peer]
        if middle is None:
            anomalous = odd[peer]
            after[peer] = replace(_after(level, own, odd[peer], anomalous, config), relative=own.relative)
        elif distances[peer] > log(config.max_ratio):
            anomalous = True
        else:
            anomalous = odd_relative[peer] if relative[peer].count >= config.observations else odd[peer]
            learned = _after(distances[peer], relative[peer], odd_relative[peer], anomalous, config)
            after[peer] = replace(_after(level, own, odd[peer], anomalous, config), relative=learned)
        verdicts[peer] = Verdict.ANOMALOUS if anomalous else Verdict.OK
    for peer in _idle(norms, levels, verdicts, before, config):
        verdicts[peer], after[peer] = Verdict.IDLE, known[peer]
    return verdicts, after


def _levels(norms: Mapping[str, float], inner_steps: Mapping[str, int], config: PenaltyConfig) -> dict[str, float]:
    """Return x = log norm - p log steps of every norm that is finite and not zero.

    Steps are what the peer says, as far as it is believed (`edit.rounds.work_claims`). Of three or more, those above max_ratio
    times the round's (lower) median do not lower a level any further; of two, one that says few would raise the other's level.
    """
    enough = len(inner_steps) >= _MEDIAN_NEEDS
    usual = config.max_ratio * max(1, median_low(inner_steps.values())) if enough else math.inf
    return {
        peer: log(norm) - config.step_power * log(min(max(inner_steps[peer], 1), usual))
        for peer, norm in norms.items()
        if math.isfinite(norm) and norm > 0
    }


def _odd(
    levels: Mapping[str, float], histories: Mapping[str, NormStatistics], delta: float, config: PenaltyConfig
) -> dict[str, bool]:
    """Return by peer_id whether a level lies above what its history allows; False before W levels.

    Allowed is forecast + delta sigma (1 + (delta^2 + 1) / (4 f)). sigma^2 is the mean of the forecast's error and the median of
    all peers', because the error of one short history is uncertain. The last factor is the first term of Student's quantile
    (Fisher and Cornish 1960; Abramowitz and Stegun 26.7.5) with the f degrees of freedom that this mean has with M peers alike:
    4 M / (M + 3) times the history's (Satterthwaite 1946). One-sided: a small norm is no anomaly.
    """
    forecasts = {p: _forecast(histories[p], config) for p in levels if histories[p].count >= config.observations}
    if not forecasts:
        return dict.fromkeys(levels, False)
    usual, peers = median([forecast.error for forecast in forecasts.values()]), len(forecasts)
    odd = {}
    for peer, level in levels.items():
        forecast = forecasts.get(peer)
        if forecast is None:
            odd[peer] = False
            continue
        sigma = max(math.sqrt((forecast.error + usual) / 2), _SIGMA_FLOOR)
        freedom = forecast.freedom * 4 * peers / (peers + 3)
        odd[peer] = level - forecast.level > delta * sigma * (1 + (config.delta * config.delta + 1) / (4 * freedom))
    return odd


def _forecast(statistics: NormStatistics, config: PenaltyConfig) -> _Forecast:
    """Return the forecast of the next level, after at least one.

    It is the moving mean, with the error sigma^2 (1 + 1/n) of a prediction from n normal values (Hahn 1969). Where the median
    of the last levels, which follows a trend, had less than half that error of late, it is that median.
    """
    n = _effective(statistics.count, config.alpha)
    freedom = max(n - 1, 1.0)
    error = statistics.variance * n / freedom * (1 + 1 / n)
    if len(statistics.last) > 1 and statistics.last_error < error / 2:
        return _Forecast(_middle(statistics.last), statistics.last_error, _effective(statistics.count - 1, _late(config)))
    return _Forecast(statistics.mean, error, freedom)


def _after(level: float, statistics: NormStatistics, odd: bool, anomalous: bool, config: PenaltyConfig) -> NormStatistics:
    """Return the statistics after a level that they found odd, or not, and whose contribution was found anomalous, or not.

    What they reject themselves is not learned but kept in a row; `relearn` in a row that agree are a level that is held, and
    the statistics start anew from them. (The last of these was still rejected: a verdict is always by what was known before.)
    What they would accept is learned if it was accepted.
    """
    if not odd:
        return statistics if anomalous else _learned(level, statistics, config)
    row = (*statistics.rejected, level)[-config.relearn :]
    if len(row) < config.relearn or max(row) - min(row) > _AGREE:
        return replace(statistics, rejected=row)
    fresh = _NONE
    for held in row:
        fresh = _learned(held, fresh, config)
    return fresh


def _learned(level: float, statistics: NormStatistics, config: PenaltyConfig) -> NormStatistics:
    """Return the statistics with one more level. Mean and variance: weighted by (1 - alpha)^age (West 1979)."""
    count = statistics.next_count
    rate = moving_rate(config.alpha, count)
    change = level - statistics.mean
    variance = (1 - rate) * (statistics.variance + rate * change * change)
    last_error = 0.0
    if statistics.last:
        miss = level - _middle(statistics.last)
        last_error = statistics.last_error + moving_rate(_late(config), count - 1) * (miss * miss - statistics.last_error)
    last = (*statistics.last, level)[-_LAST:]
    return NormStatistics(statistics.mean + rate * change, variance, count, last=last, last_error=last_error)


def _middle(last: tuple[float, ...]) -> float:
    """Return the (lower) median of a few values, as `statistics.median_low`, which is slower."""
    return sorted(last)[(len(last) - 1) // 2]


def _late(config: PenaltyConfig) -> float:
    """Return the rate of the error of the last levels' median: what it was in the first rounds of a run means little."""
    return max(config.alpha, _LATE)


def _effective(count: int, alpha: float) -> float:
    """Return the effective number of `count` values in a moving mean, (sum w)^2 / sum w^2 (Kish 1965)."""
    left = power(1 - alpha, count)
    return (2 - alpha) / alpha * (1 - left) / (1 + left)


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
        return own.count >= config.observations and levels[peer] < own.mean + log(config.idle_ratio)

    return [
        peer
        for peer, norm in accepted.items()
        if norm == 0 or (norm < config.idle_ratio * accepted[largest] and (sure or far_below(peer)))
    ]
