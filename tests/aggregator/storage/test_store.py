"""The outer state on disk when an outer step exchanges one group of fragments: recovered to the bit, updates included."""

from __future__ import annotations

import dataclasses
import errno
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from aggregator.storage import checkpoint
from aggregator.storage.journal import Disk, Journal
from aggregator.storage.journal_records import records
from aggregator.storage.store import Store
from edit.config.run import CodecConfig, OuterConfig, RunConfig, StorageConfig, SyncConfig
from edit.errors import ConfigError, RefusedError, StorageError
from edit.fragments.groups import fragments_due
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.merging.merge import Measured, measure
from edit.merging.outer_state import OuterState
from edit.records import MOST_TOKENS, Commit
from tests.support.encoded import SPECS, encode

SCHEMA = Schema(
    tuple(
        FragmentSpec(fragment_id=i, name=f"layer{i}", tensors=(TensorSpec(name=f"layer{i}.weight", shape=(4 + i,)),))
        for i in range(5)
    )
)

STORAGE = StorageConfig(keep_updates=3)


def config(groups: int, down: str = "int8") -> RunConfig:
    return RunConfig(
        sync=SyncConfig(every=6, groups=groups),
        outer=OuterConfig(optimizer="nesterov"),
        codec=CodecConfig(up="fp32", down=down),
        storage=STORAGE,
    )


def founded(store: Store, groups: int, down: str = "int8") -> OuterState:
    generator = torch.Generator().manual_seed(0)
    outer = OuterState(SCHEMA, config(groups, down), [torch.randn(f.numel, generator=generator) for f in SCHEMA.fragments])
    store.found(outer)
    return outer


def step(outer: OuterState) -> list[Measured]:
    """One contribution to each fragment that is due, by its place in the list."""
    generator = torch.Generator().manual_seed(100 + outer.outer_step)
    deltas = [encode("fp32", 0.1 * torch.randn(SCHEMA.fragments[i].numel, generator=generator)) for i in outer.due]
    return [Measured("a", 2, 10, measure(delta), delta) for delta in deltas]


def append(store: Store, outer: OuterState, *, commit: bool = True, tokens: int = 0) -> Commit | None:
    """What the round runner does with one round."""
    records = []
    for fragment_id, contribution in zip(outer.due, step(outer), strict=True):
        records.append(outer.record(outer.reduce(fragment_id, [contribution])))
        store.begin_fragment(7, records[-1]).result()
    if not commit:
        return None
    store.append_commit(7, outer.outer_step + 1, "all in", tokens, base=outer.digest)
    done = outer.commit(7, "all in", records)
    store.applied(done)
    return done


def state(outer: OuterState) -> tuple[object, ...]:
    return outer.metadata(), {name: tensor.numpy().tobytes() for name, tensor in outer.to_tensors().items()}


def test_of_the_journal_only_the_round_is_read_that_is_asked_for(tmp_path: Path) -> None:
    """In a swarm others fetch it: to read the whole journal of a large model takes longer than they wait for a byte."""

    def asked(store: Store, outer_step: int) -> tuple[object, ...]:
        found = store.committed(outer_step)
        assert found is not None
        return found.outer_step, found.base, found.digest, [record.fragment_id for record in found.fragments]

    store = Store(tmp_path, config(2), "run")
    outer = founded(store, 2)
    done = [append(store, outer) for _ in range(4)]
    store.checkpoint(outer)
    done += [append(store, outer) for _ in range(2)]
    expected = {step: asked(store, step) for step in range(1, 7)}
    assert [expected[each.outer_step][2] for each in done if each is not None] == [
        each.digest for each in done if each is not None
    ]
    assert store.committed(7) is None
    store.close()

    again = Store(tmp_path, config(2), "run")
    assert again.recover() is not None
    assert {step: asked(again, step) for step in range(1, 7)} == expected
    for base, step in ((0, 1), (4, 5)):  # the first rounds of both segments
        path = checkpoint.segment_of(tmp_path, base)
        data = bytearray(path.read_bytes())
        data[next(each for each in records(path) if each.header["kind"] == "fragment").end - 1] ^= 1
        path.write_bytes(data)
        with pytest.raises(StorageError, match="damaged at byte"):
            again.committed(step)
        assert asked(again, step + 1) == expected[step + 1]
    again.close()


@pytest.mark.covering
@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("checkpoints", [(), (1,), (4,), (5,), (1, 2, 4, 5), (1, 2, 3, 4, 5)])
def test_groups_are_recovered_to_the_bit_with_their_updates(tmp_path: Path, groups: int, checkpoints: tuple[int, ...]) -> None:
    """Whatever was written since, as many updates are there after a restart as before it: keep_updates of each group."""
    store = Store(tmp_path, config(groups), "run")
    outer = founded(store, groups)
    published = {}
    for number in range(1, 6):
        published[number] = append(store, outer)
        assert published[number] is not None
        due = fragments_due(number - 1, 5, groups, "strided")
        assert tuple(f.fragment_id for f in published[number].fragments) == due
        if number in checkpoints:
            store.checkpoint(outer)
    append(store, outer, commit=False)  # killed in the middle of the next round
    store.close()

    again = Store(tmp_path, config(groups), "run")
    recovered = again.recover()
    assert recovered is not None
    assert state(recovered) == state(outer)
    assert recovered.due == outer.due
    oldest = max(1, 6 - 3 * groups)
    assert store.oldest_update == again.oldest_update == oldest
    assert [again.update(n) for n in range(oldest, 6)] == [published[n] for n in range(oldest, 6)]
    assert again.update(oldest - 1) is None
    assert len(list(tmp_path.glob("*.updates"))) <= STORAGE.keep_checkpoints  # bounded, as the checkpoints are
    assert append(again, recovered) == append_elsewhere(outer)
    again.close()


@pytest.mark.parametrize("kept", [True, False], ids=["checkpoint", "journal"])
def test_the_sum_of_tokens_stays_at_what_a_64_bit_number_holds(tmp_path: Path, kept: bool) -> None:
    store = Store(tmp_path, config(1), "run")
    outer = founded(store, 1)
    for _ in range(3):
        append(store, outer, tokens=MOST_TOKENS - 1)
    assert store.tokens == MOST_TOKENS
    if kept:
        store.checkpoint(outer)
    store.close()
    again = Store(tmp_path, config(1), "run")
    assert again.recover() is not None and again.tokens == MOST_TOKENS
    again.close()


def test_a_checkpoint_with_a_number_that_is_none_is_damaged(tmp_path: Path) -> None:
    store = Store(tmp_path, config(1), "run")
    founded(store, 1)
    store.close()
    path = checkpoint.latest(tmp_path)
    assert path is not None
    tensors, metadata = checkpoint.load(path)
    checkpoint.save(tmp_path, tensors, {**metadata, "tokens": math.inf}, keep=1)
    with pytest.raises(StorageError, match="is damaged"):
        Store(tmp_path, config(1), "run").recover()


@pytest.mark.covering
@pytest.mark.parametrize("down", SPECS)
@pytest.mark.parametrize("checkpoints", [(), (2,)])
def test_every_codec_is_recovered_to_the_bit_from_checkpoint_and_journal(
    tmp_path: Path, down: str, checkpoints: tuple[int, ...]
) -> None:
    """The replay encodes again: residual, theta and the published bytes are those of the process that was killed."""
    store = Store(tmp_path, config(1, down), "run")
    outer = founded(store, 1, down)
    published = {}
    for number in range(1, 5):
        published[number] = append(store, outer)
        if number in checkpoints:
            store.checkpoint(outer)
    store.close()
    again = Store(tmp_path, config(1, down), "run")
    recovered = again.recover()
    assert recovered is not None and state(recovered) == state(outer)
    for number in range(2, 5):
        assert again.update(number) == published[number]
    assert append(again, recovered) == append_elsewhere(outer)
    again.close()


def test_residuals_in_bf16_are_recovered_to_the_bit(tmp_path: Path) -> None:
    """numpy, by which a checkpoint's bytes are hashed, has no bf16."""
    wanted = dataclasses.replace(config(1), codec=CodecConfig(up="fp32", down="int8", down_residual="bf16"))
    store = Store(tmp_path, wanted, "run")
    outer = OuterState(SCHEMA, wanted, [torch.zeros(f.numel) for f in SCHEMA.fragments])
    store.found(outer)
    append(store, outer)
    store.checkpoint(outer)
    store.close()
    again = Store(tmp_path, wanted, "run")
    recovered = again.recover()
    assert recovered is not None and recovered.to_tensors()["residual.0"].dtype == torch.bfloat16
    for one, other in zip(recovered.to_tensors().values(), outer.to_tensors().values(), strict=True):
        assert torch.equal(one, other)
    assert append(again, recovered) == append_elsewhere(outer)
    again.close()


def append_elsewhere(outer: OuterState) -> Commit:
    """The commit that an undisturbed process would have made next."""
    records = [outer.record(outer.reduce(i, [c])) for i, c in zip(outer.due, step(outer), strict=True)]
    return outer.commit(7, "all in", records)


@pytest.mark.parametrize(
    "changed",
    [{"codec": CodecConfig(up="fp32", down="bf16")}, {"outer": OuterConfig(optimizer="nesterov", lr=0.3)}],
    ids=["codec", "outer"],
)
def test_a_journal_is_not_replayed_to_other_parameters(tmp_path: Path, changed: dict[str, Any]) -> None:
    store = Store(tmp_path, config(1), "run")
    outer = founded(store, 1)
    append(store, outer)
    append(store, outer)
    store.close()
    other = dataclasses.replace(config(1), **changed)
    with pytest.raises(ConfigError, match=r"outer step 1 was committed with digest .* set \[outer\], \[codec\]"):
        Store(tmp_path, other, "run").recover()
    again = Store(tmp_path, config(1), "run")
    recovered = again.recover()  # nothing was changed
    assert recovered is not None and state(recovered) == state(outer)
    again.checkpoint(recovered)
    again.close()
    assert Store(tmp_path, other, "run").recover() is not None, "after a clean stop they may change"


@pytest.mark.parametrize(("commits", "noted"), [(1, True), (2, False)])
def test_each_of_the_digests_before_and_after_a_commit_tells_that_the_settings_have_changed(
    tmp_path: Path, commits: int, noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one after the last commit is not durable with it: without it, the commits before it still tell."""
    store = Store(tmp_path, config(1), "run")
    outer = founded(store, 1)
    if not noted:
        monkeypatch.setattr(Journal, "append_digest", lambda *_: None)
    for _ in range(commits):
        append(store, outer)
    store.close()
    other = dataclasses.replace(config(1), outer=OuterConfig(optimizer="nesterov", lr=0.3))
    with pytest.raises(ConfigError, match="outer step 1 was committed with digest"):
        Store(tmp_path, other, "run").recover()
    recovered = Store(tmp_path, config(1), "run").recover()
    assert recovered is not None and state(recovered) == state(outer)


def test_a_digest_that_the_disk_refuses_costs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def write(descriptor: int, data: memoryview) -> int:
        if b'"kind":"digest","outer_step":2,' in bytes(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(descriptor, data)

    store = Store(tmp_path, config(1), "run", Disk(write=write))
    outer = founded(store, 1)
    for _ in range(3):
        append(store, outer)
    store.close()
    assert "the journal lacks the digest of outer step 2" in caplog.text
    recovered = Store(tmp_path, config(1), "run").recover()
    assert recovered is not None and state(recovered) == state(outer)


def test_a_journal_of_other_groups_is_not_replayed(tmp_path: Path) -> None:
    store = Store(tmp_path, config(2), "run")
    append(store, founded(store, 2))
    store.close()
    with pytest.raises(StorageError, match=r"outer step 1 cannot be replayed \(.*needs fragments \[0, 3\]"):
        Store(tmp_path, config(3), "run").recover()


def with_a_checkpoint_of_its_last_step(folder: Path) -> tuple[OuterState, Path]:
    store = Store(folder, config(1), "run")
    outer = founded(store, 1)
    for _ in range(4):
        append(store, outer)
    store.checkpoint(outer)
    store.close()
    return outer, folder / "step-00000004.updates"


@pytest.mark.parametrize("position", [10, 200, -1])
def test_damaged_updates_cost_a_snapshot_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, position: int
) -> None:
    outer, path = with_a_checkpoint_of_its_last_step(tmp_path)
    whole = bytearray(path.read_bytes())
    whole[position] ^= 1
    path.write_bytes(whole)
    again = Store(tmp_path, config(1), "run")
    recovered = again.recover()
    assert recovered is not None
    assert (state(recovered), again.oldest_update) == (state(outer), 0)
    assert f"{path}: damaged" in caplog.text
    append(again, recovered)
    assert again.oldest_update == 5
    again.close()


@pytest.mark.parametrize("cut_at", ["nothing", "torn", "between updates"])
def test_updates_that_are_not_whole_are_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture, cut_at: str) -> None:
    _, path = with_a_checkpoint_of_its_last_step(tmp_path)
    whole = path.read_bytes()
    last_update = whole.rindex(b'{"kind":"update"') - 20  # its record's prefix
    path.write_bytes({"nothing": b"", "torn": whole[:-1], "between updates": whole[:last_update]}[cut_at])
    again = Store(tmp_path, config(1), "run")
    assert again.recover() is not None
    assert again.oldest_update == 0
    assert "take a snapshot" in caplog.text
    again.close()


@pytest.mark.parametrize("written", ["segment", "updates", "checkpoint"])
def test_killed_while_a_checkpoint_is_written_nothing_is_missing(tmp_path: Path, written: str) -> None:
    """The updates are on disk before the checkpoint counts, and the journal goes on until it does."""
    outer, path = with_a_checkpoint_of_its_last_step(tmp_path)
    kept = path.with_suffix(".safetensors")
    (tmp_path / ".step-00000004.updates.tmp").write_bytes(b"half")
    if written != "segment":  # as it was before the segment came first
        (tmp_path / "step-00000004.journal").unlink()
    if written != "checkpoint":
        kept.unlink()
    again = Store(tmp_path, config(1), "run")
    recovered = again.recover()
    assert recovered is not None
    assert (state(recovered), again.oldest_update) == (state(outer), 2)
    assert not list(tmp_path.glob(".*.tmp"))
    again.close()


def test_a_founding_that_fails_removes_nothing_that_was_there_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    founded(Store(tmp_path, config(1), "run"), 1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def save(*_: object, **__: object) -> None:
        raise StorageError("cannot be written")

    monkeypatch.setattr(checkpoint, "save", save)
    with pytest.raises(StorageError, match="cannot be written"):
        founded(Store(tmp_path, config(1), "run"), 1)
    assert before and {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("refused", ["the new segment", "the checkpoint"])
def test_a_checkpoint_that_the_disk_refused_loses_no_later_commit(
    tmp_path: Path, refused: str, keep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = [False]

    def write(descriptor: int, data: memoryview) -> int:
        if full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(descriptor, data)

    def save(*_: object, **__: object) -> None:
        raise StorageError("cannot be written")

    settings = dataclasses.replace(config(1), storage=StorageConfig(keep_checkpoints=keep))
    store = Store(tmp_path, settings, "run", Disk(write=write))
    outer = founded(store, 1)
    append(store, outer)
    with monkeypatch.context() as disk, pytest.raises(StorageError, match="cannot be written"):
        if refused == "the checkpoint":
            disk.setattr(checkpoint, "save", save)
        else:
            full[0] = True
        store.checkpoint(outer)
    full[0] = False
    append(store, outer)
    recovered = Store(tmp_path, settings, "run").recover()
    assert recovered is not None and state(recovered) == state(outer)
    store.checkpoint(outer)
    append(store, outer)
    recovered = Store(tmp_path, settings, "run").recover()
    assert recovered is not None and state(recovered) == state(outer)


def test_each_commit_says_what_it_was_taken_with(tmp_path: Path) -> None:
    settings = dataclasses.replace(
        config(1), sync=SyncConfig(every=6, milestones=((1, 2),)), outer=OuterConfig(lr=0.7, mean_steps=1)
    )
    store = Store(tmp_path, settings, "run-1")
    outer = OuterState(SCHEMA, settings, [torch.zeros(f.numel) for f in SCHEMA.fragments])
    store.found(outer)
    for _ in range(2):
        append(store, outer)
    store.close()
    segment = checkpoint.segment_of(tmp_path, 0)
    said = [record.header["in_force"] for record in records(segment) if record.header["kind"] == "commit"]
    assert said == [
        {"every": 6, "batch": 4, "lr": 1.0, "momentum": 0.0},
        {"every": 2, "batch": 4, "lr": 0.7, "momentum": 0.85},
    ]


def test_no_round_is_in_two_segments(tmp_path: Path) -> None:
    """A checkpoint in the middle of a round fails, and loses nothing; what is left of a round that is over is no reason."""
    store = Store(tmp_path, config(1), "run")
    outer = founded(store, 1)
    append(store, outer)
    store.round_opened(7)
    append(store, outer, commit=False)
    with pytest.raises(StorageError, match="a round is under way in it"):
        store.checkpoint(outer)
    assert not checkpoint.segment_of(tmp_path, 1).exists() and not checkpoint.path_of(tmp_path, 1).exists()
    append(store, outer)
    store.round_opened(8)
    store.begin_segment(2)
    store.begin_fragment(8, outer.record(outer.reduce(outer.due[0], [step(outer)[0]]))).result()
    store.round_opened(0)
    store.checkpoint(outer)
    assert checkpoint.segment_of(tmp_path, 2).exists() and checkpoint.path_of(tmp_path, 2).exists()
    store.close()
    again = Store(tmp_path, config(1), "run")
    recovered = again.recover()
    assert recovered is not None and state(recovered) == state(outer)
    again.close()


def test_what_is_merged_for_a_round_that_is_over_is_not_written(tmp_path: Path) -> None:
    """With more threads a merge may end after its round: it must not cut off what the next one has written."""
    store = Store(tmp_path, config(1), "run")
    outer = founded(store, 1)
    records = [outer.record(outer.reduce(i, [contribution])) for i, contribution in zip(outer.due, step(outer), strict=True)]
    store.round_opened(6)
    store.begin_fragment(6, records[1]).result()
    store.round_opened(7)
    store.begin_fragment(7, records[0]).result()
    with pytest.raises(RefusedError, match="round 6 is over"):
        store.begin_fragment(6, records[1]).result()
    for record in records[1:]:
        store.begin_fragment(7, record).result()
    store.append_commit(7, 1, "all in", base=outer.digest, fragments=outer.due)
    store.applied(outer.commit(7, "all in", records))
    store.close()
    again = Store(tmp_path, config(1), "run")
    recovered = again.recover()
    assert recovered is not None and recovered.digest == outer.digest
    again.close()
