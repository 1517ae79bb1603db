"""`edit-coordinator init`: for how many peers a run is made."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import aggregator.cli
from aggregator.cli import app
from aggregator.security.authority import Authority
from aggregator.storage.state_folder import StateFolder
from edit import durable_files
from edit.errors import ConfigError, StorageError
from tests.support.full_disk import FullDisk


def init(path: Path, *options: str, answer: str = "") -> Result:
    return CliRunner().invoke(app, ["init", "--state", str(path), *options], input=answer)


def waits_for(path: Path) -> tuple[int, int]:
    rounds = StateFolder(path).config().rounds
    return rounds.start_peers, rounds.quorum


def test_the_first_round_waits_for_so_many_peers_and_every_round_for_half(tmp_path: Path) -> None:
    for peers, expected in ((None, (1, 1)), ("1", (1, 1)), ("2", (2, 1)), ("5", (5, 3))):
        path = tmp_path / str(peers)
        assert init(path, *(("--peers", peers) if peers else ())).exit_code == 0
        assert waits_for(path) == expected


def test_where_h_changes_it_says_how_many_inner_steps_the_run_has(tmp_path: Path) -> None:
    said = init(tmp_path / "a", "--preset", "muloco-warmup", "--set", "sync.outer_steps=156").output
    assert "steps       156 outer steps: 120 with H 1, 36 with H 30; 1200 inner steps\n" in said
    assert "inner steps" not in init(tmp_path / "b", "--preset", "muloco").output


def test_on_a_terminal_it_asks_and_elsewhere_it_never_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "How many" not in init(tmp_path / "piped", answer="7\n").output
    assert waits_for(tmp_path / "piped") == (1, 1)
    monkeypatch.setattr(aggregator.cli, "_on_a_terminal", lambda: True)
    assert "How many peers" in init(tmp_path / "asked", answer="3\n").output
    assert waits_for(tmp_path / "asked") == (3, 2)
    assert "How many" not in init(tmp_path / "told", "--peers", "2", answer="7\n").output
    again = init(tmp_path / "told", answer="7\n")
    assert "already holds a run" in str(again.exception) and "How many" not in again.output


def test_what_contradicts_is_refused(tmp_path: Path) -> None:
    run_toml = tmp_path / "run.toml"
    run_toml.write_text("[rounds]\nquorum = 2\n")
    refused = init(tmp_path / "a", "--config", str(run_toml), "--peers", "2").exception
    assert isinstance(refused, ConfigError) and "--peers has no effect with --config" in str(refused)
    above = init(tmp_path / "b", "--config", str(run_toml)).exception
    assert isinstance(above, ConfigError)
    assert "rounds.quorum = 2: must not exceed rounds.start_peers (1)" in str(above)
    assert init(tmp_path / "c", "--peers", "0").exit_code == 2


PRIVATE = (
    "penalty.enabled=false",
    "privacy.level=organisation",
    "privacy.delta=1e-5",
    "privacy.epsilon_max=4",
    "sync.outer_steps=100",
)


def private(path: Path, *settings: str) -> Result:
    return init(path, "--peers", "16", *(word for setting in (*PRIVATE, *settings) for word in ("--set", setting)))


def test_a_run_with_noise_says_what_noise_and_budget_mean_or_is_not_made(tmp_path: Path) -> None:
    unsaid = private(tmp_path / "run").exception
    assert isinstance(unsaid, ConfigError) and "10.82 fits sync.outer_steps = 100 and privacy.epsilon_max = 4" in str(unsaid)
    drowned = private(tmp_path / "run", "privacy.noise_multiplier=10.82").exception
    assert isinstance(drowned, ConfigError)
    assert "the noise of an outer step is 613 times as long as the longest contribution" in str(drowned)
    assert "d = 820352, n0 = 16" in str(drowned) and str(drowned).endswith("or set privacy.accept_noise = true")
    assert not StateFolder.exists(tmp_path / "run")
    made = private(tmp_path / "run", "privacy.noise_multiplier=10.82", "privacy.accept_noise=true")
    assert made.exit_code == 0
    assert (
        "privacy     eps 4 at delta 1e-05 allows 100 of 100 outer steps; the noise of an outer step is 613 times" in made.output
    )
    few = private(tmp_path / "few", "privacy.noise_multiplier=8", "privacy.denominator=20000")
    assert "allows 54 of 100 outer steps; the noise of an outer step is 0.362 times as long" in few.output
    assert "privacy  " not in init(tmp_path / "none").output


@pytest.mark.parametrize(
    ("file", "whose"), [("identity.json", "a peer"), ("council.json", "a member of a swarm"), ("ca.key", "a coordinator")]
)
def test_a_folder_of_another_kind_is_not_written_into(tmp_path: Path, file: str, whose: str) -> None:
    (tmp_path / file).write_text("precious")
    refused = init(tmp_path).exception
    assert isinstance(refused, ConfigError) and f"is the folder of {whose}; choose another --state folder" in str(refused)
    assert [path.name for path in tmp_path.iterdir()] == [file]


def test_a_run_toml_that_somebody_has_written_is_not_lost(tmp_path: Path) -> None:
    run_toml = tmp_path / "run.toml"
    run_toml.write_text("[sync]\nevery = 77\n")
    refused = init(tmp_path).exception
    assert isinstance(refused, ConfigError)
    assert str(refused).endswith(f"is there already, with other settings; to begin with them: --config {run_toml}")
    assert init(tmp_path, "--config", str(run_toml)).exit_code == 0
    assert StateFolder(tmp_path).config().sync.every == 77


def test_the_settings_of_a_swarm_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    """A coordinator would serve them, and verify nothing; with gossip no round would ever open."""
    config = tmp_path / "swarm.toml"
    config.write_text("[swarm]\nverify = 1\n")
    said = init(tmp_path / "run", "--config", str(config))
    says = "[swarm] is of a run without a coordinator; remove it, or begin such a run with: edit-peer swarm start"
    assert str(said.exception) == f"{config}: {says} {config}"
    assert not (tmp_path / "run").exists()


def test_the_settings_of_a_swarm_are_refused_also_where_a_run_has_taken_them(tmp_path: Path) -> None:
    init(tmp_path)
    (tmp_path / "run.toml").write_text("[swarm]\nverify = 1\n")
    with pytest.raises(ConfigError, match=r"run.toml: \[swarm\] is of a run without a coordinator"):
        StateFolder(tmp_path).config()


def test_where_a_full_disk_has_ended_it_the_same_command_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk(monkeypatch)
    assert init(tmp_path / "whole").exit_code == 0
    settings = (tmp_path / "whole" / "run.toml").stat().st_size
    keys = sum(path.stat().st_size for path in (tmp_path / "whole").iterdir() if path.is_file()) - settings
    for room in (settings - 1, settings + keys // 2, settings + keys - 100):  # run.toml, server.pem or so, ca.key
        path, disk.room = tmp_path / str(room), room
        assert isinstance(init(path).exception, StorageError)
        disk.room = None
        assert init(path).exit_code == 0
        Authority.load(path, StateFolder(path).run_id)
    assert "already holds a run" in str(init(path).exception)


def test_while_one_is_at_work_another_is_refused_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped at any time before its last file, it looks like one that has failed."""
    really, refused = durable_files.rename, list[str]()

    def rename(source: Path, target: Path) -> None:
        before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
        with monkeypatch.context() as other:
            other.setattr(durable_files, "rename", really)
            refused.append(str(init(tmp_path, "--peers", "3").exception))
        assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
        really(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(durable_files, "rename", rename)
        assert init(tmp_path).exit_code == 0
    assert set(refused) == {f"{tmp_path}: another init is at work here; end it first"} and len(refused) > 5
    Authority.load(tmp_path, StateFolder(tmp_path).run_id)
    assert "already holds a run" in str(init(tmp_path).exception)


def test_where_it_failed_at_its_very_end_it_says_that_the_run_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last file is there, and the folder's list of names could not be synced."""

    def sync(path: Path) -> None:
        if path == tmp_path and (tmp_path / "ca.key").exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(durable_files, "sync", sync)
        assert "ca.key: cannot be written" in str(init(tmp_path).exception)
    said = f"already holds a run; it is whole, and was not used yet; run `edit-coordinator serve --state {tmp_path}`, or choose"
    assert said in str(init(tmp_path).exception)
    Authority.load(tmp_path, StateFolder(tmp_path).run_id)
    (tmp_path / "incarnation").touch()
    assert "already holds a run; choose another" in str(init(tmp_path).exception)


@pytest.mark.parametrize("there", ["incarnation", "invitations/one.json", "outer"])
def test_a_run_that_lost_its_key_is_not_made_anew(tmp_path: Path, there: str) -> None:
    assert init(tmp_path).exit_code == 0
    run_id = StateFolder(tmp_path).run_id
    (tmp_path / "ca.key").unlink()
    (tmp_path / there).touch()
    assert "already holds a run" in str(init(tmp_path).exception)
    assert StateFolder(tmp_path).run_id == run_id


def test_a_further_aggregators_folder_is_no_unfinished_run(tmp_path: Path) -> None:
    assert init(tmp_path / "a", "--set", 'aggregators.addresses=["127.0.0.1:7711"]').exit_code == 0
    StateFolder.create_further(tmp_path / "b", StateFolder(tmp_path / "a"), 1)
    assert "already holds a run" in str(init(tmp_path / "b").exception)
