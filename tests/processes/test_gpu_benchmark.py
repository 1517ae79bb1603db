"""benchmarks/gpu.py on the CPU, tiny: that each part runs, and would find what it looks for."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.profiler import record_function

from tests.test_documents import REPOSITORY

CPU = torch.device("cpu")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    path = REPOSITORY / "benchmarks" / "gpu.py"
    specification = importlib.util.spec_from_file_location("gpu", path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "gpu", module)
    specification.loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path / "gpu.jsonl")
    yield module
    assert not (tmp_path / "gpu.jsonl").exists()


def run(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
    status: int = gpu.main()
    return status


def test_without_cuda_every_part_says_that_it_was_not_run(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(gpu, monkeypatch) == 0
    assert capsys.readouterr().out.splitlines() == [f"{part}: needs CUDA: not run here" for part in gpu.PARTS]


@pytest.mark.exhaustive
def test_codecs_and_the_paths_of_every_mode(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "CODECS", ("int8", "topk"))
    assert run(gpu, monkeypatch, "--cpu-sizes", "--parts", "codecs", "paths") == 0
    assert "encode_of_copy" in (said := capsys.readouterr().out) and "streaming" in said and "FAILED" not in said


def test_training_counts_whole_exchanges_with_a_real_coordinator(gpu: ModuleType) -> None:
    before, delayed, after = gpu.training(gpu.TINY, CPU, ["delayed"])
    assert before["mode"] == after["mode"] == "alone"
    assert delayed["commits"] == gpu.TINY.rounds and delayed["tokens_per_s"] > 0 and delayed["hooks_s_per_round"] > 0


def test_the_profile_of_a_round_with_an_exchange(gpu: ModuleType) -> None:
    row = gpu.profiled(gpu.TINY, CPU)
    assert row["exchanges"] and row["adds_none"] and not gpu.failed("profile", [row])


def test_a_wait_counts_unless_it_is_in_a_hook_that_copies(gpu: ModuleType) -> None:
    value = torch.ones(1)

    def steps() -> None:
        value.item()
        with record_function(gpu.HOOK):
            value.item()
        with record_function(gpu.HOOK):
            value.item()
            with record_function(gpu.COPIES):
                pass

    waits = gpu.host_waits(steps, CPU)
    assert (waits.outside.total(), waits.inside.total(), waits.exchanges) == (2, 1, 1)


@pytest.mark.parametrize(
    ("part", "row"),
    [
        ("codecs", {"equals_cpu": False}),
        ("profile", {"adds_none": False, "exchanges": 1}),
        ("profile", {"adds_none": True, "exchanges": 0}),
        ("paths", {"same": False}),
    ],
)
def test_a_part_that_finds_a_difference_fails(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, part: str, row: dict[str, object]
) -> None:
    monkeypatch.setattr(gpu, "measure", lambda *_: [row])
    assert run(gpu, monkeypatch, "--cpu-sizes", "--parts", part) == 1
