"""`python -m aggregator.swarm FOLDER`: a host of a swarm. `python -m aggregator.swarm VERB FOLDER`: see `commands`."""

import asyncio
import sys
from pathlib import Path

from edit.command_line import log_to_stderr, run_command

_OPERATE = ("status", "evict", "pause", "resume", "drain", "leave", "recover", "rejoin", "-h", "--help")


def main() -> None:
    """Serve the folder that the command line names, or do what it says."""
    if sys.argv[1:] and sys.argv[1] not in _OPERATE:
        from aggregator.swarm.process import serve_host  # imports gRPC

        log_to_stderr()
        asyncio.run(serve_host(Path(sys.argv[1])))
        return
    from aggregator.swarm.commands import app

    app(prog_name="python -m aggregator.swarm")


if __name__ == "__main__":
    run_command("aggregator.swarm", main)
