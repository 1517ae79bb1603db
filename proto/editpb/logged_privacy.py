"""What the commits of an audit log say of differential privacy, held to the configurations in the same log.

With privacy.level = "example" a commit repeats the bound that each peer keeps for itself. With "organisation" it has epsilon,
delta, and the attempts counted so far. What these have cost at least follows from the log: each commit is an attempt with the
noise of its configuration; further ones since the commit before had at most the largest noise of the configurations since. Of
attempts before the log, or where it lacks commits, the noise is not known; they count for nothing here.

A ledger that was restored from an older copy counts fewer attempts than a commit before, but no fewer than there are commits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from edit.config.gaussian import composed_multiplier, gaussian_delta, gaussian_epsilon
from edit.config.privacy import PrivacyConfig
from edit.config.validation import build
from edit.errors import ConfigError
from edit.plain_text import parse_json
from edit.trust.canonical import canonical, parse_canonical

__all__ = ["LoggedPrivacy", "bound_of"]

_ROUNDING = 1e-6  # of epsilon, which is computed to 1e-9
_KNOWN = {each.name for each in fields(PrivacyConfig)}


def bound_of(privacy: PrivacyConfig) -> dict[str, object]:
    """Return what a commit says of the bound that each peer keeps for its examples."""
    return {"level": privacy.level, "unit": privacy.unit, "epsilon_max": privacy.epsilon_max, "delta": privacy.delta}


class LoggedPrivacy:
    """What was said so far, entry by entry. Raises ValueError, KeyError, TypeError for what does not fit."""

    def __init__(self) -> None:
        self.words = ""  # what the last commit says
        self._privacy: PrivacyConfig | None = None  # of the present configuration; None: the log does not have it
        self._sums = Counter[float]()  # attempts of which the noise is known, by the least noise that they cost
        self._commits, self._attempts = 0, 0  # with noise of the coordinator; the most that one of them counts
        self._since = 0.0  # the largest noise since the last commit
        self._largest = 0.0  # and of all configurations
        self._gap = False  # whether attempts since the last commit may have had other noise
        self._had_gap = False
        self._lost = False  # whether the ledger has lost attempts

    def configure(self, text: str) -> None:
        """Take a configuration as aggregators send it, also one with settings of other versions."""
        values = parse_json(text)
        section = values.get("privacy", {}) if isinstance(values, Mapping) else None
        if not isinstance(section, Mapping):
            raise ValueError("the configuration is no table, or its section privacy is none")
        try:
            self._privacy = build(PrivacyConfig, {key: section[key] for key in section if key in _KNOWN}, "privacy.")
        except ConfigError as error:
            raise ValueError(f"the configuration: {error}") from error
        if self._privacy.of_organisations:
            if not self._privacy.noise_multiplier > 0:
                raise ValueError('the configuration has privacy.level = "organisation", and no privacy.noise_multiplier')
            self._since = max(self._since, self._privacy.noise_multiplier)
            self._largest = max(self._largest, self._privacy.noise_multiplier)

    def gap(self) -> None:
        """The log lacks commits, or begins after some."""
        self._gap = self._had_gap = True

    def commit(self, said: Mapping[str, Any] | None) -> None:
        """Take the part of a commit; None: it has none."""
        privacy = self._privacy
        if privacy is None:
            self.words = "" if said is None else _bounded(str(said["level"]), *_floats(said, "epsilon_max", "delta"))
        elif privacy.of_organisations:
            if said is None or said["level"] != privacy.level:
                raise ValueError('lacks what was spent, though its configuration has privacy.level = "organisation"')
            self._spent(privacy, said)
        elif privacy.of_examples:  # the first versions left it out
            if said is not None and said != parse_canonical(canonical(bound_of(privacy))):
                raise ValueError("says another bound for the examples of each peer than its configuration")
            self.words = _bounded(privacy.level, privacy.epsilon_max, privacy.delta)
        elif said is not None:
            raise ValueError("speaks of differential privacy, of which its configuration has none")
        else:
            self.words = ""

    def _spent(self, privacy: PrivacyConfig, said: Mapping[str, Any]) -> None:
        (epsilon, delta), attempts = _floats(said, "epsilon", "delta"), said["attempts"]
        if delta != privacy.delta:
            raise ValueError(f"says delta {delta:g}, and its configuration has {privacy.delta:g}")
        self._commits += 1
        if type(attempts) is not int or attempts < self._commits:
            raise ValueError(f"counts {attempts} attempts, and the log has {self._commits} commits with noise")
        further = attempts - self._attempts - 1
        self._lost |= further < 0
        self._sums[privacy.noise_multiplier] += 1
        if further > 0 and not self._gap:
            self._sums[self._since] += further
        self._attempts, self._since, self._gap = max(attempts, self._attempts), privacy.noise_multiplier, False
        least = self._sums
        if self._lost:  # which attempts the ledger still has is not known
            least = Counter() if self._had_gap else Counter({self._largest: self._commits})
        self._check(epsilon, delta, least)
        self.words = f"{privacy.level}-level, eps {epsilon:.4g} at delta {delta:g}, {attempts} attempts"
        if self._lost:
            cost = gaussian_epsilon(delta, 1, composed_multiplier(self._sums.items()))
            self.words += f": more was spent, attempts of earlier commits are no longer counted: eps {cost:.4g} at least"

    def _check(self, epsilon: float, delta: float, least: Counter[float]) -> None:
        """Raise ValueError where epsilon is less than these attempts cost."""
        if not (math.isfinite(epsilon) and epsilon >= 0):
            raise ValueError(f"says epsilon {epsilon}")
        noise = composed_multiplier(least.items())
        if gaussian_delta(epsilon * (1 + _ROUNDING) + _ROUNDING, 1, noise) > delta:
            cost = gaussian_epsilon(delta, 1, noise)
            raise ValueError(f"says epsilon {epsilon:.4g}, and {least.total()} attempts cost {cost:.4g} at delta {delta:g}")


def _floats(said: Mapping[str, Any], *names: str) -> list[float]:
    return [float.fromhex(said[name]) for name in names]


def _bounded(level: str, epsilon: float, delta: float) -> str:
    return f"{level}-level, eps of each peer at most {epsilon:.4g} at delta {delta:g}"
