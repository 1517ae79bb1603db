"""Approvals of a changed configuration: which count, what a lying coordinator can show a peer, what a log of them proves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from edit.config.run import RunConfig
from edit.errors import ConfigError, RefusedError, RemoteProtocolError
from edit.trust.canonical import parse_canonical
from edit.trust.checkpoints import LogSigner
from edit.trust.merkle import MerkleTree, leaf_hash
from edit.trust.signatures import key_hash
from editpb.approvals import ApprovalRules, check_changes, governance_of
from editpb.audit_log import LogFault, LogVerifier, approval_entry, config_entry, entry_line, genesis_entry
from editpb.messages import Approval, ConfigChange, Configuration
from tests.support.approvers import GOVERNED, RUN, Approver, authority, configuration

ISSUER, OTHER = authority(), authority()
ANN, BOB, CYD, EVE = (Approver.of(ISSUER, name) for name in ("ann", "bob", "cyd", "eve"))
A, B, C = configuration(1), configuration(2, sync={"every": 3}), configuration(3, sync={"every": 5})
RULES = ApprovalRules(RUN, [ISSUER.certificate])


def test_a_change_with_two_of_three_approvals_counts() -> None:
    for given in ((ANN, BOB), (CYD, ANN), (ANN, BOB, CYD)):
        change = ConfigChange(B, tuple(each.approves(A, B) for each in given))
        assert RULES.check_change(A, change) == tuple(each.identity.peer_id for each in given)


@pytest.mark.parametrize("role", ["peer", "region", "observer", "operator"])
def test_any_member_may_be_an_approver(role: str) -> None:
    assert RULES.check(Approver.of(ISSUER, "ann", role=role).approves(A, B), A, B.digest) == "ann"


def forged(approval: Approval) -> Approval:
    return replace(approval, signature=approval.signature[:-1] + bytes([approval.signature[-1] ^ 1]))


IMPOSTOR = Approver.of(OTHER, "bob")
WRONG: Sequence[tuple[Approval, str]] = (
    (EVE.approves(A, B), "eve is no approver of configuration 1 (governance.approvers)"),
    (Approver.of(ISSUER, "bob", role="coordinator").approves(A, B), "bob is no approver of configuration 1"),
    (Approver.of(ISSUER, "bob", run_id="run2").approves(A, B), "the approval of bob is for run run2, not run1"),
    (BOB.approves(A, replace(C, number=2)), f"bob approves another configuration, sha256:{C.digest}"),
    (forged(BOB.approves(A, B)), "the approval of bob is not signed with the key of its certificate"),
    (replace(ANN.approves(A, B), certificate=BOB.certificate), "the approval of bob is not signed with the key of its"),
    (IMPOSTOR.approves(A, B), "the certificate of bob is not signed by the run's authority"),
    (replace(BOB.approves(A, B), certificate=b"\x30"), "an approval brings a certificate that cannot be read"),
    (ANN.approves(A, B), "ann approves twice"),
    (BOB.approves(replace(A, number=7), B), "bob approves it as configuration 8 after sha256:"),
    (BOB.approves(C, B), f"bob approves it as configuration 4 after sha256:{C.digest}, which is another change"),
    (replace(BOB.approves(replace(A, number=7), B), number=2), "the approval of bob is not signed with the key of its"),
)


@pytest.mark.parametrize(("approval", "why"), WRONG, ids=[why for _, why in WRONG])
def test_an_approval_that_does_not_count_is_named(approval: Approval, why: str) -> None:
    with pytest.raises(RefusedError) as caught:
        RULES.check_change(A, ConfigChange(B, (ANN.approves(A, B), approval)))
    text = str(caught.value)
    assert text.startswith(f"configuration 2, sha256:{B.digest}, has 1 (ann) of the 2 approvals that configuration 1 asks for")
    assert why in text and "\n" not in text


def test_many_that_do_not_count_are_counted() -> None:
    with pytest.raises(RefusedError, match=r"has 0 of the 2 approvals.*; and 29 more"):
        RULES.check_change(A, ConfigChange(B, (EVE.approves(A, B),) * 32))


def test_an_approver_whose_key_is_known_cannot_be_invented() -> None:
    invented = Approver.of(ISSUER, "ann")  # by the operator, who has the authority
    known = key_hash(ANN.signer.public_key)
    assert RULES.check(invented.approves(A, B), A, B.digest) == "ann"
    members = ApprovalRules(RUN, [ISSUER.certificate], {"ann": known})
    with pytest.raises(RemoteProtocolError, match="the approval of ann is by another key than is known here"):
        members.check(invented.approves(A, B), A, B.digest)
    pinned = configuration(1, governance={"approvers": [f"ann sha256:{known}", "bob"], "needed": 2})
    assert RULES.check(ANN.approves(pinned, B), pinned, B.digest) == "ann"
    with pytest.raises(RemoteProtocolError, match=r"of ann is by another key than governance\.approvers names"):
        RULES.check(invented.approves(pinned, B), pinned, B.digest)


def test_who_must_approve_a_change_of_the_approvers_the_configuration_in_force_says() -> None:
    mine = configuration(2, governance={"approvers": ["eve"], "needed": 1})
    off = Configuration(2, RunConfig.from_mapping({"audit": {"enabled": True}}).to_json())
    for after in (mine, off):
        with pytest.raises(RefusedError, match="has 0 of the 2 approvals"):
            RULES.check_change(A, ConfigChange(after, (EVE.approves(A, after),)))
        RULES.check_change(A, ConfigChange(after, (ANN.approves(A, after), BOB.approves(A, after))))
    assert RULES.check_change(replace(off, number=1), ConfigChange(mine)) == ()  # nobody was asked before


def test_a_section_that_is_none_is_an_error() -> None:
    deep = '{"governance": {"approvers": ' + "[" * 900 + "]" * 900 + "}}"
    for text in ("[", "[]", '{"governance": 3}', '{"governance": {"approvers": ["a"], "needed": 9}}', deep):
        with pytest.raises(ConfigError):
            governance_of(text)


# ---- what a coordinator tells a peer -------------------------------------------------------------------------------------


AB = ConfigChange(B, (ANN.approves(A, B), BOB.approves(A, B)))
BC = ConfigChange(C, (CYD.approves(B, C), BOB.approves(B, C)))


def test_a_peer_that_was_away_follows_several_changes() -> None:
    assert check_changes(RULES, A, A, ()) == ()
    assert check_changes(RULES, A, B, [AB]) == ("ann", "bob")
    assert check_changes(RULES, A, C, [AB, BC]) == ("cyd", "bob")
    assert check_changes(RULES, B, C, [AB, BC]) == ("cyd", "bob")


BACK = replace(A, number=3)


def test_a_change_that_was_taken_back_is_followed_too() -> None:
    changes = [AB, ConfigChange(BACK, (ANN.approves(B, BACK), CYD.approves(B, BACK)))]
    assert check_changes(RULES, A, BACK, changes) == ("ann", "cyd")
    assert check_changes(RULES, BACK, A, ()) == ()  # an aggregator beside the coordinator says no later number


LIES: Sequence[tuple[Configuration, Configuration, Sequence[ConfigChange], str]] = (
    (A, B, (), "does not say how it followed from configuration 1.*; its approvals are missing"),
    (A, B, (ConfigChange(B),), "has 0 of the 2 approvals"),
    (A, replace(B, number=1), (), "nothing is said of a change, which needs approvals"),  # as if it were the first
    (A, replace(B, number=0), (), "configuration without a number"),  # as an older coordinator would
    (A, BACK, (AB,), "configuration 2, .*; its approvals are missing"),
    (BACK, B, (AB,), "tells configuration 2, .* this peer took part under configuration 3"),
    (B, A, (), "configuration 1, .* this peer took part under configuration 2"),  # an old folder
    (A, C, (AB, ConfigChange(C, AB.approvals)), "approves another configuration"),
    (A, C, (BC,), "does not say how it followed from configuration 1"),  # the change between is left out
    (A, C, (AB, AB, BC), "does not say how it followed"),
    (A, C, (AB,), "does not say how it followed from configuration 2"),
    (
        B,
        replace(B, number=4, text=C.text),
        (ConfigChange(BACK), ConfigChange(replace(C, number=4))),
        "has 0 of the 2 approvals",
    ),
    # Approved once, taken back with approvals, and now once more, unasked.
    (
        A,
        replace(B, number=4),
        (
            AB,
            ConfigChange(BACK, (ANN.approves(B, BACK), BOB.approves(B, BACK))),
            ConfigChange(replace(B, number=4), AB.approvals),
        ),
        "ann approves it as configuration 2 after",
    ),
)


@pytest.mark.parametrize(("known", "told", "changes", "why"), LIES)
def test_a_coordinator_that_lies_of_a_change_is_refused(
    known: Configuration, told: Configuration, changes: Sequence[ConfigChange], why: str
) -> None:
    with pytest.raises(RefusedError, match=why) as caught:
        check_changes(RULES, known, told, changes)
    assert "\n" not in str(caught.value)


def test_what_is_not_governed_changes_as_it_likes() -> None:
    off = Configuration(5, RunConfig().to_json())
    assert check_changes(RULES, off, B, ()) == ()


# ---- the log ---------------------------------------------------------------------------------------------------------------


SIGNER = LogSigner(f"edit/{RUN}", LogSigner.new_key())


def log_of(*entries: dict[str, object]) -> list[bytes]:
    first = genesis_entry(RUN, SIGNER.key, RunConfig.from_json(A.text), "0" * 64, 0, "1" * 64)
    tree, lines = MerkleTree(), list[bytes]()
    for entry in (first, *entries):
        lines.append(entry_line(tree, 0.0, entry))
        tree.append(leaf_hash(lines[-1]))
    return lines


def verified(lines: Sequence[bytes]) -> LogVerifier:
    log = LogVerifier(SIGNER.key, authorities=[ISSUER.certificate])
    for line in lines:
        log.take(line)
    return log


def entry(approver: Approver, before: Configuration, after: Configuration) -> dict[str, object]:
    return approval_entry(approver.identity.peer_id, approver.approves(before, after))


CHANGED = config_entry(RunConfig.from_json(B.text))


def test_approvals_verify_offline() -> None:
    unused = entry(CYD, A, replace(C, number=2))  # of a change that the operator gave up
    log = verified(log_of(unused, entry(BOB, A, B), entry(ANN, A, B), CHANGED, entry(ANN, B, C)))
    (change,) = log.changes
    assert (change.entry, change.number, change.config_digest, change.approvers) == (4, 2, B.digest, ("ann", "bob"))
    assert log.configuration == B


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ((CHANGED,), "entry 1: configuration 2, .* has 0 of the 2 approvals"),
        ((entry(ANN, A, B), CHANGED), r"entry 2: configuration 2, .* has 1 \(ann\) of the 2 approvals"),
        ((entry(ANN, A, B), entry(BOB, A, replace(C, number=2)), CHANGED), r"entry 3: .* has 1 \(ann\) of the 2"),
        ((entry(ANN, A, B), entry(ANN, A, B)), "entry 2: ann approves sha256:.* twice"),
        ((entry(EVE, A, B),), "entry 1: eve is no approver"),
        ((entry(Approver.of(OTHER, "bob"), A, B),), "entry 1: the certificate of bob is not signed by the run's authority"),
        ((entry(Approver.of(ISSUER, "bob", run_id="run2"), A, B),), "entry 1: the approval of bob is for run run2"),
        ((approval_entry("ann", forged(ANN.approves(A, B))),), "entry 1: the approval of ann is not signed"),
        ((approval_entry("bob", ANN.approves(A, B)),), "entry 1: is said to be the approval of bob, and is that of ann"),
        ((entry(ANN, A, B), entry(BOB, A, B), CHANGED, entry(CYD, A, B)), "entry 4: cyd approves it as configuration 2"),
    ],
)
def test_a_log_with_a_change_that_was_not_approved_is_found(entries: Sequence[dict[str, object]], why: str) -> None:
    with pytest.raises(LogFault, match=why):
        verified(log_of(*entries))


@pytest.mark.parametrize(
    "change",
    [
        lambda said: said | {"certificate": "!"},
        lambda said: said | {"signature": 3},
        lambda said: said | {"number": "x"},
        lambda said: {key: value for key, value in said.items() if key != "certificate"},
    ],
)
def test_a_damaged_approval_is_a_fault_of_its_entry(change: Callable[[dict[str, object]], dict[str, object]]) -> None:
    said = parse_canonical(log_of(entry(ANN, A, B))[1])
    with pytest.raises(LogFault, match="entry 1: "):
        verified(log_of(change({key: value for key, value in said.items() if key not in ("index", "root", "time")})))


def test_the_section_is_of_the_text_that_is_sent() -> None:
    assert governance_of(A.text).names == tuple(GOVERNED["governance"]["approvers"])
