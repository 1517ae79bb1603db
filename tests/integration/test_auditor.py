"""An auditor fetches the log, and what a replay takes, over the network, with its role alone."""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

import aggregator.services.audit
from aggregator.audit_replay import replay_step
from aggregator.cli import app as coordinator_app
from aggregator.services.readers import send
from aggregator.storage.audit_files import AuditFile, audit_files
from aggregator.storage.log_key import open_log_key
from aggregator.storage.state_folder import StateFolder
from edit.errors import ConfigError, EditError, RefusedError, RemoteProtocolError
from edit.trust.checkpoints import NoteKey
from editpb import audit_pb2 as pb
from editpb import audit_pb2_grpc, control_pb2, control_pb2_grpc
from editpb.receipts import ReceiptFault
from peers import audit_fetch
from peers.carriers.hub.kept_receipts import FETCHED, KEY
from peers.cli import app
from tests.integration.test_audit import AUDITED, commit_one, verified
from tests.integration.test_governance import joined
from tests.integration.test_peers_renew import home_of
from tests.support.loops import on_a_loop
from tests.support.running import running
from tests.support.served import found_run, new_folder, served

KEPT = AUDITED.replace("checkpoint_every = 3", "checkpoint_every = 20") + "keep_contributions = 2\n"


async def trained(folder: StateFolder, steps: int) -> None:
    async with served(folder) as at, at.signing_peer("a") as a, at.signing_peer("b") as b:
        await found_run(a[0], b[0])
        for step in range(steps):
            await commit_one([a, b], step)


def fetch(home: Path, out: Path, *words: str) -> str:
    result = CliRunner().invoke(app, ["audit", "fetch", str(out), "--home", str(home), *words])
    if isinstance(result.exception, EditError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_an_auditor_fetches_verifies_and_merges_once_more(tmp_path: Path) -> None:
    folder, out = new_folder(tmp_path / "run", start=2, toml=KEPT), tmp_path / "out"
    asyncio.run(trained(folder, 3))
    with running(folder):
        ann, eve = joined(folder, tmp_path / "ann", "auditor"), joined(folder, tmp_path / "eve", "observer")
        assert f"next: edit-coordinator audit verify --state {out}" in fetch(ann, out)
        assert verified(out).commits == 3 and not (out / "run.toml").exists()
        with pytest.raises(ConfigError, match="exists; name a new folder"):
            fetch(ann, out)
        with pytest.raises(RefusedError, match="the contributions to outer step 1 are not kept; here are those to 2 to 3"):
            fetch(ann, tmp_path / "first", "--step", "1")
        assert not (tmp_path / "first").exists() and not list(tmp_path.glob(".*"))
        with pytest.raises(ConfigError, match="enrolled as observer; fetching needs an invitation with role auditor"):
            fetch(eve, tmp_path / "eves")
        assert "audit replay --step 3" in fetch(ann, tmp_path / "third", "--step", "3")
    third = tmp_path / "third"
    assert replay_step(third, 3, len(verified(third).tree)).peers == ("a", "b")
    said = CliRunner().invoke(coordinator_app, ["audit", "replay", "--step", "3", "--state", str(third)])
    assert said.exit_code == 0 and "the same verdicts" in said.stdout
    assert not [path for path in third.rglob("*") if path.suffix == ".key" and path.name != "audit-log.key"]
    assert verified(third).key is not None and (third / "audit-log.key").read_text().strip() == verified(third).key.text()


def test_a_log_that_is_not_the_one_the_auditor_knows_is_refused_and_kept_as_evidence(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", start=2, toml=KEPT)
    with running(folder):
        ann = joined(folder, tmp_path / "ann", "auditor")
    shutil.copytree(folder.path, tmp_path / "fork")
    fork, kept = StateFolder(tmp_path / "fork"), ann / FETCHED
    asyncio.run(trained(folder, 2))
    asyncio.run(trained(fork, 1))  # with the same key
    key = (ann / KEY).read_text().strip()
    with running(folder):
        assert f"next: edit-coordinator audit verify --state {tmp_path / 'one'} --key {key}\n" in fetch(ann, tmp_path / "one")
        whole = kept.read_bytes()
        assert whole == (tmp_path / "one/audit-log.head").read_bytes()
        signer, tree = open_log_key(folder.path, NoteKey.parse(key).name), verified(tmp_path / "one").tree
        kept.write_text(signer.sign(1, tree.root(1)))  # fetched when the log had one entry
        assert f"replay --step 2 --state {tmp_path / 'two'} --key {key}\n" in fetch(ann, tmp_path / "two", "--step", "2")
        assert kept.read_bytes() == whole
    with running(fork):
        with pytest.raises(
            ReceiptFault, match="three: this log of 2 entries does not begin with the 3 that were fetched before"
        ):
            fetch(ann, tmp_path / "three")
        assert verified(tmp_path / "three").commits == 1 and kept.read_bytes() == whole
        kept.unlink()
        fetch(ann, tmp_path / "four")
    with (
        running(folder),
        pytest.raises(ReceiptFault, match=r"of 3 entries does not begin with the 2 .* remove that file") as said,
    ):
        fetch(ann, tmp_path / "five")
    assert str(kept) in str(said.value) and said.value.exit_code == 3
    for name in ("audit-log.jsonl", "audit-log.head", "log.key"):
        (fork.path / name).unlink()
    with running(fork), pytest.raises(RefusedError, match=r"six: .*log\.vkey: this peer knows another key") as refused:
        fetch(ann, tmp_path / "six")
    assert refused.value.exit_code == 3 and (tmp_path / "six/audit-log.jsonl").exists()
    (ann / KEY).write_text((tmp_path / "six/audit-log.key").read_text())
    with pytest.raises(ConfigError, match=r"fetched\.head: cannot be verified with log\.vkey"):
        fetch(ann, tmp_path / "seven")
    (ann / KEY).unlink()
    with pytest.raises(ConfigError, match=r"fetched\.head: is here without the key of its log, .*, move this file away, too"):
        fetch(ann, tmp_path / "seven")
    kept.unlink()
    with running(fork):
        fetch(ann, tmp_path / "seven")
    assert (ann / KEY).read_text() == (tmp_path / "six/audit-log.key").read_text()


def test_the_head_that_comes_with_a_log_is_of_this_log_and_signed_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = new_folder(tmp_path / "run", start=2, toml=KEPT)
    asyncio.run(trained(folder, 1))
    with running(folder):
        ann = joined(folder, tmp_path / "ann", "auditor")
        for number, (name, change, why) in enumerate(
            (
                ("audit-log.jsonl", lambda data: data.replace(b'"missing":[]', b'"missing":["x"]'), "for other entries than"),
                ("audit-log.jsonl", lambda data: data.splitlines(keepends=True)[0], "for other entries than the log has"),
                ("audit-log.head", lambda data: data.replace(b"\n2\n", b"\n1\n"), "3: the head of the log: "),
            ),
            start=1,
        ):

            def changed(*given: Any, name: str = name, change: Callable[[bytes], bytes] = change) -> list[AuditFile]:
                listed = {each.name: b"".join(each.parts(1 << 20)) for each in audit_files(*given)}
                listed[name] = change(listed[name])
                return [AuditFile(each, len(data), data) for each, data in listed.items()]

            monkeypatch.setattr(aggregator.services.audit, "audit_files", changed)
            with pytest.raises(ReceiptFault, match=why):
                fetch(ann, tmp_path / str(number))
            assert not (ann / FETCHED).exists()


def test_fetching_renews_a_certificate_that_is_due(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", start=2, toml=KEPT)
    asyncio.run(trained(folder, 1))
    with running(folder) as here:
        home = home_of(here.served, tmp_path / "ann", "ann", role="auditor")
        before = home.load(time.time()).validity
        fetch(home.path, tmp_path / "out")
        after = home.load(time.time()).validity
        assert after.ends > before.ends and verified(tmp_path / "out").commits == 1
        fetch(home.path, tmp_path / "again")
        assert home.load(time.time()).validity == after, "it is not due any more"


def test_the_role_opens_nothing_else_and_no_other_role_opens_this(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", start=2, toml=KEPT)

    @on_a_loop
    async def scenario() -> None:
        await trained(folder, 1)
        async with served(folder) as at:
            request = pb.AuditRequest(run_id=folder.run_id, outer_step=1)
            for role in ("peer", "region", "observer", "operator"):
                async with at.channel("x", role) as channel:
                    with pytest.raises(grpc.aio.AioRpcError, match=f"role {role} may not do this; it needs auditor"):
                        await audit_pb2_grpc.AuditStub(channel).Fetch(request).read()
            async with at.channel("ann", "auditor") as channel:
                with pytest.raises(grpc.aio.AioRpcError, match="role auditor may not do this"):
                    await control_pb2_grpc.ControlStub(channel).Status(control_pb2.StatusRequest())
                with pytest.raises(grpc.aio.AioRpcError, match="role auditor may not do this"):
                    await control_pb2_grpc.ControlStub(channel).Pause(control_pb2.PauseRequest())
                with pytest.raises(grpc.aio.AioRpcError, match="this is run"):
                    await audit_pb2_grpc.AuditStub(channel).Fetch(pb.AuditRequest(run_id="another")).read()

    scenario()


@on_a_loop
async def test_an_auditor_that_reads_nothing_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stalling = asyncio.Event()

    async def stalls_early(write: Any, messages: Any, stalled: Callable[[], object] = lambda: None) -> None:
        """Stalls where nobody reads, if the test says so when its call begins."""
        stalls = stalling.is_set()

        async def written(message: Any) -> None:
            await write(message)
            if stalls:
                await asyncio.Event().wait()

        await send(written, messages, 0.0 if stalls else 30.0, stalled)

    monkeypatch.setattr(aggregator.services.audit, "send", stalls_early)
    folder = new_folder(tmp_path / "run", toml=KEPT)
    async with served(folder) as at, at.signing_peer("a") as (a, _):
        await found_run(a)
        request = pb.AuditRequest(run_id=folder.run_id)
        async with (
            at.channel("eve", "auditor") as eve,
            at.channel("eva", "auditor") as eva,
            at.channel("ann", "auditor") as ann,
        ):
            stalling.set()
            held = [audit_pb2_grpc.AuditStub(each).Fetch(request) for each in (eve, eva)]
            for call in held:
                await call.read()
            stalling.clear()
            for stalled in (eve, eva):  # its call goes on
                with pytest.raises(grpc.aio.AioRpcError, match=r"ev[ae] fetches here already; end that fetch, or try again"):
                    await audit_pb2_grpc.AuditStub(stalled).Fetch(request).read()
            parts = [part async for part in audit_pb2_grpc.AuditStub(ann).Fetch(request)]
            assert sum(len(part.data) for part in parts) == sum(file.bytes for file in parts[0].files.files) > 0
            for call in held:
                call.cancel()


def test_a_run_without_a_log_has_nothing_for_an_auditor(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run")

    @on_a_loop
    async def scenario() -> None:
        async with served(folder) as at, at.channel("ann", "auditor") as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="this run keeps no audit log"):
                await audit_pb2_grpc.AuditStub(channel).Fetch(pb.AuditRequest(run_id=folder.run_id)).read()

    scenario()


def test_a_file_that_goes_away_or_shrinks_meanwhile_is_named(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", start=2, toml=KEPT)
    asyncio.run(trained(folder, 1))
    log = next(each for each in audit_files(folder, 1, "key") if each.name == "audit-log.jsonl")
    with (folder.path / "audit-log.jsonl").open("ab") as file:
        file.write(b"more")
    assert b"".join(log.parts(100)) == (folder.path / "audit-log.jsonl").read_bytes()[:-4]
    (folder.path / "audit-log.jsonl").write_bytes(b"x")
    with pytest.raises(EditError, match=r"audit-log\.jsonl: has become shorter"):
        list(log.parts(100))
    (folder.path / "audit-log.jsonl").unlink()
    with pytest.raises(RefusedError, match=r"audit-log\.jsonl is kept no longer"):
        list(log.parts(100))


def files(*listed: tuple[str, int]) -> pb.AuditPart:
    return pb.AuditPart(files=pb.AuditFiles(files=[pb.AuditFile(name=name, bytes=size) for name, size in listed]))


async def told(*parts: pb.AuditPart) -> AsyncIterator[pb.AuditPart]:
    for part in parts:
        yield part


FETCH_ENDED = """
import asyncio, signal
from peers import audit_fetch
from peers.cli import main
async def waiting(out):
    print("it is at work in", out.parent.name[:5])
    asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGTERM)
    await asyncio.Event().wait()
audit_fetch._from_any = lambda enrolled, endpoints, out, step: asyncio.run(waiting(out))
main()
"""
DATA = pb.AuditPart(data=b"12345678")
LIES: tuple[tuple[tuple[pb.AuditPart, ...], str], ...] = (
    ((), "begin with their list"),
    ((DATA,), "begin with their list"),
    ((files(("../peer.key", 8)), DATA), "'../peer.key' is no file of an audit"),
    ((files(("/etc/passwd", 8)), DATA), "is no file of an audit"),
    ((files(("audit-log.cosigned/..", 8)), DATA), "is no file of an audit"),
    ((files(("outer/step-1.safetensors/x", 8)), DATA), "is no file of an audit"),
    ((files(("peer.key", 8)), DATA), "is no file of an audit"),
    ((files(("run.json", 1 << 50)),), "bytes is"),
    ((files(("run.json", 4), ("run.json", 4)), DATA), "listed twice"),
    ((files(("run.json", 9)), DATA), r"run\.json ends too early"),
    ((files(("run.json", 9)), DATA, files(("ca.pem", 1))), r"run\.json ends too early"),
    ((files(("run.json", 9)), DATA, pb.AuditPart(data=b"")), r"run\.json ends too early"),
    ((files(("run.json", 7)), DATA), "more bytes than"),
    ((files(("run.json", 8)), DATA, DATA), "more bytes than"),
)


@pytest.mark.parametrize(("parts", "why"), LIES)
def test_a_coordinator_that_sends_something_else_is_refused(tmp_path: Path, parts: tuple[pb.AuditPart, ...], why: str) -> None:
    with pytest.raises(RemoteProtocolError, match=why):
        asyncio.run(audit_fetch._store(told(*parts), tmp_path))


@pytest.mark.parametrize("config", ["[" * 5000, "[" * 5000 + "]" * 5000, '"[]"', "7"])
def test_a_log_whose_configuration_is_none_names_no_further_aggregators(tmp_path: Path, config: str) -> None:
    (tmp_path / "audit-log.jsonl").write_text(f'{{"config":{config}}}\n')
    assert audit_fetch.aggregators_in_log(tmp_path) == []


def test_bytes_are_put_together_over_files_and_the_disk_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = files(("run.json", 3), ("ca.pem", 0), ("outer/step-00000000.journal", 13))
    assert asyncio.run(audit_fetch._store(told(listed, DATA, DATA), tmp_path)) == (3, 16)
    assert (tmp_path / "run.json").read_bytes() == b"123" and (tmp_path / "ca.pem").read_bytes() == b""
    assert (tmp_path / "outer/step-00000000.journal").read_bytes() == b"4567812345678"
    usage: Callable[[Path], object] = lambda _: type("Usage", (), {"free": 15})  # noqa: E731
    monkeypatch.setattr(audit_fetch.shutil, "disk_usage", usage)
    with pytest.raises(OSError, match="16 bytes are to come, and 15 are free"):
        asyncio.run(audit_fetch._store(told(listed, DATA, DATA), tmp_path))


def test_a_disk_without_room_is_named_by_the_folder_that_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = new_folder(tmp_path / "run", start=2, toml=KEPT), tmp_path / "out"
    asyncio.run(trained(folder, 1))
    usage: Callable[[Path], object] = lambda _: type("Usage", (), {"free": 15})  # noqa: E731
    with running(folder):
        ann = joined(folder, tmp_path / "ann", "auditor")
        monkeypatch.setattr(audit_fetch.shutil, "disk_usage", usage)
        with pytest.raises(ConfigError, match=rf"^{re.escape(str(out))}: cannot be written .* to come, and 15"):
            fetch(ann, out)
    assert not out.exists() and not [*tmp_path.glob(".*")]


def test_a_fetch_that_is_ended_by_sigterm_leaves_nothing(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", start=2, toml=KEPT)
    with running(folder):
        ann = joined(folder, tmp_path / "ann", "auditor")
    there = sorted(tmp_path.iterdir())
    words = ("-c", FETCH_ENDED, "audit", "fetch", str(tmp_path / "out"), "--home", str(ann))
    done = subprocess.run((sys.executable, *words), capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGTERM, "it is at work in .out-\n", "")
    assert sorted(tmp_path.iterdir()) == there
