"""The budget of a run with noise: it counts before it allows, says too much after a failure, and ends where it must."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from aggregator.storage.privacy_budget import PrivacyBudget
from edit.config.gaussian import gaussian_epsilon
from edit.config.run import RunConfig
from edit.errors import ConfigError, RefusedError, StorageError
from edit.trust.privacy import Spent
from edit.trust.privacy_ledger import PrivacyLedger


def configured(epsilon: float = 4.0, noise: float = 8.0, **sections: Any) -> RunConfig:
    privacy = {"level": "organisation", "delta": 1e-5, "epsilon_max": epsilon, "noise_multiplier": noise}
    return RunConfig.from_mapping({"penalty": {"enabled": False}, "privacy": privacy, **sections})


def opened(path: Path, config: RunConfig | None = None) -> PrivacyBudget:
    budget = PrivacyBudget(path / "privacy-ledger.jsonl", config or configured())
    budget.begin()
    return budget


def test_attempts_add_up_over_starts_and_the_last_that_fits_is_the_last(tmp_path: Path) -> None:
    """The table: z 8, delta 1e-5, 50 outer steps cost 3.80."""
    budget = opened(tmp_path)
    assert (budget.attempts, budget.epsilon, budget.used_up) == (0, 0.0, "")
    allowed = budget.left
    assert 50 < allowed < 100
    for _ in range(50):
        budget.reserve()
    budget.close()
    again = opened(tmp_path)
    assert again.attempts == 50 and again.epsilon == pytest.approx(3.80, abs=0.005) and again.left == allowed - 50
    assert again.text == "organisation-level, eps 3.797 of at most 4 at delta 1e-05 (exact; 50 attempts counted)"
    for _ in range(allowed - 50):
        assert not again.used_up
        again.reserve()
    assert again.epsilon <= 4.0 < gaussian_epsilon(1e-5, allowed + 1, 8.0) and again.left == 0
    assert again.used_up == f"privacy.epsilon_max = 4: one more outer step would exceed it: {again.text}"
    with pytest.raises(RefusedError, match="one more outer step would exceed it"):
        again.reserve()
    assert again.attempts == allowed
    again.close()


def test_noise_that_was_changed_counts_as_it_was(tmp_path: Path) -> None:
    for noise, count in ((8.0, 10), (16.0, 40)):
        budget = opened(tmp_path, configured(noise=noise))
        for _ in range(count):
            budget.reserve()
        budget.close()
    budget = opened(tmp_path)
    assert budget.attempts == 50 and budget.epsilon == pytest.approx(gaussian_epsilon(1e-5, 20, 8.0))
    budget.close()


def test_a_write_that_fails_is_no_attempt_and_the_next_one_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = opened(tmp_path)
    budget.reserve()

    room = [5]

    def full(descriptor: int, data: memoryview) -> int:
        return really(descriptor, data[: room.pop()]) if room else _no_space()

    really = os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(StorageError, match="No space left on device"):
            budget.reserve()
    assert budget.attempts == 1 and not room, "a part of the line is there"
    budget.reserve()
    assert budget.attempts == 2
    budget.close()
    assert opened(tmp_path).attempts == 2


def _no_space() -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_what_cannot_be_synced_does_not_count_however_often_it_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = opened(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda descriptor: _no_space())
        for _ in range(3):
            with pytest.raises(StorageError):
                budget.reserve()
    budget.reserve()
    assert budget.attempts == 1
    budget.close()


def test_a_ledger_that_lost_attempts_is_not_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = opened(tmp_path)
    budget.reserve()
    budget.check(1)
    with pytest.raises(
        ConfigError, match=r"counts 1 attempts, and the run has 2 outer steps: restore the file; a run that beg"
    ):
        budget.check(2)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda descriptor: _no_space())
        with pytest.raises(StorageError):
            budget.reserve()
    (tmp_path / "privacy-ledger.jsonl").unlink()
    with pytest.raises(StorageError, match="1 attempts were counted, and it has 0; restore the file"):
        budget.reserve()
    assert budget.attempts == 1


def test_the_ledger_of_a_peer_is_not_a_runs(tmp_path: Path) -> None:
    ledger = PrivacyLedger(tmp_path / "privacy-ledger.jsonl")
    ledger.reserve(Spent(sampling="poisson", rate=0.1, noise_multiplier=1.0, count=5))
    ledger.close()
    with pytest.raises(ConfigError, match="its steps count for each sequence, and now they would for each organisation"):
        opened(tmp_path)
    PrivacyLedger(tmp_path / "privacy-ledger.jsonl").close()  # it was let go of
