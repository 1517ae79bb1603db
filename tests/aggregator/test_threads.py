"""`edit-coordinator serve` computes with one thread, or with as many as it is told: on the event loop and in the worker."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from aggregator.cli import app
from aggregator.server import Coordinator
from aggregator.storage.store import load_outer
from aggregator.worker_thread import Background
from edit.errors import ConfigError
from edit.fragments.schema import FragmentSpec, Schema, TensorSpec
from edit.merging.outer_state import OuterState
from tests.support.served import TOML, found_run, new_folder, served
from tests.support.served import theta as theta_of

WAIT_S = 30.0
MODEL = Schema(
    tuple(
        FragmentSpec(fragment_id=i, name=f"layer{i}", tensors=(TensorSpec(name=f"layer{i}.weight", shape=(n,)),))
        for i, n in enumerate((700, 200_000, 5, 131_073))
    )
)


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


def test_calls_that_compute_run_at_the_same_time_and_are_waited_for() -> None:
    async def scenario() -> None:
        with ThreadPoolExecutor(1) as worker, ThreadPoolExecutor(2) as pool:
            background, both = Background(worker), threading.Barrier(2)
            assert list(background.each(lambda x: x * x, (1, 2, 3))) == [1, 4, 9]
            assert await background.compute(threading.current_thread) is await background.in_worker(threading.current_thread)
            background.compute_with(pool)
            await asyncio.gather(*(background.compute(both.wait, WAIT_S) for _ in range(2)))
            # The worker thread hands out work, too, and gets it back in order.
            arrived = await background.in_worker(lambda: list(background.each(lambda _: both.wait(WAIT_S), "ab")))
            assert sorted(arrived) == [0, 1]
            held, ended = threading.Event(), list[str]()

            def compute() -> None:
                assert held.wait(WAIT_S)
                ended.append("computed")

            running = asyncio.ensure_future(background.compute(compute))
            await asyncio.sleep(0)
            waiting = asyncio.ensure_future(background.computed())
            await asyncio.sleep(0)
            assert not waiting.done()
            held.set()
            await waiting
            assert ended == ["computed"]
            await running

    asyncio.run(scenario())


def delta(step: int, peer: int) -> list[Tensor]:
    return [0.01 * each for each in theta_of(100 * step + peer + 1, MODEL)]


async def trained(path: Path, codec: str, threads: int) -> OuterState:
    """Train for some outer steps, with kills that leave the journal to be read again; return what is on disk."""
    toml = TOML.replace('up = "fp32"\ndown = "fp32"', f'up = "fp32"\ndown = "{codec}"').replace('"sgd"', '"nesterov"')
    folder = new_folder(path, start=2, quorum=2, toml=toml)
    for first in (0, 2):
        async with served(folder, kill=True) as at:
            if threads > 1:
                at.coordinator.compute_with(threads)
            async with at.peer("a", MODEL) as a, at.peer("b", MODEL) as b:
                if not first:
                    await found_run(a, b)
                else:
                    for peer in (a, b):
                        await peer.attend()
                        await peer.report(first)
                for step in (first, first + 1):
                    for number, peer in enumerate((a, b)):
                        view = await peer.view(lambda view, step=step: view.outer_step == step and view.round_id > 0)  # type: ignore[misc]
                        await peer.contribute(view.round_id, step, delta(step, number))
                    for peer in (a, b):
                        await peer.view(lambda view, step=step: view.outer_step == step + 1)  # type: ignore[misc]
                        await peer.report(step + 1)
    return load_outer(folder)


@pytest.mark.exhaustive
@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_with_more_threads_the_bits_are_the_same_over_kills(tmp_path: Path, codec: str) -> None:
    one, three = (asyncio.run(trained(tmp_path / str(threads), codec, threads)) for threads in (1, 3))
    assert one.outer_step == three.outer_step == 4 and one.digest == three.digest
    ours, theirs = one.to_tensors(), three.to_tensors()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
