"""A coordinator that is at none of its known addresses is looked for in a DHT, by the run's id.

The search is a process of its own, which ends: hivemind, its daemon and its threads stay out of the trainer.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from editpb.invitation import MAX_ENDPOINTS, is_endpoint
from peers.carriers.hub.channels import Channels

__all__ = ["Seeking", "searching"]

LOOK_S = 5.0  # between two looks whether it must be sought
AGAIN_S = 60.0  # from one search to the next
ROUNDS = 2  # that all known addresses are tried in vain before
SEARCH_S = 60.0  # a search that takes longer is ended
_SAID = 65_536  # bytes that are read of what it prints
_log = logging.getLogger(__name__)


class Seeking:
    """See above; spawn `keep`.

    Args:
        channels: to the coordinator; they learn where it is.
        search: returns the lines that the search printed, and why it found nothing.
    """

    def __init__(self, channels: Channels, search: Callable[[], Awaitable[tuple[Sequence[str], str]]]) -> None:
        self._channels, self._search = channels, search

    async def keep(self) -> None:
        """Look for the coordinator whenever it is lost, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self._channels.failures >= ROUNDS * self._channels.known:
                await self.seek()
                await asyncio.sleep(AGAIN_S)

    async def seek(self) -> None:
        """Look for it once."""
        _log.info("the coordinator is at none of its addresses; it is looked for in the DHT")
        lines, why = await self._search()
        if found := [line for line in lines[:MAX_ENDPOINTS] if is_endpoint(line)]:
            _log.info("the DHT says that it is at %s", ", ".join(found))
            self._channels.learn(found)
        else:
            _log.info("it was not found: %s; the known addresses are tried on", why or "nothing was said")


def searching(home: Path, dht_peers: Sequence[str]) -> Callable[[], Awaitable[tuple[Sequence[str], str]]]:
    """Return the search for the coordinator of the run that `home` is enrolled in."""
    words = [sys.executable, "-m", "aggregator.swarm", "seek", str(home), *(f"--dht-peers={each}" for each in dht_peers)]

    async def search() -> tuple[Sequence[str], str]:
        pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(*words, stdin=nothing, stdout=pipe, stderr=pipe)
        try:
            async with asyncio.timeout(SEARCH_S):
                said, errors = await process.communicate()
        except TimeoutError:
            return (), f"the search took longer than {SEARCH_S:g} s"
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        last = errors[-_SAID:].decode(errors="replace").splitlines()[-1:]
        return said[:_SAID].decode(errors="replace").splitlines(), "".join(last).removeprefix("aggregator.swarm: ")

    return search
