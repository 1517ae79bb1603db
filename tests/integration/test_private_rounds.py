"""Differential privacy of organisations at a real coordinator: what peers see has noise, is counted first, and ends in time."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from aggregator.control.status import run_status
from aggregator.data import round_runner
from aggregator.storage.store import load_outer
from edit.codecs import decode
from edit.config.gaussian import gaussian_epsilon
from edit.errors import ConfigError
from edit.records import Commit, Verdict
from edit.rounds.events import Resume
from edit.trust.noise import SecretNoise
from editpb.audit_log import LogVerifier
from editpb.messages import Expel
from tests.support.loops import on_a_loop, until
from tests.support.served import SCHEMA, TOML, BarePeer, Served, found_run, new_folder, served

ATTEMPTS = 3  # that the budget below allows
MOST = 0.5 * (gaussian_epsilon(1e-5, ATTEMPTS, 8.0) + gaussian_epsilon(1e-5, ATTEMPTS + 1, 8.0))
PRIVATE = f"""[privacy]
level = "organisation"
delta = 1e-5
epsilon_max = {MOST}
noise_multiplier = 8.0
clip = 2.0
denominator = 50
"""


def deltas(value: float) -> list[Tensor]:
    return [torch.full((fragment.numel,), value) for fragment in SCHEMA.fragments]


def flat(commit: Commit) -> Tensor:
    """The whole update of a commit: with SGD and lr 1, D."""
    payloads = [fragment.payload for fragment in commit.fragments]
    return torch.cat([decode(payload) for payload in payloads if payload is not None])


def counted(folder: Path) -> int:
    """Attempts in the ledger, as a reader of the file sees it."""
    lines = (folder / "privacy-ledger.jsonl").read_text().splitlines()[1:]
    return sum(json.loads(line)["count"] for line in lines)


class Watched(SecretNoise):
    """Notes what was counted on disk when noise was made, and all that was drawn."""

    folder: Path
    made: list[int]
    drawn: list[npt.NDArray[np.float64]]
    then: list[Callable[[], None]]  # what happens once it is made

    def __init__(self) -> None:
        super().__init__()
        self.made.append(counted(self.folder))
        if self.then:
            self.then.pop()()

    def normal(self, count: int) -> npt.NDArray[np.float64]:
        self.drawn.append(super().normal(count))
        return self.drawn[-1].copy()


@pytest.fixture
def noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[Watched]:
    watched = type("Noise", (Watched,), {"folder": tmp_path / "run", "made": [], "drawn": [], "then": []})
    monkeypatch.setattr(round_runner, "SecretNoise", watched)
    return watched


async def attempt(run: Served, peers: Sequence[BarePeer], step: int, *values: float) -> None:
    view = await peers[0].view(lambda v: v.outer_step == step and v.round_id > 0)
    for peer, value in zip(peers, values, strict=True):
        await peer.contribute(view.round_id, step, deltas(value))


async def commit(run: Served, peers: Sequence[BarePeer], step: int, *values: float) -> Commit:
    await attempt(run, peers, step, *values)
    for peer in peers:
        await peer.view(lambda v: v.outer_step == step + 1)
        await peer.report(step + 1)
    return await peers[0].fetch(step + 1)


@on_a_loop
async def test_what_is_published_is_the_clipped_sum_with_noise_and_the_run_ends_within_its_budget(
    tmp_path: Path, noise: type[Watched], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder = new_folder(tmp_path / "run", start=2, toml=TOML + PRIVATE)
    async with served(folder) as run, run.peer("a") as a, run.peer("b") as b:
        await found_run(a, b)
        length = math.sqrt(305)
        for step in range(ATTEMPTS):
            found = await commit(run, (a, b), step, 0.01, 50.0)  # 0.17 and 873 long; S is 2
            expected = torch.full((305,), 0.01 + 2.0 / length).double()
            drawn = torch.from_numpy(np.concatenate(noise.drawn[-2:]))
            assert torch.allclose(flat(found).double(), (expected + 16.0 * drawn) / 50, rtol=1e-5, atol=1e-7)
            for fragment in found.fragments:
                said = [(each.peer_id, each.verdict, each.weight) for each in fragment.verdicts]
                assert said == [("a", Verdict.OK, 0.02), ("b", Verdict.OK, 0.02)]
                assert all(math.isnan(each.norm) for each in fragment.verdicts), "a norm has no noise"
        assert noise.made == [1, 2, 3], "each attempt was counted before its noise was made"
        assert len(np.unique(np.concatenate(noise.drawn))) == 305 * ATTEMPTS, "no noise is used twice"
        await until(lambda: run.coordinator.run.finished)
        status = run_status(run.coordinator.run)
        assert (status.phase, status.outer_step) == ("finished", ATTEMPTS)
        assert status.epsilon == pytest.approx(gaussian_epsilon(1e-5, ATTEMPTS, 8.0)) and status.epsilon <= MOST
        said = f"organisation-level, eps {status.epsilon:.4g} of at most {MOST:g} at delta 1e-05 (exact; 3 attempts counted)"
        assert status.privacy == said
        assert status.reason == f"privacy.epsilon_max = {MOST:g}: one more outer step would exceed it: {said}"
        assert status.reason in caplog.messages
        rounds = run.coordinator.run.rounds
        rounds.feed(Resume())
        assert run.coordinator.run.finished and rounds.machine.round_id == 0, "no operator makes it go on"
    assert counted(folder.path) == ATTEMPTS
    async with served(folder) as run:
        assert run.coordinator.run.finished and run_status(run.coordinator.run).reason.startswith("privacy.epsilon_max")


@on_a_loop
async def test_a_contribution_that_is_not_finite_counts_for_nothing_and_not_even_in_part(
    tmp_path: Path, noise: type[Watched]
) -> None:
    async with (
        served(new_folder(tmp_path / "run", start=2, toml=TOML + PRIVATE)) as run,
        run.peer("a") as a,
        run.peer("b") as b,
    ):
        view = await found_run(a, b)
        await a.contribute(view.round_id, 0, deltas(0.01))
        await b.contribute(view.round_id, 0, [deltas(0.01)[0], deltas(math.nan)[1]])
        await a.view(lambda v: v.outer_step == 1)
        found = await a.fetch(1)
        drawn = torch.from_numpy(np.concatenate(noise.drawn))
        assert torch.allclose(flat(found).double(), (0.01 + 16.0 * drawn) / 50, rtol=1e-5, atol=1e-7)
        for fragment in found.fragments:
            assert [(v.verdict, v.weight) for v in fragment.verdicts] == [(Verdict.OK, 0.02), (Verdict.NONFINITE, 0.0)]


@on_a_loop
async def test_an_attempt_that_is_aborted_counts_is_sealed_and_is_made_again_with_other_noise(
    tmp_path: Path, noise: type[Watched]
) -> None:
    """The disk is full once its noise is made."""
    folder = new_folder(tmp_path / "run", start=2, toml=TOML + PRIVATE)
    async with served(folder) as run, run.peer("a") as a, run.peer("b") as b:
        view = await found_run(a, b)
        noise.then.append(run.disk.fill)
        for peer in (a, b):
            await peer.contribute(view.round_id, 0, deltas(0.01))
        await a.view(lambda v: v.round_id > view.round_id)
        assert run_status(run.coordinator.run).rounds[-1].committed is False
        assert noise.made == [1] and counted(folder.path) == 1
        run.disk.full = False
        found = await commit(run, (a, b), 0, 0.01, 0.01)
        assert noise.made == [1, 2]
        drawn = torch.from_numpy(np.concatenate(noise.drawn[-2:]))
        assert torch.allclose(flat(found).double(), (0.02 + 16.0 * drawn) / 50, rtol=1e-5, atol=1e-7)
        assert not np.array_equal(noise.drawn[0][:5], noise.drawn[-2][:5])
        first = await a.view(lambda v: v.outer_step == 1 and v.round_id > 0)
        noise.then.append(run.disk.fill)
        for peer in (a, b):
            await peer.contribute(first.round_id, 1, deltas(0.01))
        await until(lambda: run.coordinator.run.finished)
        assert (counted(folder.path), run_status(run.coordinator.run).outer_step) == (ATTEMPTS, 1)


@on_a_loop
async def test_a_full_disk_costs_no_budget_however_often_a_round_is_tried(tmp_path: Path, noise: type[Watched]) -> None:
    folder = new_folder(tmp_path / "run", start=2, toml=TOML + PRIVATE)
    async with served(folder) as run, run.peer("a") as a, run.peer("b") as b:
        view, journal = await found_run(a, b), folder.outer / "step-00000000.journal"
        before = journal.read_bytes()
        run.disk.full = True
        round_id = view.round_id
        for _ in range(ATTEMPTS + 1):
            for peer in (a, b):
                await peer.contribute(round_id, 0, deltas(0.01))
            await until(lambda tried=round_id: run.coordinator.run.rounds.last_closed[0] == tried)
            why = run.coordinator.run.rounds.last_closed[2]
            assert why.endswith("step-00000000.journal: cannot be written (No space left on device)")
            run.coordinator.run.rounds.feed(Resume())  # the next one opens at once
            round_id = (await a.view(lambda v, tried=round_id: v.round_id > tried)).round_id
        assert (noise.made, counted(folder.path), journal.read_bytes()) == ([], 0, before)
        run.disk.full = False
        await commit(run, (a, b), 0, 0.01, 0.01)
        assert noise.made == [1] and counted(folder.path) == 1


# The ledger's write, its fsync; a fragment, the commit, never
@pytest.mark.parametrize("at", [0, 1, 2, 6, 8])
@on_a_loop
async def test_wherever_a_start_is_killed_no_less_is_counted_than_noise_was_made(
    at: int, tmp_path: Path, noise: type[Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the `at`-th write or fsync of the ledger and the journal on, none is carried out; then another start goes on."""
    folder, calls = new_folder(tmp_path / "run", start=2, toml=TOML + PRIVATE), 0
    watched = folder.privacy_ledger

    def dying(really: object) -> object:
        def call(descriptor: int, *arguments: object) -> object:
            nonlocal calls
            name = Path(f"/proc/self/fd/{descriptor}").readlink()
            if name == watched or name.suffix == ".journal":
                calls += 1
                if calls > at:
                    raise OSError(errno.EIO, "the machine is gone")
            return really(descriptor, *arguments)  # type: ignore[operator]

        return call

    async with served(folder, kill=True) as run, run.peer("a") as a, run.peer("b") as b:
        view = await found_run(a, b)
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", dying(os.write))
            patched.setattr(os, "fsync", dying(os.fsync))
            for peer in (a, b):
                await peer.contribute(view.round_id, 0, deltas(0.01))
            await until(lambda: run.coordinator.run.rounds.last_closed[0] == view.round_id)
            committed = run.coordinator.run.rounds.last_closed[1]
    before, made = counted(folder.path), len(noise.made)
    assert made <= before, "what was never made may be counted, but not the other way round"
    async with served(folder) as run, run.peer("a") as a, run.peer("b") as b:
        step = run.coordinator.run.rounds.published.outer_step
        assert step >= committed and run.coordinator.run.privacy.attempts == before
        for peer in (a, b):
            await peer.attend()
            await peer.report(step)
        await commit(run, (a, b), step, 0.01, 0.01)
        assert noise.made[-1] == before + 1 == counted(folder.path)
    assert load_outer(folder).outer_step == step + 1, "the journal has what was published, with its noise"


def entries(folder: Path) -> tuple[LogVerifier, list[dict[str, Any]]]:
    """The audit log of a run, verified."""
    log, lines = LogVerifier(), (folder / "audit-log.jsonl").read_bytes().splitlines()
    return log, [log.take(line) for line in lines]


@on_a_loop
async def test_the_log_says_what_each_commit_has_cost_and_no_norm(tmp_path: Path, noise: type[Watched]) -> None:
    folder = new_folder(tmp_path / "run", toml=TOML + PRIVATE.replace("50", "200") + "[audit]\nenabled = true\n")
    async with served(folder) as run, run.signing_peer("a") as (a, sign):
        await found_run(a)
        for step in range(2):
            view = await a.view(lambda v, step=step: v.outer_step == step and v.round_id > 0)
            await a.contribute_signed(sign, view.round_id, step, deltas(0.01))
            await a.view(lambda v, step=step: v.outer_step == step + 1)
            await a.report(step + 1)
    log, taken = entries(folder.path)
    commits = [entry for entry in taken if entry["kind"] == "commit"]
    cost = gaussian_epsilon(1e-5, 2, 8.0)
    assert log.privacy == f"organisation-level, eps {cost:.4g} at delta 1e-05, 2 attempts"
    for attempts, entry in enumerate(commits, start=1):
        said = entry["privacy"]
        assert (said["level"], said["attempts"], float.fromhex(said["delta"])) == ("organisation", attempts, 1e-5)
        assert float.fromhex(said["epsilon"]) == pytest.approx(gaussian_epsilon(1e-5, attempts, 8.0))
        for fragment in entry["fragments"]:
            assert [(v[0], math.isnan(float.fromhex(v[1]))) for v in fragment["verdicts"].values()] == [("ok", True)]
    assert len(commits) == 2


@on_a_loop
async def test_a_run_goes_on_neither_without_its_ledger_nor_without_noise(tmp_path: Path, noise: type[Watched]) -> None:
    folder = new_folder(tmp_path / "run", toml=TOML + PRIVATE)
    async with served(folder) as run, run.peer("a") as a:
        await found_run(a)
        await commit(run, [a], 0, 0.01)
    toml = folder.run_toml.read_text()
    folder.run_toml.write_text(toml.replace(PRIVATE, ""))
    with pytest.raises(ConfigError, match=r'privacy.level = "none": the run had "organisation" until now, .*privacy-ledger'):
        async with served(folder):
            pass
    folder.run_toml.write_text(toml)
    folder.privacy_ledger.unlink()
    with pytest.raises(ConfigError, match=r"privacy-ledger\.jsonl: counts 0 attempts, and the run has 1 outer steps: restore"):
        async with served(folder):
            pass


@on_a_loop
async def test_noise_that_drowns_everything_is_refused_before_the_founder_sends_anything(tmp_path: Path) -> None:
    """A model of the peers' own is known when they announce it."""
    folder = new_folder(tmp_path / "run", toml=TOML + PRIVATE.replace("denominator = 50", "denominator = 5"))
    async with served(folder) as run, run.peer("a") as a:
        await a.open_stream()
        said = await a.receive(Expel)
    assert isinstance(said, Expel) and not said.evicted
    assert "the noise of an outer step is 27.9 times as long as the longest contribution" in said.reason
    assert said.reason.endswith("or set privacy.accept_noise = true")
