"""What commits say of differential privacy is no less than what the configurations in the log and their number come to."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edit.config.gaussian import composed_multiplier, gaussian_epsilon
from edit.trust.canonical import canonical, parse_canonical
from editpb.logged_privacy import LoggedPrivacy

DELTA = 1e-5


def text(noise: float = 2.0, **changes: object) -> str:
    privacy = {"level": "organisation", "delta": DELTA, "epsilon_max": 100.0, "noise_multiplier": noise, **changes}
    return json.dumps({"privacy": privacy, "of_a_later_version": 1})


def cost(*sums: tuple[float, int], delta: float = DELTA) -> float:
    return gaussian_epsilon(delta, 1, composed_multiplier(sums))


def said(attempts: int, epsilon: float, **changes: object) -> dict[str, Any]:
    part = {"level": "organisation", "epsilon": epsilon, "delta": DELTA, "attempts": attempts, "by": "exact", **changes}
    read: dict[str, Any] = parse_canonical(canonical(part))
    return read


def log(noise: float = 2.0) -> LoggedPrivacy:
    found = LoggedPrivacy()
    found.configure(text(noise))
    return found


def test_what_was_spent_is_taken_with_attempts_that_came_to_nothing() -> None:
    found = log()
    for attempts in (1, 2, 5, 6):
        found.commit(said(attempts, cost((2.0, attempts))))
        shown = f"eps {cost((2.0, attempts)):.4g} at delta 1e-05, {attempts} attempts"
        assert found.words == f"organisation-level, {shown}"


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (said(3, 0.999 * cost((2.0, 3))), r"says epsilon 3\.\d+, and 3 attempts cost 3\.\d+ at delta 1e-05"),
        (said(3, 0.0), "says epsilon 0, and 3 attempts cost"),
        (said(3, float("nan")), "says epsilon nan"),
        (said(3, float("inf")), "says epsilon inf"),
        (said(3, 100.0, delta=1e-9), "says delta 1e-09, and its configuration has 1e-05"),
        (said(1, 100.0), "counts 1 attempts, and the log has 2 commits with noise"),
        (said(3, 100.0, level="example"), "lacks what was spent"),
        (None, "lacks what was spent"),
    ],
)
def test_less_than_was_spent_is_found(part: dict[str, Any] | None, words: str) -> None:
    found = log()
    found.commit(said(1, cost((2.0, 1))))
    with pytest.raises(ValueError, match=words):
        found.commit(part)


def test_each_commit_costs_what_its_configuration_adds() -> None:
    found = log(2.0)
    found.commit(said(2, cost((2.0, 2))))
    found.configure(text(1.0))
    sums = (2.0, 3), (1.0, 1)  # two of three since then may have been made before the change
    with pytest.raises(ValueError, match="5 attempts cost"):
        found.commit(said(5, 0.99 * cost((2.0, 4), (1.0, 1))))
    found = log(2.0)
    found.commit(said(2, cost((2.0, 2))))
    found.configure(text(1.0))
    found.commit(said(4, cost(*sums)))
    with pytest.raises(ValueError, match="5 attempts cost"):
        found.commit(said(5, 0.99 * cost((2.0, 3), (1.0, 2))))


def test_attempts_before_the_log_or_where_it_lacks_commits_had_any_noise() -> None:
    found = log(1.0)
    found.gap()
    found.commit(said(10, cost((50.0, 9), (1.0, 1))))
    found.commit(said(11, cost((50.0, 9), (1.0, 2))))
    with pytest.raises(ValueError, match="3 attempts cost"):
        found.commit(said(12, 0.99 * cost((1.0, 3))))


def test_a_ledger_from_an_older_copy_is_told_with_what_the_log_knows() -> None:
    found = log()
    for attempts in (3, 4, 3, 6):
        found.commit(said(attempts, cost((2.0, attempts))))
    told = "more was spent, attempts of earlier commits are no longer counted"
    assert found.words.endswith(f"6 attempts: {told}: eps {cost((2.0, 7)):.4g} at least")
    with pytest.raises(ValueError, match="5 attempts cost"):
        found.commit(said(5, 0.99 * cost((2.0, 5))))


def test_the_bound_for_examples_is_the_configurations() -> None:
    found = LoggedPrivacy()
    found.configure(text(level="example", unit="document", epsilon_max=8.0))
    bound = {"level": "example", "unit": "document", "epsilon_max": 8.0, "delta": DELTA}
    for part in (parse_canonical(canonical(bound)), None):  # which the first versions left out
        found.commit(part)
        assert found.words == "example-level, eps of each peer at most 8 at delta 1e-05"
    for change in ({"epsilon_max": 1.0}, {"delta": 1e-9}, {"unit": "sequence"}, {"level": "organisation"}):
        with pytest.raises(ValueError, match="another bound"):
            found.commit(parse_canonical(canonical({**bound, **change})))


def test_no_privacy_is_none() -> None:
    found = LoggedPrivacy()
    found.configure("{}")
    found.commit(None)
    assert not found.words
    with pytest.raises(ValueError, match="speaks of differential privacy, of which its configuration has none"):
        found.commit(said(1, 1.0))


@pytest.mark.parametrize(
    ("configuration", "words"),
    [
        ("[]", "is no table"),
        ('{"privacy": 1}', "is no table"),
        (text(noise=0.0), r"no privacy\.noise_multiplier"),
        (text(delta="x"), "privacy.delta"),
        ("{", "Expecting property name"),
    ],
)
def test_a_configuration_that_is_none_is_a_fault(configuration: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LoggedPrivacy().configure(configuration)
