"""What a peer of a swarm holds an entry of the audit log to: what it sent, the update that it took, what it saw before."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edit.errors import FormatError
from edit.lab.council.parts_on_disk import RUN
from edit.records import Commit
from edit.trust.canonical import canonical, parse_canonical
from edit.trust.signatures import Signer, key_hash
from editpb.limits import MAX_ENTRY_BYTES
from editpb.messages import LoggedEntry
from editpb.owner_signatures import signed_by_owner
from editpb.part_receipts import ExpectedLog, Outcome, check_logged
from editpb.receipts import Mine, ReceiptFault
from editpb.seen_entries import SeenBy, SeenEntry, read_seen, seen_line
from editpb.signed_contributions import config_digest
from tests.support.council.audited import AUDITED, KEYS, AuditedMember

Entry = dict[str, Any]


class Told:
    """The entries of three outer steps to which p and q contributed, and what p knows."""

    def __init__(self, folder: Path) -> None:
        owner = AuditedMember(folder).found()
        self.schema, self.commits = owner.replica.outer.schema, list[Commit]()
        for step in (1, 2, 3):
            owner.take(owner.offer(step))
            commit = owner.store.update(step)
            assert commit is not None
            self.commits.append(commit)
        self.log = owner.log
        self.logged = [owner.log.entry(step) for step in (1, 2, 3)]

    def expected(self, step: int = 2, *, sent: bool = True, peer: str = "p", **changed: Any) -> ExpectedLog:
        mine, whole = Mine(peer, Signer(KEYS[peer]).public_key), dict[int, set[int]]()
        if sent:
            parts = parse_canonical(self.logged[step - 1].entry)["contributions"][peer]["parts"]
            signed = {values[0]: (base64.b64decode(values[12]),) for values in parts}
            delivered = frozenset((step, fragment) for fragment in signed)
            mine, whole = replace(mine, signatures={step: signed}, delivered=delivered), {step: {*signed}}
        known: dict[str, Any] = {
            "run_id": RUN,
            "part": 0,
            "config_digest": config_digest(AUDITED),
            "schema_hash": self.schema.schema_hash,
            "commit": self.commits[step - 1],
            "seen": None,
            "again": None,
            "mine": mine,
            "whole": whole,
        }
        return ExpectedLog(**{**known, **changed})

    def signed_anew(self, change: Callable[[Entry], object], step: int = 2, key: bytes = KEYS["a"]) -> LoggedEntry:
        entry = parse_canonical(self.logged[step - 1].entry)
        change(entry)
        rest = {name: each for name, each in entry.items() if name not in ("key", "signature")}
        return replace(self.logged[step - 1], entry=signed_by_owner(RUN, rest, Signer(key)))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return Told(tmp_path_factory.mktemp("owner"))


def test_each_entry_fits_and_follows_the_one_before(told: Told) -> None:
    seen: SeenEntry | None = None
    for step in (1, 2, 3):
        found = check_logged(told.logged[step - 1], told.expected(step, seen=seen))
        assert (found.owner, found.outcome, found.left_out, found.seen.size) == ("a", Outcome.MERGED, False, step + 1)
        assert found.linked and check_logged(told.logged[step - 1], told.expected(step, again=found.seen)).seen == found.seen
        seen = found.seen


def test_a_contribution_of_an_earlier_life_is_one_of_this_peer(told: Told) -> None:
    """The peer has signed nothing since it started: its host has verified the signature."""
    assert check_logged(told.logged[1], told.expected(sent=False, schema_hash="")).outcome is Outcome.MERGED
    assert check_logged(told.logged[1], told.expected(sent=False)).outcome is Outcome.MERGED
    other = told.expected(sent=False, schema_hash="", mine=Mine("p", Signer(KEYS["q"]).public_key))
    with pytest.raises(ReceiptFault, match="the log names another key as this peer's"):
        check_logged(told.logged[1], other)
    before = replace(other.mine, earlier=frozenset({key_hash(Signer(KEYS["p"]).public_key)}))
    for known in (other, told.expected(sent=False)):
        assert check_logged(told.logged[1], replace(known, mine=before)).outcome is Outcome.MERGED


def out(entry: Entry) -> None:
    """p is in nothing of it."""
    del entry["contributions"]["p"]
    for fragment in entry["fragments"]:
        fragment["verdicts"].pop("p")


def without_p(told: Told, step: int = 2) -> Commit:
    commit = told.commits[step - 1]
    fragments = tuple(replace(one, verdicts=tuple(v for v in one.verdicts if v.peer_id != "p")) for one in commit.fragments)
    return replace(commit, fragments=fragments)


def test_an_owner_that_leaves_out_what_it_had_is_named(told: Told) -> None:
    expected = told.expected(commit=without_p(told))
    with pytest.raises(ReceiptFault, match=r"neither names the contribution of this peer to round 2.*that a has signed"):
        check_logged(told.signed_anew(out), expected)
    for name, outcome in (("missing", Outcome.MISSING), ("unmerged", Outcome.UNMERGED)):

        def said(entry: Entry, name: str = name) -> None:
            out(entry)
            entry[name] = sorted([*entry[name], "p"])

        found = check_logged(told.signed_anew(said), expected)
        assert (found.owner, found.outcome, found.left_out) == ("a", outcome, True)
        partly = replace(expected, whole={2: {0}})
        assert not check_logged(told.signed_anew(said), partly).left_out, "it need not have had all of it"
        late = told.expected(commit=without_p(told), sent=False)
        assert not check_logged(told.signed_anew(said), late).left_out


def test_an_owner_that_leaves_out_a_fragment_that_it_had_is_named(told: Told) -> None:
    last = told.commits[1].fragments[-1].fragment_id

    def withhold(entry: Entry) -> None:
        given = entry["contributions"]["p"]
        given["parts"] = [values for values in given["parts"] if values[0] != last]
        del entry["fragments"][-1]["verdicts"]["p"]

    def said(entry: Entry) -> None:
        withhold(entry)
        entry["unmerged_fragments"] = {"p": [last]}

    fragments = (*told.commits[1].fragments[:-1], without_p(told).fragments[-1])
    expected = told.expected(commit=replace(told.commits[1], fragments=fragments))
    with pytest.raises(ReceiptFault, match=rf"to round 2, fragment {last}, nor says that it was not merged, .* a has signed"):
        check_logged(told.signed_anew(withhold), expected)
    found = check_logged(told.signed_anew(said), expected)
    assert (found.outcome, found.left_out) == (Outcome.MERGED, False)
    partly = replace(expected.mine, delivered=expected.mine.delivered - {(2, last)})
    assert check_logged(told.signed_anew(withhold), replace(expected, mine=partly)).outcome is Outcome.MERGED


def test_what_was_sent_for_an_earlier_round_is_not_merged_in_a_later_one(told: Told) -> None:
    earlier = parse_canonical(told.logged[0].entry)["contributions"]["q"]
    wrong = told.signed_anew(lambda entry: entry["contributions"].update(q=earlier))
    with pytest.raises(ReceiptFault, match=r"the contribution of q .* is to round 1, from outer step 0; merged was round 2"):
        check_logged(wrong, told.expected())


def test_who_contributed_nothing_is_in_no_entry(told: Told) -> None:
    found = check_logged(told.logged[1], told.expected(sent=False, peer="b"))
    assert (found.outcome, found.left_out) == (Outcome.NOTHING, False)


def another_payload(entry: Entry) -> None:
    entry["contributions"]["p"]["parts"][0][11] = entry["contributions"]["p"]["parts"][1][11]


def only_judged(entry: Entry) -> None:
    del entry["contributions"]["p"]


LIES: list[tuple[Callable[[Entry], object], str]] = [
    (another_payload, "the log names another contribution of this peer to round 2, fragment 0 than it sent"),
    (only_judged, "a verdict or a contribution, and not both"),
    (lambda entry: entry.update(after="0" * 64), "leads to 000000000000 by the log"),
    (lambda entry: entry.update(round_id=7), "is of round 7"),
    (lambda entry: entry.update(round_id="7" * 5000), "is of round 77777777777777777777 and"),
    (lambda entry: entry.update(part=1), "the log says part = 1, this peer knows 0"),
    (lambda entry: entry.update(outer_step=3), "the log says outer_step = 3"),
    (lambda entry: entry.update(config_digest="0" * 64), "the log says config_digest = 0000"),
    (lambda entry: entry["fragments"].pop(), "the log has other fragments than the update"),
    (
        lambda entry: entry["fragments"][0]["verdicts"]["q"].__setitem__(2, (0.75).hex()),
        "the verdicts on fragment 0 are others",
    ),
    (lambda entry: entry.update(index=3), "is not the one that follows the 2 entries before it"),
    (lambda entry: entry.update(root="0" * 64), "is not the one that follows the 2 entries before it"),
    (lambda entry: entry.update(kind="score"), "it is no commit"),
    (lambda entry: entry.update(contributions={}, missing=None), "a verdict or a contribution, and not both"),
    (lambda entry: entry.update(contributions=[]), "the entry is no entry of a commit"),
    (lambda entry: entry.update(fragments={}), "the entry is no entry of a commit|has other fragments"),
]


@pytest.mark.parametrize(("lie", "why"), LIES)
def test_an_entry_that_says_something_else_is_a_fault(told: Told, lie: Callable[[Entry], object], why: str) -> None:
    with pytest.raises(ReceiptFault, match=why):
        check_logged(told.signed_anew(lie), told.expected())


def test_what_is_no_entry_or_not_signed_is_a_fault(told: Told) -> None:
    logged, expected = told.logged[1], told.expected()
    entry = parse_canonical(logged.entry)
    for line, why in (
        (b"", "no entry of a commit"),
        (b"[]", "it is no commit"),
        (b"[" * 100_000, "nested too deeply"),
        (logged.entry.replace(b'"reason":"', b'"reason":' + b"[" * 700 + b"]" * 700 + b',"said":"'), "nested too deeply"),
        (json.dumps(entry).encode(), "not canonical JSON"),
        (canonical({**entry, "reason": "nobody came"}), "it is not signed by a, who owned the part"),
        (b"0" * (MAX_ENTRY_BYTES + 1), "it has 4194305 bytes"),
    ):
        with pytest.raises(ReceiptFault, match=why):
            check_logged(replace(logged, entry=line), expected)
    for peaks in ((), logged.peaks * 2, (bytes(31),), (bytes(32),)):
        with pytest.raises(ReceiptFault, match=r"full subtrees|is not the one that follows"):
            check_logged(replace(logged, peaks=peaks), expected)


def test_a_log_that_does_not_go_on_from_what_was_seen_is_a_fault(told: Told) -> None:
    first = check_logged(told.logged[0], told.expected(1)).seen
    other = check_logged(told.signed_anew(lambda entry: entry.update(time=1), 1), told.expected(1)).seen
    check_logged(told.logged[1], told.expected(2, seen=first))
    with pytest.raises(ReceiptFault, match="the log does not go on from the 2 entries that this peer has seen"):
        check_logged(told.logged[1], told.expected(2, seen=other))
    with pytest.raises(
        ReceiptFault, match="entry 1 of the log is another one than this peer has seen before, by the entry that a"
    ):
        check_logged(told.logged[0], told.expected(1, again=other))


def test_after_a_gap_the_log_is_shown_to_go_on_from_what_was_seen(told: Told) -> None:
    """Of outer step 2 nothing was seen, as after a restart."""
    first = check_logged(told.logged[0], told.expected(1)).seen
    other = check_logged(told.signed_anew(lambda entry: entry.update(time=1), 1), told.expected(1)).seen
    proven = told.log.entry(3, first.size)
    assert proven.consistency and check_logged(proven, told.expected(3, seen=first)).linked
    assert not check_logged(told.logged[2], told.expected(3, seen=first)).linked, "the host could not show it"
    wrong = replace(proven, consistency=(*proven.consistency[:-1], bytes(32)))
    for logged, seen in ((proven, other), (wrong, first)):
        with pytest.raises(ReceiptFault, match="the log does not go on from the 2 entries that this peer has seen"):
            check_logged(logged, told.expected(3, seen=seen))


# -- what is kept of it --------------------------------------------------------------------------------------------------------

BY = SeenBy(RUN, "p", 0)


def test_any_changed_byte_of_a_kept_line_is_found(tmp_path: Path) -> None:
    signer, seen = Signer(KEYS["p"]), SeenEntry(7, bytes(range(32)), bytes(range(1, 33)))
    line = seen_line(BY, seen, signer)
    assert read_seen(tmp_path, line, BY, [signer.public_key]) == seen
    for at, bit in itertools.product(range(len(line)), (1, 32)):
        changed = line[:at] + bytes([line[at] ^ bit]) + line[at + 1 :]
        with pytest.raises((ValueError, FormatError)):
            read_seen(tmp_path, changed, BY, [signer.public_key])


@pytest.mark.parametrize("by", [SeenBy("another-run", "p", 0), SeenBy(RUN, "q", 0), SeenBy(RUN, "p", 1)])
def test_a_line_of_another_peer_part_or_run_names_both(by: SeenBy, tmp_path: Path) -> None:
    signer = Signer(KEYS["p"])
    line = seen_line(BY, SeenEntry(7, bytes(32), bytes(32)), signer)
    others = [Signer(KEYS["q"]).public_key]
    with pytest.raises(ValueError, match="it is not signed with a key of this peer"):
        read_seen(tmp_path, line, BY, others)
    assert read_seen(tmp_path, line, BY, [*others, signer.public_key]).outer_step == 7
    with pytest.raises(ValueError, match=f"p has seen it, of part 0 of the run {RUN}; this is {by.peer_id}, part {by.part}"):
        read_seen(tmp_path, line, by, [signer.public_key])


@pytest.mark.parametrize("line", [b"", b"[]", b"{}", b"7", b"[" * 100_000, b'{"format":1,"part":[],"peer_id":{},"run_id":1}'])
def test_what_is_no_kept_line_is_said_so(line: bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        read_seen(tmp_path, line, BY, [Signer(KEYS["p"]).public_key])
