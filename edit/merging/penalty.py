"""The EDiT penalty on scalars: whose contribution is anomalous, and how much weight the others have.

The weights of Cheng et al., arXiv 2412.07210, section 3.3, with a cap on each share, and the paper's own detector ("edit"); the
default one ("level") is in `edit.merging.detector`; a detector may be a plug-in. Pure functions of floats.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from edit import plugins
from edit.config.run import PenaltyConfig
from edit.errors import PluginError
from edit.merging.detector import NormStatistics, by_levels
from edit.merging.portable_math import exp, moving_rate, power
from edit.plain_text import parse_json
from edit.records import Verdict

__all__ = ["NormStatistics", "capped", "freshness", "judge", "judge_round", "observe", "verdicts", "weights"]

_SIGMA_FLOOR = 1e-3  # of the mean. Equal norms have sigma 0; without a floor their rounding errors would be anomalies
_IDLE_NEEDS = 3  # finite norms in a round before a median can call one of them idle


def judge_round(
    norms: Mapping[str, float], inner_steps: Mapping[str, int], before: Mapping[str, NormStatistics], config: PenaltyConfig
) -> tuple[dict[str, Verdict], dict[str, NormStatistics]]:
    """Judge one round in one fragment as `config.detector` says; return verdicts, and the statistics after them, by peer_id.

    before: a peer without a history is left out. With the penalty off only NONFINITE is a verdict, and nothing is learned.
    """
    if not config.enabled:
        return verdicts(norms, {}, config), {}
    plugin, made = plugins.make("penalties", config.detector, config)
    if plugin.built_in:
        # What a plug-in has learned before, in whose place a built-in detector was put, may be nothing that this one computes.
        own: Judged = made(norms, inner_steps, {p: before[p] for p in norms if p in before and before[p].of_detector})
        return own
    return _by_plugin(plugin, made, norms, inner_steps, before)


Judged = tuple[dict[str, Verdict], dict[str, NormStatistics]]
Judge = Callable[[Mapping[str, float], Mapping[str, int], Mapping[str, NormStatistics]], Judged]


@plugins.built_in("penalties", "level")
def _level(config: PenaltyConfig) -> Judge:
    return lambda norms, inner_steps, before: by_levels(norms, inner_steps, before, config)


@plugins.built_in("penalties", "edit")
def _edit(config: PenaltyConfig) -> Judge:
    def judge_all(norms: Mapping[str, float], inner_steps: Mapping[str, int], before: Mapping[str, NormStatistics]) -> Judged:
        judged = verdicts(norms, before, config)
        history = {peer_id: before.get(peer_id, NormStatistics()) for peer_id in norms}
        after = {
            peer_id: observe(norms[peer_id], statistics, config) if judged[peer_id] is Verdict.OK else statistics
            for peer_id, statistics in history.items()
        }
        return judged, after

    return judge_all


def _by_plugin(
    plugin: plugins.Plugin,
    made: Any,
    norms: Mapping[str, float],
    inner_steps: Mapping[str, int],
    before: Mapping[str, NormStatistics],
) -> Judged:
    """Let a plug-in judge what is finite. Raises PluginError."""
    finite = {peer_id: norm for peer_id, norm in norms.items() if math.isfinite(norm)}
    with plugins.blame(plugin):
        said, after = made.judge(dict(finite), {peer_id: inner_steps[peer_id] for peer_id in finite}, dict(before))
        said, after = dict(said), dict(after)
    if said.keys() != finite.keys() or not all(isinstance(verdict, Verdict) for verdict in said.values()):
        raise PluginError(f"{plugin}: judge() must give each of {sorted(finite)} a Verdict")
    if not after.keys() <= finite.keys():
        raise PluginError(f"{plugin}: judge() must give NormStatistics of peers in this round only")
    try:
        read = {peer_id: _read_again(statistics) for peer_id, statistics in after.items()}
    except (AttributeError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise PluginError(f"{plugin}: judge() must give NormStatistics that can be read again: {error!s:.200}") from error
    return {peer_id: said.get(peer_id, Verdict.NONFINITE) for peer_id in norms}, read


def _read_again(statistics: object) -> NormStatistics:
    """Return what a restart, or another member, would read of a plug-in's statistics. Raises an error where it could not."""
    if not isinstance(statistics, NormStatistics):
        raise TypeError(f"a {type(statistics).__name__} is none")
    return NormStatistics.from_json(parse_json(json.dumps(statistics.to_json()), finite=True), strict=False)


def judge(norm: float, statistics: NormStatistics, config: PenaltyConfig) -> Verdict:
    """Judge a norm by the statistics from before it, as the paper does. One-sided: a small norm is no anomaly.

    NONFINITE: NaN or Inf. ANOMALOUS: after W norms, more than delta sigma above the mean. With the penalty off only NONFINITE.
    """
    if not math.isfinite(norm):
        return Verdict.NONFINITE
    sigma = max(math.sqrt(statistics.variance), _SIGMA_FLOOR * statistics.mean)
    if config.enabled and statistics.count >= config.observations and norm - statistics.mean > config.delta * sigma:
        return Verdict.ANOMALOUS
    return Verdict.OK


def observe(norm: float, statistics: NormStatistics, config: PenaltyConfig) -> NormStatistics:
    """Return the paper's statistics after a norm with verdict OK.

    The EMA with rate alpha, corrected for its start: with rate_n = alpha / (1 - (1 - alpha)^n) the first norm IS the mean.
    mu <- mu + rate_n (G - mu); sigma^2 <- (1 - rate_n) sigma^2 + rate_n (G - mu_new)^2.
    """
    count = statistics.next_count
    rate = moving_rate(config.alpha, count)
    mean = statistics.mean + rate * (norm - statistics.mean)
    deviation = norm - mean
    return NormStatistics(mean, (1 - rate) * statistics.variance + rate * deviation * deviation, count)


def verdicts(norms: Mapping[str, float], before: Mapping[str, NormStatistics], config: PenaltyConfig) -> dict[str, Verdict]:
    """Judge every peer in one fragment of one round with the detector "edit": by its own history (`judge`) and by the round.

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

    Penalty on: softmax of -G/T over the OK ones, where G is the norm as `config.norm` says; but with the detector "edit", no
    share exceeds max_share / M, M being the number of OK ones. Off: uniform, or by tokens.
    staleness: in outer steps, empty when all are 0: weights are multiplied by `freshness`, then normalised again.
    damped: the exponent is `config.damping` and they are not normalised again, so a contribution that comes alone counts less
    the older it is (arXiv 1903.03934, algorithm 1). Shares of arrivals are not capped.
    """
    good = [i for i, verdict in enumerate(verdicts) if verdict is Verdict.OK]
    raw = _softmax(good, norms, inner_steps, config) if config.enabled else _shares(good, inner_steps, tokens, config)
    exponent = config.damping if damped else config.staleness
    fresh = [freshness(staleness[i], exponent) if staleness else 1.0 for i in good]
    total = math.fsum(raw) if damped else math.fsum(share * factor for share, factor in zip(raw, fresh, strict=True))
    counted = [share * factor / total for share, factor in zip(raw, fresh, strict=True)]
    if config.enabled and config.detector != "edit" and not damped:
        counted = capped(counted, config.max_share)
    shares = [0.0] * len(verdicts)
    for i, share in zip(good, counted, strict=True):
        shares[i] = share
    return shares


def capped(shares: Sequence[float], most: float) -> list[float]:
    """Return the shares, which sum to 1, with none above most / M; what is cut is spread over the others, in proportion.

    The result is the one below the cap that is nearest to the shares in relative entropy (Warmuth and Kuzmin 2008, section 3).
    """
    limit, full = most / len(shares) if shares else 1.0, set[int]()
    result = list(shares)
    while over := {i for i, share in enumerate(result) if share > limit and i not in full}:
        full |= over
        others = [i for i in range(len(result)) if i not in full]
        left, rest = 1 - limit * len(full), math.fsum(shares[i] for i in others)
        for i in full:
            result[i] = limit
        for i in others:  # shares too small for a float get equal parts
            result[i] = shares[i] * (left / rest) if rest > 1e-12 else left / len(others)
    return result


def freshness(staleness: int, exponent: float) -> float:
    """Return (1 + s) ** -a: 1 for a contribution that is not stale (arXiv 1903.03934, section 5.2, the polynomial form)."""
    return power(1 + staleness, -exponent)


def _softmax(good: Sequence[int], norms: Sequence[float], inner_steps: Sequence[int], config: PenaltyConfig) -> list[float]:
    """Return exp(-(G - G_min) / T), unnormalised: the largest is 1, so the sum cannot underflow."""
    if not good:
        return []
    middle = median([norms[i] for i in good])
    values = [_entering(norms[i], inner_steps[i], middle, config.norm) for i in good]
    least = min(values)
    return [exp(-(value - least) / config.temperature) for value in values]


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
