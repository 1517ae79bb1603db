"""What a message of Watch costs the coordinator: CPU seconds of making and of serializing it.

    .venv/bin/python benchmarks/watch_cost.py                            # 8 peers, 300 outer steps; some seconds
    .venv/bin/python benchmarks/watch_cost.py --watchers 8 --profile

A real coordinator in this process, whose peers attend over gRPC on loopback, with a history of so many outer steps. Time on its
event loop stands still and is moved on by hand: a second from each message to the next, in which every peer reports and a round
is committed. What is measured is the CPU time of this process in the seconds with a message, less that in as many without;
sending them is not part of it. The first messages, which are whole, are counted apart.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from cryptography import x509

from aggregator.control.run import Run
from aggregator.run_feed import PeerReported, RoundReport
from aggregator.services.authorization import Authorizer
from aggregator.services.control import ControlService
from edit.lab.bench.results import circumstances
from edit.records import FragmentCommit, PeerVerdict, Verdict
from editpb.messages import Heartbeat, PeerState
from tests.support.loops import pass_time, run_held
from tests.support.served import found_run, new_folder, served, theta

FRAGMENTS = 4


class Caller:
    """The context of a call, as gRPC has it."""

    def __init__(self, certificate: bytes) -> None:
        names = (
            x509.load_pem_x509_certificate(certificate).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        )
        self._names = [str(each.value).encode() for each in names]
        self._certificate = certificate

    def auth_context(self) -> dict[str, list[bytes]]:
        """Return whom the certificate names."""
        return {"x509_pem_cert": [self._certificate], "x509_subject_alternative_name": self._names}


def second(run: Run, step: int, peers: list[str]) -> None:
    """Let every peer report, and commit a round."""
    for peer_id in peers:
        heartbeat = Heartbeat(state=PeerState.TRAINING, outer_step=step, inner_steps=10 * step, loss=3.0 + 1.0 / step)
        run.feed.publish(PeerReported(peer_id, heartbeat))
    verdicts = tuple(
        PeerVerdict(peer_id=peer_id, verdict=Verdict.OK, norm=1.0, weight=1.0 / len(peers), staleness=0) for peer_id in peers
    )
    fragments = tuple(
        FragmentCommit(fragment_id=i, payload=None, verdicts=verdicts, merged_norm=1.0, clip=1.0) for i in range(FRAGMENTS)
    )
    run.feed.publish(
        RoundReport(
            round_id=step << 8,
            outer_step=step,
            committed=True,
            reason="all are here",
            seconds=1.0,
            bytes_in=10_000,
            bytes_out=2_000,
            missing=(),
            digest="ab" * 16,
            fragments=fragments,
        )
    )


async def measure(folder: Path, asked: argparse.Namespace, profile: cProfile.Profile | None) -> dict[str, Any]:
    """Return the figures."""
    async with AsyncExitStack() as opened:
        at = await opened.enter_async_context(served(new_folder(folder / "run", start=asked.peers)))
        peers = [await opened.enter_async_context(at.peer(f"p{i}")) for i in range(asked.peers)]
        view = await found_run(*peers)
        await asyncio.gather(*(peer.contribute(view.round_id, 0, theta()) for peer in peers))
        await peers[0].view(lambda one: one.outer_step == 1)  # before it, no curves are sent
        run, names = at.coordinator.run, [peer.peer_id for peer in peers]
        for step in range(1, asked.steps + 1):
            second(run, step, names)
        assert at.coordinator.authority is not None
        control = ControlService(run, Authorizer(run.run_id, at.coordinator.authority.members, time.time))
        streams = []
        for i in range(asked.watchers):
            caller: Any = Caller(at.certificate(f"o{i}", "observer")[1])
            streams.append(control.statuses(1.0, caller, curves_kept=True))
        begun = time.process_time()
        first = [(await anext(stream)).SerializeToString() for stream in streams]
        first_s, sizes, spent = time.process_time() - begun, list[int](), {True: 0.0, False: 0.0}  # with watchers, and without
        for step in range(asked.steps + 1, asked.steps + 1 + 2 * asked.messages):
            watched = step % 2 == 0
            waiting = [asyncio.ensure_future(anext(stream)) for stream in streams if watched]
            await asyncio.sleep(0)
            second(run, step, names)
            pass_time(1.0)
            begun = time.process_time()
            if profile is not None and watched:
                profile.enable()
            for _ in range(3):
                await asyncio.sleep(0)
            sizes += [len((await each).SerializeToString()) for each in waiting]
            if profile is not None:
                profile.disable()
            spent[watched] += time.process_time() - begun
        for stream in streams:
            await stream.aclose()
    return {
        "peers": asked.peers,
        "outer_steps": asked.steps,
        "watchers": asked.watchers,
        "first_ms": round(1e3 * first_s / len(first), 3),
        "first_bytes": len(first[0]),
        "messages": len(sizes),
        "message_ms": round(1e3 * (spent[True] - spent[False]) / len(sizes), 4),
        "message_bytes": round(sum(sizes) / len(sizes)),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=300, help="outer steps of the run's history")
    parser.add_argument("--watchers", type=int, default=1)
    parser.add_argument("--messages", type=int, default=300, help="to each watcher")
    parser.add_argument("--profile", action="store_true", help="print where the time goes; it is then longer")
    asked = parser.parse_args()
    begins, profile = circumstances(""), cProfile.Profile() if asked.profile else None
    with tempfile.TemporaryDirectory(prefix="watch-cost-") as folder:
        figures = run_held(measure(Path(folder), asked, profile))
    print(json.dumps({**begins, **figures}))
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
