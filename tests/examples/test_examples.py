"""Every example runs as a user would start it, and trains: together the peers know what none of them saw alone."""

from __future__ import annotations

import concurrent.futures
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
IN_ONE_PROCESS = {"bring_your_own_loop": 0.01, "frozen_base": 0.02, "lora": 2.7}
OVER_THE_NETWORK = {"transformers_trainer": 1.6, "lightning_trainer": 0.1, "sharded_loop": 0.05}
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
def test_peers_that_take_turns(name: str) -> None:
    losses = run(name, "-W", "error", timeout=220)
    assert common_loss(losses[-2:]) < IN_ONE_PROCESS[name]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", sorted(OVER_THE_NETWORK))
def test_peers_over_the_network(name: str) -> None:
    losses = run(name, timeout=220)
    assert common_loss(losses) < OVER_THE_NETWORK[name]


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


def run(name: str, *flags: str, timeout: float) -> list[str]:
    """Start the example; what ada and grace print as their loss at the end."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    command = [sys.executable, *flags, str(EXAMPLES / f"{name}.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    assert ended.returncode == 0, ended.stderr[-3000:]
    told = [line for line in ended.stdout.splitlines() if re.match("after .*ada|ada|grace", line)]
    return [loss for line in told for loss in re.findall(r"\d+\.\d{4}(?! before)", line)]
