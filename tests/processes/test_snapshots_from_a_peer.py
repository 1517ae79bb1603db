"""Real daemons over loopback and mutual TLS: a peer joins a running run and takes its snapshot from another peer."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.support.daemons import Daemon, Site, small
from tests.support.tripwire import HERE, Tripwire

SETTINGS = small(
    "donors",
    model={"layers": 2, "width": 64},
    sync={"every": 8, "outer_steps": 1000},
    rounds={"start_peers": 2},
    membership={"heartbeat_s": 0.2},
)


@pytest.mark.timeout(300)
def test_who_joins_reads_from_a_peer_and_goes_on_elsewhere_when_it_is_killed_in_the_middle(tmp_path: Path) -> None:
    """The run is paused while they join, so that its outer step stands."""
    with Site(tmp_path, SETTINGS) as site:
        coordinator = site.serve()
        site.enrol("a", "b", "c", "d")

        def peer(name: str, *options: object) -> Daemon:
            return site.peer(name, "--throttle", 10, "--metrics", tmp_path / f"{name}.jsonl", *options)

        with Tripwire(lambda: a.process.send_signal(signal.SIGKILL)) as wire:
            a = peer("a", "--serve-snapshots", f"127.0.0.1:{wire.port}", "--advertise", HERE)
            b = peer("b")
            b.until("outer step 2,")
            site.operate("pause")
            step, digest = all_at_one_step(site)

            c = peer("c")
            assert c.until("snapshot of outer step").rstrip().endswith(f"snapshot of outer step {step} from a")
            assert f"joined at outer step {step}, digest {digest[:12]}" in c.until("joined at outer step")

            # Of 460 kB. The first call asks for 256 KiB (START_BYTES of pace.py); the next is made when half of it is taken.
            # So beyond 256 KiB whole fragments are taken (the first has 64 KiB); before that, perhaps none.
            wire.watch(400_000)
            d = peer("d")
            assert f"joined at outer step {step}, digest {digest[:12]}" in d.until("joined at outer step")
            assert d.last("snapshot of").rstrip().endswith(f"snapshot of outer step {step} from a, the aggregator")
        site.operate("resume")
        coordinator.until("committed: all 3 contributors in")
        site.operate("drain")
        assert [each.finish() for each in (b, c, d)] == [0, 0, 0]
        end = site.status()
        assert end["outer_step"] > step
        for each in (b, c, d):
            assert f"outer step {end['outer_step']}, digest {end['digest'][:12]}" in each.last("the run has finished")
        lines = [json.loads(line) for line in (tmp_path / "d.jsonl").read_text().splitlines()]
        taken = next(line for line in lines if line["kind"] == "snapshot")
        assert (taken["outer_step"], taken["digest"], taken["sources"]) == (step, digest, ["a", "the aggregator"])


def all_at_one_step(site: Site) -> tuple[int, str]:
    """Wait until every peer has reported the run's outer step."""
    while True:
        status = site.status()
        here = {member["outer_step"] for member in status["members"] if member["state"] in ("training", "exchanging")}
        if status["phase"] == "paused" and here == {status["outer_step"]}:
            return status["outer_step"], status["digest"]
