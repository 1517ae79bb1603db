"""A coordinator whose audit log is honest and whose data are not: what it sends is used only where the log says the same."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from aggregator.data.published import PublishedState
from aggregator.services.data import DataService
from edit.errors import GoneError, RefusedError
from edit.fragments.digest import combine, fragment_hash
from edit.records import EncodedTensor
from editpb import tensors_pb2 as pb
from editpb.data_pb2 import UpdatePart
from editpb.messages import SnapshotManifest, SnapshotRequest, UpdateRequest
from peers.carriers.hub.kept_receipts import verify_kept
from tests.integration.test_receipts import Member, exchange, log_of, members, toml
from tests.support.running import running
from tests.support.served import new_folder

LIE = 2  # the outer step that it lies about


def digests(two: Mapping[str, Member]) -> set[str]:
    return {one.worker.digest for one in two.values()}


def altered(data: bytes | bytearray | memoryview) -> bytes:
    """Other bytes that are as good a payload."""
    wrong = bytearray(data)
    wrong[0] ^= 1
    return bytes(wrong)


@pytest.fixture
def wrong_updates(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of the update to outer step LIE other bytes are sent than were committed; returns of which fragments."""
    honest, lied = PublishedState.payloads, list[int]()

    def payloads(
        self: PublishedState, fragments: Iterable[tuple[int, EncodedTensor]], wanted: object, room: object
    ) -> AsyncGenerator[tuple[int, EncodedTensor, int], None]:
        def others() -> Iterator[tuple[int, EncodedTensor]]:
            for i, payload in fragments:
                if wanted.outer_step == LIE:  # type: ignore[attr-defined]
                    lied.append(i)
                    yield i, replace(payload, data=altered(payload.data))
                else:
                    yield i, payload

        return honest(self, others(), wanted, room)  # type: ignore[arg-type]

    monkeypatch.setattr(PublishedState, "payloads", payloads)
    return lied


@pytest.mark.parametrize(
    ("sync", "rounds"), [("", ""), ('mode = "delayed"\ndelay = 1', ""), ("groups = 2", ""), ("", "max_staleness = 1")]
)
def test_an_update_of_other_bytes_is_not_applied_and_the_peer_goes_on_from_a_snapshot(
    tmp_path: Path, wrong_updates: list[int], sync: str, rounds: str
) -> None:
    folder = new_folder(tmp_path / "run", toml=toml(4, sync, rounds=rounds))
    with running(folder) as here, members(folder, here, tmp_path) as two:
        while min(one.worker.outer_step for one in two.values()) < 4:
            exchange(two)
            for one in two.values():
                assert one.worker.digest in {here.run.rounds.published.digest, *after(folder.path)}
        assert digests(two) == {here.run.rounds.published.digest}
        assert not any(one.fault for one in two.values())
    assert wrong_updates and log_of(folder).commits == 4
    for one in two.values():
        assert verify_kept(one.home).last_step == 4


def after(folder: Path) -> set[str]:
    """The digests of theta that the audit log has."""
    lines = map(json.loads, (folder / "audit-log.jsonl").read_bytes().splitlines())
    return {line["after"] if line["kind"] == "commit" else line["digest"] for line in lines}


def test_an_update_of_other_bytes_that_is_used_as_it_arrives_ends_the_peer(tmp_path: Path, wrong_updates: list[int]) -> None:
    folder = new_folder(tmp_path / "run", toml=toml(50, 'mode = "forward"'))
    left = pytest.raises(RefusedError, match="the bytes of fragment")
    with running(folder) as here, left, members(folder, here, tmp_path) as two:
        for _ in range(LIE + 1):
            exchange(two)
    assert wrong_updates
    for one in two.values():
        assert one.fault.startswith("the bytes of fragment") and one.worker.digest in after(folder.path)


def test_a_snapshot_of_other_bytes_than_it_is_described_with_is_not_taken(
    tmp_path: Path, wrong_updates: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, lies = PublishedState.snapshot_chunks, [2]

    def snapshot_chunks(self: PublishedState, wanted: SnapshotRequest, chunk_bytes: int = 1 << 18) -> Iterator[pb.Chunk]:
        for chunk in honest(self, wanted, chunk_bytes):
            if lies[0]:
                lies[0] -= 1
                chunk = pb.Chunk(offset=chunk.offset, data=altered(chunk.data))
            yield chunk

    monkeypatch.setattr(PublishedState, "snapshot_chunks", snapshot_chunks)
    folder = new_folder(tmp_path / "run", toml=toml(50))
    with running(folder) as here, members(folder, here, tmp_path) as two:
        for _ in range(LIE):
            exchange(two)
        assert {one.worker.outer_step for one in two.values()} == {LIE}
        assert digests(two) == {here.run.rounds.published.digest} and lies == [0]
        assert not any(one.fault for one in two.values())


def test_a_snapshot_of_another_theta_than_the_log_has_ends_the_peer(
    tmp_path: Path, wrong_updates: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is described as it is, so its hashes fit; and no later update would tell, where this is the last outer step."""
    honest = PublishedState.describe_snapshot

    async def describe_snapshot(self: PublishedState) -> SnapshotManifest:
        manifest = await honest(self)
        if manifest.outer_step != LIE:
            return manifest
        theta = tuple(torch.ones_like(one) for one in self._outer.theta)
        hashes = tuple(map(fragment_hash, theta))
        return self._snapshots.put(replace(manifest, fragment_hash=hashes, digest=combine(hashes)), theta, self._now())

    monkeypatch.setattr(PublishedState, "describe_snapshot", describe_snapshot)
    folder = new_folder(tmp_path / "run", toml=toml(LIE))
    left = pytest.raises(RefusedError, match="theta after outer step 2 has the digest")
    with running(folder) as here, left, members(folder, here, tmp_path) as two:
        exchange(two)
        before = digests(two)
        for _ in range(2):
            for one in two.values():
                one.step()
        for one in two.values():
            with pytest.raises(RefusedError, match=r"by the log, [0-9a-f]{12} by the snapshot"):
                one.worker.synchronize()
            assert "by the snapshot" in one.fault
        assert digests(two) == before  # nothing of it was used
    assert wrong_updates


@pytest.mark.parametrize("kept", [True, False])
def test_a_snapshot_in_place_of_an_update_brings_its_receipt_where_that_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """Without it, the next receipt is compared with the snapshot."""
    honest, asked = DataService._update_parts, list[bool]()

    def update(self: DataService, context: Any, wanted: UpdateRequest, *rest: Any) -> AsyncGenerator[UpdatePart | bytes, None]:
        nothing = wanted.shards is not None and not any(one.numel for one in wanted.shards)
        if wanted.outer_step == LIE:
            asked.append(nothing)
            if not (nothing and kept):
                raise GoneError("no longer kept")
        return honest(self, context, wanted, *rest)

    monkeypatch.setattr(DataService, "_update_parts", update)
    folder = new_folder(tmp_path / "run", toml=toml(50))
    with running(folder) as here, members(folder, here, tmp_path) as two:
        for _ in range(LIE + 1):
            exchange(two)
        assert digests(two) == {here.run.rounds.published.digest}
    assert asked.count(True) == 2 and False in asked
    for one in two.values():
        found = verify_kept(one.home)
        assert (found.receipts, found.last_step) == (LIE + kept, LIE + 1) and not one.fault
