"""Real daemons, one run over two aggregators: one is killed, the other goes on; back again, everything ends well."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

import aggregator.cli
from aggregator.storage.state_folder import StateFolder
from aggregator.storage.store import load_outer
from edit.config.run import RunConfig
from edit.errors import RefusedError, TransportError
from edit.lab.run_toml import Setting, Settings
from peers.models.registry import build
from tests.support.daemons import Daemon, Site, call, small
from tests.support.ports import hold_port

STEPS = 40


def settings(port: int, **sync: Setting) -> Settings:
    return small(
        "spread",
        model={"layers": 2},
        sync={"every": 8, "outer_steps": STEPS, **sync},
        rounds={"start_peers": 2},
        storage={"checkpoint_every": 5},
        aggregators={"addresses": (f"127.0.0.1:{port}",)},
    )


class Spread(Site):
    """A site with a second aggregator."""

    def __init__(self, folder: Path, **sync: Setting) -> None:
        self.port = hold_port(self)
        super().__init__(folder, settings(self.port, **sync))
        self.second = folder / "second"
        call(aggregator.cli.app, "new-aggregator", 1, self.second, "--state", self.state)

    def serve_second(self) -> Daemon:
        daemon = self.start("aggregator", "serve", "--keep-serving", "--state", self.second)
        daemon.until(" serving ")
        return daemon

    def fails(self, *arguments: object) -> Exception:
        """The error of an operator's command."""
        result = CliRunner().invoke(aggregator.cli.app, [*map(str, arguments), "--state", str(self.state)])
        assert isinstance(result.exception, Exception), result.output
        return result.exception


@pytest.mark.timeout(240)
def test_one_of_two_aggregators_is_killed_and_the_other_goes_on(tmp_path: Path) -> None:
    with Spread(tmp_path) as site:
        first, second = site.serve(), site.serve_second()
        site.enrol("a", "b")
        a, b = site.peer("a", "--throttle", 6), site.peer("b", "--throttle", 6)
        a.until("outer step 4,")
        second.kill()
        left = load_outer(StateFolder(site.second))
        a.until(f"aggregator 0: outer step {left.outer_step + 6},")
        assert load_outer(StateFolder(site.second)).outer_step == left.outer_step
        error = site.fails("status")
        assert isinstance(error, TransportError)
        assert f"aggregator 1 (127.0.0.1:{site.port}) does not answer" in str(error) and "the others have done it" in str(error)

        second = site.serve_second()
        assert f"recovered outer step {left.outer_step}, digest {left.digest[:12]}" in second.last("recovered outer step")
        second.until("finished at outer step")
        assert (a.finish(), b.finish()) == (0, 0)
        status = site.status()
        assert (status["phase"], status["outer_step"]) == ("finished", STEPS)
        (further,) = status["aggregators"]
        assert (further["aggregator"], further["phase"], further["outer_step"]) == (1, "finished", STEPS)
        for peer in (a, b):
            assert f"aggregator 0: outer step {STEPS}, digest {status['digest'][:12]}" in peer.last("aggregator 0: outer")
            assert f"aggregator 1: outer step {STEPS}, digest {further['digest'][:12]}" in peer.last("aggregator 1: outer")
        assert a.last("the run has finished").split("digest")[1] == b.last("the run has finished").split("digest")[1]
        whole = a.last("the run has finished").split("digest ")[1][:12]
        out = tmp_path / "model.safetensors"
        assert whole in call(aggregator.cli.app, "export", "--state", site.second, "--state", site.state, "--out", out)
        assert "give the folder of aggregator 1, too" in str(site.fails("export", "--out", out))
        for daemon in (first, second):
            daemon.process.send_signal(signal.SIGTERM)
            assert daemon.finish() == 0
    config = RunConfig.from_toml(site.state / "run.toml")
    build(config.model, 1, frozenset()).load_state_dict(load_file(out))
    with safe_open(out, "pt") as file:
        assert file.metadata()["outer_step"] == str(STEPS)
    every = list(range(1, STEPS + 1))  # no commit lost, none made twice
    assert committed(site.state) == every
    seen = committed(site.second)  # it was killed: the line about the commit that it had just made may be missing
    assert seen == sorted(set(seen)) and set(every) - set(seen) <= {left.outer_step}


@pytest.mark.timeout(240)
def test_pause_and_evict_reach_both_and_a_peer_waits_for_both_to_be_there(tmp_path: Path) -> None:
    with Spread(tmp_path) as site:
        site.serve()
        site.enrol("a", "b")
        a, b = site.peer("a", "--throttle", 6), site.peer("b", "--throttle", 6)
        a.until("trying again")  # the second aggregator is not there yet: nobody has come to the first
        second = site.serve_second()
        a.until("outer step 2,")
        call(aggregator.cli.app, "pause", "--state", site.state)
        status = site.status()
        assert [status["phase"], *(one["phase"] for one in status["aggregators"])] == ["paused", "paused"]
        assert isinstance(site.fails("evict", "nobody"), RefusedError)
        call(aggregator.cli.app, "evict", "b", "--state", site.state, "--reason", "key lost")
        assert b.finish() == 4 and b.lines[-1] == "edit-peer: evicted from the run: key lost\n"
        status = site.status()
        for members in (status["members"], status["aggregators"][0]["members"]):
            assert {one["peer_id"]: one["state"] for one in members}["b"] == "evicted"
        call(aggregator.cli.app, "resume", "--state", site.state)
        second.until("committed: the only contributor in")
        again = site.peer("b")
        assert again.finish() == 4
        call(aggregator.cli.app, "drain", "--state", site.state)
        assert a.finish() == 0 and "its operator drained it" in a.last("the run has finished")


@pytest.mark.timeout(240)
def test_a_drain_ends_both_at_one_outer_step_though_one_is_behind(tmp_path: Path) -> None:
    with Spread(tmp_path, outer_steps=1000) as site:
        first, second = site.serve(), site.serve_second()
        site.enrol("a", "b")
        a, b = site.peer("a", "--throttle", 6), site.peer("b", "--throttle", 6)
        a.until("outer step 4,")
        second.kill()
        behind = load_outer(StateFolder(site.second)).outer_step
        a.until(f"aggregator 0: outer step {behind + 4},")
        second = site.serve_second()
        a.until(f"aggregator 1: outer step {behind + 2},")
        call(aggregator.cli.app, "drain", "--state", site.state)
        assert (a.finish(), b.finish()) == (0, 0)
        status = site.status()
        ends = [status["outer_step"], *(one["outer_step"] for one in status["aggregators"])]
        assert behind + 4 < ends[0] < 1000 and ends == [ends[0]] * 2
        for daemon in (first, second):
            daemon.process.send_signal(signal.SIGTERM)
            assert daemon.finish() == 0


@pytest.mark.exhaustive
@pytest.mark.timeout(240)
def test_a_sharded_peer_that_is_killed_goes_on_with_the_checkpoint_of_all_parts(tmp_path: Path) -> None:
    with Spread(tmp_path, mode="forward", strict=True) as site:
        site.serve()
        site.serve_second()
        site.enrol("a", "b")
        a, b = site.peer("a", "--throttle", 4, ranks=2), site.peer("b")
        a.until("outer step 6,")
        a.kill()
        a = site.peer("a", ranks=2)
        assert "checkpoint-" in a.until("resuming from")
        assert (a.finish(), b.finish()) == (0, 0)
        status = site.status()
        parts = [status, *status["aggregators"]]
        assert [part["outer_step"] for part in parts] == [STEPS, STEPS]
        for peer in (a, b):
            for number, part in enumerate(parts):
                end = f"aggregator {number}: outer step {STEPS}, digest {part['digest'][:12]}"
                assert end in peer.last(f"aggregator {number}: outer step {STEPS}, digest")


def committed(state: Path) -> list[int]:
    lines = (json.loads(line) for line in (state / "metrics.jsonl").read_text().splitlines())
    return [line["outer_step"] for line in lines if line["kind"] == "round" and line["committed"]]
