"""Short chaos runs with real processes: one peer killed, the coordinator killed, another link silent; a hostile member.

Beside a hostile member they are forked with their imports done; the others are started as a user's are.
"""

import io
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import IO

import pytest
from rich.console import Console

from edit.lab import processes, procfs
from edit.lab.chaos.command import run_chaos
from edit.lab.chaos.faults import Fault, Kind
from edit.lab.chaos.options import ChaosOptions
from edit.lab.processes import COORDINATOR
from tests.support import fork_server
from tests.support.fork_server import Forked


class Child(Forked):
    """What the lab holds of a process that it has started."""

    def __init__(self, argv: Sequence[str], output: IO[bytes]) -> None:
        assert tuple(argv[:2]) == (sys.executable, "-m")
        super().__init__(argv[2:], output)

    def wait(self, timeout: float | None = None) -> int:
        if (code := super().wait(timeout)) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def poll(self) -> int | None:
        return Forked.wait(self, 0)


@pytest.mark.timeout(100)
@pytest.mark.skipif(not procfs.available(), reason="no /proc")
def test_three_faults_break_nothing(tmp_path, capsys):
    faults = (
        Fault(number=1, at_s=0.5, kind=Kind.SILENCE, target="peer-1", lasts_s=2.5),
        Fault(number=2, at_s=1.0, kind=Kind.KILL_PEER, target="peer-0", lasts_s=0.5),
        Fault(number=3, at_s=5.0, kind=Kind.KILL_COORDINATOR, target=COORDINATOR, lasts_s=0.5),
    )
    options = ChaosOptions(peers=2, seconds=10.0, faults=faults, throttle=2.0, out=tmp_path / "chaos")
    report = run_chaos(options, True, Console(file=io.StringIO()))
    values = json.loads(capsys.readouterr().out)
    assert values == json.loads((options.out / "chaos.json").read_text())
    assert values["violation"] is None
    assert {name: kind["count"] for name, kind in values["faults"].items()} == {
        "silence": 1,
        "kill_peer": 1,
        "kill_coordinator": 1,
    }
    assert values["exit_codes"] == {"peer-0": 0, "peer-1": 0, "coordinator": 0}
    assert values["outer_step"] >= values["commits"] > 2
    assert values["faults"]["kill_peer"]["contributes_again_s"]["max"] <= options.bounds.return_s
    killed, ended = report.history.recovered
    assert 0 < killed.outer_step < ended.outer_step == values["outer_step"]


@pytest.mark.timeout(100)
@pytest.mark.skipif(not procfs.available(), reason="no /proc")
@pytest.mark.parametrize("behaviours", [("bad-bytes", "heartbeats-only"), ("x100",)], ids=["bad-bytes", "x100"])
def test_a_hostile_member_breaks_nothing(tmp_path, capsys, behaviours, monkeypatch):
    fork_server.start()  # outside of the chaos, which leaves no process behind
    monkeypatch.setattr(processes, "_spawn", Child)
    faults = (Fault(number=1, at_s=4.0, kind=Kind.KILL_COORDINATOR, target=COORDINATOR, lasts_s=0.5),)
    options = ChaosOptions(
        peers=2,
        hostile=1,
        behaviours=behaviours,
        behaviour_s=1.5,
        seconds=10.0,
        faults=faults,
        throttle=2.0,
        out=tmp_path / "chaos",
    )
    report = run_chaos(options, True, Console(file=io.StringIO()))
    values = json.loads(capsys.readouterr().out)
    assert values["violation"] is None
    assert values["exit_codes"] == {"hostile-0": 0, "peer-0": 0, "peer-1": 0, "coordinator": 0}
    lines = [json.loads(line) for line in (options.out / "logs" / "hostile-0.log").read_text().splitlines()]
    done = [line for line in lines if line["kind"] == "behaviour"]
    assert {line["name"] for line in done} == set(behaviours)
    if "bad-bytes" in behaviours:
        assert sum(line["answers"].get("INVALID_ARGUMENT", 0) for line in done if line["name"] == "bad-bytes") > 0
    else:  # its bytes are good, so it is not quarantined: the penalty judges it in one commit after the other
        assert any("hostile-0" in commit.weights for commit in report.history.commits)


@pytest.mark.timeout(150)
@pytest.mark.skipif(not procfs.available(), reason="no /proc")
def test_two_coordinators_of_one_run_are_found(tmp_path, capsys, monkeypatch):
    fork_server.start()  # outside of the chaos, which leaves no process behind
    monkeypatch.setattr(processes, "_spawn", Child)
    options = ChaosOptions(peers=2, forked=True, seconds=10.0, faults=(), throttle=2.0, out=tmp_path / "chaos")
    run_chaos(options, True, Console(file=io.StringIO()))
    values = json.loads(capsys.readouterr().out)
    assert values["violation"] is None
    fork = values["fork"]
    assert (fork["moved"], fork["ended"]) == (["peer-1"], {"peer-1": 3})
    assert fork["merged"]["coordinator"] > 0 < fork["merged"]["copy"]
    assert set(fork["found_after_s"]) == {"coordinator", "peer-1"}
    proof = json.loads((options.out / "peers" / "peer-1" / "receipt-fault.json").read_text())
    seen, came = (int(note.splitlines()[1]) for note in (proof["seen"]["note"], proof["came"]["checkpoint"]))
    what = "entries were removed" if came < seen else "does not begin with"  # the copy may have made more outer steps, or fewer
    assert what in proof["fault"]
