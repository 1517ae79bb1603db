"""A member's port, reached through a relay: what `relay` says, from the member's side.

The member dials, the relay asks, the member dials again and joins that connection to its own port. Whoever comes by it meets
the TLS of this member's host, as at its port. A relay that lies can close, delay or lose; more than MOST_OF_MEMBER connections
at a time it does not get.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from aggregator.swarm.callers import moved
from aggregator.swarm.relay import (
    BACK,
    CHUNK_BYTES,
    HELLO,
    HELLO_S,
    MOST_LINE,
    MOST_OF_MEMBER,
    MOVED,
    PING_S,
    READY,
    SILENT_S,
    TOKEN_BYTES,
    Ends,
    keep_alive,
    relay_identity,
    splice,
)
from edit.errors import ConfigError, EditError, RefusedError, TransportError
from editpb.identity import Identity
from editpb.invitation import local_address

__all__ = ["RelayedPort"]

_log = logging.getLogger(__name__)
FIRST_AGAIN_S, AGAIN_S = 0.5, 10.0  # between two attempts to reach the relay; doubled from first to last
_REMAKE = "make the relay's folder again"
_OPEN = re.compile(rb"open ([0-9a-f]{%d})\n" % (2 * TOKEN_BYTES))


class RelayedPort:
    """See above. `run` it. Used on the event loop.

    Args:
        relay: HOST:PORT.
        folder: of the member, with its key and certificate, which are read at each attempt.
        identity: of the member.
    """

    def __init__(self, relay: str, folder: Path, identity: Identity) -> None:
        self.relay, self._folder, self._identity = relay, folder, identity
        host, _, port = relay.rpartition(":")
        self._address = host.strip("[]"), int(port)
        self._port = ("", 0)
        self._said = ""
        self._note: Callable[[str], None] = lambda _: None
        self._passing: set[asyncio.Task[None]] = set()

    async def run(self, listen: str, note: Callable[[str], None]) -> None:
        """Stay connected until cancelled.

        Args:
            listen: HOST:PORT of this member's own port.
            note: is told of news: connected, and why not.
        """
        self._note = note
        host, _, port = local_address(listen).rpartition(":")
        self._port = host.strip("[]"), int(port)
        pause_s = FIRST_AGAIN_S
        try:
            while True:
                try:
                    await self._stay()
                except EditError as error:
                    pause_s = FIRST_AGAIN_S if self._said.endswith("connected") else min(2 * pause_s, AGAIN_S)
                    self._say(f"{error}; others cannot dial this member until it is back")
                await asyncio.sleep(pause_s)
        finally:
            for task in self._passing:
                task.cancel()
            await asyncio.gather(*self._passing, return_exceptions=True)

    def _say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._note(f"the relay at {self.relay}: {text}")

    def _context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            context.load_verify_locations(self._folder / "ca.pem")
            context.load_cert_chain(self._folder / "peer.pem", self._folder / "peer.key")
        except OSError as error:
            raise ConfigError(f"{self._folder}: the member's certificate cannot be read ({error})") from error
        return context

    async def _stay(self) -> None:
        """Be connected; raise why that ended."""
        name = relay_identity(self._identity.run_id).server_name
        try:
            async with asyncio.timeout(HELLO_S):
                reader, writer = await asyncio.open_connection(
                    *self._address, ssl=self._context(), server_hostname=name, limit=MOST_LINE
                )
        except ssl.SSLCertVerificationError as error:
            raise RefusedError(_why_not_trusted(error)) from None
        except ConnectionResetError:
            raise TransportError("ends the connection; is it a relay of this run?") from None
        except (OSError, TimeoutError, UnicodeError) as error:  # UnicodeError: of a name that no host can have
            raise TransportError(f"does not answer ({error or 'no answer in time'})") from None
        keep_alive(writer.get_extra_info("socket"))
        pings = asyncio.ensure_future(_ping(writer))
        try:
            writer.write(HELLO)
            if (said := await _line(reader)) == MOVED:
                raise RefusedError(f"refuses this machine: {moved(self._identity.peer_id)}")
            if said != READY:
                raise TransportError("refuses this member: is its certificate of this run, and still valid?")
            self._say("connected")
            while True:
                self._take(await _line(reader))
        except (OSError, ValueError) as error:  # also of a line that is too long
            raise TransportError(f"the connection broke ({error})") from None
        finally:
            pings.cancel()
            await asyncio.gather(pings, return_exceptions=True)
            writer.transport.abort()

    def _take(self, line: bytes) -> None:
        if line == b"pong\n":
            return
        if (asked := _OPEN.fullmatch(line)) is None:
            raise TransportError("says what this version does not know")
        if len(self._passing) >= MOST_OF_MEMBER:
            return  # who waits there is told nothing, and tries again
        task = asyncio.get_running_loop().create_task(self._dial_back(bytes.fromhex(asked[1].decode())))
        self._passing.add(task)
        task.add_done_callback(self._passing.discard)

    async def _dial_back(self, token: bytes) -> None:
        opened: list[Ends] = []
        try:
            async with asyncio.timeout(HELLO_S):
                for address in (self._port, self._address):
                    opened.append(await asyncio.open_connection(*address, limit=CHUNK_BYTES))
                    keep_alive(opened[-1][1].get_extra_info("socket"))
            opened[-1][1].write(BACK + token)
            await splice(*opened)
        except (OSError, TimeoutError) as error:
            _log.debug("the relay at %s: %s %s", self.relay, type(error).__name__, error)
        finally:
            for _, writer in opened:
                writer.transport.abort()


def _why_not_trusted(error: ssl.SSLCertVerificationError) -> str:
    match error.verify_code:
        case 9:  # X509_V_ERR_CERT_NOT_YET_VALID
            return (
                "its certificate is not valid yet: the clock where its folder was made, or this machine's, is wrong; " + _REMAKE
            )
        case 10:  # X509_V_ERR_CERT_HAS_EXPIRED
            return "its certificate has expired, by this machine's clock; set the clock if it is wrong, or " + _REMAKE
    return (
        f"is of another authority than this member's ({error.verify_message}); after new-authority {_REMAKE}, and if this "
        "member was off meanwhile, invite it again"
    )


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        async with asyncio.timeout(SILENT_S):
            line = await reader.readline()
    except TimeoutError:
        raise TransportError(f"is silent for {SILENT_S:g} s") from None
    if not line:
        raise TransportError("ended the connection")
    return line


async def _ping(writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while True:
            await asyncio.sleep(PING_S)
            writer.write(b"ping\n")
            await writer.drain()
