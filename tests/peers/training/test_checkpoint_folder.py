"""A peer's checkpoint folder is not trusted: nothing in it runs, every fault is one line, and nobody else may write there."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file, save_file
from torch import Tensor

from edit.errors import EditError, FormatError, StorageError
from edit.fragments.shards import Box
from peers.training import checkpoint_files
from peers.training.checkpoint_files import Checkpoints, Owner, Saved

OWNER = Owner(run_id="run-1", peer_id="a", schema_hash="5c")
SHARD = "rank-00000.safetensors"


class Touch:
    """What a hostile pickle does: it runs a command on being read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def tensors() -> dict[str, Tensor]:
    return {
        "model/a": torch.arange(12.0).view(3, 4),
        "model/b": torch.arange(3, dtype=torch.bfloat16),
        "step": torch.tensor(7.0),
        "random": torch.arange(9, dtype=torch.uint8),
        "none": torch.empty(0, 4),
    }


def written(folder: Path) -> Path:
    checkpoints = Checkpoints(folder, OWNER, 3)
    checkpoints.save(tensors(), {"steps": 2})
    checkpoints.wait()
    return folder / "checkpoint-00000001"


def read(folder: Path) -> dict[str, Tensor]:
    checkpoints = Checkpoints(folder, OWNER, 3)
    saved = checkpoints.newest()
    if saved is None:
        raise StorageError("none")
    return checkpoints.load(saved, lambda name, size, dtype: torch.empty(size, dtype=dtype))


def edit(path: Path, **changes: Any) -> None:
    """Change the metadata of a checkpoint; the files' lengths and digests are made to fit."""
    manifest = path / "peer.json"
    values = {**json.loads(manifest.read_text()), **changes}
    for name in values["files"]:
        data = (path / name).read_bytes()
        values["files"][name] = [len(data), blake3(data).hexdigest()]
    manifest.write_text(json.dumps(values))


def table(path: Path) -> dict[str, Any]:
    return dict(json.loads((path / "peer.json").read_text())["tensors"])


class TestNothingInItRuns:
    def test_what_is_read_is_what_was_written(self, tmp_path: Path) -> None:
        written(tmp_path)
        found = read(tmp_path)
        assert found.keys() == tensors().keys()
        for name, tensor in tensors().items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name

    def test_a_pickle_in_the_folder_is_not_read(self, tmp_path: Path) -> None:
        path, ran = written(tmp_path), tmp_path / "ran"
        (path / ".metadata").write_bytes(pickle.dumps(Touch(ran)))
        manifest = path / "peer.json"
        values = json.loads(manifest.read_text())
        data = (path / ".metadata").read_bytes()
        values["files"][".metadata"] = [len(data), blake3(data).hexdigest()]
        manifest.write_text(json.dumps(values))
        try:
            read(tmp_path)
        except EditError as error:
            assert "\n" not in str(error)
        except Exception:  # whatever comes after the pickle was read
            assert not ran.exists()
            raise
        assert not ran.exists()

    def test_one_of_the_former_format_is_refused_with_both_names(self, tmp_path: Path) -> None:
        path = written(tmp_path)
        (path / SHARD).rename(path / "__0_0.distcp")
        (path / ".metadata").write_bytes(b"a pickle")
        values = json.loads((path / "peer.json").read_text())
        (path / "peer.json").write_text(json.dumps({**values, "format": 1}))
        with pytest.raises(FormatError) as caught:
            Checkpoints(tmp_path, OWNER, 3).newest()
        line = str(caught.value)
        assert str(path) in line and "torch.distributed.checkpoint" in line and "safetensors" in line and "--fresh" in line
        assert "\n" not in line

    def test_the_package_has_no_pickle(self) -> None:
        words = re.compile(r"pickle|torch\.load\(|torch\.save\(|torch\.distributed\.checkpoint\.\w|FileSystemReader")
        for source in (Path(__file__).parents[3] / "peers").rglob("*.py"):
            for number, line in enumerate(source.read_text().splitlines(), 1):
                code = line.partition("#")[0]
                assert not (words.search(code) and ("import" in code or "(" in code)), f"{source}:{number}: {line}"


class TestADamagedOne:
    def refused(self, folder: Path, caplog: pytest.LogCaptureFixture, file: str, words: str) -> None:
        """It is passed over with one line that names the file, and so is none."""
        assert Checkpoints(folder, OWNER, 3).newest() is None
        (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert f"checkpoint-00000001/{file}" in line and "\n" not in line, line
        assert re.search(words, line), line

    @pytest.mark.parametrize("part", [0.0, 0.5, 0.99])
    def test_truncated_metadata(self, tmp_path: Path, part: float, caplog: pytest.LogCaptureFixture) -> None:
        manifest = written(tmp_path) / "peer.json"
        data = manifest.read_bytes()
        manifest.write_bytes(data[: int(part * len(data))])
        self.refused(tmp_path, caplog, "peer.json", "damaged")

    @pytest.mark.parametrize("text", ["[]", "{}", "null", '{"format": 3}', "[" * 100_000, "\udcff"])
    def test_other_json(self, tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
        (written(tmp_path) / "peer.json").write_bytes(text.encode(errors="surrogateescape"))
        if text in ("{}",):  # no format said: that of before formats were numbered
            with pytest.raises(FormatError, match="format 1"):
                Checkpoints(tmp_path, OWNER, 3).newest()
            return
        self.refused(tmp_path, caplog, "peer.json", "damaged")

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"dtype": "O"}, "dtype"),
            ({"dtype": ["F32"]}, "dtype"),
            ({"shape": [3, -4]}, "shape"),
            ({"shape": [3, 4.0]}, "shape"),
            ({"shape": [3, True]}, "shape"),
            ({"shape": [1] * 9}, "shape"),
            ({"shape": [2**40, 2**40]}, "shape"),
            ({"shape": [4, 4]}, "cover"),
            ({"shape": "34"}, "shape"),
            ({"boxes": [["../peer.json", [0, 0], [3, 4]]]}, "file"),
            ({"boxes": [["rank-00001.safetensors", [0, 0], [3, 4]]]}, "file"),
            ({"boxes": [[SHARD, [0, 1], [3, 4]]]}, "box"),
            ({"boxes": [[SHARD, [0], [3, 4]]]}, "box"),
            ({"boxes": [[SHARD, [0, 0], [3, 3]]]}, "cover"),
            ({"boxes": [[SHARD, [0, 0], [3, 4]], [SHARD, [0, 0], [3, 4]]]}, "twice"),
            ({"boxes": []}, "cover"),
            ({"boxes": [[SHARD]]}, "box"),
            ({"boxes": None}, "boxes"),
            ({"shape": [2**30, 2**10], "boxes": [[SHARD, [0, 0], [2**30, 2**10]]]}, "bytes"),
        ],
    )
    def test_an_edited_table(
        self, tmp_path: Path, change: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = written(tmp_path)
        entries = table(path)
        edit(path, tensors={**entries, "model/a": {**entries["model/a"], **change}})
        self.refused(tmp_path, caplog, "peer.json", words)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"owner": 3}, "owner"),
            ({"ranks": 0}, "ranks"),
            ({"ranks": "1"}, "ranks"),
            ({"scalars": []}, "scalars"),
            ({"tensors": [1]}, "tensors"),
            ({"tensors": {"a": 1}}, "tensor a"),
        ],
    )
    def test_edited_values(self, tmp_path: Path, change: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture) -> None:
        path = written(tmp_path)
        edit(path, **change)
        self.refused(tmp_path, caplog, "peer.json", words)

    def test_a_file_elsewhere_is_not_opened(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        path = written(tmp_path)
        values = json.loads((path / "peer.json").read_text())
        values["files"]["../../../etc/passwd"] = [1, "00"]
        (path / "peer.json").write_text(json.dumps(values))
        self.refused(tmp_path, caplog, "peer.json", "file")

    def test_a_link_in_place_of_a_file_is_not_followed(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        path = written(tmp_path)
        (path / SHARD).rename(tmp_path / "elsewhere")
        (path / SHARD).symlink_to(tmp_path / "elsewhere")
        self.refused(tmp_path, caplog, SHARD, "not a regular file")

    def test_a_truncated_shard(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        shard = written(tmp_path) / SHARD
        shard.write_bytes(shard.read_bytes()[:-1])
        self.refused(tmp_path, caplog, SHARD, "truncated")

    @pytest.mark.parametrize("damage", ["truncated", "huge header", "no header", "other shape", "other dtype", "missing"])
    def test_a_shard_that_is_not_what_the_table_says(self, tmp_path: Path, damage: str) -> None:
        path = written(tmp_path)
        shard = path / SHARD
        kept = load_file(shard)
        match damage:
            case "truncated":
                shard.write_bytes(shard.read_bytes()[:-1])
            case "huge header":
                shard.write_bytes(b"\xff" * 8 + shard.read_bytes()[8:])
            case "no header":
                shard.write_bytes(b"\x02\0\0\0\0\0\0\0{}" + b"\0" * 200)
            case "other shape":
                save_file({**kept, "model/a": kept["model/a"].reshape(4, 3)}, shard)
            case "other dtype":
                save_file({**kept, "model/a": kept["model/a"].int()}, shard)
            case "missing":
                del kept["model/a"]
                save_file({**kept, "more": torch.zeros(12)}, shard)
        shard.chmod(0o600)
        edit(path)
        with pytest.raises(StorageError) as caught:
            read(tmp_path)
        assert f"checkpoint-00000001/{SHARD}" in str(caught.value) and "\n" not in str(caught.value)


def test_a_rank_reads_only_the_boxes_that_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two files, each with half of the rows, one that holds none of the wanted rows is not opened."""
    path = written(tmp_path)
    full = tensors()["model/a"]
    save_file({"model/a": full[:1].clone()}, path / SHARD)
    save_file({"model/a": full[1:].clone()}, path / "rank-00001.safetensors")
    (path / "rank-00001.safetensors").chmod(0o600)
    boxes = [[SHARD, [0, 0], [1, 4]], ["rank-00001.safetensors", [1, 0], [2, 4]]]
    edit(
        path,
        ranks=2,
        files={SHARD: [], "rank-00001.safetensors": []},
        tensors={"model/a": {"dtype": "F32", "shape": [3, 4], "boxes": boxes}},
    )
    assert torch.equal(read(tmp_path)["model/a"], full)
    (path / SHARD).unlink()
    monkeypatch.setattr(checkpoint_files, "held_box", lambda *given: Box(0, (2, 1), (1, 2)))
    monkeypatch.setattr(checkpoint_files, "local_of", lambda tensor: tensor[2:, 1:3])
    checkpoints = Checkpoints(tmp_path, OWNER, 3)
    found = checkpoints.load(Saved(path, 2, {}), lambda name, size, dtype: torch.zeros(size, dtype=dtype))["model/a"]
    assert torch.equal(found[2, 1:3], full[2, 1:3]) and found.count_nonzero() == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_a_gpu_wrote_the_cpu_reads_and_back(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, OWNER, 3)
    checkpoints.save({name: tensor.cuda() for name, tensor in tensors().items()}, {})
    checkpoints.wait()
    saved = checkpoints.newest()
    assert saved is not None
    for device in ("cpu", "cuda"):
        found = checkpoints.load(saved, lambda name, size, dtype, on=device: torch.empty(size, dtype=dtype, device=on))
        assert all(torch.equal(found[name].cpu(), tensor) for name, tensor in tensors().items())


class TestWhoMayWrite:
    def test_folders_and_files_are_the_owners_alone(self, tmp_path: Path) -> None:
        before = os.umask(0)
        try:
            path = written(tmp_path / "new")
        finally:
            os.umask(before)
        assert (path.parent.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o700)
        assert {file.name: file.stat().st_mode & 0o777 for file in path.iterdir()} == {SHARD: 0o600, "peer.json": 0o600}

    @pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777, 0o702])
    def test_a_folder_that_others_can_write_is_refused(self, tmp_path: Path, mode: int) -> None:
        (tmp_path / "shared").mkdir()
        (tmp_path / "shared").chmod(mode)
        with pytest.raises(StorageError, match=r"shared: others can write.*chmod 700 .*shared$"):
            Checkpoints(tmp_path / "shared", OWNER, 3)

    def test_a_checkpoint_that_others_can_write_is_refused(self, tmp_path: Path) -> None:
        path = written(tmp_path)
        path.chmod(0o707)
        with pytest.raises(StorageError, match=r"checkpoint-00000001: others can write.*chmod 700"):
            Checkpoints(tmp_path, OWNER, 3).newest()

    def test_a_file_that_others_can_write_is_refused(self, tmp_path: Path) -> None:
        path = written(tmp_path)
        (path / "peer.json").chmod(0o606)
        with pytest.raises(StorageError, match=r"peer.json: others can write.*chmod 600"):
            Checkpoints(tmp_path, OWNER, 3).newest()

    def test_one_of_another_user_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
        with pytest.raises(StorageError, match=r"belongs to user \d+, not to this process's \(\d+\).*--checkpoints"):
            Checkpoints(tmp_path, OWNER, 3)

    def test_a_linked_checkpoint_is_refused(self, tmp_path: Path) -> None:
        path = written(tmp_path / "a")
        Checkpoints(tmp_path / "b", OWNER, 3)
        (tmp_path / "b" / path.name).symlink_to(path)
        with pytest.raises(StorageError, match="checkpoint-00000001: is a link"):
            Checkpoints(tmp_path / "b", OWNER, 3).newest()


def test_what_cannot_be_moved_aside_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "c")
    checkpoints = Checkpoints(path.parent, OWNER, 3)

    def rename(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(StorageError, match=r"/checkpoint-00000001: cannot be moved aside \(Read-only file system\)"):
        checkpoints.set_aside()
