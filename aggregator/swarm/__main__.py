"""`python -m aggregator.swarm FOLDER`: a host of a swarm."""

import asyncio
import sys
from pathlib import Path

from aggregator.swarm.process import serve_host
from edit.command_line import log_to_stderr, run_command

if __name__ == "__main__":
    log_to_stderr()
    run_command("aggregator.swarm", lambda: asyncio.run(serve_host(Path(sys.argv[1]))))
