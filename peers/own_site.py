"""What the connections of a peer take from its folder and its site's policy."""

from __future__ import annotations

from dataclasses import replace

from edit.trust.signatures import Signer, key_hash
from editpb.earlier_keys import earlier_keys
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
    enrolled, key = folder.load(), folder.key()
    own, members = enrolled.identity.peer_id, masks.members if masks is not None else None
    if masks is not None and members is not None and own in members:  # of its own keys the folder knows best
        keys = (*earlier_keys(folder.path, enrolled.identity), Signer(key).public_key)
        hashes = dict.fromkeys(map(key_hash, keys))
        members = {**members, own: (*(each for each in members[own] if each not in hashes), *hashes)}
        masks = replace(masks, members=members)
    return Site(
        key=key,
        masks=masks,
        receipts=folder.path,
        check=policy.check,
        configuration=KeptConfiguration.open(folder.path, enrolled.run_id, enrolled.authority, members),
        clip=clip,
        hide=policy.protect.hide,
    )
