"""What the connections of a peer take from its folder and its site's policy."""

from __future__ import annotations

from peers.carriers.hub.kept_configuration import KeptConfiguration
from peers.carriers.hub.masking import MaskFolder
from peers.carriers.hub.site import Site
from peers.identity.peer_folder import PeerFolder
from peers.identity.policy import SitePolicy

__all__ = ["site_of"]


def site_of(policy: SitePolicy, folder: PeerFolder, masks: MaskFolder | None = None, *, clip: float = 0.0) -> Site:
    """Return what the connections take. masks: None: it takes part in no masked round. clip: where they shorten contributions.

    Raises ConfigError where the key, or what is kept of the run, cannot be read.
    """
    enrolled, members = folder.load(), masks.members if masks is not None else None
    return Site(
        key=folder.key(),
        masks=masks,
        receipts=folder.path,
        check=policy.check,
        configuration=KeptConfiguration.open(folder.path, enrolled.run_id, enrolled.authority, members),
        clip=clip,
        hide=policy.protect.hide,
    )
