"""The receipts of a peer: each update brings one, which is checked before anything of the update is used, and kept.

Rank 0 alone asks for receipts, on the loop's thread. What contributions carry is the head of the last one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from edit.durable_files import write_json
from edit.errors import RefusedError, RemoteProtocolError, StorageError, TransportError
from edit.trust.checkpoints import Cosigner, NoteKey, open_note
from editpb import data_pb2
from editpb.audit_log import log_origin
from editpb.data_messages import receipt_from_pb
from editpb.limits import one_line
from editpb.messages import ContributionHeader, Cosignature, LogReceipt, SeenHead, SnapshotManifest, UpdateManifest
from editpb.receipts import Expected, Head, Mine, ReceiptFault, SeenMasks, check_receipt
from peers.carriers.hub.kept_receipts import FAULT, FORMAT, RECEIPTS, KeptReceipts, base64_text, kept_of, other_key, pinned_key

__all__ = ["Receipts"]


@dataclass(slots=True)
class Receipts:
    """What a peer asks of the receipts of its run. On the loop's thread. Make it with `open`."""

    home: Path
    key: NoteKey  # of the log
    run_id: str
    schema_hash: str
    mine: Mine
    members: Mapping[str, tuple[str, ...]] | None  # see `Expected`
    failed: Callable[[str], object]  # told why the peer must not go on
    kept: KeptReceipts
    cosigner: Cosigner | None = None  # None: this peer does not cosign
    masked: bool = False  # whether contributions are masked in this run
    lazily: bool = False  # whether updates are used as they arrive, before theta's digest after them is known
    max_staleness: int = 0  # as in `Expected`
    config_digest: str = ""  # likewise
    position: tuple[int, str] = (-1, "")  # outer step and digest of theta, by the last snapshot or receipt
    _reached: int = -1  # the newest outer step of a snapshot or a receipt
    _saving: asyncio.Lock = field(default_factory=asyncio.Lock)
    _cosigned: Cosignature | None = None  # the last one

    @classmethod
    def open(
        cls,
        home: Path,
        log_key: str,
        run_id: str,
        schema_hash: str,
        mine: Mine,
        failed: Callable[[str], object],
        members: Mapping[str, tuple[str, ...]] | None = None,
        cosigner: Cosigner | None = None,
        *,
        aggregator: int = 0,
        masked: bool = False,
        lazily: bool = False,
        max_staleness: int = 0,
        config_digest: str = "",
    ) -> Receipts:
        """Go on from what is kept in a peer's folder.

        log_key: as the aggregator says it. aggregator: whose log it is. masked and what follows: see the fields.

        Raises ConfigError (damaged files), RefusedError (another key; an earlier receipt did not fit), StorageError.
        """
        home = kept_of(home, aggregator)
        if (path := home / FAULT).exists():
            raise RefusedError(
                f"{path}: a receipt of the audit log did not fit, so this peer does not take part. Show that file to the other "
                f"members; to take part all the same, move it and {home / RECEIPTS} away"
            )
        try:
            home.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{home}: cannot be created ({error.strerror})") from error
        key = pinned_key(home, log_key, log_origin(run_id, aggregator))
        kept = KeptReceipts.open(home, key)
        return cls(
            home, key, run_id, schema_hash, mine, members, failed, kept, cosigner, masked, lazily, max_staleness, config_digest
        )

    def check_key(self, log_key: str) -> None:
        """Raise RefusedError where the log has another key than before. log_key: as the aggregator says it now."""
        if log_key != self.key.text():
            raise other_key(self.home, log_key)

    @property
    def head(self) -> Head:
        """The head of the last receipt that was accepted."""
        return self.kept.head

    def seen(self) -> SeenHead | None:
        """Return what contributions carry."""
        return self.head.seen(self.key)

    def cosigned(self) -> Cosignature | None:
        """Return the newest head that this peer vouches for; None: it has none, or does not cosign.

        Only what is on disk here is signed: after any restart the log is held to it, so no two heads that do not belong to one
        log are ever signed.
        """
        head = self.kept.saved
        if self.cosigner is None or (seen := head.seen(self.key)) is None:
            return None
        if self._cosigned is None or self._cosigned.head != seen:
            text, _ = open_note(head.note, [self.key])
            self._cosigned = Cosignature(seen, self.cosigner.sign(text))
        return self._cosigned

    def agrees(self, snapshot: SnapshotManifest) -> bool:
        """Return whether nothing is left to be asked of a snapshot: it is theta as known, of no commit, or nothing is known."""
        known = self.position[0] >= 0 and snapshot.outer_step > 0
        return not known or self.position == (snapshot.outer_step, snapshot.digest)

    def check_snapshot(self, snapshot: SnapshotManifest) -> None:
        """Raise ReceiptFault, after which the peer must not go on, where the log says another theta of that outer step."""
        (step, digest), other = self.position, snapshot.digest
        if step == snapshot.outer_step and digest != other:
            why = f"theta after outer step {step} has the digest {digest[:12]} by the log, {other[:12]} by the snapshot"
            self.fault(snapshot, why)

    def at(self, outer_step: int, digest: str) -> None:
        """Note theta as a snapshot has it: the next receipt must begin with it."""
        self.position = outer_step, digest
        self._reached = max(self._reached, outer_step)

    def signed(self, header: ContributionHeader) -> ContributionHeader:
        """Note what this peer signs; return it."""
        self.mine = self.mine.with_signed(header)
        return header

    def delivered(self, header: ContributionHeader) -> None:
        """Note that the coordinator has said that it has all of this shard."""
        self.mine = self.mine.with_delivered(header.round_id, header.fragment_id)

    def saw_masks(self, round_id: int, seen: SeenMasks) -> None:
        """Note what this peer has seen of a masked round, or has signed in it."""
        self.mine = self.mine.with_masks(round_id, seen)

    def accept(self, manifest: UpdateManifest, message: data_pb2.LogReceipt | None, asked: Head) -> dict[int, str | None]:
        """Check the receipt of an update; return the hashes that the update's bytes are to have, by fragment; None: any.

        Of an update beyond all before it theta's digest after it is compared before any of it is used, unless `lazily`: that
        digest is the log's, so the bytes need not be hashed, too.

        message: None: there was none. asked: the head that the request was made with.

        Raises ReceiptFault, after which the peer must not go on; TransportError when another receipt came meanwhile.
        """
        if asked != self.head:
            raise TransportError("the receipt of another update has come meanwhile; this one is asked for again")
        receipt: LogReceipt | None = None
        try:
            if message is None:
                raise ReceiptFault("the update brings no receipt")
            receipt = receipt_from_pb(message)
            step, digest = self.position
            expected = Expected(
                key=self.key,
                run_id=self.run_id,
                schema_hash=self.schema_hash,
                seen=self.head,
                manifest=manifest,
                before=digest if step == manifest.outer_step - 1 else "",
                mine=self.mine,
                members=self.members,
                masked=self.masked,
                max_staleness=self.max_staleness,
                config_digest=self.config_digest,
            )
            head, entry = check_receipt(receipt, expected)
        except (ReceiptFault, RemoteProtocolError) as error:
            self.fault(manifest, str(error), receipt)
        self.kept.add(head, receipt, manifest.outer_step)
        self.position = manifest.outer_step, manifest.digest
        checked_by_digest = not self.lazily and manifest.outer_step > self._reached
        self._reached = max(self._reached, manifest.outer_step)
        return {one["fragment"]: None if checked_by_digest else one["update"] for one in entry["fragments"]}

    def fault(self, manifest: UpdateManifest | SnapshotManifest, why: str, receipt: LogReceipt | None = None) -> NoReturn:
        """Keep what was seen before and what came now, say that the peer must not go on, and raise ReceiptFault."""
        path = self.home / FAULT
        reason = one_line(f"the audit log at outer step {manifest.outer_step}: {why}; what was seen is in {path}")
        seen = {"size": self.head.size, "root": self.head.root.hex(), "note": self.head.note}
        values: dict[str, object] = {
            "fault": why,
            "run_id": self.run_id,
            "key": self.key.text(),
            "outer_step": manifest.outer_step,
            "round_id": manifest.round_id if isinstance(manifest, UpdateManifest) else 0,  # 0: it came as a snapshot
            "digest": manifest.digest,
            "seen": seen,
            "came": _as_json(receipt) if receipt is not None else None,
        }
        try:
            write_json(path, values, version=FORMAT)
        except StorageError as error:
            reason = one_line(f"the audit log at outer step {manifest.outer_step}: {why} ({error})")
        self.failed(reason)
        raise ReceiptFault(reason)

    async def save(self) -> None:
        """Bring what was accepted to the disk."""
        async with self._saving:
            await self.kept.save()


def _as_json(receipt: LogReceipt) -> dict[str, object]:
    return {
        "entry": receipt.entry.decode(errors="backslashreplace"),
        "index": receipt.index,
        "inclusion": [base64_text(each) for each in receipt.inclusion],
        "checkpoint": receipt.checkpoint,
        "consistency": [base64_text(each) for each in receipt.consistency],
        "seen": {str(size): [base64_text(each) for each in proof] for size, proof in receipt.seen.items()},
    }
