"""What the connections of a peer take from its folder and its site's policy."""

from __future__ import annotations

from peers.carriers.hub.masking import MaskFolder
from peers.carriers.hub.site import Site
from peers.identity.peer_folder import PeerFolder
from peers.identity.policy import SitePolicy

__all__ = ["site_of"]


def site_of(policy: SitePolicy, folder: PeerFolder, masks: MaskFolder | None = None, *, clip: float = 0.0) -> Site:
    """Return what the connections take. masks: None: it takes part in no masked round. clip: where they shorten contributions.

    Raises ConfigError where the key cannot be read.
    """
    hide = policy.protect.hide
    return Site(key=folder.key(), masks=masks, receipts=folder.path, check=policy.check, clip=clip, hide=hide)
