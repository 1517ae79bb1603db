"""What a region contributed last survives a kill, and a damaged file of it costs a line in the log."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from edit.errors import FormatError, StorageError
from edit.regional_peer import Sent
from peers.regions import last_contribution
from peers.regions.last_contribution import SentFile

SENT = Sent(4, 17, (torch.arange(3.0), torch.ones(2)))


def test_the_last_one_is_read_again_by_its_run_alone(tmp_path: Path) -> None:
    file = tmp_path / "sent.safetensors"
    assert SentFile(file, "above").sent() is None
    SentFile(file, "above").keep(Sent(3, 1, (torch.zeros(3), torch.zeros(2))))
    SentFile(file, "above").keep(SENT)
    read = SentFile(file, "above").sent()
    assert read is not None and (read.upper_step, read.lower_step) == (4, 17)
    assert all(torch.equal(a, b) for a, b in zip(read.parameters, SENT.parameters, strict=True))
    assert SentFile(file, "elsewhere").sent() is None
    assert [path.name for path in tmp_path.iterdir()] == ["sent.safetensors"]


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
    with pytest.raises(FormatError, match=rf"^{file}: format 9, this software reads format 1$"):
        SentFile(file, "above").sent()
