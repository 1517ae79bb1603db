"""What a run with differential privacy of organisations has spent: a ledger of attempts, and the bound that ends the run.

An attempt at an outer step is counted, on disk, before anything is computed with its noise. So one that was aborted, or cut off
by a kill, counts as well, and what is made after a restart counts again: the ledger says too much, never too little.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from edit.config.run import RunConfig
from edit.errors import ConfigError, RefusedError, StorageError
from edit.trust.privacy import Spent, most_steps, spent_epsilon
from edit.trust.privacy_ledger import PrivacyLedger

__all__ = ["PrivacyBudget", "attempts_in"]


def attempts_in(path: Path) -> int:
    """Return how many attempts a ledger counts; 0 where there is none. Raises ConfigError, StorageError."""
    if not path.exists():
        return 0
    with contextlib.closing(PrivacyLedger(path, unit="organisation")) as ledger:
        return ledger.count


class PrivacyBudget:
    """The budget of one run. `reserve` is for the worker thread; the rest reads what it has left.

    path: of the ledger; where it is not there, `begin` makes it. Raises ConfigError, StorageError.
    """

    def __init__(self, path: Path, config: RunConfig) -> None:
        self._path, self._privacy, self._planned = path, config.privacy, config.sync.outer_steps
        self._ledger: PrivacyLedger | None = None
        self.spent: tuple[Spent, ...] = ()  # replaced in one go: the event loop reads it
        if path.exists():
            self._open()

    def begin(self) -> None:
        """Make the ledger where it is not there. Raises ConfigError, StorageError."""
        if self._ledger is None:
            self._open()

    def check(self, outer_step: int) -> None:
        """Raise ConfigError unless every outer step up to this one was counted."""
        if self.attempts < outer_step:
            raise ConfigError(
                f"{self._path}: counts {self.attempts} attempts, and the run has {outer_step} outer steps: restore the file; a "
                'run that began without privacy.level = "organisation" cannot have it later'
            )

    @property
    def attempts(self) -> int:
        """Those that were counted, committed or not."""
        return sum(each.count for each in self.spent)

    @property
    def epsilon(self) -> float:
        """Spent so far, at privacy.delta; exact."""
        return spent_epsilon(self.spent, self._privacy.delta)

    @property
    def used_up(self) -> str:
        """Why no other attempt may be made, or ''."""
        if spent_epsilon((*self.spent, self._one()), self._privacy.delta) <= self._privacy.epsilon_max:
            return ""
        return f"privacy.epsilon_max = {self._privacy.epsilon_max:g}: one more outer step would exceed it: {self.text}"

    @property
    def text(self) -> str:
        """`organisation-level, eps 1.53 of at most 4 at delta 1e-05 (exact; 10 attempts counted)`."""
        privacy = self._privacy
        most = f"of at most {privacy.epsilon_max:g} at delta {privacy.delta:g}"
        counted = f"{self.attempts} attempt{'' if self.attempts == 1 else 's'} counted"
        return f"organisation-level, eps {self.epsilon:.4g} {most} (exact; {counted})"

    @property
    def left(self) -> int:
        """How many attempts may still be made; counted no further than sync.outer_steps."""
        return most_steps(
            lambda steps: spent_epsilon((*self.spent, self._one(steps)), self._privacy.delta),
            self._privacy.epsilon_max,
            self._planned,
        )

    def said(self) -> dict[str, object]:
        """Return what the audit log has of it, beside each commit."""
        privacy = self._privacy
        return {
            "level": privacy.level,
            "epsilon": self.epsilon,
            "delta": privacy.delta,
            "attempts": self.attempts,
            "by": "exact",
        }

    def reserve(self) -> None:
        """Count one attempt, on disk when this returns.

        Raises RefusedError when it would exceed the budget, StorageError; the attempt must not be made then, and may count.
        """
        ledger = self._ledger or self._open()
        if reason := self.used_up:
            raise RefusedError(reason)
        try:
            ledger.reserve(self._one())
        except StorageError:
            self.close()  # opened again, it cuts off what the write has left
            raise
        self.spent = ledger.spent

    def close(self) -> None:
        """Close the file."""
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None

    def _one(self, count: int = 1) -> Spent:
        return Spent(sampling="all", rate=1.0, noise_multiplier=self._privacy.noise_multiplier, count=count)

    def _open(self) -> PrivacyLedger:
        ledger, before = PrivacyLedger(self._path, unit="organisation"), self.attempts
        with contextlib.ExitStack() as undo:
            undo.callback(ledger.close)
            if ledger.count < before:
                raise StorageError(f"{self._path}: {before} attempts were counted, and it has {ledger.count}; restore the file")
            undo.pop_all()
        self._ledger, self.spent = ledger, ledger.spent
        return ledger
