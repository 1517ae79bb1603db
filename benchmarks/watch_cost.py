"""What a message of Watch costs the coordinator: CPU seconds of making and of serializing it.

    .venv/bin/python benchmarks/watch_cost.py                            # 8 peers, 300 outer steps; some seconds
    .venv/bin/python benchmarks/watch_cost.py --watchers 8 --profile

A real coordinator in this process, whose peers attend over gRPC on loopback, with a history of so many outer steps. Time on its
event loop stands still and is moved on by hand: a second from each message to the next, in which every peer reports and a round
is committed. What is measured is the CPU time of this process in the seconds with a message, less that in as many without;
sending them is not part of it. The first messages, which are whole, are counted apart.

With `--send` it is: a process beside this one watches over gRPC on loopback, told each two seconds, as a page is. It says
of each message that it came, which is waited for and counted, too. A line is appended to benchmarks/results/page_cost.jsonl.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import math
import os
import pstats
import subprocess
import sys
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
from edit.lab.bench.results import append_lines, circumstances
from edit.records import FragmentCommit, PeerVerdict, Verdict
from editpb.messages import Heartbeat, PeerState
from tests.support.loops import outside, pass_time, run_held
from tests.support.served import found_run, new_folder, served, theta

FRAGMENTS = 4
RESULTS = Path(__file__).parent / "results" / "page_cost.jsonl"


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


WATCHER = """
import sys, grpc
from editpb import control_pb2, control_pb2_grpc
address, ca, key, certificate, kept = sys.argv[1:]
credentials = grpc.ssl_channel_credentials(*(open(name, "rb").read() for name in (ca, key, certificate)))
with grpc.secure_channel(address, credentials) as channel:
    for reply in control_pb2_grpc.ControlStub(channel).Watch(control_pb2.WatchRequest(every_s=2.0, curves_kept=kept == "kept")):
        sys.stdout.buffer.write(reply.ByteSize().to_bytes(4, "big"))
        sys.stdout.buffer.flush()
"""


async def measure_sending(folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """Return the figures where messages are sent."""
    async with AsyncExitStack() as opened:
        at = await opened.enter_async_context(served(new_folder(folder / "run", start=asked.peers)))
        peers = [await opened.enter_async_context(at.peer(f"p{i}")) for i in range(asked.peers)]
        view = await found_run(*peers)
        await asyncio.gather(*(peer.contribute(view.round_id, 0, theta()) for peer in peers))
        await peers[0].view(lambda one: one.outer_step == 1)
        run, names = at.coordinator.run, [peer.peer_id for peer in peers]
        for step in range(1, asked.steps + 1):
            second(run, step, names)
        files = [folder / name for name in ("ca.pem", "key.pem", "own.pem")]
        for file, text in zip(files, (at.ca, *at.certificate("eve", "observer")), strict=True):
            file.write_bytes(text)
        line = [
            sys.executable,
            "-c",
            WATCHER,
            at.coordinator.listen,
            *map(str, files),
            "whole" if asked.whole_curves else "kept",
        ]
        process = opened.enter_context(subprocess.Popen(line, stdout=subprocess.PIPE))  # noqa: ASYNC220 (it is read by the loop)
        opened.callback(process.kill)
        told: asyncio.Queue[int] = asyncio.Queue()
        assert process.stdout is not None
        pipe, loop = process.stdout.fileno(), asyncio.get_running_loop()
        loop.add_reader(pipe, lambda: told.put_nowait(int.from_bytes(os.read(pipe, 4), "big")))
        opened.callback(loop.remove_reader, pipe)
        begun = time.process_time()
        first = await told.get()
        first_s, sizes, spent = time.process_time() - begun, list[int](), {True: 0.0, False: 0.0}
        due = math.floor(loop.time() / 2.0) * 2.0 + 2.0
        for step in range(asked.steps + 1, asked.steps + 1 + 2 * asked.messages):
            await outside(0.01)  # until the watcher's call waits for the time
            second(run, step, names)
            pass_time(1.0)
            watched = loop.time() >= due
            begun = time.process_time()
            if watched:
                due += 2.0
                coming, late = asyncio.ensure_future(told.get()), asyncio.ensure_future(outside(1.0))
                await asyncio.wait((coming, late), return_when=asyncio.FIRST_COMPLETED)
                if not coming.done():  # it waits for two seconds later
                    coming.cancel()
                    continue
                late.cancel()
                sizes.append(coming.result())
            for _ in range(3):
                await asyncio.sleep(0)
            spent[watched] += time.process_time() - begun
    return {
        "peers": asked.peers,
        "outer_steps": asked.steps,
        "first_ms": round(1e3 * first_s, 3),
        "first_bytes": first,
        "curves": "whole" if asked.whole_curves else "new points",
        "messages": len(sizes),
        "sent_message_ms": round(1e3 * (spent[True] / len(sizes) - spent[False] / asked.messages), 4),
        "message_bytes": round(sum(sizes) / len(sizes)),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=300, help="outer steps of the run's history")
    parser.add_argument("--watchers", type=int, default=1)
    parser.add_argument("--messages", type=int, default=300, help="to each watcher")
    parser.add_argument("--send", action="store_true", help="to one watcher, over gRPC")
    parser.add_argument("--whole-curves", action="store_true", help="with --send: what a watcher of earlier versions is told")
    parser.add_argument("--profile", action="store_true", help="print where the time goes; it is then longer")
    parser.add_argument("--out", type=Path, default=RESULTS, help="with --send")
    asked = parser.parse_args()
    begins, profile = circumstances(""), cProfile.Profile() if asked.profile else None
    with tempfile.TemporaryDirectory(prefix="watch-cost-") as folder:
        work = measure_sending(Path(folder), asked) if asked.send else measure(Path(folder), asked, profile)
        figures = run_held(work)
    print(json.dumps({**begins, **figures}))
    if asked.send:
        append_lines(asked.out, [{**begins, **figures}])
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
