"""Whoever has no certificate fills no log."""

from __future__ import annotations

import asyncio
import json
import signal
import ssl
from pathlib import Path

from tests.support.daemons import Site, small

HANDSHAKES = 40


def test_a_handshake_without_a_certificate_leaves_no_line_in_the_log(tmp_path: Path) -> None:
    with Site(tmp_path, small("strangers")) as site:
        coordinator = site.serve()
        host, _, port = json.loads((site.state / "addresses.json").read_text())["listen"].rpartition(":")
        assert asyncio.run(handshakes(host, int(port))) == HANDSHAKES
        coordinator.process.send_signal(signal.SIGTERM)
        assert coordinator.finish() == 0
    foreign = [line for line in coordinator.lines if "andshake" in line or "ssl" in line]
    assert not foreign, f"{len(foreign)} lines, the first: {foreign[0]}"


async def handshakes(host: str, port: int) -> int:
    """Return how many handshakes without a certificate were refused."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    refused = 0
    for _ in range(HANDSHAKES):
        reader, writer = await asyncio.open_connection(host, port, ssl=context)
        try:
            refused += not await reader.read()
        except ssl.SSLError:
            refused += 1
        finally:
            writer.close()
    return refused
