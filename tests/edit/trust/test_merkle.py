"""The tree of RFC 6962: its published roots, and proofs against a tree that is computed as the RFC writes it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edit.trust.merkle import EMPTY_ROOT, MOST_PROOF, MerkleTree, leaf_hash, verify_consistency, verify_inclusion

INPUTS = [
    bytes.fromhex(text)
    for text in ("", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f")
]  # those of the reference implementation of RFC 6962
ROOTS = {
    0: "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    1: "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    8: "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
}


def tree_of(entries: Sequence[bytes]) -> MerkleTree:
    return MerkleTree(map(leaf_hash, entries))


def naive_root(entries: Sequence[bytes]) -> bytes:
    """Section 2.1 of RFC 6962."""
    if not entries:
        return hashlib.sha256(b"").digest()
    if len(entries) == 1:
        return hashlib.sha256(b"\x00" + entries[0]).digest()
    k = 1
    while 2 * k < len(entries):
        k *= 2
    return hashlib.sha256(b"\x01" + naive_root(entries[:k]) + naive_root(entries[k:])).digest()


@pytest.mark.parametrize("size", ROOTS)
def test_the_roots_of_rfc_6962(size: int) -> None:
    assert tree_of(INPUTS).root(size).hex() == tree_of(INPUTS[:size]).root().hex() == ROOTS[size]


def entries_of(count: int) -> list[bytes]:
    return [b"entry %d" % i for i in range(count)]


@given(st.integers(0, 70))
def test_every_root_is_that_of_the_rfc(size: int) -> None:
    assert tree_of(entries_of(70)).root(size) == naive_root(entries_of(size))


@given(st.data())
def test_inclusion_is_proved_of_the_right_leaf_place_and_root_only(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 70))
    index = data.draw(st.integers(0, size - 1))
    tree = tree_of(entries_of(70))
    proof, root, leaf = tree.inclusion_proof(index, size), tree.root(size), tree.leaf(index)
    assert verify_inclusion(leaf, index, size, proof, root)
    assert len(proof) <= size.bit_length()
    other = data.draw(st.integers(0, 69).filter(lambda i: i != index))
    assert not verify_inclusion(tree.leaf(other), index, size, proof, root)
    assert not verify_inclusion(leaf, other, size, proof, root)
    assert not verify_inclusion(leaf, index, size, (*proof, root), root)
    assert not verify_inclusion(leaf, index, size, proof, leaf_hash(b"another root"))
    if proof:
        assert not verify_inclusion(leaf, index, size, proof[:-1], root)
        place = data.draw(st.integers(0, len(proof) - 1))
        wrong = [*proof[:place], bytes([proof[place][0] ^ 1]) + proof[place][1:], *proof[place + 1 :]]
        assert not verify_inclusion(leaf, index, size, wrong, root)


@given(st.data())
def test_consistency_is_proved_of_a_beginning_only(data: st.DataObject) -> None:
    new = data.draw(st.integers(0, 70))
    old = data.draw(st.integers(0, new))
    tree = tree_of(entries_of(70))
    proof, old_root, new_root = tree.consistency_proof(old, new), tree.root(old), tree.root(new)
    assert verify_consistency(old, new, proof, old_root, new_root)
    assert not verify_consistency(old, new, (*proof, old_root), old_root, new_root)
    if old:
        place = data.draw(st.integers(0, old - 1))
        forked = entries_of(new)
        forked[place] = b"another entry"
        other = tree_of(forked)
        assert not verify_consistency(old, new, other.consistency_proof(old, new), old_root, other.root(new))
    if proof:
        assert not verify_consistency(old, new, proof[:-1], old_root, new_root)
        place = data.draw(st.integers(0, len(proof) - 1))
        wrong = [*proof[:place], bytes([proof[place][0] ^ 1]) + proof[place][1:], *proof[place + 1 :]]
        assert not verify_consistency(old, new, wrong, old_root, new_root)


@given(st.data())
def test_a_tree_goes_on_from_the_hashes_of_full_subtrees_alone(data: st.DataObject) -> None:
    size = data.draw(st.integers(0, 70))
    tree, later = tree_of(entries_of(70)), MerkleTree.after(size, tree_of(entries_of(size)).peaks)
    assert len(later) == size and later.root() == tree.root(size) and later.peaks == tree_of(entries_of(size)).peaks
    for entry in entries_of(70)[size:]:
        later.append(leaf_hash(entry))
    assert len(later) == 70 and later.root() == tree.root() and later.peaks == tree.peaks
    if size < 70:
        index = data.draw(st.integers(size, 69))
        assert later.root(index) == tree.root(index) and later.leaf(index) == tree.leaf(index)
        assert later.inclusion_proof(index, 70) == tree.inclusion_proof(index, 70)
        assert later.consistency_proof(index, 70) == tree.consistency_proof(index, 70)


def test_what_is_not_known_of_a_tree_is_an_error() -> None:
    later = MerkleTree.after(6, tree_of(INPUTS[:6]).peaks)
    for call in (lambda: later.leaf(0), lambda: later.leaf(5), lambda: later.root(5), lambda: later.inclusion_proof(2, 6)):
        with pytest.raises(IndexError):
            call()
    for size, peaks in (
        (5, later.peaks[:1]),
        (6, later.peaks[:1]),
        (6, (*later.peaks, bytes(32))),
        (1, [b"no hash"]),
        (0, [b""]),
    ):
        with pytest.raises(ValueError, match="not the"):
            MerkleTree.after(size, peaks)


def test_an_empty_tree_begins_every_other_and_only_under_its_own_root() -> None:
    tree = tree_of(INPUTS)
    assert verify_consistency(0, 8, (), EMPTY_ROOT, tree.root())
    assert verify_consistency(0, 0, (), EMPTY_ROOT, EMPTY_ROOT)
    assert not verify_consistency(0, 8, (), tree.root(4), tree.root())
    assert not verify_consistency(0, 0, (), EMPTY_ROOT, tree.root())


def test_what_is_no_proof_is_refused() -> None:
    tree = tree_of(INPUTS)
    root = tree.root()
    assert not verify_inclusion(tree.leaf(0), 0, 8, [b"short"] * 3, root)
    assert not verify_inclusion(b"", 0, 8, tree.inclusion_proof(0, 8), root)
    assert not verify_inclusion(tree.leaf(0), 0, 1 << 62, [root] * (MOST_PROOF + 1), root)
    assert not verify_inclusion(tree.leaf(0), -1, 8, tree.inclusion_proof(0, 8), root)
    assert not verify_consistency(9, 8, (), root, root)
    assert not verify_consistency(3, 8, (), root, root)


def test_what_is_not_in_the_tree_is_an_error() -> None:
    tree = tree_of(INPUTS)
    for call in (
        lambda: tree.root(9),
        lambda: tree.leaf(8),
        lambda: tree.inclusion_proof(4, 4),
        lambda: tree.inclusion_proof(0, 9),
        lambda: tree.consistency_proof(5, 4),
        lambda: tree.consistency_proof(-1, 4),
    ):
        with pytest.raises(IndexError):
            call()
    with pytest.raises(ValueError, match="32 bytes"):
        tree.append(b"no hash")
