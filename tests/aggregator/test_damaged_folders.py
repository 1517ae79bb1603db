"""A state folder that is damaged, read-only, or lacks a file: one line that names the file and the mend, and nobody let in."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from aggregator import cli
from aggregator.security.authority import Authority
from aggregator.server import Coordinator
from aggregator.storage.state_folder import MAX_STARTS, StateFolder
from edit.errors import ConfigError, EditError, StorageError
from edit.view.status import print_members
from editpb.limits import MAX_COUNT
from editpb.run_status import MemberStatus
from peers.identity.peer_folder import PeerFolder
from tests.support.served import TOML, found_run, new_folder, served

DEEP = "[" * 100_000
OBJECT_DEEP = '{"format": 1, "members": ' + DEEP


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    """Of a run that has parameters and is not served now."""
    folder = new_folder(tmp_path / "run")

    async def scenario() -> None:
        async with served(folder) as run, run.peer("a") as a:
            await found_run(a)

    asyncio.run(scenario())
    return folder


def error_of_serving(path: Path) -> EditError:
    async def scenario() -> None:
        async with served(StateFolder(path)):
            pass

    with pytest.raises(EditError) as caught:
        asyncio.run(scenario())
    assert "\n" not in str(caught.value)
    return caught.value


def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command says on stderr: one line, with exit code 2."""
    monkeypatch.setattr(sys, "argv", ["edit-coordinator", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    said = capsys.readouterr().err
    assert caught.value.code == 2 and said.count("\n") == 1 and said.startswith("edit-coordinator: "), said
    return said


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda path: (path / name).write_text(text)


def folder_for(name: str) -> Callable[[Path], object]:
    """What cannot be read, also by root."""

    def damage(path: Path) -> None:
        (path / name).unlink()
        (path / name).mkdir()

    return damage


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (write("addresses.json", "{"), r"addresses\.json: is damaged .*; remove it; `edit-coordinator serve` writes it anew"),
        (write("addresses.json", DEEP), r"addresses\.json: is damaged \(nested too deeply\)"),
        (write("addresses.json", "[]"), r"addresses\.json: is damaged \(no addresses\)"),
        (write("addresses.json", '{"listen": 7}'), r"addresses\.json: is damaged \(no addresses\)"),
        (write("run.json", OBJECT_DEEP), r"run\.json: is damaged; restore it from a copy \(nested too deeply\)"),
        (write("run.toml", f"a = {DEEP}"), r"run\.toml: is not TOML: nested too deeply"),
        (write("members.json", OBJECT_DEEP), r"members\.json: is damaged; .*nested too deeply"),
        (write("orders.json", DEEP), r"orders\.json: is damaged .*nested too deeply"),
        (write("high-water.json", DEEP), r"high-water\.json: is damaged .*nested too deeply"),
        (folder_for("addresses.json"), r"addresses\.json: cannot be read \(Is a directory\)$"),
        (folder_for("members.json"), r"members\.json: cannot be read \(Is a directory\)$"),
        (folder_for("incarnation"), r"incarnation: cannot be read \(Is a directory\)$"),
        (write("incarnation", "two"), r"incarnation: is damaged; write a number larger than any before into it"),
        (write("incarnation", "-3"), r"incarnation: -3 is not a number of a start"),
        (write("incarnation", str(MAX_STARTS)), r"incarnation: \d+ is not a number of a start"),
        (lambda path: (path / "ca.key").chmod(0o644), r"ca\.key: others can read this key \(mode 0644\); run: chmod 600 /"),
        (lambda path: (path / "ca.key").chmod(0o640), r"ca\.key: others can read this key \(mode 0640\); run: chmod 600 /"),
    ],
)
def test_serving_a_damaged_folder_names_the_file_and_the_mend(
    folder: StateFolder, damage: Callable[[Path], object], said: str
) -> None:
    damage(folder.path)
    assert re.search(said, str(error_of_serving(folder.path)))


@pytest.mark.parametrize(
    ("damage", "arguments", "said"),
    [
        (write("addresses.json", "{"), ["status"], r"addresses\.json: is damaged"),
        (write("addresses.json", DEEP), ["invite", "b"], r"addresses\.json: is damaged \(nested too deeply\)"),
        (
            lambda path: (path / "operator.key").chmod(0o644),
            ["status"],
            r"operator\.key: others can read this key \(mode 0644\)",
        ),
        (
            lambda path: (path / "ca.key").chmod(0o644),
            ["invite", "b"],
            r"ca\.key: others can read this key \(mode 0644\); run: ch",
        ),
        (lambda path: (path / "members.json").unlink(), ["invite", "b"], r"members\.json: is missing: it says who is a member"),
    ],
)
def test_a_command_on_a_damaged_folder_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    folder: StateFolder,
    damage: Callable[[Path], object],
    arguments: list[str],
    said: str,
) -> None:
    damage(folder.path)
    assert re.search(said, command(monkeypatch, capsys, *arguments, "--state", str(folder.path)))


def test_a_folder_that_cannot_be_written_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: StateFolder
) -> None:
    (folder.path / "lock").unlink(missing_ok=True)
    (folder.path / "lock").mkdir()  # no user can open it for writing, root neither
    said = command(monkeypatch, capsys, "serve", "--state", str(folder.path))
    assert "/lock: cannot be written (Is a directory); `serve` needs a folder that it may write" in said


def test_a_folder_that_cannot_be_entered_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def refuse(self: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "is_file", refuse)
    assert "run.json: is damaged" not in (said := command(monkeypatch, capsys, "status", "--state", str(tmp_path)))
    assert "run.json: cannot be read (Permission denied)" in said


def test_a_folder_that_cannot_be_entered_is_one_line_for_who_makes_one_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def refuse(self: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "exists", refuse)
    assert "cannot be created (Permission denied)" in command(monkeypatch, capsys, "init", "--state", str(tmp_path))
    for read in (PeerFolder(tmp_path).identity, PeerFolder(tmp_path).load):
        with pytest.raises(ConfigError, match=r"identity\.json: cannot be read \(Permission denied\)"):
            read()


# ---- a file that is gone -------------------------------------------------------------------------------------------------


def test_without_members_json_nobody_is_let_in(folder: StateFolder) -> None:
    """Else whoever was evicted would be a stranger, whose invitation counts again."""
    (folder.path / "members.json").unlink()
    said = str(error_of_serving(folder.path))
    assert "members.json: is missing: it says who is a member and who was evicted; restore it from a copy" in said
    assert not (folder.path / "members.json").exists()


def test_a_further_aggregator_does_not_forget_whom_it_evicted(tmp_path: Path) -> None:
    coordinator = new_folder(tmp_path / "run", toml=TOML + '\n[aggregators]\naddresses = ["127.0.0.1:7"]\n')
    folder = StateFolder.create_further(tmp_path / "further", coordinator, 1)
    Authority.load(coordinator.path, coordinator.run_id).equip(folder.path, 1, "127.0.0.1", now=time.time())

    async def evict() -> None:
        Coordinator.open(folder).run.evict("mallory", "bad manners")

    asyncio.run(evict())
    (folder.path / "members.json").unlink()
    assert "members.json: is missing" in str(error_of_serving(folder.path))


def test_a_founded_run_without_its_number_of_starts_is_not_served(folder: StateFolder) -> None:
    folder.incarnation.unlink()
    assert "incarnation: is missing; write a number larger than any before into it" in str(error_of_serving(folder.path))
    folder.incarnation.write_text("7")

    async def scenario() -> None:
        async with served(folder) as run:
            assert run.coordinator.run.rounds.machine.phase.name == "GATHERING"

    asyncio.run(scenario())
    assert int(folder.incarnation.read_text()) > 7


def test_the_ids_of_two_starts_never_meet(tmp_path: Path) -> None:
    folder, now, year = new_folder(tmp_path / "run"), 1_800_000_000.0, 365 * 86_400
    first, second = folder.first_round_id(now), folder.first_round_id(now + year)
    in_a_year_of_aborts = year * 250  # 2,015 of them were seen in 8 seconds
    assert second > first + in_a_year_of_aborts
    assert folder.first_round_id(now) > second + in_a_year_of_aborts  # the clock was set back
    folder.incarnation.write_text(str(MAX_STARTS - 1))
    with pytest.raises(StorageError, match="is not a number of a start"):
        folder.first_round_id(now)
    folder.incarnation.write_text(str(MAX_STARTS - 86_401))
    assert folder.first_round_id(now) + in_a_year_of_aborts <= MAX_COUNT


def test_the_ids_of_a_start_from_an_older_copy_are_newer_than_any(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run")
    folder.incarnation.write_text("3")  # as an earlier version counted them, ten times as many ids to each
    starts = [folder.first_round_id(1_800_000_000.0)]
    copy = folder.incarnation.read_bytes()
    starts += [folder.first_round_id(1_800_000_000.0 + each) for each in (10, 20)]
    folder.incarnation.write_bytes(copy)
    starts.append(folder.first_round_id(1_800_000_030.0))
    assert starts == sorted(set(starts)) and starts[0] > 3 * 10**10 + 10**10


def test_a_missing_key_of_the_server_is_made_anew_with_one_line(folder: StateFolder, caplog: pytest.LogCaptureFixture) -> None:
    (folder.path / "server.key").unlink()

    async def scenario() -> None:
        async with served(folder) as run, run.peer("a") as a:
            await a.attend()

    asyncio.run(scenario())
    said = [line for line in caplog.messages if "server.key" in line]
    assert said == [f"{folder.path / 'server.key'}: is missing; another key is made, and a certificate for it"]


# ---- a clock that is wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ahead_s", "said"),
    [
        (-6 * 3600.0, r"operator\.pem: is valid from .* on: this machine's clock is at least [45] h behind; set the clock"),
        (
            11 * 365 * 86_400.0,
            r"operator\.pem: expired on .*, 365 days ago by this machine's clock; `edit-coordinator serve` renews",
        ),
    ],
)
def test_a_command_names_a_clock_that_is_wrong_and_a_certificate_that_is_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: StateFolder, ahead_s: float, said: str
) -> None:
    monkeypatch.setattr("aggregator.operator_client.time", SimpleNamespace(time=lambda: time.time() + ahead_s))
    assert re.search(said, command(monkeypatch, capsys, "status", "--state", str(folder.path)))


def test_the_table_of_members_says_how_long_each_certificate_lasts() -> None:
    def member(peer_id: str, days: float) -> MemberStatus:
        expires = time.time() + days * 86_400 if days else 0.0
        return MemberStatus(peer_id=peer_id, role="peer", state="training", reason="", expires=expires)

    console = Console(record=True, width=200, file=io.StringIO())
    print_members(console, [member("a", 200.5), member("b", 6.5), member("c", -1.0), member("d", 0)])
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert lines[0].endswith("certificate")
    assert [line.split()[0] + line[lines[0].index("certificate") :] for line in lines[1:]] == [
        "a200 days",
        "b6 days",
        "cexpired",
        "d",
    ]
