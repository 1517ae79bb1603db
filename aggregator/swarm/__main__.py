"""`python -m aggregator.swarm FOLDER`: a host of a swarm."""

import asyncio
import sys
from pathlib import Path

from edit.command_line import log_to_stderr, run_command
from edit.errors import ConfigError


def serve() -> None:
    """Serve the folder that the command line names."""
    from aggregator.swarm.process import serve_host  # imports gRPC

    if len(sys.argv) != 2:
        raise ConfigError("give the folder of one host: python -m aggregator.swarm FOLDER")
    log_to_stderr()
    asyncio.run(serve_host(Path(sys.argv[1])))


if __name__ == "__main__":
    run_command("aggregator.swarm", serve)
