"""What the audit log says of a masked round: who shared keys, whose sum was opened, who has signed that; each lie is named."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from typer.testing import CliRunner

from aggregator.cli import app
from edit.config.run import AuditConfig, RoundsConfig, RunConfig, SecaggConfig
from edit.merging.outer_state import MergeRecord, Staged
from edit.records import EncodedTensor, FragmentCommit, PeerVerdict, Verdict
from edit.trust.canonical import canonical
from edit.trust.checkpoints import LogSigner
from edit.trust.mask_roster import Advert, AgreedSet, Roster, RoundName
from edit.trust.merkle import MerkleTree, leaf_hash
from edit.trust.signatures import key_hash
from editpb.audit_log import (
    LogFault,
    LogVerifier,
    RoundFacts,
    agreed_set,
    commit_entry,
    entry_line,
    genesis_entry,
    verify_signatures,
)
from editpb.messages import ContributionHeader, FragmentUpdate, LogReceipt, UpdateManifest
from editpb.receipts import NOTHING_SEEN, Expected, Mine, ReceiptFault, SeenMasks, check_receipt
from editpb.signed_contributions import config_digest, contribution_statement
from tests.edit.trust.masked_round import UPLOAD, MaskedRound, names, signer

RUN, ROUND, STEP, SCHEMA = "run", 77, 4, "5" * 64
CONFIG = RunConfig(
    audit=AuditConfig(enabled=True), secagg=SecaggConfig(enabled=True), rounds=RoundsConfig(start_peers=5, quorum=3)
)
PEERS = names(5)
BAD = PEERS[4]  # is anomalous in fragment 0
INSIDE = PEERS[:4]
KEY = LogSigner(f"edit/{RUN}", LogSigner.new_key())
DIGESTS = "0" * 64, "1" * 64
OF_ROUND = RoundName(
    run_id=RUN, config_digest=config_digest(CONFIG), round_id=str(ROUND), outer_step=STEP - 1, plan=bytes(range(32))
)
Change = Callable[[dict[str, Any]], object]


def header(peer: str, fragment: int) -> ContributionHeader:
    made = ContributionHeader(
        run_id=RUN,
        round_id=ROUND,
        outer_step=STEP - 1,
        peer_id=peer,
        fragment_id=fragment,
        schema_hash=SCHEMA,
        inner_steps=2,
        tokens=10,
        codec="masked16",
        numel=8,
        total_bytes=32,
        norm=1.0,
        payload_blake3=blake3(peer.encode()).digest(),
        public_key=signer(peer).public_key,
    )
    return replace(made, signature=signer(peer).sign(contribution_statement(made, config_digest(CONFIG))))


def verdicts(fragment: int) -> tuple[PeerVerdict, ...]:
    bad = Verdict.REJECTED if fragment else Verdict.ANOMALOUS
    inside = [PeerVerdict(peer_id=peer, verdict=Verdict.OK, norm=1.0, weight=0.25) for peer in INSIDE]
    return (*inside, PeerVerdict(peer_id=BAD, verdict=bad, norm=9.0, weight=0.0))


@dataclass(frozen=True)
class Log:
    """A genesis and one masked commit."""

    lines: tuple[bytes, bytes]
    agreed: AgreedSet
    headers: dict[int, tuple[ContributionHeader, ...]]

    def changed(self, *changes: Change) -> tuple[bytes, bytes]:
        entry = json.loads(self.lines[1])
        for change in changes:
            change(entry)
        return self.lines[0], canonical(entry)


@pytest.fixture(scope="module")
def log() -> Log:
    played = MaskedRound(PEERS, drops={BAD: UPLOAD}, of_round=OF_ROUND).run()
    agreed = played.server.agreed
    assert played.opening is not None and agreed is not None
    payload = EncodedTensor("fp32", 8, torch.zeros(8).numpy().tobytes())
    headers = {i: tuple(header(peer, i) for peer in PEERS) for i in range(2)}
    records = [
        MergeRecord(
            outer_step=STEP - 1,
            fragment_id=i,
            payload=payload,
            residual=None,
            verdicts=verdicts(i),
            statistics={},
            merged_norm=1.0,
            clip=1.0,
        )
        for i in range(2)
    ]
    entry = commit_entry(
        RoundFacts(round_id=ROUND, outer_step=STEP, reason="all in", agreed=agreed),
        digests=DIGESTS,
        config=config_digest(CONFIG),
        records=records,
        staged={i: Staged(payload, b"", merges=True, largest=0.0) for i in range(2)},
        contributions=headers,
    )
    tree = MerkleTree()
    first = entry_line(tree, 1.0, genesis_entry(RUN, KEY.key, CONFIG, SCHEMA, STEP - 1, DIGESTS[0]))
    tree.append(leaf_hash(first))
    return Log((first, entry_line(tree, 2.0, entry)), agreed, headers)


def verified(lines: tuple[bytes, bytes], *, signatures: bool = True) -> LogVerifier:
    found = LogVerifier(KEY.key, signatures=signatures)
    for line in lines:
        found.take(line)
    return found


def test_the_entry_says_who_shared_keys_whose_sum_it_is_and_who_has_signed_that(log: Log) -> None:
    said = json.loads(log.lines[1])["secagg"]
    assert said["hash"] == log.agreed.roster.hash.hex() and list(said["roster"]) == said["sharers"] == PEERS
    assert said["survivors"] == INSIDE and sorted(said["confirmed"]) == INSIDE  # t = 4 of 5
    found = verified(log.lines)
    assert found.verified == 2 * 5 + 4 and (found.confirmed, found.unconfirmed) == (1, 0)
    without = verified(log.lines, signatures=False)
    assert without.verified == 0 and verify_signatures(without.signed, [(1, log.lines[1])]) == 2 * 5 + 4
    back = agreed_set(RUN, json.loads(log.lines[1]))
    assert back is not None and back.roster.hash == log.agreed.roster.hash
    assert (back.sharers, back.survivors, back.signatures) == (log.agreed.sharers, log.agreed.survivors, log.agreed.signatures)


def secagg(entry: dict[str, Any]) -> dict[str, Any]:
    said: dict[str, Any] = entry["secagg"]
    return said


def weigh(entry: dict[str, Any], peer: str, verdict: str, weight: float) -> None:
    for fragment in entry["fragments"]:
        fragment["verdicts"][peer][0], fragment["verdicts"][peer][2] = verdict, weight.hex()


def swap(entry: dict[str, Any]) -> None:
    confirmed = secagg(entry)["confirmed"]
    confirmed[PEERS[1]] = confirmed[PEERS[2]]


def flip(entry: dict[str, Any]) -> None:
    confirmed = secagg(entry)["confirmed"]
    signature = bytearray(base64.b64decode(confirmed[PEERS[2]]))
    signature[40] ^= 1
    confirmed[PEERS[2]] = base64.b64encode(signature).decode()


def leave_out(entry: dict[str, Any]) -> None:
    said = secagg(entry)
    said["survivors"].remove(PEERS[3])


def another_key(entry: dict[str, Any]) -> None:
    roster = secagg(entry)["roster"]
    roster[PEERS[0]][0] = base64.b64encode(signer("stranger").public_key).decode()


def unroster(entry: dict[str, Any]) -> None:
    """The roster is made smaller, so that fewer must sign; its hash is made to fit."""
    said = secagg(entry)
    del said["roster"][BAD]
    said["sharers"].remove(BAD)
    del said["confirmed"][PEERS[3]]
    said["hash"] = log_roster(said)


def log_roster(said: dict[str, Any]) -> str:
    keys = {peer: [base64.b64decode(each) for each in given] for peer, given in said["roster"].items()}
    adverts = (Advert(peer_id=peer, public_key=key, mask_key=mask, signature=b"") for peer, (key, mask) in keys.items())
    return Roster(OF_ROUND, tuple(adverts)).hash.hex()


LIES: dict[str, tuple[tuple[Change, ...], str]] = {
    "a flipped signature": ((flip,), f"{PEERS[2]} has not signed that the sum of peer-00, .*, peer-03 is opened"),
    "another's signature": ((swap,), f"{PEERS[1]} has not signed that the sum"),
    "a missing confirmation": (
        (lambda e: secagg(e)["confirmed"].pop(PEERS[1]),),
        "is confirmed by peer-00, peer-02, peer-03 only; 4 of the 5 peers on the roster must have",
    ),
    "no confirmation": ((lambda e: secagg(e)["confirmed"].clear(),), "is confirmed by nobody only"),
    "a changed set": ((leave_out,), f"{PEERS[3]} has confirmed the sum, and is not in it"),
    "a larger set": (
        (lambda e: secagg(e)["survivors"].append(BAD),),
        f"fragment 0: the sum is not of those who count by the verdicts; not both: {BAD}",
    ),
    "a larger set, and verdicts": (
        (lambda e: secagg(e)["survivors"].append(BAD), lambda e: weigh(e, BAD, "ok", 0.2)),
        f"{PEERS[0]} has not signed that the sum of .*{BAD} is opened",
    ),
    "who is left out for nothing": (
        (lambda e: weigh(e, BAD, "rejected", 0.0),),
        f"{BAD} contributed and is left out of the sum, though no verdict is against it",
    ),
    "who shared": ((lambda e: secagg(e)["sharers"].remove(BAD),), f"{PEERS[0]} has not signed that"),
    "a survivor that shared nothing": (
        (lambda e: secagg(e)["sharers"].remove(PEERS[0]),),
        f"{PEERS[0]} is in the sum, and has shared no keys",
    ),
    "a sharer of no roster": (
        (lambda e: secagg(e)["sharers"].append("z"),),
        "z shared keys, and is not on the roster",
    ),
    "the hash": ((lambda e: secagg(e).update(hash="0" * 64),), "the hash of the masked round's roster is not that of"),
    "the plan": ((lambda e: secagg(e).update(plan="00" * 32),), "the hash of the masked round's roster is not that of"),
    "a key of the roster": ((another_key,), "the hash of the masked round's roster is not that of"),
    "another key, and the hash": (
        (another_key, lambda e: secagg(e).update(hash=log_roster(secagg(e)))),
        f"{PEERS[0]} has signed its contribution with another key than it has on the masked round's roster",
    ),
    "a smaller roster": ((unroster,), f"{PEERS[0]} has not signed that"),
    "no roster": ((lambda e: secagg(e).update(roster={}),), "a roster of 0 peers"),
    "a part": ((lambda e: secagg(e).pop("plan"),), "lacks 'plan'"),
    "no text": ((lambda e: secagg(e)["confirmed"].update({PEERS[1]: 7}),), "entry 1: "),
    "no object": ((lambda e: e.update(secagg=[1]),), "entry 1: "),
}


@pytest.mark.parametrize("lie", LIES)
def test_whoever_verifies_the_log_finds_each_lie_in_its_entry(log: Log, lie: str) -> None:
    changes, words = LIES[lie]
    with pytest.raises(LogFault, match=f"entry 1: .*{words}" if not words.startswith("entry") else words):
        verified(log.changed(*changes))


def test_signatures_are_left_out_where_they_are_not_asked_for_and_nothing_else_is(log: Log) -> None:
    assert verified(log.changed(flip), signatures=False).confirmed == 1
    with pytest.raises(LogFault, match=f"entry 1: {PEERS[2]} has not signed"):
        verify_signatures(verified(log.lines).signed, [(1, log.changed(flip)[1])])
    with pytest.raises(LogFault, match="the hash of the masked round"):
        verified(log.changed(*LIES["the hash"][0]), signatures=False)


def test_a_log_of_an_earlier_version_verifies_and_the_command_says_what_it_lacks(log: Log, tmp_path: Path) -> None:
    old = log.changed(lambda e: e.pop("secagg"))
    found = verified(old)
    assert found.verified == 2 * 5 and (found.confirmed, found.unconfirmed) == (0, 1)
    for lines, words in (
        (log.lines, "1 outer step: more than two thirds of the peers that had keys confirmed whose sum it is"),
        (old, "1 outer step without a word of who confirmed the sum, as earlier versions wrote them"),
    ):
        tree = MerkleTree(map(leaf_hash, lines))
        (tmp_path / "audit-log.jsonl").write_bytes(b"\n".join(lines) + b"\n")
        (tmp_path / "audit-log.head").write_text(KEY.sign(len(tree), tree.root()))
        result = CliRunner().invoke(app, ["audit", "verify", "--state", str(tmp_path)])
        assert result.exit_code == 0 and f"masked      {words}" in result.output
    result = CliRunner().invoke(app, ["audit", "verify", "--state", str(tmp_path), "--json"])
    assert json.loads(result.output)["masked"] == {"confirmed": 0, "unconfirmed": 1}


def test_a_commit_that_merges_nothing_says_nothing_of_a_sum(log: Log) -> None:
    nothing = log.changed(lambda e: e.pop("secagg"), *(lambda e, p=p: weigh(e, p, "rejected", 0.0) for p in PEERS))
    found = verified(nothing)
    assert (found.confirmed, found.unconfirmed) == (0, 0)
    check_receipt(receipt(nothing), expected(log, verdicts_of=nothing))


# ---- the receipt at a peer ---------------------------------------------------------------------------------------------------


def receipt(lines: tuple[bytes, bytes]) -> LogReceipt:
    tree = MerkleTree(map(leaf_hash, lines))
    return LogReceipt(
        entry=lines[1],
        index=1,
        inclusion=tree.inclusion_proof(1, 2),
        checkpoint=KEY.sign(2, tree.root()),
        consistency=tree.consistency_proof(0, 2),
        seen={},
    )


def expected(log: Log, peer: str = PEERS[0], verdicts_of: tuple[bytes, bytes] | None = None, **of_mine: Any) -> Expected:
    """What a peer holds a receipt to; verdicts_of: the update has the verdicts of this log."""
    said = json.loads((verdicts_of or log.lines)[1])["fragments"]
    commits = [
        FragmentCommit(
            fragment_id=i,
            payload=None,
            verdicts=tuple(
                PeerVerdict(peer_id=name, verdict=Verdict(verdict), norm=float.fromhex(norm), weight=float.fromhex(weight))
                for name, (verdict, norm, weight, *_) in each["verdicts"].items()
            ),
            merged_norm=1.0,
            clip=1.0,
        )
        for i, each in enumerate(said)
    ]
    signatures = {ROUND: {i: tuple(h.signature for h in of if h.peer_id == peer) for i, of in log.headers.items()}}
    return Expected(
        key=KEY.key,
        run_id=RUN,
        schema_hash=SCHEMA,
        seen=NOTHING_SEEN,
        manifest=UpdateManifest(
            outer_step=STEP,
            round_id=ROUND,
            digest=DIGESTS[1],
            reason="all in",
            fragments=tuple(FragmentUpdate(commit=each, codec="fp32", numel=8, total_bytes=32) for each in commits),
        ),
        before=DIGESTS[0],
        mine=Mine(peer, signer(peer).public_key, signatures, **of_mine),
        masked=True,
    )


def saw(log: Log, **changes: Any) -> dict[int, SeenMasks]:
    return {ROUND: replace(SeenMasks(log.agreed.roster.hash, (log.agreed.sharers, log.agreed.survivors)), **changes)}


def test_a_peer_takes_the_receipt_of_the_sum_that_it_has_signed_for(log: Log) -> None:
    for peer in PEERS:
        check_receipt(receipt(log.lines), expected(log, peer, masks=saw(log)))
    check_receipt(receipt(log.lines), expected(log, masks=saw(log, agreed=None)))  # it was not asked
    check_receipt(receipt(log.lines), expected(log))  # an earlier process was
    known = {peer: (key_hash(signer(peer).public_key), "0" * 64) for peer in PEERS}  # each got a new key since then
    check_receipt(receipt(log.lines), replace(expected(log), members=known))


@pytest.mark.parametrize("lie", ["a flipped signature", "a missing confirmation", "a larger set", "the hash", "who shared"])
def test_a_peer_refuses_a_receipt_that_whoever_verifies_would_refuse(log: Log, lie: str) -> None:
    changes, words = LIES[lie]
    with pytest.raises(ReceiptFault, match=words):
        check_receipt(receipt(log.changed(*changes)), expected(log))


def test_a_peer_refuses_a_receipt_of_another_sum_than_it_has_signed_for(log: Log) -> None:
    for masks, words in (
        (saw(log, roster=bytes(32)), f"the log has another roster of the masked round {ROUND} than this peer was shown"),
        (
            saw(log, agreed=(log.agreed.sharers, log.agreed.survivors - {PEERS[3]})),
            f"the sum of {', '.join(INSIDE)} was opened in round {ROUND}, this peer has signed for that of {PEERS[0]}, ",
        ),
    ):
        with pytest.raises(ReceiptFault, match=words):
            check_receipt(receipt(log.lines), expected(log, masks=masks))
    with pytest.raises(ReceiptFault, match="does not say whose sum was opened in round 77, and who has confirmed that"):
        check_receipt(receipt(log.changed(lambda e: e.pop("secagg"))), expected(log, masks=saw(log)))
    with pytest.raises(ReceiptFault, match=f"names another key of {BAD} than the one that this peer knows"):
        check_receipt(receipt(log.lines), replace(expected(log), members={BAD: ("0" * 64,)}))


def test_a_peer_whose_contribution_is_left_out_for_nothing_refuses_the_receipt(log: Log) -> None:
    changed = log.changed(lambda e: weigh(e, BAD, "rejected", 0.0))
    with pytest.raises(ReceiptFault, match=f"{BAD} contributed and is left out of the sum, though no verdict is against it"):
        check_receipt(receipt(changed), expected(log, BAD, changed))
