"""Epsilon against tables, against a second method, and against itself: the exact form and dp-accounting must agree."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edit.config.gaussian import gaussian_delta, gaussian_epsilon, gaussian_multiplier
from edit.errors import ConfigError
from edit.trust.privacy import Accountant, Spent, most_steps

# Sampled examples: number of them, batch, steps, delta; epsilon for each noise multiplier, by a run of dp-accounting 0.6.0.
EXAMPLES = [
    (10_000, 64, 2_000, 4.0e-5, {0.6: 5.89, 0.8: 2.40, 1.0: 1.43, 1.5: 0.73}),
    (100_000, 256, 10_000, 3.2e-6, {0.6: 5.95, 0.8: 2.34, 1.0: 1.44, 1.5: 0.78}),
    (1_000_000, 1_024, 10_000, 2.5e-7, {0.6: 3.62, 0.8: 1.11, 1.0: 0.64, 1.5: 0.38}),
]
SHUFFLED = [(10_000, 64, 2_000, 4.0e-5, 20.1), (100_000, 256, 10_000, 3.2e-6, 35.3), (1_000_000, 1_024, 10_000, 2.5e-7, 21.6)]
# Organisations, delta 1e-5: epsilon by noise multiplier and number of outer steps.
ORGANISATIONS = {
    2: {10: 7.51, 50: 20.7, 100: 33.1, 500: 109, 1000: 192},
    8: {10: 1.53, 50: 3.80, 100: 5.68, 500: 15.2, 1000: 24.0},
    32: {10: 0.34, 50: 0.81, 100: 1.18, 500: 2.90, 1000: 4.32},
}
MULTIPLIERS = {1: {20: 16.7, 100: 37.3, 500: 83.4}, 4: {20: 4.8, 100: 10.8, 500: 24.2}, 8: {20: 2.7, 100: 6.0, 500: 13.4}}


def poisson(rate: float, noise: float, count: int) -> Spent:
    return Spent(sampling="poisson", rate=rate, noise_multiplier=noise, count=count)


def passes(noise: float, count: int) -> Spent:
    return Spent(sampling="shuffle", rate=1.0, noise_multiplier=noise, count=count)


@pytest.mark.parametrize(("examples", "batch", "steps", "delta", "table"), EXAMPLES)
def test_steps_on_sampled_examples_cost_what_the_table_says(
    examples: int, batch: int, steps: int, delta: float, table: dict[float, float]
) -> None:
    accountant = Accountant(delta)
    for noise, epsilon in table.items():
        assert accountant.epsilon([poisson(batch / examples, noise, steps)]) == pytest.approx(epsilon, rel=0.01, abs=0.005)


@pytest.mark.parametrize(("examples", "batch", "steps", "delta", "epsilon"), SHUFFLED)
def test_shuffled_passes_are_not_amplified(examples: int, batch: int, steps: int, delta: float, epsilon: float) -> None:
    count = -(-steps * batch // examples)
    assert Accountant(delta).epsilon([passes(1.0, count)]) == pytest.approx(epsilon, rel=0.01)
    assert gaussian_epsilon(delta, count, 1.0) == pytest.approx(epsilon, rel=0.01)


def test_another_method_gives_more_but_not_much_more() -> None:
    from dp_accounting import dp_event
    from dp_accounting.rdp import RdpAccountant

    rdp = RdpAccountant()
    rdp.compose(dp_event.PoissonSampledDpEvent(0.0064, dp_event.GaussianDpEvent(1.0)), 2000)
    assert rdp.get_epsilon(4e-5) == pytest.approx(1.63, rel=0.01)
    assert 1.4 < Accountant(4e-5).epsilon([poisson(0.0064, 1.0, 2000)]) < 1.63


def test_what_was_spent_adds_up_over_kinds_and_starts() -> None:
    accountant = Accountant(1e-5)
    once = accountant.epsilon([poisson(0.01, 1.0, 1000)])
    halves = accountant.epsilon([poisson(0.01, 1.0, 400), poisson(0.01, 1.0, 600)])
    assert halves == pytest.approx(once, rel=1e-3)
    assert accountant.epsilon([poisson(0.01, 1.0, 1000), passes(4.0, 1)]) > once
    assert accountant.epsilon([]) == 0.0 == accountant.epsilon([poisson(0.01, 1.0, 0)])


@pytest.mark.parametrize("noise", ORGANISATIONS)
def test_a_sum_with_noise_costs_what_the_table_says(noise: int) -> None:
    for steps, epsilon in ORGANISATIONS[noise].items():
        assert gaussian_epsilon(1e-5, steps, noise) == pytest.approx(epsilon, rel=0.01, abs=0.005)


@pytest.mark.parametrize("epsilon", MULTIPLIERS)
def test_the_noise_for_a_target_is_the_tables(epsilon: int) -> None:
    for steps, noise in MULTIPLIERS[epsilon].items():
        found = gaussian_multiplier(epsilon, 1e-5, steps)
        assert found == pytest.approx(noise, abs=0.051)
        assert gaussian_epsilon(1e-5, steps, found) <= epsilon * (1 + 1e-6)


@given(st.integers(1, 10_000), st.floats(0.3, 100), st.sampled_from([1e-12, 1e-9, 1e-5, 1e-2]))
def test_the_exact_form_is_its_own_inverse_and_errs_upwards(steps: int, noise: float, delta: float) -> None:
    epsilon = gaussian_epsilon(delta, steps, noise)
    assert gaussian_delta(epsilon, steps, noise) <= delta
    if epsilon > 0:
        assert gaussian_delta(epsilon * (1 - 1e-6), steps, noise) > delta * (1 - 1e-9)


def test_the_exact_form_and_the_distribution_agree() -> None:
    for steps, noise in ((1, 1.0), (20, 2.0), (500, 16.0)):
        exact, computed = gaussian_epsilon(1e-6, steps, noise), Accountant(1e-6).epsilon([passes(noise, steps)])
        assert exact * (1 - 1e-4) <= computed <= exact * 1.02


@given(st.integers(0, 300), st.integers(0, 300))
def test_most_steps_is_the_last_one_within_the_budget(planned: int, within: int) -> None:
    asked: list[int] = []

    def epsilon(steps: int) -> float:
        asked.append(steps)
        return float(steps)

    assert most_steps(epsilon, within, planned) == min(planned, within)
    assert len(asked) <= 4 + planned.bit_length() and max(asked, default=0) <= max(1, 8 * within)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ConfigError, match=r"pip install 'edit-localsgd\[dp\]'$"):
        Accountant(1e-5)
