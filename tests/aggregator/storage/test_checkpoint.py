from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from aggregator.storage import checkpoint
from aggregator.storage.journal import Journal, replay_segments
from edit.errors import LocalProtocolError, StorageError
from tests.aggregator.storage.test_journal import record

Damage = Callable[[bytes], bytes]
DAMAGES: dict[str, Damage] = {
    "truncated": lambda data: data[: len(data) // 2],
    "empty": lambda _: b"",
    "flipped in a tensor": lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
    "flipped in the metadata": lambda data: data.replace(b"loss", b"lost", 1),
    "flipped in the header": lambda data: data.replace(b"theta.0", b"theta.7", 1),
}


def tensors(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {f"theta.{i}": torch.randn(11 + i, generator=generator) for i in range(3)}


def save(folder: Path, step: int, keep: int = 2) -> Path:
    return checkpoint.save(folder, tensors(step), {"outer_step": step, "loss": [1.5, {"x": "é"}]}, keep=keep)


def journal(folder: Path, base: int, *steps: int) -> None:
    segment = Journal.create(checkpoint.segment_of(folder, base), base)
    for step in steps:
        segment.append_fragment(step, record(0, step))
        segment.append_commit(step, step, "")
    segment.close()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def damage(path: Path, how: Damage) -> None:
    before = path.read_bytes()
    after = how(before)
    assert after != before
    path.write_bytes(after)


def test_a_checkpoint_comes_back_to_the_bit(tmp_path: Path) -> None:
    path = save(tmp_path / "outer", 20)
    assert path.name == "step-00000020.safetensors"
    loaded, metadata = checkpoint.load(path)
    assert metadata == {"outer_step": 20, "loss": [1.5, {"x": "é"}]}
    assert loaded.keys() == tensors(20).keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors(20).items())
    assert checkpoint.latest(tmp_path / "outer") == path


def test_the_newest_ones_are_kept_with_the_segments_since(tmp_path: Path) -> None:
    for step in (20, 40, 60, 80):
        save(tmp_path, step)
        journal(tmp_path, step)
    assert names(tmp_path) == [f"step-000000{s}.{kind}" for s in (60, 80) for kind in ("journal", "safetensors")]


def test_what_a_replay_of_the_last_outer_steps_reads_is_kept_too_however_close_the_checkpoints_are(tmp_path: Path) -> None:
    def kept(*steps: int) -> list[int]:
        for step in steps:
            metadata = {"outer_step": step}
            checkpoint.save(tmp_path, tensors(step), metadata, keep=2, replayable=20)
            journal(tmp_path, step)
        found = [name.removesuffix(".journal") for name in names(tmp_path) if name.endswith(".journal")]
        assert names(tmp_path) == sorted(name + kind for name in found for kind in (".journal", ".safetensors"))
        return [int(name.removeprefix("step-")) for name in found]

    assert kept(0, 6, 7, 8) == [0, 6, 7, 8], "a replay of outer step 1 begins with 0"
    assert kept(20) == [0, 6, 7, 8, 20]
    assert kept(27) == [7, 8, 20, 27]
    assert kept(40) == [20, 27, 40] and kept(60, 80) == [60, 80]
    for step in range(81, 201):
        found = kept(step)
        assert found[0] <= step - 20 and len(found) <= 21


def test_an_empty_folder_has_nothing_to_recover(tmp_path: Path) -> None:
    assert checkpoint.recover(tmp_path) is None
    assert checkpoint.recover(tmp_path / "missing") is None
    assert checkpoint.latest(tmp_path) is None


def test_a_folder_that_cannot_be_read_is_no_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who took it for one would found the run anew."""
    save(tmp_path, 20)

    def refused(folder: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))

    monkeypatch.setattr(os, "scandir", refused)  # what `Path.glob` asks
    monkeypatch.setattr(Path, "iterdir", refused)
    for look in (checkpoint.recover, checkpoint.latest, checkpoint.segments, lambda folder: checkpoint.recover(folder, at=20)):
        with pytest.raises(StorageError, match=r"cannot be read \(Permission denied\)"):
            look(tmp_path)


def test_recovery_begins_with_the_newest(tmp_path: Path) -> None:
    save(tmp_path, 20), journal(tmp_path, 20, 21, 22)
    save(tmp_path, 22), journal(tmp_path, 22, 23)
    recovered = checkpoint.recover(tmp_path)
    assert recovered is not None
    assert (recovered.outer_step, recovered.at_least, recovered.notes) == (22, 22, ())
    assert recovered.metadata["outer_step"] == 22
    assert recovered.segments == ((22, checkpoint.segment_of(tmp_path, 22)),)


@pytest.mark.parametrize("how", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_newest_falls_back_and_loses_no_step(tmp_path: Path, how: Damage) -> None:
    save(tmp_path, 20), journal(tmp_path, 20, 21, 22)
    newest = save(tmp_path, 22)
    journal(tmp_path, 22, 23, 24)
    damage(newest, how)
    recovered = checkpoint.recover(tmp_path)
    assert recovered is not None
    assert (recovered.outer_step, recovered.at_least) == (20, 22)
    assert len(recovered.notes) == 1 and "step-00000022.safetensors: damaged" in recovered.notes[0]
    rounds = replay_segments(recovered.segments, recovered.outer_step, recovered.at_least)
    assert [r.outer_step for r in rounds] == [21, 22, 23, 24]


def test_a_damaged_one_does_not_count_among_the_kept(tmp_path: Path) -> None:
    save(tmp_path, 20), journal(tmp_path, 20, 21, 22)
    damage(save(tmp_path, 22), DAMAGES["truncated"])
    journal(tmp_path, 22, 23, 24)
    assert checkpoint.recover(tmp_path) is not None
    save(tmp_path, 24)
    assert [name for name in names(tmp_path) if "safetensors" in name] == [
        "step-00000020.safetensors",
        "step-00000022.safetensors.damaged",
        "step-00000024.safetensors",
    ]
    save(tmp_path, 26)
    assert names(tmp_path) == ["step-00000024.safetensors", "step-00000026.safetensors"]


def test_a_missing_segment_behind_a_damaged_checkpoint_is_no_silent_loss(tmp_path: Path) -> None:
    save(tmp_path, 20)
    damage(save(tmp_path, 22), DAMAGES["truncated"])
    for _ in range(2):  # also when asked again: the damaged one is remembered
        recovered = checkpoint.recover(tmp_path)
        assert recovered is not None
        with pytest.raises(StorageError, match="ends at outer step 20, but step 22 was committed"):
            list(replay_segments(recovered.segments, recovered.outer_step, recovered.at_least))


def test_all_damaged_is_an_error_that_names_the_files(tmp_path: Path) -> None:
    for step in (20, 40):
        damage(save(tmp_path, step), DAMAGES["truncated"])
    with pytest.raises(StorageError, match=r"step-00000040\.safetensors.*; .*step-00000020\.safetensors"):
        checkpoint.recover(tmp_path)
    assert len(names(tmp_path)) == 2, "nothing was moved or removed"


def test_a_journal_alone_is_an_error(tmp_path: Path) -> None:
    journal(tmp_path, 20, 21)
    with pytest.raises(StorageError, match="a journal without the checkpoint before it"):
        checkpoint.recover(tmp_path)


def test_a_renamed_checkpoint_is_not_believed(tmp_path: Path) -> None:
    save(tmp_path, 20)
    save(tmp_path, 40).rename(tmp_path / "step-00000060.safetensors")
    recovered = checkpoint.recover(tmp_path)
    assert recovered is not None
    assert recovered.outer_step == 20
    assert "holds outer step 40; was it renamed?" in recovered.notes[0]


def test_half_written_files_are_ignored_and_removed(tmp_path: Path) -> None:
    save(tmp_path, 20)
    (tmp_path / ".step-00000040.safetensors.tmp").write_bytes(b"half")
    recovered = checkpoint.recover(tmp_path)
    assert recovered is not None and recovered.outer_step == 20
    assert names(tmp_path) == ["step-00000020.safetensors"]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), SafetensorError("No space left on device")]
)
def test_a_full_disk_leaves_the_folder_as_it_was(tmp_path: Path, error: Exception) -> None:
    save(tmp_path, 20)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def write(whole: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        save_file(whole, path, metadata)
        os.truncate(path, 100)
        raise error

    with pytest.raises(StorageError, match=r"step-00000040\.safetensors: cannot be written \(No space left on device\)"):
        checkpoint.save(tmp_path, tensors(40), {"outer_step": 40}, keep=1, write=write)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    save(tmp_path, 40)


def test_any_other_safetensors_file_is_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "step-00000020.safetensors"
    save_file(tensors(20), path)
    with pytest.raises(StorageError, match="damaged or not a checkpoint"):
        checkpoint.load(path)
    with pytest.raises(StorageError, match="damaged or not a checkpoint"):
        checkpoint.load(tmp_path / "missing")


def test_metadata_without_an_outer_step_is_our_own_bug(tmp_path: Path) -> None:
    with pytest.raises(LocalProtocolError, match="outer_step None"):
        checkpoint.save(tmp_path, tensors(1), {}, keep=1)
