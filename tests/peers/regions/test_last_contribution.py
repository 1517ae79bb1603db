"""What a region contributed last survives a kill, and a damaged file of it costs a line in the log."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from edit.errors import FormatError, StorageError
from edit.fragments.digest import digest
from edit.regional_peer import Owed, Sent
from peers.regions import last_contribution
from peers.regions.last_contribution import SentFile

SENT = Sent(4, 17, (torch.arange(3.0), torch.ones(2)), 1700, 100)
OWED = Owed(5, {0: torch.arange(3.0), 2: torch.arange(6, dtype=torch.uint8), 3: torch.ones(5, dtype=torch.bfloat16)})


def test_the_last_one_is_read_again_by_its_run_alone(tmp_path: Path) -> None:
    file = tmp_path / "sent.safetensors"
    assert SentFile(file, "above").sent() is None
    SentFile(file, "above").keep(Sent(3, 1, (torch.zeros(3), torch.zeros(2))))
    SentFile(file, "above").keep(SENT)
    read = SentFile(file, "above").sent()
    assert read is not None and (read.upper_step, read.lower_step, read.lower_tokens, read.tokens) == (4, 17, 1700, 100)
    assert all(torch.equal(a, b) for a, b in zip(read.parameters, SENT.parameters, strict=True))
    assert SentFile(file, "elsewhere").sent() is None
    assert [path.name for path in tmp_path.iterdir()] == ["sent.safetensors"]


def test_what_is_owed_is_read_again_by_its_run_alone(tmp_path: Path) -> None:
    subject = SentFile(tmp_path / "sent.safetensors", "above")
    assert subject.owed() is None
    subject.keep_owed(Owed(4, {}))
    assert subject.owed() == Owed(4, {})
    subject.keep_owed(OWED)
    read = subject.owed()
    assert read is not None and read.upper_step == 5 and read.residuals.keys() == OWED.residuals.keys()
    assert all(torch.equal(part, OWED.residuals[i]) for i, part in read.residuals.items())
    assert SentFile(tmp_path / "sent.safetensors", "elsewhere").owed() is None


def test_a_damaged_one_of_what_is_owed_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    subject = SentFile(tmp_path / "sent.safetensors", "above")
    subject.keep_owed(OWED)
    data = bytearray((tmp_path / "residual.safetensors").read_bytes())
    data[-1] ^= 4
    (tmp_path / "residual.safetensors").write_bytes(data)
    with caplog.at_level(logging.WARNING, "peers"):
        assert subject.owed() is None
    assert "residual.safetensors: is damaged and ignored" in caplog.text


def test_one_of_format_1_is_read(tmp_path: Path) -> None:
    file, parts = tmp_path / "sent.safetensors", SENT.parameters
    about = {"format": "1", "sent": json.dumps(["above", 4, 17, digest(parts)])}
    save_file({f"{i}": part for i, part in enumerate(parts)}, file, about)
    read = SentFile(file, "above").sent()
    assert read is not None and (read.upper_step, read.lower_step, read.lower_tokens, read.tokens) == (4, 17, None, 0)


@pytest.mark.parametrize("cut", [0, 5, -1, -9])
def test_a_damaged_one_is_passed_over(tmp_path: Path, cut: int, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "sent.safetensors"
    SentFile(file, "above").keep(SENT)
    data = bytearray(file.read_bytes())
    if cut >= 0:
        file.write_bytes(data[:cut])
    else:
        data[cut] ^= 4
        file.write_bytes(data)
    with caplog.at_level(logging.WARNING, "peers"):
        assert SentFile(file, "above").sent() is None
    assert "is damaged and ignored" in caplog.text


def test_a_disk_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be written"):
        SentFile(tmp_path / "gone" / "sent.safetensors", "above").keep(SENT)


def test_one_of_another_format_is_refused_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "sent.safetensors"
    with monkeypatch.context() as newer:
        newer.setattr(last_contribution, "FORMAT", 9)
        SentFile(file, "above").keep(SENT)
    with pytest.raises(FormatError, match=rf"^{file}: format 9, this software reads format 2$"):
        SentFile(file, "above").sent()
