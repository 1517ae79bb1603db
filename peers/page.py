"""`edit-peer web`: the page of a run, with a member's certificate."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from pathlib import Path

from edit.view.overlaid import overlaid
from edit.web.serve import EVERY_S, page_tls, serve_page
from editpb.run_status import RunStatus
from peers.identity.peer_folder import PeerFolder
from peers.watching import reached

__all__ = ["serve_members_page"]


def serve_members_page(
    home: Path,
    *,
    listen: str,
    certificate: Path | None,
    key: Path | None,
    beside: Mapping[str, RunStatus],
    say: Callable[[str], None],
) -> None:
    """Serve the page of the run that this folder's member is of, until Ctrl-C or SIGTERM. It has no orders.

    Each connection reads the folder anew, so a certificate that was renewed meanwhile is taken.

    Args:
        certificate, key: what the page's server shows to others than this machine, in PEM; None: only this machine may look.
        beside: other runs, whose curves are shown, too.
    """
    folder = PeerFolder(home)
    identity = folder.load(time.time()).identity
    tls = page_tls(listen, certificate, key, home / "ca.pem")
    turn = itertools.count()

    async def shown() -> AsyncGenerator[RunStatus, None]:
        async with aclosing(reached(folder, turn, EVERY_S)) as told:
            async for status in told:
                yield overlaid(status, beside)

    serve_page(shown, identity, listen=listen, tls=tls, say=say)
