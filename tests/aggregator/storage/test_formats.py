"""Every file that outlasts a process says its format; one of another format is refused in one line, and left as it is."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

from aggregator.security import authority, members
from aggregator.security.authority import Authority
from aggregator.security.certificates import new_key
from aggregator.security.members import Members
from aggregator.server import serve_run
from aggregator.storage import checkpoint, journal, journal_records, operator_flags, published_updates, state_folder
from aggregator.storage.operator_flags import OperatorFlags
from aggregator.storage.pending_injection import Injections, Sender
from aggregator.storage.state_folder import StateFolder
from aggregator.storage.store import Store
from edit.command_line import run_command
from edit.errors import FormatError
from edit.merging.injection import Injected, Injection
from editpb.identity import Identity
from tests.aggregator.security.test_authority import request
from tests.aggregator.storage.test_store import append, config, founded
from tests.support.served import TOML, new_folder


def write_outer(folder: Path) -> None:
    store = Store(folder, config(1), "run")
    outer = founded(store, 1)
    append(store, outer)
    store.checkpoint(outer)
    store.close()


def read_outer(folder: Path) -> None:
    Store(folder, config(1), "run").recover()


def write_injection(folder: Path) -> None:
    fragments = {0: torch.ones(3)}
    injection = Injection(brings=Injected("above", 3, 0), base=None, replaces=False, fragments=fragments)
    Injections(folder).save(injection, Sender("west", ""))


def write_run(folder: Path) -> None:
    StateFolder.create(folder, TOML.format(start=1, quorum=1))


def write_invitation(folder: Path) -> None:
    made = Authority.create(folder, "run", ["localhost"], now=time.time())
    (folder / "token").write_text(made.invite("a", role="peer", enrol=["localhost:1"], lifetime_s=60, now=time.time()).token)


def redeem(folder: Path) -> None:
    Authority.load(folder, "run").redeem((folder / "token").read_text(), request(new_key()), now=time.time())


def test_an_injection_with_a_number_that_is_none_is_asked_for_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_injection(tmp_path)
    tensors, metadata = checkpoint.load(tmp_path / "injection/step-00000003.safetensors")
    checkpoint.save(tmp_path / "injection", tensors, {**metadata, "brings": ["above", math.inf, 0]}, keep=1)
    injections = Injections(tmp_path)
    injections.recover(None)
    assert injections.pending is None and "is no injection" in caplog.text


@dataclass(frozen=True)
class Kind:
    """module: whose FORMAT is another one while the file is written."""

    module: ModuleType
    constant: str
    write: Callable[[Path], object]
    read: Callable[[Path], object]
    file: str


KINDS = {
    "checkpoint": Kind(checkpoint, "FORMAT", write_outer, read_outer, "step-00000001.safetensors"),
    "journal": Kind(journal, "FORMAT", write_outer, read_outer, "step-00000001.journal"),
    "records of the journal": Kind(journal_records, "MAGIC", write_outer, read_outer, "step-00000001.journal"),
    "published updates": Kind(published_updates, "FORMAT", write_outer, read_outer, "step-00000001.updates"),
    "injection": Kind(
        checkpoint, "FORMAT", write_injection, lambda f: Injections(f).recover(None), "step-00000003.safetensors"
    ),
    "run": Kind(state_folder, "FORMAT", write_run, StateFolder, "run.json"),
    "orders": Kind(
        operator_flags, "FORMAT", lambda f: OperatorFlags(f / "orders").pause(), lambda f: OperatorFlags(f / "orders"), "orders"
    ),
    "members": Kind(
        members,
        "MEMBERS_FORMAT",
        lambda f: Authority.create(f, "run", ["localhost"], now=time.time()),
        lambda f: Members(f / "members.json"),
        "members.json",
    ),
    "invitation": Kind(authority, "INVITATION_FORMAT", write_invitation, redeem, ".json"),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_another_format_is_one_line_that_names_the_file_and_both(
    tmp_path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = getattr(kind.module, kind.constant)
    with monkeypatch.context() as newer:
        newer.setattr(kind.module, kind.constant, b"EdJ9" if kind.constant == "MAGIC" else 9)
        kind.write(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    number = 1 if kind.constant == "MAGIC" else reads
    with pytest.raises(
        FormatError, match=rf"^{tmp_path}.*{kind.file}: format 9, this software reads format {number}$"
    ) as error:
        kind.read(tmp_path)
    assert error.value.exit_code == 2
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_members_without_a_format_are_read(tmp_path: Path) -> None:
    path = tmp_path / "members.json"
    path.write_text('[{"peer_id": "a", "role": "peer", "serial": "1f", "issued": 2.5, "evicted": null}]')
    kept = Members(path)
    assert kept.why_refused(Identity("run", "peer", "a")) is None
    kept.evict("a", "left")
    assert (record := Members(path).get("a")) is not None and record.evicted == "left"


def test_serve_ends_with_exit_code_2_and_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = new_folder(tmp_path / "run")
    folder.run_json.write_text(folder.run_json.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(SystemExit) as end:
        run_command("edit-coordinator", lambda: asyncio.run(serve_run(StateFolder(folder.path))))
    assert end.value.code == 2
    assert capsys.readouterr().err == f"edit-coordinator: {folder.run_json}: format 2, this software reads format 1\n"
