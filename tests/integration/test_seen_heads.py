"""What contributions say that their signers have seen of the audit log, held to the log by the coordinator."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from aggregator.control.status import run_status
from aggregator.run_feed import PeerFaulted
from aggregator.storage.audit_log import AuditLog
from aggregator.storage.state_folder import StateFolder
from edit.errors import GoneError
from edit.trust.checkpoints import LogSigner
from editpb.data_messages import receipt_from_pb, update_manifest_from_pb, update_request_to_pb
from editpb.messages import ContributionHeader, SeenHead, UpdateRequest, Welcome
from editpb.receipts import NOTHING_SEEN, Expected, Head, Mine, check_receipt
from editpb.signed_contributions import ContributionSigner
from tests.integration.test_audit import AUDITED, delta
from tests.support.encoded import encode
from tests.support.served import SCHEMA, BarePeer, Served, found_run, new_folder, served, small_chunks


def head(signer: LogSigner, size: int, root: bytes) -> SeenHead:
    seen = Head(size, root, signer.sign(size, root)).seen(signer.key)
    assert seen is not None
    return seen


def signer_of(folder: StateFolder) -> LogSigner:
    return LogSigner(f"edit/{folder.run_id}", (folder.path / "log.key").read_bytes())


def log_of(run: Served) -> AuditLog:
    log = run.coordinator.run.rounds._store.audit
    assert log is not None
    return log


async def contribute(peer: BarePeer, sign: ContributionSigner, round_id: int, fragment_id: int = 0) -> ContributionHeader:
    data = bytes(encode("fp32", delta(0)[fragment_id]).data)
    header = sign(peer.header(round_id, 0, fragment_id, len(data)), memoryview(data))
    await peer.send(header, small_chunks(data))
    return header


@pytest.mark.parametrize(
    ("seen", "why", "code", "known"),
    [
        (lambda own, root: head(own, 1, root), "", None, False),
        (lambda own, root: head(own, 9, bytes(32)), "9 entries of the audit log, which has 1", "PERMISSION_DENIED", True),
        (lambda own, root: head(own, 1, bytes(32)), "another audit log of 1 entries", "PERMISSION_DENIED", True),
        (
            lambda own, root: replace(head(own, 1, root), signature=bytes(64)),
            "a head of the audit log that is not signed with its key",
            "INVALID_ARGUMENT",
            False,
        ),
        (
            lambda own, root: head(LogSigner(own.key.name, LogSigner.new_key()), 9, bytes(32)),
            "a head of the audit log that is not signed with its key",
            "INVALID_ARGUMENT",
            False,
        ),
        (lambda own, root: replace(head(own, 1, root), root=b"short"), "a root of 5 bytes", "INVALID_ARGUMENT", False),
    ],
)
def test_a_head_that_is_not_the_logs_is_refused_and_who_is_at_fault_is_told_apart(
    tmp_path: Path, seen: Callable[[LogSigner, bytes], SeenHead], why: str, code: str | None, known: bool
) -> None:
    folder = new_folder(tmp_path / "run", toml=AUDITED)

    async def scenario() -> None:
        async with served(folder) as run, run.signing_peer("a") as (a, sign):
            view = await found_run(a)
            said = seen(signer_of(folder), log_of(run)._tree.root(1))
            sign._seen = lambda: said
            faults: list[PeerFaulted] = []
            feed = run.coordinator.run.feed
            feed.subscribe(lambda event, unix: faults.append(event) if isinstance(event, PeerFaulted) else None)
            if code is None:
                await contribute(a, sign, view.round_id)
                return
            with pytest.raises(grpc.aio.AioRpcError, match=why) as error:
                await contribute(a, sign, view.round_id)
            assert error.value.code().name == code
            warnings = run_status(run.coordinator.run).warnings
            assert [why in warning and "old copy of its folder" in warning for warning in warnings] == [True] * known
            assert [one.peer_id for one in faults] == ["a"] * ("not signed with its key" in why)

    asyncio.run(scenario())


def test_a_run_without_a_log_takes_no_heads_of_one(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run")

    async def scenario() -> None:
        async with served(folder) as run, run.signing_peer("a") as (a, sign):
            view = await found_run(a)
            assert (await a.receive(Welcome)).log_key == ""
            sign._seen = lambda: head(LogSigner("edit/x", LogSigner.new_key()), 1, bytes(32))
            with pytest.raises(grpc.aio.AioRpcError, match="names a head of an audit log; the run keeps none"):
                await contribute(a, sign, view.round_id)

    asyncio.run(scenario())


def test_a_contribution_without_a_head_is_signed_as_before(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=AUDITED)

    async def scenario() -> None:
        async with served(folder) as run, run.signing_peer("a") as (a, sign):
            view = await found_run(a)
            await contribute(a, sign, view.round_id)
            seen = head(signer_of(folder), 1, log_of(run)._tree.root(1))
            sign._seen = lambda: seen
            header = sign(a.header(view.round_id, 0, 1, 1200), memoryview(bytes(1200)))
            with pytest.raises(grpc.aio.AioRpcError, match="not of what the header says"):
                await a.send(replace(header, seen=None), ())

    asyncio.run(scenario())


def test_who_began_to_contribute_and_is_not_merged_stands_in_the_log(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", start=2, toml=AUDITED)

    async def scenario() -> None:
        async with served(folder) as run, run.signing_peer("a") as a, run.signing_peer("b") as b:
            await found_run(a[0], b[0])
            view = await a[0].view(lambda v: v.round_id > 0)
            data = memoryview(bytes(encode("fp32", delta(0)[0]).data))
            await b[0].send(b[1](b[0].header(view.round_id, 0, 0, len(data)), data), ())
            for i in range(2):
                await contribute(*a, view.round_id, i)
            await b[0].disconnect()
            await a[0].view(lambda v: v.outer_step == 1)

    asyncio.run(scenario())
    entry = json.loads((folder.path / "audit-log.jsonl").read_bytes().splitlines()[-1])
    assert (entry["kind"], [*entry["contributions"]], entry["unmerged"]) == ("commit", ["a"], ["b"])


def test_a_receipt_waits_until_the_log_can_be_written(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=AUDITED)

    async def scenario() -> None:
        async with served(folder) as run, run.signing_peer("a") as (a, sign):
            view = await found_run(a)
            file = log_of(run)._file
            write, full = file._disk.write, True

            def refusing(descriptor: int, data: memoryview) -> int:
                if full and descriptor == file._descriptor:
                    raise OSError(28, "No space left on device")
                return write(descriptor, data)

            object.__setattr__(file, "_disk", replace(file._disk, write=refusing))
            for i in range(2):
                await contribute(a, sign, view.round_id, i)
            await a.view(lambda v: v.outer_step == 1)
            request = update_request_to_pb(UpdateRequest(a.run_id, 1, seen_size=0))
            for _ in range(2):
                with pytest.raises(grpc.aio.AioRpcError, match=r"no receipt for outer step 1: .*No space left") as error:
                    await a.data.FetchUpdate(request).read()
                assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            full = False
            part = await a.data.FetchUpdate(request).read()
            assert part.manifest.receipt.index == 1

    asyncio.run(scenario())


def test_who_asks_for_an_update_tells_the_coordinator_of_another_log(tmp_path: Path) -> None:
    """A peer that has been with another coordinator finds the fork by the receipt, and then says nothing more."""
    folder = new_folder(tmp_path / "run", toml=AUDITED)

    async def scenario() -> None:
        async with served(folder) as run, run.signing_peer("a") as (a, sign):
            view = await found_run(a)
            for i in range(2):
                await contribute(a, sign, view.round_id, i)
            await a.view(lambda v: v.outer_step == 1)
            own = signer_of(folder)

            async def ask(seen: SeenHead) -> int:
                request = UpdateRequest(a.run_id, 1, seen_size=seen.size, seen=seen)
                index: int = (await a.data.FetchUpdate(update_request_to_pb(request)).read()).manifest.receipt.index
                return index

            assert await ask(head(own, 1, log_of(run)._tree.root(1))) == 1
            assert run_status(run.coordinator.run).warnings == ()
            with pytest.raises(grpc.aio.AioRpcError, match="a head of the audit log that is not signed with its key"):
                await ask(replace(head(own, 1, bytes(32)), signature=bytes(64)))
            assert run_status(run.coordinator.run).warnings == ()
            assert await ask(head(own, 9, bytes(32))) == 1
            (warning,) = run_status(run.coordinator.run).warnings
            assert "a has seen 9 entries of the audit log, which has 2: " in warning and "two of them serve this run" in warning

    asyncio.run(scenario())


@pytest.mark.parametrize("kill", [True, False])
def test_the_receipt_of_a_commit_is_the_same_after_a_restart(tmp_path: Path, kill: bool) -> None:
    folder = new_folder(tmp_path / "run", toml=AUDITED)

    async def told(a: BarePeer, key: bytes) -> None:
        """Fetch the receipt of the first outer step, and hold it to the manifest."""
        part = await a.data.FetchUpdate(update_request_to_pb(UpdateRequest(a.run_id, 1, seen_size=0))).read()
        expected = Expected(
            key=signer_of(folder).key,
            run_id=folder.run_id,
            schema_hash=SCHEMA.schema_hash,
            seen=NOTHING_SEEN,
            manifest=update_manifest_from_pb(part.manifest, SCHEMA, 1),
            before="",
            mine=Mine("a", key),
        )
        check_receipt(receipt_from_pb(part.manifest.receipt), expected)

    async def scenario() -> None:
        async with served(folder, kill=kill) as run, run.signing_peer("a") as (a, sign):
            view, key = await found_run(a), sign._signer.public_key
            for i in range(2):
                await contribute(a, sign, view.round_id, i)
            await a.view(lambda v: v.outer_step == 1)
            await told(a, key)
        if kill:  # before the last entry and the head were written
            lines = (folder.path / "audit-log.jsonl").read_bytes().splitlines(keepends=True)
            (folder.path / "audit-log.jsonl").write_bytes(b"".join(lines[:-1]))
            (folder.path / "audit-log.head").unlink()
        async with served(folder) as run, run.signing_peer("a") as (a, _):
            await a.attend()
            await told(a, key)

    asyncio.run(scenario())


def test_a_commit_that_is_not_in_the_log_has_no_receipt(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=AUDITED)

    async def scenario() -> None:
        async with served(folder) as run, run.signing_peer("a") as (a, _):
            await found_run(a)
            with pytest.raises(GoneError, match="the commit to outer step 1 is not in the audit log; take a snapshot"):
                log_of(run).receipt(1, 0)

    asyncio.run(scenario())
