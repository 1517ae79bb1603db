"""What the page of a run asks of its coordinator: statuses as they come, who may look, and the operator's orders."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from functools import partial
from pathlib import Path

from cryptography import x509

from aggregator.operator_client import ask_every, drain_every, evict_peer, pause_run, resume_run, watch_run
from aggregator.past import last_status
from aggregator.security.members import OPERATOR_ID, Members
from aggregator.storage.state_folder import StateFolder
from edit.errors import StorageError, TransportError
from edit.view.overlaid import overlaid
from edit.web.feed import Source
from edit.web.serve import EVERY_S, page_tls, serve_page
from editpb.identity import Identity
from editpb.run_status import RunStatus

__all__ = ["give_order", "serve_operators_page", "statuses_of_operator"]

_ORDERS = {"pause": pause_run, "resume": resume_run}
_EVICTED = "evicted by the operator"


def serve_operators_page(
    folder: StateFolder,
    *,
    listen: str,
    certificate: Path | None,
    key: Path | None,
    beside: Mapping[str, RunStatus],
    say: Callable[[str], None],
) -> None:
    """Serve the page of this folder's run until Ctrl-C or SIGTERM, as its operator.

    Args:
        certificate, key: what the page's server shows to others than this machine, in PEM; None: the coordinator's own.
        beside: other runs, whose curves are shown, too.

    Raises as `edit.web.serve.serve_page`, and StorageError where members.json is needed and cannot be read.
    """
    own = (folder.path / "server.pem", folder.path / "server.key")
    tls = page_tls(listen, certificate, key, folder.path / "ca.pem", own)
    identity = Identity(folder.run_id, "operator", OPERATOR_ID)
    serve_page(
        statuses_of_operator(folder, beside),
        identity,
        listen=listen,
        tls=tls,
        give_order=partial(give_order, folder),
        why_refused=_Enrolled(folder.path / "members.json").why_refused if tls is not None else None,
        say=say,
    )


class _Enrolled:
    """Who may look, by what members.json says now: `serve`, in another process, writes it. Raises StorageError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._members, self._read = Members(path), b""

    def why_refused(self, identity: Identity, certificate: x509.Certificate) -> str | None:
        """As `Members.why_refused`. While the file cannot be read, what it said last counts."""
        with contextlib.suppress(OSError, StorageError):
            if (found := self._path.read_bytes()) != self._read:
                self._members, self._read = Members(self._path), found
        return self._members.why_refused(identity, certificate)


def statuses_of_operator(folder: StateFolder, beside: Mapping[str, RunStatus]) -> Source:
    """Return the statuses that the operator's page shows, with the curves of other runs.

    Where the coordinator has ended before the page asks for the first time, that is how the run stood then, by its folder.
    """
    known = False

    async def statuses() -> AsyncGenerator[RunStatus, None]:
        nonlocal known
        try:
            async with aclosing(watch_run(folder, EVERY_S)) as told:
                async for status in told:
                    known = True
                    yield overlaid(status, beside)
        except TransportError:
            if not known:
                known = True
                yield overlaid(await asyncio.to_thread(last_status, folder), beside)
            raise

    return statuses


async def give_order(folder: StateFolder, order: str, peer_id: str) -> None:
    """Carry out one of `edit.web.app.ORDERS` at every aggregator of the run. Raises as `operator_client.ask_every`."""
    if order == "drain":
        (await drain_every(folder)).check()
    else:
        (await ask_every(folder, _ORDERS.get(order) or evict_peer(peer_id, _EVICTED))).check()
