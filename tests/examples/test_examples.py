"""Every example runs and trains: together the peers know what none of them saw alone.

Those that rehearse a run on this machine do so here; what they start are processes as a user would start them. Of those that
need no other process the first is started so, too.
"""

from __future__ import annotations

import concurrent.futures
import io
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.exhaustive import rarely

EXAMPLES = Path(__file__).parents[2] / "examples"
IN_ONE_PROCESS = {"bring_your_own_loop": 0.01, "frozen_base": 0.02, "lora": 2.7}
OVER_THE_NETWORK = {"transformers_trainer": 1.6, "lightning_trainer": 0.1, "sharded_loop": 0.05}
Main = Callable[[str], str]
NEEDS = {"lora": "peft", "transformers_trainer": "transformers", "lightning_trainer": "lightning"}


def common_loss(losses: list[str]) -> float:
    """Equal at both peers, or it is not the outer parameters that were evaluated."""
    assert len(set(losses)) == 1, losses
    return float(losses[0])


def test_every_example_is_tested() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")} - {"rehearsal"}
    assert names == {*IN_ONE_PROCESS, *OVER_THE_NETWORK}


@pytest.mark.parametrize("name", sorted({*IN_ONE_PROCESS, *OVER_THE_NETWORK}))
def test_at_most_five_lines_are_added(name: str) -> None:
    lines = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()
    assert 1 <= len([line for line in lines if line.rstrip().endswith("# edit")]) <= 5


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", sorted(IN_ONE_PROCESS))
def test_peers_that_take_turns(name: str, main: Main) -> None:
    losses = started(name) if name == "bring_your_own_loop" else losses_in(main(name))
    assert common_loss(losses[-2:]) < IN_ONE_PROCESS[name]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", rarely(sorted(OVER_THE_NETWORK), kept=["sharded_loop"]))
def test_peers_over_the_network(name: str, main: Main) -> None:
    assert common_loss(losses_in(main(name))) < OVER_THE_NETWORK[name]


def test_peers_on_one_screen_do_not_cut_into_each_others_lines() -> None:
    sys.path.insert(0, str(EXAMPLES))
    try:
        import rehearsal
    finally:
        sys.path.remove(str(EXAMPLES))
    screen = io.StringIO()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        (ada, ada_says), (grace, grace_says) = (tuple(map(os.fdopen, os.pipe(), "rw")) for _ in range(2))
        with ada, grace:
            ended = [pool.submit(rehearsal.relay, peer, screen) for peer in (ada, grace)]
            print("ada: ", end="", file=ada_says, flush=True)
            print("grace: 2", file=grace_says, flush=True)
            print("1", file=ada_says, flush=True)
            ada_says.close()
            grace_says.close()
            concurrent.futures.wait(ended)
    assert sorted(screen.getvalue().splitlines()) == ["ada: 1", "grace: 2"]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Main:
    """Run an example in this process, which has imported what it does; what it prints."""
    monkeypatch.syspath_prepend(EXAMPLES)

    def run(name: str) -> str:
        if name in NEEDS:
            pytest.importorskip(NEEDS[name])
        file = os.fspath(EXAMPLES / f"{name}.py")
        monkeypatch.setattr(sys, "argv", [file])
        runpy.run_path(file, run_name="__main__")
        return capsys.readouterr().out

    return run


def started(name: str) -> list[str]:
    """Start an example, where a warning is an error; the losses that it prints."""
    command = [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=220, env=environment)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return losses_in(ended.stdout)


def losses_in(printed: str) -> list[str]:
    """What ada and grace print as their loss at the end."""
    told = [line for line in printed.splitlines() if re.match("after .*ada|ada|grace", line)]
    return [loss for line in told for loss in re.findall(r"\d+\.\d{4}(?! before)", line)]
