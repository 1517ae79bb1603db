"""Enrol a member: what `edit-coordinator invite` and `edit-peer join` do, without two processes."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path

from aggregator.security.authority import Authority
from aggregator.storage.state_folder import StateFolder
from edit.lab.link import Link, LinkShape
from peers.identity.enrolment import join

__all__ = ["address_of", "enrol", "invite", "join_behind_a_link", "lead_through"]


def enrol(state: Path, name: str, home: Path, role: str = "peer") -> None:
    """Enrol `name` in the run in `state`, which is being served; its key and certificate lie in `home` afterwards."""
    join(invite(state, name, role), home, time.time())


def invite(state: Path, name: str, role: str = "peer") -> str:
    """Return an invitation for `name` to the run in `state`, which is being served."""
    folder = StateFolder(state)
    authority = Authority.load(folder.path, folder.run_id)
    enrol_at = (folder.bound()["enrol_listen"],)
    return authority.invite(name, role=role, enrol=enrol_at, lifetime_s=3600.0, now=time.time()).encode()


def address_of(state: Path) -> tuple[str, int]:
    """Return where the run in `state`, which is being served, listens on this machine."""
    return "127.0.0.1", int(StateFolder(state).bound()["listen"].rpartition(":")[2])


def join_behind_a_link(opened: ExitStack, state: Path, name: str, home: Path, shape: LinkShape) -> Link:
    """Enrol `name` in the run in `state`, which is being served, and return its link. opened: will close the link."""
    enrol(state, name, home)
    link = opened.enter_context(Link(address_of(state), shape))
    lead_through(home, link.port)
    return link


def lead_through(home: Path, port: int) -> None:
    """Let the peer in `home` connect to this port of the machine it is on, instead of the coordinator's address."""
    identity = home / "identity.json"
    identity.write_text(json.dumps({**json.loads(identity.read_text()), "endpoints": [f"127.0.0.1:{port}"]}))
