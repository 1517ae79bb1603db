"""Several aggregators keep a log each: of their own fragments, with a key of their own, and a peer holds every one to it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from aggregator.cli import app as coordinator_app
from aggregator.provenance import PAYLOAD_TYPE
from aggregator.storage.state_folder import StateFolder
from aggregator.storage.store import load_outer
from edit.errors import ConfigError, EditError, RefusedError
from edit.trust.envelopes import open_envelope
from editpb.messages import LogReceipt
from editpb.receipts import ReceiptFault
from peers.carriers.hub.kept_receipts import FAULT, KEY, RECEIPTS, kept_of, verify_all
from peers.cli import app as peer_app
from peers.connection import connect
from tests.integration.test_audit import verified
from tests.integration.test_governance import joined
from tests.integration.test_receipts import exchange, log_of
from tests.support.learner import Learner
from tests.support.ports import held_port
from tests.support.running import Running, enter_together, running
from tests.support.served import new_folder

TOML = """
name = "logs"
[model]
name = "entry:mine"
[sync]
every = 2
outer_steps = 50
[rounds]
start_peers = 2
quorum = 2
[audit]
enabled = true
cosign = true
keep_contributions = 2
[storage]
checkpoint_every = 20
[aggregators]
addresses = ["127.0.0.1:PORT"]
[server]
listen = "127.0.0.1:0"
enrol_listen = "127.0.0.1:0"
"""


def run(app: Any, *words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if isinstance(result.exception, EditError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[tuple[StateFolder, StateFolder]]:
    with held_port() as port:
        first = new_folder(tmp_path / "run", toml=TOML.replace("PORT", str(port)))
        run(coordinator_app, "new-aggregator", 1, tmp_path / "run-1", "--state", first.path)
        yield first, StateFolder(tmp_path / "run-1")


@contextmanager
def serving(folders: tuple[StateFolder, StateFolder]) -> Iterator[tuple[Running, Running]]:
    with running(folders[0]) as first, running(folders[1]) as second:
        yield first, second


@contextmanager
def members(homes: Path, names: str = "ab") -> Iterator[dict[str, Learner]]:
    """Peers that attend at both."""
    with ExitStack() as stack:
        found = {}
        for name in names:
            collective, settings = stack.enter_context(connect(homes / name))
            found[name] = Learner(name, collective, settings)  # type: ignore[arg-type]
        enter_together(stack, [one.worker for one in found.values()])
        yield found


@pytest.fixture
def homes(folders: tuple[StateFolder, StateFolder], tmp_path: Path) -> Path:
    with running(folders[0]):
        for name, role in (("a", "peer"), ("b", "peer"), ("ann", "auditor")):
            joined(folders[0], tmp_path / name, role)
    return tmp_path


def test_each_log_is_of_its_own_fragments_and_peers_keep_receipts_of_all(
    folders: tuple[StateFolder, StateFolder], homes: Path
) -> None:
    first = folders[0]
    with serving(folders):
        for reached in (2, 4):  # the second time from what lies in the folders
            with members(homes) as two:
                for _ in range(2):
                    exchange(two)
                assert {one.worker.outer_step for one in two.values()} == {reached}
    logs = [log_of(folder) for folder in folders]
    assert [(log.run_id, log.commits, log.digest) for log in logs] == [
        (first.run_id, 4, load_outer(folder).digest) for folder in folders
    ]
    names = [f"edit/{first.run_id}", f"edit/{first.run_id}/1"]
    keys = [log.key for log in logs]
    assert [key.name for key in keys if key is not None] == names
    entries = [[json.loads(line) for line in (one.path / "audit-log.jsonl").read_bytes().splitlines()] for one in folders]
    merged = [{len(entry["fragments"]) for entry in each if entry["kind"] == "commit"} for each in entries]
    assert merged == [{1}, {1}], "each has the fragments that it merges"
    assert entries[0][0]["config_digest"] == entries[1][0]["config_digest"]
    for name in "ab":
        found = verify_all(homes / name)
        assert [(one.key, one.receipts, one.last_step) for one in found] == [(key, 4, 4) for key in keys]
        assert [one.head.root for one in found] == [log.tree.root(one.head.size) for log, one in zip(logs, found, strict=True)]
        assert (kept_of(homes / name, 1) / KEY).read_text() != (homes / name / KEY).read_text()
    # What the commands say.
    said = run(peer_app, "audit", "verify", "--home", homes / "a")
    assert [line.split(":")[0] for line in said.splitlines() if "receipts" in line] == names
    both = [key.text() for key in keys if key is not None]
    given = run(peer_app, "audit", "verify", "--home", homes / "a", "--key", both[1], "--key", both[0])
    assert "kept in --home" not in given and said.count("kept in --home") == 2
    values = json.loads(run(peer_app, "audit", "verify", "--home", homes / "a", "--json"))
    assert (values["key"], [one["key"] for one in values["further"]]) == (both[0], [both[1]])
    with pytest.raises(ConfigError, match=rf"--key: of the log edit/other; here are receipts of {names[0]}, {names[1]}"):
        run(peer_app, "audit", "verify", "--home", homes / "a", "--key", both[0].replace(names[0], "edit/other"))
    for folder in folders:
        assert "2 members: a, b" in run(coordinator_app, "audit", "verify", "--state", folder.path)
    # A receipt of the further log that was changed is found, too.
    kept = kept_of(homes / "a", 1) / RECEIPTS
    lines = kept.read_bytes().splitlines(keepends=True)
    kept.write_bytes(b"".join([lines[0], *lines[2:]]))
    with pytest.raises(ReceiptFault, match=r"aggregator-1/receipts\.jsonl: line 2: "):
        run(peer_app, "audit", "verify", "--home", homes / "a")


def test_an_auditor_has_all_logs_and_an_export_is_held_to_each(
    folders: tuple[StateFolder, StateFolder], homes: Path, tmp_path: Path
) -> None:
    first, second = folders
    address = second.config().aggregators.addresses[0]
    with serving(folders), members(homes) as two:
        for _ in range(2):
            exchange(two)
        out, further = tmp_path / "out", tmp_path / "out-1"
        said = run(peer_app, "audit", "fetch", out, "--home", homes / "ann", "--step", 2)
        words = f"edit-peer audit fetch {further} --aggregator {address} --home {homes / 'ann'} --step 2"
        assert f"aggregator 1 keeps a log, too: {words}" in said
        run(peer_app, *words.split()[1:])
        for at, name in ((homes / "ann", out), (homes / "ann" / "aggregator-1", further)):
            assert (at / "fetched.head").read_bytes() == (name / "audit-log.head").read_bytes()
        with pytest.raises(ConfigError, match="--aggregator there: is not HOST:PORT"):
            run(peer_app, "audit", "fetch", tmp_path / "no", "--aggregator", "there", "--home", homes / "ann")
    for folder in (out, further):
        assert "the same verdicts" in run(coordinator_app, "audit", "replay", "--step", 2, "--state", folder)
    model = tmp_path / "model.safetensors"
    run(coordinator_app, "export", "--state", first.path, "--state", second.path, "--out", model)
    for number, folder in enumerate(folders):
        copy = tmp_path / f"copy-{number}"
        run(coordinator_app, "audit", "export", copy, "--state", folder.path, "--provenance", "--of", model)
        log = verified(copy)
        assert log.key is not None
        statement = json.loads(open_envelope((copy / "provenance.json").read_bytes(), PAYLOAD_TYPE, log.key))
        assert [one["name"] for one in statement["subject"]] == [
            f"{first.run_id}, fragments of aggregator {number} at outer step 2",
            "model.safetensors",
        ]
        run(coordinator_app, "audit", "card", tmp_path / f"card-{number}.md", "--state", folder.path)
        assert f", fragments of aggregator {number}, model " in (tmp_path / f"card-{number}.md").read_text()


def test_a_lie_of_a_further_aggregator_ends_a_peers_part_and_is_kept(
    folders: tuple[StateFolder, StateFolder], homes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lie = pytest.raises(RefusedError, match=r"is not in the log of \d+ entries; what was seen is in .*/aggregator-1/")
    with serving(folders) as (_, second), lie, members(homes) as two:
        exchange(two)
        log = second.run._resources.store.audit
        assert log is not None
        honest = log.receipt

        def receipt(outer_step: int, seen_size: int) -> LogReceipt:
            told = honest(outer_step, seen_size)
            return replace(told, entry=told.entry.replace(b'"missing":[]', b'"missing":["x"]'))

        monkeypatch.setattr(log, "receipt", receipt)
        for _ in range(3):
            exchange(two)
    assert not any((homes / name / FAULT).exists() for name in "ab")
    stopped = next(homes / name for name in "ab" if (homes / name / "aggregator-1" / FAULT).exists())
    with pytest.raises(ReceiptFault, match="a receipt did not fit"):
        verify_all(stopped)
    with (
        serving(folders),
        pytest.raises(RefusedError, match=r"aggregator-1/receipt-fault\.json: a receipt of the audit log did"),
        members(homes),
    ):
        pass
