"""`python -m aggregator.swarm FOLDER`: a host of a swarm. `python -m aggregator.swarm VERB FOLDER`: see `commands`."""

import argparse
import asyncio
import json
import logging
import os
import sys
import threading
from pathlib import Path

from edit.command_line import CALLED_AS, ENDS_WITH, loading, log_to_stderr, run_command

__all__ = ["main", "program"]

_VERBS = (
    *(
        "found",
        "seek",
        "seek-enrolment",
        "seek-members",
        "invite",
        "observe",
        "status",
        "configured",
        "kept-status",
        "watch",
        "report",
        "export",
        "web",
        "evict",
        "pause",
        "resume",
        "drain",
        "share-authority",
        "new-authority",
        "leave",
        "make-relay",
        "relay",
        "recover",
        "rejoin",
        "audit",
    ),
    *("-h", "--help"),
)


def main() -> None:
    """Entry point of `python -m aggregator.swarm`. Where a peer asks it something, it ends with that peer's process."""
    if pipe := os.environ.pop(ENDS_WITH, ""):
        threading.Thread(target=_end_with, args=(int(pipe),), name="asked by", daemon=True).start()
    run_command(os.environ.pop(CALLED_AS, "aggregator.swarm"), program)


def program() -> None:
    """Serve the folder that the command line names, or do what it says."""
    if sys.argv[1:] and sys.argv[1] not in _VERBS:
        _serve()
        return
    with loading():
        from aggregator.swarm.commands import app  # imports gRPC; what must, torch

    app(prog_name="python -m aggregator.swarm")


def _end_with(pipe: int) -> None:
    """End this process, as a kill does, when all that could write to the pipe have ended."""
    os.read(pipe, 1)
    os._exit(1)


def _serve() -> None:
    parser = argparse.ArgumentParser(prog="python -m aggregator.swarm")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--listen", help="HOST:PORT; port 0 chooses one, once")
    parser.add_argument("--advertise", help="the host by which others reach it; empty: nobody does")
    parser.add_argument("--relay", help="HOST:PORT of a relay by which others reach it; empty: none")
    parser.add_argument("--dht-peers", action="append", default=[], help="a libp2p node of the DHT to begin with")
    parser.add_argument("--hours", help="in which it takes part, by this machine's clock: 22:00-06:00")
    parser.add_argument("--max-mbit", type=float, help="what is sent per second, in 10^6 bits")
    parser.add_argument("--allow", action="append", default=[], help="a plug-in that this member's operator trusts")
    parser.add_argument("--metrics-listen", default="", help="HOST:PORT of /metrics, /healthz and /readyz; empty: none")
    parser.add_argument("--seed", action="append", default=[], help="NAME=HOST:PORT of a member to begin with")
    parser.add_argument(
        "--settings-only", action="store_true", help="ask others for the run's settings, if the folder has none, and print JSON"
    )
    parser.add_argument("--who", default="", help="begins each line of the log: it is beside a peer that trains")
    given = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported, as by `edit-coordinator serve`
    with loading():
        from aggregator.swarm.host_folder import seeds_of
        from aggregator.swarm.process import serve_host, settings_here, settle  # imports torch and gRPC
        from editpb.hours import Hours, keep_hours

    log_to_stderr(who=given.who)
    if given.who:  # the peer tells of each outer step
        for name in ("aggregator.run_feed.rounds", "aggregator.swarm.host.steps"):
            logging.getLogger(name).setLevel(logging.WARNING)
    settle(given.folder, given.listen, given.advertise, seeds_of(given.seed), tuple(given.dht_peers), given.relay)
    if given.settings_only:
        print(json.dumps(asyncio.run(settings_here(given.folder))))  # noqa: T201
        return
    hours = Hours.parse(given.hours) if given.hours else None
    allowed = frozenset(given.allow)

    def serve() -> None:
        asyncio.run(serve_host(given.folder, max_mbit=given.max_mbit, allowed=allowed, metrics_listen=given.metrics_listen))

    keep_hours(hours, serve)
