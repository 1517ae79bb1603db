"""The Merkle tree of RFC 6962: a log whose entries cannot be changed, removed or inserted without changing its root.

The hash of a leaf is SHA-256(0x00 | entry), that of an inner node SHA-256(0x01 | left | right); the left subtree of n leaves
has the largest power of two below n. An inclusion proof shows that a leaf is in a tree, a consistency proof that a tree begins
with all leaves of an older one; both have about log2(n) hashes. They are verified as in RFC 9162, sections 2.1.3.2 and 2.1.4.2,
whose tree is the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

__all__ = ["EMPTY_ROOT", "HASH_BYTES", "MOST_PROOF", "MerkleTree", "leaf_hash", "verify_consistency", "verify_inclusion"]

HASH_BYTES = 32
MOST_PROOF = 64  # hashes of a proof of either kind that is looked at: as many as a tree of 2^63 leaves has
EMPTY_ROOT = hashlib.sha256().digest()


def leaf_hash(entry: bytes) -> bytes:
    """Return the hash of the leaf of a log entry."""
    return hashlib.sha256(b"\x00" + entry).digest()


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


class MerkleTree:
    """A tree that grows by one leaf at a time. It keeps the hashes of all full subtrees: 64 bytes per leaf."""

    def __init__(self, leaf_hashes: Iterable[bytes] = ()) -> None:
        self._levels: list[bytearray] = [bytearray()]  # [k]: of the full subtrees with 2^k leaves, from the left
        self._unknown: list[int] = [0]  # [k]: how many of these, the first ones, are not kept
        for each in leaf_hashes:
            self.append(each)

    @classmethod
    def after(cls, size: int, peaks: Sequence[bytes]) -> MerkleTree:
        """Return a tree of `size` leaves that are not known themselves: it grows, and says its root from there on.

        peaks: as `peaks` returned them of the whole tree. Raises ValueError for another number of them, or no hashes.
        """
        levels = [level for level in reversed(range(size.bit_length())) if size >> level & 1]
        if len(levels) != len(peaks) or any(len(each) != HASH_BYTES for each in peaks):
            raise ValueError(f"not the {len(levels)} full subtrees of {size} leaves")
        tree, known = cls(), dict(zip(levels, peaks, strict=True))
        tree._levels = [bytearray(known.get(level, b"")) for level in range(max(1, size.bit_length()))]
        tree._unknown = [(size >> level) - (level in known) for level in range(len(tree._levels))]
        return tree

    def __len__(self) -> int:
        return self._count(0)

    @property
    def peaks(self) -> tuple[bytes, ...]:
        """The hashes of the largest full subtrees that all leaves are in, from the left: about log2(n)."""
        size = len(self)
        return tuple(
            self._full(level, (size >> level) - 1) for level in reversed(range(size.bit_length())) if size >> level & 1
        )

    def append(self, leaf: bytes) -> None:
        """Add a leaf, given by its hash (`leaf_hash`)."""
        if len(leaf) != HASH_BYTES:
            raise ValueError(f"the hash of a leaf has {HASH_BYTES} bytes, not {len(leaf)}")
        level, added = 0, leaf
        while True:
            if level == len(self._levels):
                self._levels.append(bytearray())
                self._unknown.append(0)
            self._levels[level] += added
            count = self._count(level)
            if count % 2:
                return
            added = _node(self._full(level, count - 2), self._full(level, count - 1))
            level += 1

    def leaf(self, index: int) -> bytes:
        """Return the hash of a leaf. Raises IndexError, also where it is not known."""
        if not 0 <= index < len(self):
            raise IndexError(f"leaf {index} of {len(self)}")
        return self._full(0, index)

    def root(self, size: int | None = None) -> bytes:
        """Return the root of the first `size` leaves; None: of all. Raises IndexError, also where they are not known."""
        size = self._checked(len(self) if size is None else size)
        return self._subtree(0, size) if size else EMPTY_ROOT

    def inclusion_proof(self, index: int, size: int) -> tuple[bytes, ...]:
        """Return the proof that leaf `index` is in the tree of the first `size` leaves, from the leaf up. Raises IndexError."""
        if not 0 <= index < self._checked(size):
            raise IndexError(f"leaf {index} of the first {size}")
        begin, end, proof = 0, size, []
        while end - begin > 1:
            middle = begin + _split(end - begin)
            if index < middle:
                proof.append(self._subtree(middle, end))
                end = middle
            else:
                proof.append(self._subtree(begin, middle))
                begin = middle
        return tuple(reversed(proof))

    def consistency_proof(self, old: int, new: int) -> tuple[bytes, ...]:
        """Return the proof that the tree of `new` leaves begins with that of `old`; empty for old = 0 and old = new.

        Raises IndexError unless 0 <= old <= new <= len.
        """
        if not 0 <= old <= self._checked(new):
            raise IndexError(f"the first {old} of the first {new} leaves")
        if old in (0, new):
            return ()
        begin, end, proof, whole = 0, new, [], True
        while old != end:
            middle = begin + _split(end - begin)
            if old <= middle:
                proof.append(self._subtree(middle, end))
                end = middle
            else:
                proof.append(self._subtree(begin, middle))
                begin, whole = middle, False
        if not whole:
            proof.append(self._subtree(begin, end))
        return tuple(reversed(proof))

    def _checked(self, size: int) -> int:
        if not 0 <= size <= len(self):
            raise IndexError(f"the first {size} of {len(self)} leaves")
        return size

    def _count(self, level: int) -> int:
        return self._unknown[level] + len(self._levels[level]) // HASH_BYTES

    def _full(self, level: int, index: int) -> bytes:
        if (place := index - self._unknown[level]) < 0:
            raise IndexError(f"the leaves {index << level} to {((index + 1) << level) - 1} are not known")
        return bytes(self._levels[level][place * HASH_BYTES : (place + 1) * HASH_BYTES])

    def _subtree(self, begin: int, end: int) -> bytes:
        """Return the hash over leaves begin to end - 1, where begin is a multiple of a power of two not below end - begin."""
        size = end - begin
        if size & (size - 1) == 0:
            level = size.bit_length() - 1
            return self._full(level, begin >> level)
        middle = begin + _split(size)
        return _node(self._subtree(begin, middle), self._subtree(middle, end))


def _split(size: int) -> int:
    """Return the largest power of two below `size`, which is above 1."""
    return 1 << ((size - 1).bit_length() - 1)


def verify_inclusion(leaf: bytes, index: int, size: int, proof: Sequence[bytes], root: bytes) -> bool:
    """Return whether the proof shows that a leaf (its hash) is number `index` of the `size` leaves under `root`."""
    if not _is_proof(proof) or len(leaf) != HASH_BYTES or not 0 <= index < size:
        return False
    at, last, found = index, size - 1, leaf
    for sibling in proof:
        if last == 0:
            return False
        if at & 1 or at == last:
            found = _node(sibling, found)
            while at and not at & 1:
                at, last = at >> 1, last >> 1
        else:
            found = _node(found, sibling)
        at, last = at >> 1, last >> 1
    return last == 0 and found == root


def verify_consistency(old: int, new: int, proof: Sequence[bytes], old_root: bytes, new_root: bytes) -> bool:
    """Return whether the proof shows that the tree (new, new_root) begins with the tree (old, old_root)."""
    if not _is_proof(proof) or not 0 <= old <= new:
        return False
    if old == 0:
        return not proof and old_root == EMPTY_ROOT and (new > 0 or new_root == EMPTY_ROOT)
    if old == new:
        return not proof and old_root == new_root
    hashes = (old_root, *proof) if old & (old - 1) == 0 else tuple(proof)
    if not hashes:
        return False
    at, last = old - 1, new - 1
    while at & 1:
        at, last = at >> 1, last >> 1
    found_old = found_new = hashes[0]
    for each in hashes[1:]:
        if last == 0:
            return False
        if at & 1 or at == last:
            found_old, found_new = _node(each, found_old), _node(each, found_new)
            while at and not at & 1:
                at, last = at >> 1, last >> 1
        else:
            found_new = _node(found_new, each)
        at, last = at >> 1, last >> 1
    return last == 0 and found_old == old_root and found_new == new_root


def _is_proof(proof: Sequence[bytes]) -> bool:
    return len(proof) <= MOST_PROOF and all(len(each) == HASH_BYTES for each in proof)
