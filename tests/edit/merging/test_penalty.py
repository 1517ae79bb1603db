"""The penalty: weights; the detector "edit", and the defects T1, T2 and T10 of the EDiT authors' code."""

import dataclasses
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edit.config.run import PenaltyConfig
from edit.merging.penalty import NormStatistics, judge, observe, verdicts, weights
from edit.records import Verdict
from edit.reference import stale_weights
from tests.support.exhaustive import examples

CONFIG = PenaltyConfig(norm="raw", detector="edit")
NORMS = st.floats(1e-6, 1e6)


def after(norms: list[float], config: PenaltyConfig = CONFIG) -> NormStatistics:
    """Statistics after norms judged one by one, the bad ones left out, as in a run."""
    statistics = NormStatistics()
    for norm in norms:
        if judge(norm, statistics, config) is Verdict.OK:
            statistics = observe(norm, statistics, config)
    return statistics


def noisy(count: int, mean: float = 2.0, spread: float = 0.05, seed: int = 0) -> list[float]:
    generator = random.Random(seed)
    return [generator.gauss(mean, spread) for _ in range(count)]


def share(verdict: list[Verdict], norms: list[float], config: PenaltyConfig, steps: list[int] | None = None) -> list[float]:
    return weights(verdict, norms, steps or [1] * len(norms), [1] * len(norms), config)


def test_t1_an_anomaly_is_not_absorbed_so_the_next_one_is_seen() -> None:
    statistics = after(noisy(50))
    assert judge(1e6, statistics, CONFIG) is Verdict.ANOMALOUS
    statistics = after([*noisy(50), 1e6, 1e6])
    assert statistics == after(noisy(50))
    assert judge(4.0, statistics, CONFIG) is Verdict.ANOMALOUS
    assert judge(2.0, statistics, CONFIG) is Verdict.OK


@pytest.mark.parametrize("norm", [math.nan, math.inf])
@pytest.mark.parametrize("history", [0, 50])
@pytest.mark.parametrize("enabled", [True, False])
def test_t2_what_is_not_finite_is_flagged_from_the_first_round_and_weighs_nothing(
    norm: float, history: int, enabled: bool
) -> None:
    config = PenaltyConfig(enabled=enabled, detector="edit")
    judged = verdicts({"a": norm, "b": 2.0}, {"a": after(noisy(history))}, config)
    assert judged == {"a": Verdict.NONFINITE, "b": Verdict.OK}
    assert share([judged["a"], judged["b"]], [norm, 2.0], config) == [0.0, 1.0]


def test_t10_the_start_is_bias_corrected() -> None:
    """The authors' detector starts from zero: after 120 rounds of norm 1 it flags nothing below 1.76. Ours sees 1.2 after W."""
    statistics = after([1.0] * CONFIG.observations)
    assert statistics.mean == pytest.approx(1.0) and statistics.variance == pytest.approx(0.0, abs=1e-12)
    assert judge(1.2, statistics, CONFIG) is Verdict.ANOMALOUS
    spread = after(noisy(120, mean=1.0, spread=0.02, seed=3))
    assert spread.mean == pytest.approx(1.0, abs=0.02)
    assert judge(1.2, spread, CONFIG) is Verdict.ANOMALOUS
    assert judge(1.03, spread, CONFIG) is Verdict.OK


def test_equal_norms_do_not_make_rounding_an_anomaly() -> None:
    statistics = after([1.0] * 100)
    assert judge(1.0 + 1e-6, statistics, CONFIG) is Verdict.OK
    assert judge(1.0029, statistics, CONFIG) is Verdict.OK
    assert judge(1.01, statistics, CONFIG) is Verdict.ANOMALOUS


def test_nothing_is_anomalous_before_w_observations_and_small_norms_never_are() -> None:
    early, late = after([1.0] * (CONFIG.observations - 1)), after([1.0] * CONFIG.observations)
    assert judge(1e9, early, CONFIG) is Verdict.OK
    assert judge(1e9, late, CONFIG) is Verdict.ANOMALOUS
    assert judge(0.0, late, CONFIG) is Verdict.OK


def test_the_verdict_uses_the_statistics_from_before_the_norm() -> None:
    """With alpha 1 the statistics are the last norm alone: had the new one been absorbed first, its z-score would be 0."""
    config = PenaltyConfig(alpha=1.0, observations=1, detector="edit")
    assert judge(5.0, after([1.0], config), config) is Verdict.ANOMALOUS


@given(norms=st.lists(NORMS, min_size=1, max_size=60), alpha=st.floats(1e-6, 1.0))
@settings(deadline=None, max_examples=examples(150))
def test_observe_is_the_bias_corrected_moving_average(norms: list[float], alpha: float) -> None:
    """Against the textbook form: the uncorrected average from zero, divided by 1 - (1 - alpha)^n."""
    config, statistics = PenaltyConfig(alpha=alpha), NormStatistics()
    mean = square = remaining = 0.0
    remaining = 1.0
    for norm in norms:
        statistics = observe(norm, statistics, config)
        remaining *= 1 - alpha
        mean = (1 - alpha) * mean + alpha * norm
        square = (1 - alpha) * square + alpha * (norm - mean / (1 - remaining)) ** 2
    assert statistics.count == len(norms)
    rounding = 1e-14 * max(norms)  # what is left of a large norm by a rate of 1 is its rounding
    assert statistics.mean == pytest.approx(mean / (1 - remaining), rel=1e-6, abs=rounding)
    assert statistics.variance == pytest.approx(square / (1 - remaining), rel=1e-4, abs=1e-6 * max(norms) ** 2)


def test_idle_is_a_norm_far_below_the_rounds_median_among_at_least_three() -> None:
    ok, idle = Verdict.OK, Verdict.IDLE
    assert verdicts({"a": 0.0, "b": 1.0, "c": 1.2}, {}, CONFIG) == {"a": idle, "b": ok, "c": ok}
    assert verdicts({"a": 0.0, "b": 1.0}, {}, CONFIG) == {"a": ok, "b": ok}
    assert verdicts({"a": 0.0, "b": 1.0, "c": math.nan}, {}, CONFIG)["a"] is ok
    assert verdicts({"a": 0.011, "b": 1.0, "c": 1.2}, {}, CONFIG)["a"] is ok
    assert verdicts({"a": 0.0, "b": 0.0, "c": 0.0}, {}, CONFIG) == {"a": ok, "b": ok, "c": ok}
    assert verdicts({"a": 0.0, "b": 1.0, "c": 1.2}, {}, PenaltyConfig(idle_ratio=0.0, detector="edit"))["a"] is ok
    assert verdicts({"a": 0.0, "b": 1.0, "c": 1.2}, {}, PenaltyConfig(enabled=False))["a"] is ok


def test_an_anomalous_norm_is_anomalous_though_it_is_the_rounds_smallest() -> None:
    history = {"a": after([0.001] * 20)}
    assert verdicts({"a": 0.005, "b": 1.0, "c": 1.0}, history, CONFIG)["a"] is Verdict.ANOMALOUS


@given(
    entries=st.lists(
        st.tuples(st.sampled_from(list(Verdict)), st.floats(0, 1e30), st.integers(0, 1000), st.integers(0, 10**9)), max_size=8
    ),
    config=st.sampled_from(
        [PenaltyConfig(norm=rule) for rule in ("raw", "per_sqrt_step", "relative")]
        + [PenaltyConfig(enabled=False, weighting=rule) for rule in ("uniform", "tokens", "tokens2_per_step")]
    ),
)
@settings(deadline=None, max_examples=examples(300))
def test_weights_are_shares_of_the_good_ones_only(
    entries: list[tuple[Verdict, float, int, int]], config: PenaltyConfig
) -> None:
    judged = [entry[0] for entry in entries]
    shares = weights(judged, [e[1] for e in entries], [e[2] for e in entries], [e[3] for e in entries], config)
    assert all(0 <= share <= 1 for share in shares)
    assert all(share == 0 for share, verdict in zip(shares, judged, strict=True) if verdict is not Verdict.OK)
    assert sum(shares) == pytest.approx(1.0 if Verdict.OK in judged else 0.0)


def test_raw_weights_are_the_papers() -> None:
    """exp(-G) / sum exp(-G): G 3 against 1 gives the slow peer 0.88 (arXiv 2412.07210)."""
    assert share([Verdict.OK] * 2, [3.0, 1.0], CONFIG)[1] == pytest.approx(1 / (1 + math.exp(-2)))
    warm = share([Verdict.OK] * 2, [3.0, 1.0], PenaltyConfig(norm="raw", temperature=4.0, detector="edit"))
    assert warm[1] == pytest.approx(1 / (1 + math.exp(-0.5)))


def test_per_sqrt_step_lets_a_slow_peer_weigh_the_same() -> None:
    config = PenaltyConfig(norm="per_sqrt_step")
    assert share([Verdict.OK] * 2, [2.0, 1.0], config, steps=[64, 16]) == pytest.approx([0.5, 0.5])
    assert sum(share([Verdict.OK] * 2, [2.0, 1.0], config, steps=[0, 0])) == pytest.approx(1.0)


def test_relative_does_not_depend_on_the_models_scale() -> None:
    config = PenaltyConfig(norm="relative", detector="edit")
    small = share([Verdict.OK] * 3, [1.0, 2.0, 3.0], config)
    assert share([Verdict.OK] * 3, [1e3, 2e3, 3e3], config) == pytest.approx(small)
    assert small[0] == pytest.approx(math.exp(-0.5) / (math.exp(-0.5) + math.exp(-1) + math.exp(-1.5)))


def test_relative_takes_the_median_of_the_good_ones_and_zero_makes_it_uniform() -> None:
    config, ok, bad = PenaltyConfig(norm="relative"), Verdict.OK, Verdict.ANOMALOUS
    assert share([ok, ok, bad], [1.0, 1.0, 1e6], config) == pytest.approx([0.5, 0.5, 0.0])
    assert share([ok, ok, ok], [0.0, 0.0, 5.0], config) == pytest.approx([1 / 3] * 3)


def test_without_the_penalty_weights_are_uniform_or_by_tokens() -> None:
    ok = [Verdict.OK] * 2
    assert weights(ok, [9.0, 1.0], [1, 1], [300, 100], PenaltyConfig(enabled=False)) == [0.5, 0.5]
    by_tokens = PenaltyConfig(enabled=False, weighting="tokens")
    assert weights(ok, [9.0, 1.0], [1, 1], [300, 100], by_tokens) == [0.75, 0.25]
    assert weights(ok, [9.0, 1.0], [1, 1], [0, 0], by_tokens) == [0.5, 0.5]


def test_a_gap_beyond_floating_point_gives_all_to_the_smallest() -> None:
    assert share([Verdict.OK] * 2, [1e9, 1.0], CONFIG) == [0.0, 1.0]


def test_tokens2_per_step_is_tokens_times_tokens_per_step() -> None:
    """arXiv 2604.21428: a peer with twice the batch and half the steps has the same tokens and twice the weight."""
    ok, config = [Verdict.OK] * 2, PenaltyConfig(enabled=False, weighting="tokens2_per_step")
    assert weights(ok, [9.0, 1.0], [10, 5], [1000, 1000], config) == pytest.approx([1 / 3, 2 / 3])
    assert weights(ok, [9.0, 1.0], [10, 20], [1000, 2000], config) == pytest.approx([1 / 3, 2 / 3])
    assert weights(ok, [9.0, 1.0], [0, 0], [0, 0], config) == [0.5, 0.5]


CONFIGS = [
    CONFIG,
    PenaltyConfig(detector="edit"),
    PenaltyConfig(enabled=False),
    PenaltyConfig(enabled=False, weighting="tokens"),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_what_is_stale_counts_less(config: PenaltyConfig) -> None:
    arguments = [Verdict.OK] * 3, [1.0, 2.0, 3.0], [5, 6, 7], [50, 60, 70]
    fresh = weights(*arguments, config)
    assert weights(*arguments, config, [0, 1, 8]) == pytest.approx(stale_weights(fresh, [0, 1, 8], config.staleness))
    assert weights(*arguments, config, [4, 4, 4]) == pytest.approx(fresh)
    assert weights(*arguments, config, [0, 3, 8], damped=True) == fresh, "every arrival is stale by the others' number"
    damped = weights(*arguments, dataclasses.replace(config, damping=0.5), [0, 3, 8], damped=True)
    assert damped == pytest.approx([fresh[0], fresh[1] / 2, fresh[2] / 3]), "4 ** -0.5 and 9 ** -0.5"


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("damped", [False, True])
def test_nothing_stale_changes_no_bit(config: PenaltyConfig, damped: bool) -> None:
    arguments = [Verdict.OK] * 3, [1.0, 2.7, 3.1], [5, 6, 7], [50, 60, 70]
    assert weights(*arguments, config, [0, 0, 0], damped) == weights(*arguments, config)


def test_the_extremes_of_staleness_still_leave_shares() -> None:
    config = PenaltyConfig(norm="raw", staleness=10.0, detector="edit")
    assert weights([Verdict.OK] * 2, [1.0, 1e9], [1, 1], [1, 1], config, [1 << 20, 0]) == [1.0, 0.0]
