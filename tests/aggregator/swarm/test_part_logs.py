"""The audit log of a swarm: each member keeps it, and holds no update whose entry is wrong; all have the same bytes."""

from __future__ import annotations

import base64
import errno
import json
import os
import re
import shutil
import time
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from aggregator.security.authority import Authority
from aggregator.security.certificates import Issuer, new_key
from aggregator.storage import checkpoint, part_log
from aggregator.storage.journal import Disk, replay_segments
from aggregator.storage.state_folder import part_log_of, part_logs
from aggregator.swarm import operate
from aggregator.swarm.commands import app
from aggregator.swarm.enrolments import Enrolments
from aggregator.swarm.member_folder import MemberFolder
from aggregator.swarm.owner_entries import OwnerEntries
from aggregator.swarm.replication import Claimed, carry_out
from edit.config.run import RunConfig
from edit.council import events as ev
from edit.council.record import Enrolled, Root, Saved, Update, update_id
from edit.errors import ConfigError, GoneError, StorageError
from edit.lab.council.parts_on_disk import RUN
from edit.lab.council.replicated import same
from edit.trust.canonical import canonical, parse_canonical
from edit.trust.merkle import verify_consistency
from edit.trust.signatures import Signer, key_hash
from editpb.audit_log import LogFault, LogVerifier, RoundFacts, config_entry, consent_entry, continued_entry, entry_line
from editpb.consents import signed_consent
from editpb.earlier_keys import keep_earlier
from editpb.identity import Identity
from editpb.limits import MAX_ENTRY_BYTES
from editpb.messages import Consent, DataStatement, SeenHead
from editpb.owner_signatures import signed_by_owner
from editpb.part_entries import begins_line
from editpb.seen_entries import SeenBy, SeenEntry, seen_file, seen_line
from editpb.signed_contributions import ContributionSigner, config_digest
from tests.aggregator.storage.test_audit_log import Killed, MortalDisk
from tests.aggregator.swarm.test_operating import equip, in_thread
from tests.aggregator.swarm.test_takeover import EITHER, LOST
from tests.aggregator.swarm.test_verification import PEERS, contribute
from tests.support.council.audited import AUDITED, KEYS, AuditedMember, AuditedTable, audited_toml, enrolled_key, record_of
from tests.support.council.hosts import Hosts, hosts
from tests.support.council.replicated_table import CONFIG, ReplicatedTable
from tests.support.council.table import LEASE_S
from tests.support.keys import member_key
from tests.support.loops import run_held
from tests.support.served import TOML, new_folder

Entry = dict[str, Any]


def verified(log: bytes) -> LogVerifier:
    verifier = LogVerifier()
    for line in log.splitlines():
        verifier.take(line)
    return verifier


@pytest.fixture
def two(tmp_path: Path) -> tuple[AuditedMember, AuditedMember]:
    """The owner, and another member; both have taken an outer step."""
    owner, other = AuditedMember(tmp_path / "a").found(), AuditedMember(tmp_path / "b", "b").found()
    offer = owner.offer()
    owner.take(offer)
    assert carry_out(other.replica, ev.Hold(offer.update), offer=offer) == ev.Held(offer.update)
    other.replica.adopt(offer.update.id)
    return owner, other


def test_a_log_shows_that_it_goes_on_from_what_a_peer_has_seen_unless_it_begins_later(tmp_path: Path) -> None:
    owner, late = AuditedMember(tmp_path / "a").found(), AuditedMember(tmp_path / "b", "b").found()
    for round_id in (1, 2, 3):
        owner.take(owner.offer(round_id))
    late.log.begin(owner.replica.outer, owner.log.tree.peaks)
    owner.take(owner.offer(4))
    late.log.append(owner.log.entry(4).entry.decode())
    tree, there, here = owner.log.tree, owner.log.entry(4, 2), late.log.entry(4, 2)
    assert verify_consistency(2, 4, there.consistency, tree.root(2), tree.root(4))
    assert replace(there, consistency=()) == here == owner.log.entry(4), "without what is not known, or not asked for"


def test_a_log_that_cannot_give_way_to_a_snapshots_is_an_error_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, late = AuditedMember(tmp_path / "a").found(), AuditedMember(tmp_path / "b", "b").found()
    owner.take(owner.offer(1))
    part_log_of(late.folder, 2).touch()

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(StorageError, match=r"audit-log-00000002\.jsonl: cannot be renamed \(Read-only file system\)"):
        late.log.begin(owner.replica.outer, owner.log.tree.peaks)


def test_entries_are_told_also_of_updates_that_are_kept_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer asks for them later than it takes the updates, of which 4 are kept."""
    owner = AuditedMember(tmp_path / "a", disk=QUICK).found()
    for step in range(1, 8):
        owner.take(owner.offer(step))
    assert parse_canonical(owner.log.entry(1).entry)["outer_step"] == 1
    monkeypatch.setattr(part_log, "_MOST_BYTES", 1)
    owner.take(owner.offer(8))
    assert parse_canonical(owner.log.entry(5).entry)["outer_step"] == 5
    with pytest.raises(GoneError, match="the entry of outer step 4 is kept no longer"):
        owner.log.entry(4)


# -- what an owner may say -----------------------------------------------------------------------------------------------------


def of_fragment(name: str, value: Any) -> Callable[[Entry], None]:
    return lambda entry: entry["fragments"][1].update({name: value})


def another_share(entry: Entry) -> None:
    entry["fragments"][0]["verdicts"]["p"][2] = (0.75).hex()


def without_a_contribution(entry: Entry) -> None:
    del entry["contributions"]["q"]


def in_a_part(place: int, value: Any) -> Callable[[Entry], None]:
    def change(entry: Entry) -> None:
        entry["contributions"]["q"]["parts"][0][place] = value

    return change


def forged(entry: Entry) -> None:
    signature = Signer(member_key()).sign(b"anything")
    entry["contributions"]["q"]["parts"][0][12] = base64.b64encode(signature).decode()


def of_a_stranger(entry: Entry) -> None:
    entry["contributions"]["q"]["key"] = base64.b64encode(Signer(member_key()).public_key).decode()


def twice(entry: Entry) -> None:
    parts = entry["contributions"]["q"]["parts"]
    parts.append(parts[0])


LIES: list[tuple[Callable[[Entry], Any], str]] = [
    (lambda entry: entry.update(after="0" * 64), "after: it says otherwise than was computed here"),
    (lambda entry: entry.update(before="0" * 64), "before: it says otherwise"),
    (lambda entry: entry.update(outer_step=3), "outer_step: it says otherwise"),
    (lambda entry: entry.update(index=True), "index: it says otherwise"),
    (lambda entry: entry.update(root="0" * 64), "root: it says otherwise"),
    (lambda entry: entry.update(owner="b"), "owner: it says otherwise"),
    (lambda entry: entry.update(grant=2), "grant: it says otherwise"),
    (lambda entry: entry.update(part=1), "part: it says otherwise"),
    (lambda entry: entry.update(config_digest="0" * 64), "config_digest: it says otherwise"),
    (lambda entry: entry.update(reason="nobody came"), "reason: it says otherwise"),
    (another_share, "verdicts of fragment 0: it says otherwise"),
    (of_fragment("update", "0" * 64), "update of fragment 1: it says otherwise"),
    (of_fragment("merged_norm", (1.0).hex()), "merged_norm of fragment 1: it says otherwise"),
    (lambda entry: entry["fragments"].pop(), "fragments: it says otherwise"),
    (without_a_contribution, "of q it has a verdict on fragment 0 or a contribution to it, not both"),
    (in_a_part(6, 11), "the contribution of q to fragment 0: q has not signed what the entry says"),
    (in_a_part(8, 6), "q has not signed what the entry says"),
    (in_a_part(1, False), "a shard of a contribution has the rank False"),
    (in_a_part(2, 1), "the contribution of q to fragment 0 is to another round than was merged"),
    (in_a_part(12, ""), "q has not signed what the entry says"),
    (forged, "q has not signed what the entry says"),
    (of_a_stranger, "it names a key of q that it is not enrolled for"),
    (twice, "the contribution of q to fragment 0 is there twice"),
    (lambda entry: entry.update(missing=["c", "b"]), "its missing is not in order"),
    (lambda entry: entry.update(unmerged=["no name"]), "its unmerged is no list of members"),
    (lambda entry: entry.update(time=-1), "its time is no time"),
    (lambda entry: entry.update(more=1), "it has not the fields of the commit of a part"),
    (lambda entry: entry.update(reason="x" * MAX_ENTRY_BYTES), f"at most {MAX_ENTRY_BYTES} are read"),
]


@pytest.mark.parametrize(("lie", "why"), LIES)
def test_no_update_is_held_whose_entry_is_wrong(
    two: tuple[AuditedMember, AuditedMember], lie: Callable[[Entry], Any], why: str
) -> None:
    owner, other = two
    before = other.logs
    wrong = owner.offer(2, lambda entry: lie(entry) and None)
    answer = carry_out(other.replica, ev.Hold(wrong.update), offer=wrong)
    assert isinstance(answer, ev.Failed) and answer.is_wrong, "so its owner loses the part when enough say so"
    assert answer.reason.startswith("part 0: outer step 2: the owner's entry of the audit log: ") and why in answer.reason
    assert other.replica.state.held is None and other.logs == before
    right = owner.offer(3)
    assert carry_out(other.replica, ev.Hold(right.update), offer=right) == ev.Held(right.update)


LATE = {"q": [1]}


def test_an_update_is_held_whose_entry_names_a_fragment_that_came_too_late(two: tuple[AuditedMember, AuditedMember]) -> None:
    owner, other = two
    right = owner.offer(2, late=LATE)
    assert carry_out(other.replica, ev.Hold(right.update), offer=right) == ev.Held(right.update)
    owner.take(right)
    *before, last = owner.logs[0].splitlines()
    entry = parse_canonical(last)
    assert entry["unmerged_fragments"] == LATE and verified(owner.logs[0]).commits == 2
    rest = {name: each for name, each in entry.items() if name not in ("key", "signature")}
    for said in ({"q": [0]}, {"q": []}, {"q": [7]}):
        wrong = signed_by_owner(RUN, {**rest, "unmerged_fragments": said}, Signer(KEYS["a"]))
        with pytest.raises(LogFault, match="what it says was not merged of q was merged, or is no list of fragments in order"):
            verified(b"".join(line + b"\n" for line in (*before, wrong)))


@pytest.mark.parametrize("said", [{"q": [0, 1]}, {"q": [1, 1]}, {"q": []}, {"p": [0]}, {"q": [7]}, {"d": [1]}, [["q", [1]]]])
def test_no_update_is_held_whose_entry_names_other_fragments_as_late(
    two: tuple[AuditedMember, AuditedMember], said: Any
) -> None:
    owner, other = two
    wrong = owner.offer(2, lambda entry: entry.update(unmerged_fragments=said), late=LATE)
    answer = carry_out(other.replica, ev.Hold(wrong.update), offer=wrong)
    assert isinstance(answer, ev.Failed) and answer.is_wrong
    assert other.replica.state.held is None


def test_no_update_is_held_whose_entry_its_owner_has_not_signed(two: tuple[AuditedMember, AuditedMember]) -> None:
    owner, other = two
    stranger = owner.offer(2, key=member_key())
    answer = carry_out(other.replica, ev.Hold(stranger.update), offer=stranger)
    assert isinstance(answer, ev.Failed) and answer.is_wrong
    assert "it names a key of a that it is not enrolled for" in answer.reason
    manifest = json.loads(owner.offer(2).manifest)
    changed = {**parse_canonical(manifest["audit"].encode()), "unmerged": ["b"]}  # the signature is of another entry
    deep = "[" * 700 + "]" * 700
    consent = f'{{"config_digest":{deep},"key":"","peer":"p","policy_digest":"","signature":""}}'
    for audit, why in (
        (canonical(changed).decode(), "it is not signed by a, who owned the part"),
        (manifest["audit"] + " ", "not canonical JSON"),
        ("[]", "it has not the fields of the commit of a part"),
        ("[" * 100_000, "nested too deeply"),
        (manifest["audit"].replace('"all in"', deep), "nested too deeply"),
        (manifest["audit"].replace('"contributions":', f'"consents":[{consent}],"contributions":'), "nested too deeply"),
    ):
        offer, text = owner.offer(2), json.dumps({**manifest, "audit": audit}).encode()
        found = update_id(RUN, 0, 2, offer.update.base, text, offer.hashes)
        offer = replace(offer, manifest=text, update=replace(offer.update, id=found, digest=found))
        answer = carry_out(other.replica, ev.Hold(offer.update), offer=offer)
        assert isinstance(answer, ev.Failed) and answer.is_wrong and why in answer.reason
    for lacking in (["audit"], ["audit", "theta"]):
        offer = owner.offer(2)
        text = json.dumps({name: each for name, each in manifest.items() if name not in lacking}).encode()
        found = update_id(RUN, 0, 2, offer.update.base, text, offer.hashes)
        offer = replace(offer, manifest=text, update=replace(offer.update, id=found, digest=found))
        answer = carry_out(other.replica, ev.Hold(offer.update), offer=offer)
        assert isinstance(answer, ev.Failed) and answer.is_wrong and "not a manifest" in answer.reason


@pytest.mark.parametrize("changed", [{"round_id": 1}, {"outer_step": 0}, {"run_id": "other"}, {"schema_hash": "0" * 64}])
def test_what_was_signed_for_something_else_is_no_contribution(
    two: tuple[AuditedMember, AuditedMember], changed: dict[str, Any]
) -> None:
    """An owner that puts an earlier contribution into its entry once more, as it was signed, or as if it were of now."""
    owner, other = two
    for place in (2, 3):
        wrong = owner.offer(2, in_a_part(place, {2: 2, 3: 1}[place]), headers=changed)
        answer = carry_out(other.replica, ev.Hold(wrong.update), offer=wrong)
        assert isinstance(answer, ev.Failed) and answer.is_wrong
        assert "is to another round than was merged" in answer.reason or "has not signed" in answer.reason


def test_what_cannot_be_told_yet_is_not_held_against_the_owner(two: tuple[AuditedMember, AuditedMember]) -> None:
    owner, other = two
    offer = owner.offer(2)
    enrolled = {peer_id: each for peer_id, each in record_of().enrolled.items() if peer_id != "q"}
    for record, why in (
        (None, "is of another grant"),
        (replace(record_of(), parts=(replace(record_of().parts[0], grant=2),)), "is of another grant"),
        (replace(record_of(), enrolled=enrolled), "the enrolment of q is not known here"),
    ):
        other.enrolments = Enrolments.of(record) if record is not None else None
        answer = carry_out(other.replica, ev.Hold(offer.update), offer=offer)
        assert isinstance(answer, ev.Failed) and not answer.is_wrong and not answer.is_unclear and why in answer.reason


OTHER_KEY = Enrolled("2" * 32, key_hash(Signer(KEYS["b"]).public_key))
CHANGES = {
    "enrolled again": record_of(q=OTHER_KEY),
    "an observer": record_of(q=replace(record_of().enrolled["q"], observer=True)),
    "evicted": replace(record_of(), evicted={"q": "late"}),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("at", "late"), [(1, False), (0, True)])
def test_a_key_of_before_counts_for_the_outer_step_that_was_on_its_way_and_for_no_other(
    two: tuple[AuditedMember, AuditedMember], change: str, at: int, late: bool
) -> None:
    """q's key changes while the record names outer step `at`; the update with its old key is to outer step 2."""
    owner, other = two
    offer = owner.offer(2)
    parts = (replace(record_of().parts[0], outer_step=at),)
    other.enrolments = other.enrolments.taking(replace(CHANGES[change], parts=parts))
    answer = carry_out(other.replica, ev.Hold(offer.update), offer=offer)
    if not late:
        assert answer == ev.Held(offer.update)
    else:
        assert isinstance(answer, ev.Failed) and answer.is_wrong and "it names a key of q that it is not" in answer.reason


@pytest.mark.parametrize("change", ["enrolled again", "an observer"])
def test_a_key_that_a_member_which_has_just_started_cannot_tell_about_blames_nobody(
    two: tuple[AuditedMember, AuditedMember], change: str
) -> None:
    owner, other = two
    offer = owner.offer(2)
    other.enrolments = Enrolments.of(replace(CHANGES[change], parts=(replace(record_of().parts[0], outer_step=1),)))
    answer = carry_out(other.replica, ev.Hold(offer.update), offer=offer)
    assert isinstance(answer, ev.Failed) and answer.is_unclear and not answer.is_wrong
    assert "whether this key of q counted when the owner merged is not known here" in answer.reason


def test_a_contribution_that_names_a_signed_head_of_the_log_is_refused(two: tuple[AuditedMember, AuditedMember]) -> None:
    """There is none; and what a member checks of an entry has no place for it."""
    owner, other = two
    offer = owner.offer(2, headers={"seen": SeenHead(1, bytes(32), bytes(64))})
    answer = carry_out(other.replica, ev.Hold(offer.update), offer=offer)
    assert isinstance(answer, ev.Failed) and answer.is_wrong and "is no contribution" in answer.reason


# -- consents ------------------------------------------------------------------------------------------------------------------


def consent_of(peer_id: str = "p", policy: str = "", key: bytes = b"", data: DataStatement | None = None) -> Consent:
    signer = Signer(key or KEYS[peer_id])
    return signed_consent(RUN, peer_id, config_digest(AUDITED), policy, signer, data or DataStatement())


def said(*consents: Entry) -> Callable[[Entry], None]:
    return lambda entry: entry.update(consents=[*consents])


def test_a_consent_is_in_the_log_of_all_once_until_its_policy_is_another(two: tuple[AuditedMember, AuditedMember]) -> None:
    owner, other = two
    policies, found = ("", "", "5" * 64, ""), list[bool]()
    entries = OwnerEntries(owner.log, RUN, 0, 1, AUDITED, "a", Signer(KEYS["a"]), lambda: 1.7e9, enrolled_key)
    for step, policy in enumerate(policies, 2):
        data = DataStatement("notes", "6" * 64, "DUA")
        entries.consent("p", consent_of("p", policy, data=data))
        entries.consent("q", consent_of("q"))
        consents = entries._unlogged()
        found.append(bool(consents))
        offer = owner.offer(step, said(*consents) if consents else lambda entry: None)
        owner.take(offer)
        assert carry_out(other.replica, ev.Hold(offer.update), offer=offer) == ev.Held(offer.update)
        other.replica.adopt(offer.update.id)
        if step == 3:
            owner, other = owner.again(), other.again()
            entries._log = owner.log
    assert found == [True, False, True, True] and owner.logs == other.logs
    log = verified(owner.logs[0])
    assert {peer_id: each.data.licence for peer_id, each in log.consents.items()} == {"p": "DUA", "q": ""}


def test_a_consent_that_is_signed_with_a_replaced_key_is_not_logged(two: tuple[AuditedMember, AuditedMember]) -> None:
    """The member's new machine says it again, with its own key."""
    owner, _ = two
    keys = {"p": key_hash(Signer(KEYS["p"]).public_key), "q": OTHER_KEY.key}
    entries = OwnerEntries(owner.log, RUN, 0, 1, AUDITED, "a", Signer(KEYS["a"]), lambda: 1.7e9, lambda one: keys.get(one, ""))
    for peer_id in "pqd":
        entries.consent(peer_id, consent_of(peer_id))
    assert entries._unlogged() == [OF_P]
    entries.consent("q", consent_of("q", key=KEYS["b"]))
    assert [each["peer"] for each in entries._unlogged()] == ["p", "q"]


OF_P = consent_entry("p", consent_of("p"))
CONSENT_LIES: list[tuple[list[Any], str]] = [
    ([], "its consents are no list of some"),
    ([OF_P] * 2, "its consents are not in order"),
    ([consent_entry("q", consent_of("q")), OF_P], "its consents are not in order"),
    ([OF_P] * 65, "its consents are no list of some"),
    ([{**OF_P, "peer": "q"}], "the consent of q is not signed with the key that it names"),
    ([{**OF_P, "policy_digest": "5" * 64}], "the consent of p is not signed"),
    ([consent_entry("p", consent_of("p", "none"))], "the consent of p names a digest that is none"),
    ([{**OF_P, "more": 1}], "the consent of p is written otherwise"),
    ([{**OF_P, "data": {}}], "the consent of p is written otherwise"),
    ([consent_entry("p", consent_of("p", data=DataStatement("x" * 513)))], "the consent of p is written otherwise"),
    ([consent_entry("p", consent_of("p", data=DataStatement("x", "6")))], "the consent of p names a digest that is none"),
    ([consent_entry("p", consent_of("p", key=KEYS["q"]))], "it names a key of p that it is not enrolled for"),
    ([consent_entry("p", signed_consent(RUN, "p", "0" * 64, "", Signer(KEYS["p"])))], "consents to another configuration"),
    (["p"], "string indices"),
    ([{**OF_P, "key": 1}], "the consent of p|base64|Incorrect padding|only"),
]


@pytest.mark.parametrize(("consents", "why"), CONSENT_LIES)
def test_no_update_is_held_whose_entry_has_a_wrong_consent(
    two: tuple[AuditedMember, AuditedMember], consents: list[Any], why: str
) -> None:
    owner, other = two
    wrong = owner.offer(2, said(*consents))
    answer = carry_out(other.replica, ev.Hold(wrong.update), offer=wrong)
    assert isinstance(answer, ev.Failed) and answer.is_wrong and re.search(why, answer.reason), answer


def test_the_consent_of_who_is_not_known_to_be_enrolled_is_not_held_against_the_owner(
    two: tuple[AuditedMember, AuditedMember],
) -> None:
    owner, other = two
    stranger = consent_entry("z", signed_consent(RUN, "z", config_digest(AUDITED), "", Signer(KEYS["p"])))
    answer = carry_out(other.replica, ev.Hold((offer := owner.offer(2, said(stranger))).update), offer=offer)
    assert isinstance(answer, ev.Failed) and not answer.is_wrong and "the enrolment of z" in answer.reason


# -- on disk -------------------------------------------------------------------------------------------------------------------


QUICK = Disk(fsync=lambda descriptor: None)


def journal_of(folder: Path, outer_step: int) -> list[str]:
    """The entries of the outer steps that are taken; what is held only is not."""
    committed = replay_segments(checkpoint.segments(folder), 0)
    return [each.audit for each in committed if each.outer_step <= outer_step]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", ["before", "middle", "after"])
def test_killed_at_any_write_the_log_is_the_journal_after_the_next_start(tmp_path: Path, how: str) -> None:
    config = replace(AUDITED, storage=replace(AUDITED.storage, checkpoint_every=100))
    owner = AuditedMember(tmp_path / "a", disk=QUICK, config=config).found()
    shutil.copytree(tmp_path / "a", tmp_path / "founded")
    offers = []
    for step in (1, 2, 3):
        offers.append(owner.offer(step))
        owner.take(offers[-1])
    whole, died, killed = owner.logs[0], 0, True
    for calls in range(100):
        folder, mortal = tmp_path / str(calls), MortalDisk(calls, how)
        shutil.copytree(tmp_path / "founded", folder)
        try:
            dying = AuditedMember(folder, disk=Disk(write=mortal.write, fsync=mortal.fsync), config=config)
        except Killed:
            died += 1
            continue
        killed = False
        try:
            for offer in offers[:2]:
                dying.take(offer)
        except Killed:
            killed = True
        dying.store.close()
        again = AuditedMember(folder, disk=QUICK, config=config)
        step = again.replica.state.outer_step
        assert journal_of(folder, step) == whole.decode().splitlines()[1 : step + 1]
        assert again.logs == {0: b"".join(whole.splitlines(keepends=True)[: step + 1])}
        for offer in offers:
            again.take(offer)
        assert again.logs == {0: whole} and same(again.replica.snapshot(), owner.replica.snapshot())
        again.store.close()
        if not killed:
            break
        died += 1
    assert died > 12 and not killed


def test_while_the_log_cannot_be_written_nothing_further_is_held_and_nothing_is_lost(tmp_path: Path) -> None:
    full = False

    def write(descriptor: int, data: memoryview) -> int:
        if full and b'"kind":"commit"' in bytes(data) and data[:1] == b"{":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(descriptor, data)

    owner = AuditedMember(tmp_path / "a").found()
    member = AuditedMember(tmp_path / "b", "b", Disk(write=write)).found()
    offers = []
    for step in (1, 2):
        offers.append(owner.offer(step))
        owner.take(offers[-1])
    full = True
    member.take(offers[0])
    assert member.replica.state.outer_step == 1 and len(member.logs[0].splitlines()) == 1
    for _ in range(2):
        answer = carry_out(member.replica, ev.Hold(offers[1].update), offer=offers[1])
        assert isinstance(answer, ev.Failed) and not answer.is_wrong and "audit-log.jsonl: cannot be written" in answer.reason
    full = False
    member.take(offers[1])
    assert member.logs == owner.logs
    member = member.again()
    assert member.logs == owner.logs


DAMAGES: list[tuple[Callable[[bytes], bytes], str]] = [
    (lambda text: text[: text.rindex(b"\n", 0, -1) + 1], "no audit log has the 3 entries"),
    (lambda text: text.replace(b'"reason":"all in"', b'"reason":"all On"', 1), "no audit log has the 3 entries"),
    (lambda text: text.replace(b'"kind":"genesis"', b'"kind":"genesiS"', 1), "no audit log has the 3 entries"),
    (lambda text: text.replace(b'"kind":"genesis"', b'"kind" :"genesis"', 1), "its first line is damaged"),
    (lambda text: text.replace(b'"config_digest":"', b'"config_digest":"0', 1), "was begun with other settings"),
    (lambda text: b"", "no audit log has the 3 entries"),
]


@pytest.mark.parametrize(("damage", "why"), DAMAGES)
def test_a_log_that_was_changed_while_nobody_looked_stops_the_start(
    tmp_path: Path, damage: Callable[[bytes], bytes], why: str
) -> None:
    owner = AuditedMember(tmp_path / "a").found()
    for step in (1, 2):  # a checkpoint every 2 steps
        owner.take(owner.offer(step))
    owner.store.close()
    path = tmp_path / "a" / "audit-log.jsonl"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises((StorageError, ConfigError), match=why):
        AuditedMember(tmp_path / "a")


def test_a_log_that_was_lost_is_restored_from_another_member(tmp_path: Path) -> None:
    owner, member = AuditedMember(tmp_path / "a").found(), AuditedMember(tmp_path / "b", "b").found()
    for step in (1, 2, 3):  # a checkpoint every 2 steps
        offer = owner.offer(step)
        owner.take(offer)
        member.take(offer)
    member.store.close()
    (tmp_path / "b" / "audit-log.jsonl").unlink()
    with pytest.raises(StorageError, match="no audit log has the 3 entries"):
        AuditedMember(tmp_path / "b", "b")
    lines = owner.logs[0].splitlines(keepends=True)
    (tmp_path / "b" / "audit-log.jsonl").write_bytes(b"".join(lines[:3]))
    assert AuditedMember(tmp_path / "b", "b").logs == owner.logs


def test_a_member_that_takes_a_snapshot_says_from_where_on_it_has_the_log(tmp_path: Path) -> None:
    owner, member = AuditedMember(tmp_path / "a").found(), AuditedMember(tmp_path / "b", "b")
    fetch = ev.Fetch(0, 0, owner.replica.state.digest, owner.replica.state.digest, "a", True)
    assert isinstance(carry_out(member.replica, fetch, source=owner), ev.Applied)
    assert member.logs == owner.logs, "of the founding it can tell what the log begins with"
    for step in (1, 2, 3):
        offer = owner.offer(step)
        owner.take(offer)
        if step == 1:
            member.take(offer)
    state = owner.replica.state
    fetch = ev.Fetch(0, state.outer_step, state.digest, state.digest, "a", True)
    assert isinstance(carry_out(member.replica, fetch, source=owner), ev.Applied)
    assert [*member.logs] == [0, 4] and member.replica.claimed() == owner.replica.claimed(), "the head is in the state's digest"
    member = member.again()
    for step in (4, 5, 6):
        offer = owner.offer(step)
        owner.take(offer)
        member.take(offer)
    whole, later = owner.logs[0].splitlines(), member.logs[4].splitlines()
    assert later[1:] == whole[4:] and member.logs[0].splitlines() == whole[:2]
    log = verified(member.logs[4])
    assert (log.before, log.outer_step, log.commits, log.verified) == (4, 6, 3, 12)
    assert log.tree.root() == verified(owner.logs[0]).tree.root()
    assert verified(member.logs[0]).outer_step == 1
    member = member.again()
    assert member.replica.claimed() == owner.replica.claimed()


def test_a_snapshot_of_what_is_here_already_goes_on_with_the_same_log(tmp_path: Path) -> None:
    """As a member takes one whose parameters are damaged in memory, and not on disk."""
    owner, member = AuditedMember(tmp_path / "a").found(), AuditedMember(tmp_path / "b", "b").found()
    offer = owner.offer()
    owner.take(offer)
    member.take(offer)
    fetch = ev.Fetch(0, 1, offer.update.id, offer.update.id, "a", True)
    assert isinstance(carry_out(member.replica, fetch, source=owner), ev.Applied)
    offer = owner.offer(2)
    owner.take(offer)
    member.take(offer)
    assert member.logs == owner.logs and member.again().logs == owner.logs


@pytest.mark.parametrize("killed", ["before the log", "after the log"])
def test_killed_while_it_takes_a_snapshot_a_member_goes_on_from_what_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: str
) -> None:
    owner, member = AuditedMember(tmp_path / "a").found(), AuditedMember(tmp_path / "b", "b").found()
    for step in (1, 2, 3, 4, 5):
        offer = owner.offer(step)
        owner.take(offer)
        if step < 3:
            member.take(offer)
    before, state = member.logs, owner.replica.state

    def dies(*arguments: Any, **named: Any) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        if killed == "before the log":
            patched.setattr(member.log, "_make", dies)
        else:
            patched.setattr(checkpoint, "save", dies)
        with pytest.raises(Killed):
            carry_out(member.replica, ev.Fetch(0, 5, state.digest, state.digest, "a", True), source=owner)
    member = member.again()
    assert member.replica.state.outer_step == 2 and member.logs == before
    assert isinstance(
        carry_out(member.replica, ev.Fetch(0, 5, state.digest, state.digest, "a", True), source=owner), ev.Applied
    )
    assert [*member.logs] == [0, 6] and member.replica.claimed() == owner.replica.claimed()
    offer = owner.offer(6)
    owner.take(offer)
    member.take(offer)
    assert member.logs[6].splitlines()[1:] == owner.logs[0].splitlines()[6:]


def test_a_log_of_an_earlier_lineage_is_kept_beside_the_one_that_takes_its_place(tmp_path: Path) -> None:
    """After a recovery: what a lost majority agreed on is followed by another outer step than here."""
    owner, member = AuditedMember(tmp_path / "a").found(), AuditedMember(tmp_path / "b", "b")
    for step in (1, 2):
        owner.take(owner.offer(step))
    state = owner.replica.state
    fetch = ev.Fetch(0, 2, state.digest, state.digest, "a", True)
    assert isinstance(carry_out(member.replica, fetch, source=owner), ev.Applied)
    member.take(member.offer(9))
    lost = member.logs[3]
    member.replica._damaged = True  # else it is kept
    owner.take(owner.offer(3))
    state = owner.replica.state
    fetch = ev.Fetch(0, 3, state.digest, state.digest, "a", True)
    assert isinstance(carry_out(member.replica, fetch, source=owner), ev.Applied)
    assert [*member.logs] == [3, 4] and member.logs[3] == lost
    member = member.again()
    assert member.replica.claimed() == owner.replica.claimed() and verified(member.logs[4]).outer_step == 3


@pytest.mark.parametrize("peaks", [[], ["00"], ["0" * 64, "1" * 64], "no list", None, [1], ["0" * 64] * 65])
def test_a_snapshot_whose_head_cannot_be_is_not_taken(tmp_path: Path, peaks: Any) -> None:
    owner, member = AuditedMember(tmp_path / "a").found(), AuditedMember(tmp_path / "b", "b").found()
    owner.take(owner.offer())
    snapshot = owner.replica.snapshot
    lies = lambda: replace(snapshot(), metadata={**snapshot().metadata, "audit": peaks})  # noqa: E731
    owner.replica.snapshot = lies  # type: ignore[method-assign]
    owner.replica.claimed = lambda: replace(claimed, digest=lies().digest)  # type: ignore[method-assign]
    state = owner.replica.state
    claimed = Claimed(state.outer_step, state.digest, "")
    answer = carry_out(member.replica, ev.Fetch(0, 1, state.digest, state.digest, "a", True), source=owner)
    assert isinstance(answer, ev.Failed) and "audit log" in answer.reason
    assert member.replica.state.outer_step == 0
    assert member.again().replica.state.outer_step == 0


def test_an_agreed_update_whose_entry_does_not_fit_is_replaced_by_a_snapshot(two: tuple[AuditedMember, AuditedMember]) -> None:
    """A quorum has held what this member would not: it goes on with the others, and its log does not say that it saw that."""
    owner, other = two
    wrong = owner.offer(2, another_share)
    owner.replica._proposed = wrong.update.id  # the owner holds what its own engine has made
    owner.take(wrong)
    state = owner.replica.state
    assert isinstance(
        carry_out(other.replica, ev.Fetch(0, 2, state.digest, state.digest, "a", False), source=owner), ev.Applied
    )
    assert other.replica.state == state and [*other.logs] == [0, 3]
    assert other.logs[0].splitlines() == owner.logs[0].splitlines()[:2] and len(other.logs[3].splitlines()) == 1


# -- owners that are killed ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", LOST + EITHER)
def test_whatever_point_an_owner_is_killed_at_all_members_have_the_same_log(
    tmp_path: Path, point: Callable[[ReplicatedTable], Update]
) -> None:
    table = AuditedTable(tmp_path)
    table.elect("c")
    table.run(LEASE_S / 2)
    table.go_on()
    point(table)
    table.cut = set()
    table.run(3 * LEASE_S)
    table.go_on()
    table.start("a")
    table.run(2 * LEASE_S)
    table.go_on(2)
    table.check_equal()


def test_a_member_that_missed_many_steps_has_the_rest_of_the_log_and_one_that_missed_few_all_of_it(tmp_path: Path) -> None:
    table = AuditedTable(tmp_path)
    table.elect("c")
    table.run(LEASE_S / 2)
    table.go_on()
    table.kill("b")
    table.go_on(3)
    table.start("b")
    table.run(LEASE_S)
    table.kill("e")
    table.go_on(5)
    table.start("e")
    table.run(LEASE_S)
    assert table.fetched == {"updates": 3, "snapshot": 1}
    table.go_on()
    table.check_equal()
    assert [first for first, _ in part_logs(tmp_path / "b" / "part-0")] == [0]
    assert [first for first, _ in part_logs(tmp_path / "e" / "part-0")] == [0, 10]


# -- verifying it --------------------------------------------------------------------------------------------------------------


def command(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    app(["audit", *map(str, words)], standalone_mode=False)
    return capsys.readouterr().out


def test_the_commands_verify_sum_up_and_export_and_name_what_was_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    owner = AuditedMember(tmp_path / "home" / "part-0").found()
    for step in (1, 2, 3):
        owner.take(owner.offer(step))
    owner.store.close()
    log, home = verified(owner.logs[0]), tmp_path / "home"
    said = command(capsys, "verify", home)
    assert f"run {RUN}\n" in said
    assert "part 0: 3 commits, each signed by the owner that it names, 12 signatures of contributions: verified" in said
    assert f"head        4 entries, root {log.tree.root().hex()}" in said
    assert "left out" in command(capsys, "verify", home, "--hashes")
    assert "(those of 2 commits, drawn at random)" in command(capsys, "verify", home, "--sample", 2)
    with pytest.raises(ConfigError, match="--sample: has no effect with --hashes"):
        command(capsys, "verify", home, "--hashes", "--sample", 2)
    (values,) = json.loads(command(capsys, "verify", home, "--json"))
    assert (values["part"], values["commits"], values["before"], values["outer_step"]) == (0, 3, 0, 3)
    (values,) = json.loads(command(capsys, "usage", home, "--json"))
    assert values["peers"]["p"]["outer_steps"] == 3 and values["peers"]["q"]["tokens"] == 30
    assert values["peers"]["c"]["missing"] == 3
    assert "part 0, outer steps 1 to 3" in command(capsys, "usage", home)
    assert "audit-log.jsonl: 3 commits, outer step 3" in command(capsys, "export", home, tmp_path / "copy")
    assert (tmp_path / "copy" / "part-0" / "audit-log.jsonl").read_bytes() == owner.logs[0]
    assert "3 commits" in command(capsys, "verify", tmp_path / "copy")
    (tmp_path / "peer.pem").touch()
    with pytest.raises(ConfigError, match="has no audit log"):
        command(capsys, "verify", tmp_path)
    path = tmp_path / "copy" / "part-0" / "audit-log.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"reason":"all in"', b'"reason":"all On"', 1))
    with pytest.raises(LogFault, match=r"audit-log\.jsonl: entry 1: it is not signed by a, who owned the part"):
        command(capsys, "verify", tmp_path / "copy", "--hashes")
    path.parent.rename(tmp_path / "copy" / "part-1")
    with pytest.raises(ConfigError, match="part-0: has no audit log, and the run has one of each part"):
        command(capsys, "verify", tmp_path / "copy")


def last_signed_by(home: Path, owner: object, key: bytes) -> None:
    """Have the last entry of a part's log signed by another owner, with this key."""
    path = home / "part-0" / "audit-log.jsonl"
    *before, last = path.read_bytes().splitlines()
    entry = {name: each for name, each in parse_canonical(last).items() if name not in ("key", "signature")} | {"owner": owner}
    path.write_bytes(b"".join(line + b"\n" for line in (*before, signed_by_owner(RUN, entry, Signer(key)))))


def three_steps(home: Path) -> None:
    owner = AuditedMember(home / "part-0").found()
    for step in (1, 2, 3):
        owner.take(owner.offer(step))
    owner.store.close()


def test_the_keys_of_owners_are_named_and_one_that_signed_no_contribution_of_its_owner_is_doubtful(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    three_steps(tmp_path)
    a, made_up = key_hash(Signer(KEYS["a"]).public_key), member_key()
    said = command(capsys, "verify", tmp_path)
    assert f"  owned       by a, 3 commits, key sha256:{a}\n" in said and "doubtful" not in said
    last_signed_by(tmp_path, "q", made_up)
    q = key_hash(Signer(made_up).public_key)
    said = command(capsys, "verify", tmp_path)
    assert f"  owned       by q, 1 commits, key sha256:{q}\n" in said
    assert f"  doubtful    what q signed as owner, by a key that has signed no contribution of it: sha256:{q}\n" in said
    (values,) = json.loads(command(capsys, "verify", tmp_path, "--json"))
    assert values["owners"] == {"a": {a: 2}, "q": {q: 1}} and values["doubtful_owners"] == {"q": [q]}
    last_signed_by(tmp_path, "q", KEYS["q"])
    assert "doubtful" not in command(capsys, "verify", tmp_path), "it has contributed with this key"
    last_signed_by(tmp_path, [], KEYS["a"])
    with pytest.raises(LogFault, match=r"audit-log\.jsonl: entry 3: '\[\]' is no name of a peer"):
        command(capsys, "verify", tmp_path)


def test_an_owners_key_that_was_never_enrolled_is_a_fault_in_a_members_folder_and_one_of_before_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    three_steps(tmp_path)
    made_up, disk = member_key(), MemberFolder(tmp_path)

    def knows(**enrolled: Enrolled) -> None:
        record = replace(record_of(**enrolled), roots=(Root("AA=="),))
        disk.save(Saved(incarnation=1, record=record))

    now = Enrolled("2" * 32, key_hash(Signer(made_up).public_key))
    for enrolled in ({}, {"a": now}):  # a was invited again after it had signed all of them
        knows(**enrolled)
        assert "part 0: 3 commits" in command(capsys, "verify", tmp_path)
    knows(a=replace(now, invitation="0" * 32))
    with pytest.raises(LogFault, match=r"audit-log\.jsonl: entry 1 is signed with a key for which a was not enrolled: sha256:"):
        command(capsys, "verify", tmp_path)
    last_signed_by(tmp_path, "a", made_up)
    knows(a=now)
    assert "part 0: 3 commits" in command(capsys, "verify", tmp_path), "it was invited again before the last one"
    knows()
    for owner in "aq":  # q has only contributed
        last_signed_by(tmp_path, owner, made_up)
        with pytest.raises(
            LogFault, match=rf"entry 3 is signed with a key for which {owner} was not enrolled: sha256:{now.key}"
        ):
            command(capsys, "verify", tmp_path)
    last_signed_by(tmp_path, "z", made_up)
    with pytest.raises(LogFault, match="entry 3 is signed by z, and nobody of that name is enrolled by this member's record"):
        command(capsys, "verify", tmp_path)


def of_two_parts(home: Path, steps: int = 0) -> None:
    """A member's folder, with the logs of both parts of a model. a owned them."""
    config = RunConfig.from_mapping({**CONFIG, "audit": {"enabled": True}, "swarm": {"parts": 2}})
    for part in (0, 1):
        owner = AuditedMember(home / f"part-{part}", config=config, part=part).found()
        for step in range(1, steps + 1):
            owner.take(owner.offer(step, lambda entry, part=part: entry.update(part=part)))
        owner.store.close()


def test_a_lost_log_of_a_part_is_named_in_a_members_folder_and_in_an_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home, out = tmp_path / "home", tmp_path / "out"
    of_two_parts(home)
    command(capsys, "export", home, out)
    for folder in (home, out):
        assert "part 1: 0 commits" in command(capsys, "verify", folder)
        (folder / "part-1" / "audit-log.jsonl").unlink()
        for verb in ("verify", "usage"):
            with pytest.raises(ConfigError, match="part-1: has no audit log, and the run has one of each part"):
                command(capsys, verb, folder)


def test_a_log_that_begins_after_a_snapshot_and_has_no_commit_yet_is_of_no_other_lineage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    owner, late = AuditedMember(tmp_path / "a" / "part-0").found(), AuditedMember(tmp_path / "b" / "part-0", "b").found()
    owner.take(owner.offer(1))
    late.log.begin(owner.replica.outer, owner.log.tree.peaks)
    late.store.close()
    said = command(capsys, "verify", tmp_path / "b")
    assert "begins      with entry 2" in said and "lineage" not in said


def test_an_export_is_written_whole_or_not_at_all_and_over_no_other_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home, out = tmp_path / "home", tmp_path / "out"
    owner = AuditedMember(home / "part-0").found()
    owner.take(owner.offer(1))
    command(capsys, "export", home, out)
    owner.take(owner.offer(2))
    assert "2 commits" in command(capsys, "export", home, out), "the same log, which has grown"
    owner.store.close()
    kept = (out / "part-0" / "audit-log.jsonl").read_bytes()

    other = AuditedMember(tmp_path / "other" / "part-0").found()
    other.store.close()
    with pytest.raises(ConfigError, match="is another log, or one that has more entries; export to another folder"):
        command(capsys, "export", tmp_path / "other", out)
    assert (out / "part-0" / "audit-log.jsonl").read_bytes() == kept

    for name in ("run.json", "host.json"):  # a coordinator's folder, and another member's
        (taken := tmp_path / f"with-{name}").mkdir()
        (taken / name).touch()
        with pytest.raises(ConfigError, match=r"is the folder of a .*; export to another folder"):
            command(capsys, "export", home, taken)
        assert [path.name for path in taken.iterdir()] == [name]

    two = tmp_path / "two"
    of_two_parts(two)
    log = two / "part-1" / "audit-log.jsonl"
    log.write_bytes(log.read_bytes().replace(b'"outer_step":0', b'"outer_step":1'))
    with pytest.raises(ConfigError, match="is another log"):
        command(capsys, "export", two, out)
    log.write_bytes(log.read_bytes()[:-9] + b"\n")
    with pytest.raises(LogFault, match=r"part-1/audit-log\.jsonl: entry 0"):
        command(capsys, "export", two, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def certify(home: Path, peer_id: str) -> Issuer:
    """Make this the folder of a member, by its certificate. Return who has issued it."""
    run = new_folder(home.with_name(f"run-of-{peer_id}"))
    issuer, key = Authority.load(run.path, run.run_id).issuer, serialization.load_pem_private_key(KEYS[peer_id], None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    certificate = issuer.issue(Identity(RUN, "peer", peer_id), key.public_key(), lifetime_s=3600, now=time.time())
    (home / "peer.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return issuer


def test_a_log_that_lost_what_the_members_own_peer_has_seen_does_not_verify(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    owner = AuditedMember(home / "part-0").found()
    for step in (1, 2, 3):
        owner.take(owner.offer(step))
    owner.store.close()
    issuer = certify(home, "a")
    tree, by = owner.log.tree, SeenBy(RUN, "a", 0)
    lines = [seen_line(by, SeenEntry(step, tree.leaf(step), tree.root(step + 1)), Signer(KEYS["a"])) for step in (1, 2, 3)]
    seen_file(home, 0).write_bytes(b"".join(line + b"\n" for line in lines))
    assert "seen        the log has the last 3 entries that this member's peer has seen" in command(capsys, "verify", home)
    renewed = issuer.issue(Identity(RUN, "peer", "a"), new_key().public_key(), lifetime_s=3600, now=time.time())
    keep_earlier(home, Identity(RUN, "peer", "a"), home / "peer.pem", renewed)  # it was invited again
    (home / "peer.pem").write_bytes(renewed.public_bytes(serialization.Encoding.PEM))
    assert "seen        the log has the last 3 entries that this member's peer has seen" in command(capsys, "verify", home)
    path = home / "part-0" / "audit-log.jsonl"
    whole = path.read_bytes()
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:3]))
    with pytest.raises(LogFault, match=r"audit-log\.jsonl: has 3 entries, and this member's peer has seen 4"):
        command(capsys, "verify", home)
    path.write_bytes(whole)
    other = seen_line(by, SeenEntry(2, tree.leaf(2), bytes(32)), Signer(KEYS["a"]))
    seen_file(home, 0).write_bytes(other + b"\n")
    with pytest.raises(LogFault, match="entry 2, or one before it, is another one than this member's peer has seen"):
        command(capsys, "verify", home)
    seen_file(home, 0).write_bytes(other.replace(b'"part":0', b'"part":1') + b"\n")
    with pytest.raises(ConfigError, match=r"receipts-part-0\.jsonl: line 1 cannot be used: a has seen it, of part 1"):
        command(capsys, "verify", home)


@pytest.mark.parametrize("whole", [True, False], ids=["from the genesis", "after a snapshot"])
def test_every_byte_of_the_log_matters_and_the_entry_is_named(tmp_path: Path, whole: bool) -> None:
    """Some of them here; more of the first line, and of the last entry, which no later root is of."""
    owner, member = AuditedMember(tmp_path / "a", disk=QUICK).found(), AuditedMember(tmp_path / "b", "b", QUICK)
    for step in (1, 2, 3, 4):
        offer = owner.offer(step)
        owner.take(offer)
        if step == 2:
            fetch = ev.Fetch(0, 2, offer.update.id, offer.update.id, "a", True)
            assert isinstance(carry_out(member.replica, fetch, source=owner), ev.Applied)
        if step > 2:
            member.take(offer)
    log, before = (owner.logs[0], 0) if whole else (member.logs[3], 2)
    ends = [i for i, byte in enumerate(log) if byte == ord("\n")]
    for place in {*range(0, len(log), 41), *range(0, ends[0], 7), *range(ends[-2], ends[-1], 9)} - {*ends}:
        entry = before + sum(end < place for end in ends)
        changed = bytearray(log)
        changed[place] ^= 1
        with pytest.raises(LogFault) as caught:
            verifier = LogVerifier(signatures=not whole)  # what a first line says of the model, contributions are signed for
            for line in bytes(changed).split(b"\n")[:-1]:
                verifier.take(line)
        named = (entry, entry + 1, *((0,) if place < ends[0] else ()))  # of a first line that cannot be read no number is known
        assert any(f"entry {each}" in str(caught.value) for each in named), (place, str(caught.value))


def test_what_no_owner_has_signed_is_no_entry_of_a_parts_log(tmp_path: Path) -> None:
    owner = AuditedMember(tmp_path / "a", disk=QUICK).found()
    owner.take(owner.offer())
    log = verified(owner.logs[0])
    for entry in (
        continued_entry(7, "0" * 64),
        config_entry(RunConfig()),
        consent_entry("p", signed_consent(RUN, "p", config_digest(AUDITED), "", Signer(KEYS["p"]))),
    ):
        with pytest.raises(LogFault, match=r"entry 2: is of the kind [a-z]+, and only commits are in the log"):
            verified(owner.logs[0] + entry_line(log.tree, 1.7e9, entry))
    begins = begins_line(RUN, 0, AUDITED, "0" * 64, 1, log.digest, log.tree.peaks)
    with pytest.raises(LogFault, match="entry 2"):
        verified(owner.logs[0] + begins)


# -- after a recovery ----------------------------------------------------------------------------------------------------------

RECOVERED = 1 << 20  # what a grant of the next lineage is greater by


def under(grant: int) -> Callable[[Entry], None]:
    return lambda entry: entry.update(grant=grant)


def test_a_log_shows_where_another_lineage_goes_on_from_all_before_and_grants_never_fall(tmp_path: Path) -> None:
    owner = AuditedMember(tmp_path / "a", disk=QUICK).found()
    owner.take(owner.offer())
    whole, entry = owner.logs[0], lambda grant: json.loads(owner.offer(2, under(grant)).manifest)["audit"].encode()
    log = verified(whole)
    assert not log.recovered and log.grant == 1
    root = log.tree.root().hex()
    log.take(entry(RECOVERED + 1))
    assert log.recovered == [(2, 2, root, "a")]
    begun = LogVerifier()
    begun.take(
        begins_line(RUN, 0, AUDITED, owner.replica.outer.schema.schema_hash, 1, owner.replica.outer.digest, log_peaks(whole))
    )
    begun.take(entry(RECOVERED + 1))
    assert not begun.recovered and begun.grant == RECOVERED + 1, "what was before is not known"
    with pytest.raises(LogFault, match="entry 2: was made under grant 0, and one before it under grant 1"):
        verified(whole + entry(0))


def log_peaks(log: bytes) -> tuple[bytes, ...]:
    return verified(log).tree.peaks


def test_who_recovers_goes_on_with_its_log_which_names_what_was_before_and_the_lost_one_is_kept_beside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def body() -> None:
        async with hosts(tmp_path, config=RunConfig.from_text(audited_toml().encode(), "run.toml")) as swarm:
            await grown(swarm)
            for step in (1, 2):
                await take_step(swarm, step)
            folders = {peer_id: equip(swarm, peer_id) for peer_id in "abc"}
            for folder in folders.values():
                (folder / "run.toml").write_text(audited_toml())
            for peer_id in "cab":
                await swarm.stop(peer_id)
            plans: list[operate.Recovery] = []
            root = verified(log_of(swarm, "c")).tree.root().hex()
            await in_thread(operate.recover, folders["c"], lambda plan: plans.append(plan) is None)
            assert plans[0].lines[-1] == f"the audit log of part 0 goes on from its 3 entries, root {root}"
            await swarm.start("c")
            await swarm.until(lambda: swarm.owner() is not None, passes=1.0)
            await in_thread(operate.rejoin, folders["b"])
            await swarm.start("b")
            await swarm.until(lambda: swarm.settled("cb") and swarm.steps() == {"c": 2, "b": 2}, passes=1.0)
            await take_step(swarm, 3)
            said = command(capsys, "verify", swarm.path / "c")
            assert f"recovered   lineage 2 begins with entry 3, of c: it goes on from the 3 entries before, root {root}" in said
            (values,) = json.loads(command(capsys, "verify", swarm.path / "c", "--json"))
            assert values["recovered"] == [{"entry": 3, "lineage": 2, "root": root, "owner": "c"}]
            said = command(capsys, "verify", swarm.path / "b")
            assert "lineage     2: the swarm was recovered before this log begins" in said
            (aside,) = (swarm.path / "b").glob("lineage-1-*")
            assert f"head        3 entries, root {root}" in command(capsys, "verify", aside), "what it had before"

    run_held(body())


# -- hosts ---------------------------------------------------------------------------------------------------------------------


def config(verify: int = 0, start: int = 2) -> RunConfig:
    values: dict[str, Any] = tomllib.loads(TOML.format(start=start, quorum=start))
    del values["server"]
    values["outer"] = {"optimizer": "nesterov", "lr": 0.7, "momentum": 0.9}
    return RunConfig.from_mapping({**values, "audit": {"enabled": True}, "swarm": {"parts": 1, "verify": verify}})


async def grown(swarm: Hosts, members: str = "abc") -> None:
    swarm.closed = True
    swarm.found(members[0])
    await swarm.start(members[0])
    await swarm.until(lambda: swarm.leader == members[0], passes=1.0)
    await swarm.enrol(*members[1:], *PEERS)
    for peer_id in members[1:]:
        await swarm.start(peer_id)
    await swarm.until(lambda: swarm.settled(members), passes=1.0)


async def take_step(swarm: Hosts, step: int) -> None:
    await contribute(swarm, step)
    await swarm.until(lambda: swarm.steps() == dict.fromkeys(swarm.running, step), passes=1.0)
    assert len(swarm.taken[0, step]) == 1 and swarm.same()


def log_of(swarm: Hosts, peer_id: str) -> bytes:
    return (swarm.folder(peer_id).part(0) / "audit-log.jsonl").read_bytes()


def test_all_members_have_the_same_log_when_owners_are_killed_in_between(tmp_path: Path) -> None:
    async def body() -> None:
        async with hosts(tmp_path, config=config()) as swarm:
            await grown(swarm, "abcd")
            owners = []
            for step in (1, 2, 3, 4):
                await take_step(swarm, step)
                owners.append(swarm.record.parts[0].owner)
                if step == 2:
                    await swarm.stop(owners[-1])
                    await swarm.until(lambda: swarm.owner() is not None, passes=1.0)
            await swarm.start(owners[1])
            await swarm.until(lambda: swarm.steps() == dict.fromkeys("abcd", 4), passes=1.0)
            await take_step(swarm, 5)
            found = log_of(swarm, "a")
            assert all(log_of(swarm, peer_id) == found for peer_id in "bcd"), "from the genesis on, byte for byte"
            log = verified(found)
            assert (log.outer_step, log.commits, log.part, log.before) == (5, 5, 0, 0)
            assert log.verified == 5 * 2 * len(PEERS) and log.usage["p"].outer_steps == 5
            assert {log.digest} == swarm.taken[0, 5]
            signers = [parse_canonical(line)["owner"] for line in found.splitlines()[1:]]
            assert signers[:2] == owners[:2] and signers[2] != signers[1]

    run_held(body())


def test_it_goes_with_members_that_verify(tmp_path: Path) -> None:
    async def body() -> None:
        async with hosts(tmp_path, config=config(verify=1)) as swarm:
            await grown(swarm)
            await swarm.until(lambda: len(swarm.record.parts[0].verifiers) == 1, passes=1.0)
            for step in (1, 2):
                await take_step(swarm, step)
            assert log_of(swarm, "a") == log_of(swarm, "b") == log_of(swarm, "c")
            assert verified(log_of(swarm, "a")).commits == 2

    run_held(body())


def test_an_owner_that_names_another_contribution_than_it_merged_is_found_out_by_who_verifies(tmp_path: Path) -> None:
    """Peers sign a contribution anew when they send it again: both signatures are good, one of them is of what was merged."""

    async def body() -> None:
        async with hosts(tmp_path, config=config(verify=1)) as swarm:
            await grown(swarm)
            await swarm.until(lambda: len(swarm.record.parts[0].verifiers) == 1, passes=1.0)
            await take_step(swarm, 1)
            owner = swarm.record.parts[0].owner
            store = swarm.running[owner].parts[0].replica._engine
            assert store is not None and store._entries is not None
            commit, sign = store._entries.commit, ContributionSigner(swarm.own("p")[0], swarm.config)

            def lie(outer: Any, records: Any, staged: Any, contributions: Any, facts: RoundFacts) -> str:
                (p, q), *others = contributions.values()
                anew = sign(replace(p, attempt=p.attempt + 1), memoryview(b"anything else"))
                return commit(outer, records, staged, dict(enumerate([(anew, q), *others])), facts)

            store._entries.commit = lie  # type: ignore[method-assign]
            await contribute(swarm, 2)
            await swarm.until(lambda: swarm.record.parts[0].owner != owner, passes=1.0)
            said = [text for _, text in swarm.running[swarm.leader]._notices]
            assert any("its entry of the audit log names other contributions than it was merged from" in text for text in said)
            await take_step(swarm, 2)

    run_held(body())


def test_an_owner_whose_entry_is_wrong_is_named_and_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with hosts(tmp_path, config=config()) as swarm:
            await grown(swarm)
            await take_step(swarm, 1)
            owner = swarm.record.parts[0].owner
            store = swarm.running[owner].parts[0].replica._engine
            assert store is not None and store._entries is not None
            commit = store._entries.commit

            def lie(outer: Any, records: Any, staged: Any, contributions: Any, facts: RoundFacts) -> str:
                """It leaves q out, though q's contribution is in the update."""
                less = {i: [each for each in headers if each.peer_id != "q"] for i, headers in contributions.items()}
                return commit(outer, records, staged, less, facts)

            monkeypatch.setattr(store._entries, "commit", lie)
            await contribute(swarm, 2)
            await swarm.until(lambda: swarm.record.parts[0].owner != owner, passes=1.0)
            said = [text for _, text in swarm.running[swarm.leader]._notices]
            why = "of q it has a verdict on fragment 0 or a contribution to it, not both"
            assert any(f"part 0, owned by {owner}: " in text and why in text for text in said), said
            assert swarm.record.parts[0].outer_step == 1
            await take_step(swarm, 2)
            assert log_of(swarm, "a") == log_of(swarm, "b") == log_of(swarm, "c")

    run_held(body())
