"""Enrol a peer that connects through a link: what `edit-coordinator invite` and `edit-peer join` do, without two processes."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path

from aggregator.security.authority import Authority
from aggregator.storage.state_folder import StateFolder
from edit.lab.link import Link, LinkShape
from peers.identity.enrolment import join

__all__ = ["join_behind_a_link"]


def join_behind_a_link(opened: ExitStack, state: Path, name: str, home: Path, shape: LinkShape) -> Link:
    """Enrol `name` in the run in `state`, which is being served, and return its link. opened: will close the link."""
    addresses = json.loads((state / "addresses.json").read_text())
    folder = StateFolder(state)
    authority = Authority.load(folder.path, folder.run_id)
    invitation = authority.invite(name, role="peer", enrol=(addresses["enrol_listen"],), lifetime_s=3600.0, now=time.time())
    join(invitation.encode(), home, time.time())
    link = opened.enter_context(Link(("127.0.0.1", int(addresses["listen"].rpartition(":")[2])), shape))
    identity = home / "identity.json"
    identity.write_text(json.dumps({**json.loads(identity.read_text()), "endpoints": [f"127.0.0.1:{link.port}"]}))
    return link
