"""What a copy beside the computation waits for, on a GPU that only takes notes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from edit.errors import ConfigError
from edit.replica.device_copies import Transfers


class FakeCuda:
    """torch.cuda as `Transfers` uses it; `log`: what was queued or waited for, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def Stream(self, device: torch.device) -> FakeCuda:
        self.device = device
        return self

    def current_stream(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(record_event=lambda: self.log.append("event") or "the event")

    def wait_stream(self, stream: object) -> None:
        self.log.append("wait for all")

    def wait_event(self, event: object) -> None:
        self.log.append(f"wait for {event}")

    def synchronize(self) -> None:
        self.log.append("finished")

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        self.log.append("begin")
        yield


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    return fake


def transfers() -> Transfers:
    return Transfers([SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1))])  # type: ignore[list-item]


def test_a_copy_waits_for_all_that_is_queued_and_is_finished_at_the_end(cuda: FakeCuda) -> None:
    subject = transfers()
    assert subject.pinned and cuda.device == torch.device("cuda", 1)
    with subject.beside():
        cuda.log.append("copy")
    assert cuda.log == ["wait for all", "begin", "copy", "finished"]


def test_between_the_marks_it_waits_only_for_what_was_queued_before(cuda: FakeCuda) -> None:
    subject = transfers()
    subject.mark_unchanged()
    for _ in range(2):
        with subject.beside():
            pass
    subject.mark_changing()
    with subject.beside():
        pass
    once = ["wait for the event", "begin", "finished"]
    assert cuda.log == ["event", *once, *once, "wait for all", "begin", "finished"]


def test_a_copy_that_fails_leaves_nothing_under_way(cuda: FakeCuda) -> None:
    with pytest.raises(KeyboardInterrupt), transfers().beside():
        raise KeyboardInterrupt
    assert cuda.log[-1] == "finished"


def test_a_model_on_several_gpus_is_refused(cuda: FakeCuda) -> None:
    both = [SimpleNamespace(is_cuda=True, device=torch.device("cuda", i)) for i in (0, 1, 0)]
    with pytest.raises(ConfigError, match="the model is on cuda:0, cuda:1 in one process: load it onto one GPU"):
        Transfers(both)  # type: ignore[arg-type]


def test_without_a_gpu_there_is_nothing_to_wait_for() -> None:
    subject = Transfers([torch.zeros(1)])
    subject.mark_unchanged()
    with subject.beside():
        pass
    assert not subject.pinned
