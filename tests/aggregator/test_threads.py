"""`edit-coordinator serve` computes with one thread, or with as many as it is told: on the event loop and in the worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from aggregator.cli import app
from aggregator.server import Coordinator
from edit.errors import ConfigError
from tests.support.served import new_folder


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    """As on a machine with three cores: that many are torch's own default."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("options", "threads"), [((), 1), (("--threads", "2"), 2)])
def test_serve_computes_with_so_many_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], threads: int
) -> None:
    seen: list[int] = []

    async def start(coordinator: Coordinator) -> None:
        seen.extend((torch.get_num_threads(), await coordinator.background.in_worker(torch.get_num_threads)))
        raise ConfigError("seen enough")

    monkeypatch.setattr(Coordinator, "start", start)
    monkeypatch.setenv("OMP_WAIT_POLICY", "")
    result = CliRunner().invoke(app, ["serve", "--state", str(new_folder(tmp_path / "run").path), *options])
    assert isinstance(result.exception, ConfigError), result.output
    assert seen == [threads, threads]


def test_no_threads_at_all_are_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["serve", "--state", str(tmp_path), "--threads", "0"])
    assert result.exit_code == 2
