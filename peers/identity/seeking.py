"""A coordinator that is at none of its known addresses is looked for in a DHT, by the id of the run.

A peer looks for where it serves, who is invited for where invitations are redeemed. The search is a process of its
own, which ends: hivemind, its daemon and its threads stay out of the trainer.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from edit.errors import ConfigError, EditError, RemoteStorageError, TransportError
from editpb.identity import Identity
from editpb.invitation import MAX_ENDPOINTS, Invitation, check_dht_peers, is_endpoint
from peers.carriers.hub.channels import Channels
from peers.helper_process import ends_with_this
from peers.identity.enrolment import UntrustedServerError, join

__all__ = ["Seeking", "redeem", "searching"]

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
        with ends_with_this() as beside:
            try:
                process = await asyncio.create_subprocess_exec(*words, stdin=nothing, stdout=pipe, stderr=pipe, **beside)
            except OSError as error:  # of the system, which may have room for a process later
                return (), f"the search cannot be started ({error.strerror})"
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


def redeem(invitation: str, home: Path, dht_peers: Sequence[str] = ()) -> Identity:
    """Redeem an invitation to a run with a coordinator into `home`; where it does not answer, at the address that the DHT says.

    The coordinator signs what it says there, and only the invitation's authority counts (`Discovery.of_invited`). Raises as
    `join`, and ConfigError for dht_peers.
    """
    check_dht_peers(dht_peers)
    try:
        return join(invitation, home, time.time())
    except RemoteStorageError:
        raise  # it did answer
    except (TransportError, UntrustedServerError) as silence:
        if not dht_peers:
            raise
        _log.info("%s; the coordinator is looked for in the DHT", silence)
        try:
            found = _sought_enrolment(invitation, home, dht_peers)
        except EditError as error:
            if isinstance(silence, TransportError):
                raise
            _log.info("%s", error)
            raise silence from None  # it may be this machine's clock that is wrong
        _log.info("the DHT says that invitations are redeemed at %s", ", ".join(found))
        elsewhere = replace(Invitation.decode(invitation), enrol=found)
        return join(elsewhere.encode(), home, time.time())


def _sought_enrolment(invitation: str, home: Path, dht_peers: Sequence[str]) -> tuple[str, ...]:
    words = [sys.executable, "-m", "aggregator.swarm", "seek-enrolment", str(home / "seeking")]
    words += [f"--dht-peers={each}" for each in dht_peers]
    told = f"{invitation.strip()}\n"
    try:
        with ends_with_this() as beside:
            done = subprocess.run(words, capture_output=True, text=True, input=told, check=False, timeout=SEARCH_S, **beside)
    except subprocess.TimeoutExpired:
        raise TransportError(f"the search took longer than {SEARCH_S:g} s; try again") from None
    lines = done.stdout[:_SAID].splitlines()[:MAX_ENDPOINTS]
    if found := tuple(line for line in lines if is_endpoint(line)):
        return found
    last = "".join(done.stderr.splitlines()[-1:]).removeprefix("aggregator.swarm: ")
    error = ConfigError if done.returncode == 2 else TransportError
    raise error(last or "the search in the DHT said nothing")
