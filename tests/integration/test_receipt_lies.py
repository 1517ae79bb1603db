"""Every lie that a receipt can tell is refused by name: real receipts of a real coordinator, changed and signed anew."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from aggregator.resources import Clock
from edit.errors import ConfigError, FormatError, TransportError
from edit.trust.canonical import canonical
from edit.trust.checkpoints import Cosigner, LogSigner, NoteKey, signature_of
from edit.trust.merkle import MerkleTree, leaf_hash
from edit.trust.signatures import Signer, key_hash
from editpb import data_pb2
from editpb.audit_log import log_origin
from editpb.data_messages import receipt_from_pb, receipt_to_pb, update_manifest_from_pb, update_request_to_pb
from editpb.limits import MAX_ENTRY_BYTES, MAX_PROOF_HASHES, MAX_SEEN_PROOFS
from editpb.messages import ContributionHeader, LogReceipt, SeenHead, UpdateManifest, UpdateRequest, Welcome
from editpb.receipts import NOTHING_SEEN, Expected, Head, Mine, ReceiptFault, check_receipt
from editpb.signed_contributions import ContributionSigner
from peers.carriers import kept_lines
from peers.carriers.hub import kept_receipts
from peers.carriers.hub.kept_receipts import FAULT, pinned_key, verify_kept
from peers.carriers.hub.receipts import Receipts
from peers.cli import app
from tests.integration.test_audit import AUDITED, commit_one, delta, verified
from tests.support.encoded import encode
from tests.support.keys import member_key
from tests.support.served import SCHEMA, BarePeer, found_run, new_folder, served, small_chunks

STEPS = 3


@dataclass(frozen=True)
class Told:
    """What peer a was told by an honest coordinator: the manifests and receipts of three outer steps."""

    lines: tuple[bytes, ...]  # of the log
    signer: LogSigner
    manifests: tuple[UpdateManifest, ...]
    receipts: tuple[LogReceipt, ...]
    expected: Expected  # of the last one
    sign_b: ContributionSigner

    @property
    def last(self) -> LogReceipt:
        return self.receipts[-1]


async def contribute(peer: BarePeer, sign: ContributionSigner, round_id: int, step: int) -> dict[int, Sequence[bytes]]:
    signatures: dict[int, Sequence[bytes]] = {}
    for i, each in enumerate(delta(step)):
        data = bytes(encode("fp32", each).data)
        header = sign(peer.header(round_id, step, i, len(data)), memoryview(data))
        signatures[i] = (header.signature,)
        await peer.send(header, small_chunks(data))
    return signatures


async def fetch(peer: BarePeer, step: int, seen_size: int | None) -> tuple[UpdateManifest, LogReceipt | None]:
    request = update_request_to_pb(UpdateRequest(peer.run_id, step, seen_size=seen_size))
    async for part in peer.data.FetchUpdate(request):
        found = part.manifest
        receipt = receipt_from_pb(found.receipt) if found.HasField("receipt") else None
        return update_manifest_from_pb(found, SCHEMA, step), receipt
    raise AssertionError("no manifest")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    folder = new_folder(tmp_path_factory.mktemp("told") / "run", start=2, toml=AUDITED)
    heads: dict[str, Head] = {"a": NOTHING_SEEN, "b": NOTHING_SEEN}
    manifests, receipts, sent = [], [], {}
    keys: dict[str, bytes] = {}

    async def scenario() -> None:
        async with served(folder) as run, run.signing_peer("a") as (a, sign_a), run.signing_peer("b") as (b, sign_b):
            keys["a"], keys["b"] = sign_a._signer.public_key, sign_b._signer.public_key
            told["sign_b"] = sign_b
            await found_run(a, b)
            key = NoteKey.parse((await a.receive(Welcome)).log_key)
            for step in range(STEPS):
                view = await a.view(lambda v, step=step: v.outer_step == step and v.round_id > 0)
                for peer, sign in ((a, sign_a), (b, sign_b)):
                    sign._seen = lambda name=peer.peer_id: heads[name].seen(key)
                    made = await contribute(peer, sign, view.round_id, step)
                    if peer is a:
                        sent[view.round_id] = made
                for peer in (a, b):
                    await peer.view(lambda v, step=step: v.outer_step == step + 1)
                    await peer.report(step + 1)
                    before = heads[peer.peer_id]
                    manifest, receipt = await fetch(peer, step + 1, before.size)
                    assert receipt is not None
                    delivered = frozenset((view.round_id, fragment) for fragment in made)
                    mine = Mine(peer.peer_id, keys[peer.peer_id], sent if peer is a else {}, delivered=delivered)
                    expected = Expected(
                        key=key,
                        run_id=folder.run_id,
                        schema_hash=SCHEMA.schema_hash,
                        seen=before,
                        manifest=manifest,
                        before=manifests[-1].digest if manifests else "",
                        mine=mine,
                    )
                    if peer is b:
                        expected = replace(expected, before="")
                    heads[peer.peer_id], _ = check_receipt(receipt, expected)
                    if peer is a:
                        told["expected"] = expected
                        manifests.append(manifest)
                        receipts.append(receipt)
            assert (await fetch(a, STEPS, None))[1] is None  # who has not asked gets none

    told: dict[str, Any] = {}
    asyncio.run(scenario())
    lines = tuple((folder.path / "audit-log.jsonl").read_bytes().splitlines())
    signer = LogSigner(f"edit/{folder.run_id}", (folder.path / "log.key").read_bytes())
    return Told(lines, signer, tuple(manifests), tuple(receipts), told["expected"], told["sign_b"])


def receipt_of(lines: Sequence[bytes], signer: LogSigner, seen_size: int, index: int = -1) -> LogReceipt:
    """The receipt of an entry, by a coordinator whose log has these lines."""
    tree, index = MerkleTree(map(leaf_hash, lines)), index % len(lines)
    heads = [one for given in json.loads(lines[index]).get("contributions", {}).values() for one in given.get("seen", ())]
    return LogReceipt(
        entry=lines[index],
        index=index,
        inclusion=tree.inclusion_proof(index, len(tree)),
        checkpoint=signer.sign(len(tree), tree.root()),
        consistency=tree.consistency_proof(seen_size, len(tree)) if seen_size <= len(tree) else (),
        seen={size: tree.consistency_proof(size, len(tree)) for size, *_ in heads if size <= len(tree)},
    )


def rewritten(told: Told, change: Callable[[dict[str, Any]], object], index: int = -1) -> LogReceipt:
    """The receipt of the last commit, by a coordinator that has changed an entry before it signed for it."""
    lines = list(told.lines)
    entry = json.loads(lines[index])
    change(entry)
    lines[index] = canonical(entry)
    return receipt_of(lines, told.signer, told.expected.seen.size)


def test_what_an_honest_coordinator_tells_is_accepted(told: Told) -> None:
    head, entry = check_receipt(told.last, told.expected)
    assert (head.size, entry["outer_step"], entry["index"]) == (len(told.lines), STEPS, len(told.lines) - 1)
    assert told.last == receipt_of(told.lines, told.signer, told.expected.seen.size)
    assert receipt_from_pb(receipt_to_pb(told.last)) == told.last
    assert [given["seen"][0][0] for given in entry["contributions"].values()] == [told.expected.seen.size] * 2


def drop_mine(entry: dict[str, Any]) -> None:
    del entry["contributions"]["a"]


def forget_me(entry: dict[str, Any]) -> None:
    drop_mine(entry)
    for fragment in entry["fragments"]:
        del fragment["verdicts"]["a"]


def part_of(entry: dict[str, Any], peer: str, place: int, value: object) -> None:
    entry["contributions"][peer]["parts"][0][place] = value


def other_root(entry: dict[str, Any], peer: str) -> None:
    entry["contributions"][peer]["seen"][0][1] = base64.b64encode(bytes(32)).decode()


LIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "outer step": (lambda e: e.update(outer_step=9), "the entry is of outer step 9"),
    "round": (lambda e: e.update(round_id=9), "round 9; the update is of outer step 3"),
    "digest after": (lambda e: e.update(after="0" * 64), "theta after outer step 3 has the digest 000000000000 by the log"),
    "digest before": (lambda e: e.update(before="0" * 64), "theta before outer step 3 has the digest 000000000000 by the log"),
    "fragments": (lambda e: e["fragments"].pop(), "has other fragments by the log"),
    "rolled back": (lambda e: e["fragments"][0].update(update=None), "fragment 0 is rolled back by the log or by the update"),
    "weight": (lambda e: e["fragments"][0]["verdicts"]["b"].__setitem__(2, "0x1.0p+0"), "verdicts on fragment 0 are others"),
    "mine left out": (drop_mine, "the log lacks the contribution of this peer to fragment 0, which was merged"),
    "theirs left out": (lambda e: e["contributions"].pop("b"), "of b the log has a verdict or a contribution, not both"),
    "my key": (
        lambda e: e["contributions"]["a"].update(key=e["contributions"]["b"]["key"]),
        "the log names another key as this peer's",
    ),
    "my tokens": (lambda e: part_of(e, "a", 6, 99), "another contribution of this peer to round .*, fragment 0 than it sent"),
    "my signature": (lambda e: part_of(e, "a", 12, "AAAA"), "another contribution of this peer to round .*, fragment 0"),
    "their head": (lambda e: other_root(e, "b"), "what b has seen of the log is not signed by it"),
    "their head left out": (lambda e: e["contributions"]["b"]["seen"].append([1, "A" * 43 + "=", ""]), "b names other heads"),
    "no entry": (lambda e: e.pop("contributions"), "the entry of the commit is no entry of a commit: lacks 'contributions'"),
    "kind": (lambda e: e.update(kind="genesis"), "of the kind genesis, not a commit"),
    "no numbers": (lambda e: e.update(fragments=7), "the entry of the commit is no entry of a commit"),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_entry_that_says_something_else_is_refused(told: Told, lie: str) -> None:
    change, why = LIES[lie]
    with pytest.raises(ReceiptFault, match=why):
        check_receipt(rewritten(told, change), told.expected)


def test_what_an_earlier_process_has_signed_counts_and_of_the_present_one_only_what_it_sent(told: Told) -> None:
    mine = told.expected.mine
    others = {number: dict.fromkeys(of_round, (bytes(64),)) for number, of_round in mine.signatures.items()}
    check_receipt(told.last, replace(told.expected, mine=replace(mine, signatures=others, since=1)))
    with pytest.raises(ReceiptFault, match="names another contribution of this peer"):
        check_receipt(told.last, replace(told.expected, mine=replace(mine, signatures=others)))


def test_what_an_earlier_key_of_this_peer_has_signed_counts_until_this_process_sends_something(told: Told) -> None:
    signed, earlier = told.expected.mine, frozenset({key_hash(told.expected.mine.public_key)})
    new = Mine("a", Signer(member_key()).public_key, earlier=earlier)

    def check(mine: Mine, receipt: LogReceipt = told.last) -> None:
        check_receipt(receipt, replace(told.expected, mine=mine))

    check(new)
    round_id = max(signed.signatures)
    check(replace(new, signatures={round_id + 1: {0: (bytes(64),)}}))  # it was sent before, whatever the clocks said
    for since in (0, 1 << 50):  # what the attempt is, says who has the key
        for last in (round_id, round_id - 1):
            with pytest.raises(ReceiptFault, match="names another contribution of this peer"):
                check(replace(new, signatures={last: {0: (bytes(64),)}}, since=since))
    with pytest.raises(ReceiptFault, match="the log names another key as this peer's"):
        check(replace(new, earlier=frozenset({"0" * 64})))
    for lie in ("my tokens", "my signature"):
        with pytest.raises(ReceiptFault, match="names another contribution of this peer"):
            check(new, rewritten(told, LIES[lie][0]))


def test_a_log_that_leaves_a_peer_out_must_say_so(told: Told) -> None:
    fragments = tuple(
        replace(one, commit=replace(one.commit, verdicts=tuple(v for v in one.commit.verdicts if v.peer_id != "a")))
        for one in told.expected.manifest.fragments
    )
    expected = replace(told.expected, manifest=replace(told.expected.manifest, fragments=fragments))
    with pytest.raises(
        ReceiptFault, match=r"neither names the contribution of this peer to round .*, nor says that it is missing"
    ):
        check_receipt(rewritten(told, forget_me), expected)
    for said in ("missing", "unmerged"):
        check_receipt(rewritten(told, lambda e, said=said: (forget_me(e), e[said].append("a"))), expected)
    undelivered = replace(expected, mine=replace(expected.mine, delivered=frozenset()))
    check_receipt(rewritten(told, forget_me), undelivered)


def without_fragment(expected: Expected, fragment_id: int) -> Expected:
    """The update with the verdict on b alone of this fragment."""
    fragments = list(expected.manifest.fragments)
    commit = fragments[fragment_id].commit
    verdicts = tuple(v for v in commit.verdicts if v.peer_id != "a")
    fragments[fragment_id] = replace(fragments[fragment_id], commit=replace(commit, verdicts=verdicts))
    return replace(expected, manifest=replace(expected.manifest, fragments=tuple(fragments)))


def withhold_fragment_1(entry: dict[str, Any]) -> None:
    given = entry["contributions"]["a"]
    given["parts"] = [values for values in given["parts"] if values[0] != 1]
    del entry["fragments"][1]["verdicts"]["a"]


def test_a_log_that_leaves_out_a_fragment_must_say_so(told: Told) -> None:
    expected, mine = without_fragment(told.expected, 1), told.expected.mine
    withheld, round_id = rewritten(told, withhold_fragment_1), told.expected.manifest.round_id
    with pytest.raises(
        ReceiptFault, match=r"neither names the contribution of this peer to round .*, fragment 1, nor says that it was not"
    ):
        check_receipt(withheld, expected)

    def said(entry: dict[str, Any], fragments: object) -> None:
        withhold_fragment_1(entry)
        entry["unmerged_fragments"] = {"a": fragments}

    check_receipt(rewritten(told, lambda entry: said(entry, [1])), expected)
    for wrong in ([0], [1, 1], [], [2]):
        with pytest.raises(ReceiptFault, match="what it says was not merged of a was merged, or is no list of fragments"):
            check_receipt(rewritten(told, lambda entry, wrong=wrong: said(entry, wrong)), expected)
    # It had not come whole, or to another round; another one is not due.
    for delivered in ({(round_id, 0)}, {(round_id, 0), (round_id - 1, 1)}, {(round_id, 0), (round_id, 9)}):
        check_receipt(withheld, replace(expected, mine=replace(mine, delivered=frozenset(delivered))))


def test_an_honest_log_says_which_fragment_came_after_it_was_merged(tmp_path: Path) -> None:
    """c is waited for by nobody: fragment 1 is merged before c's comes, and fragment 0 with c's."""
    folder = new_folder(tmp_path / "run", start=2, toml=AUDITED)
    found: dict[str, Any] = {}
    now = [0.0]

    async def scenario() -> None:
        async with (
            served(folder, Clock(monotonic=lambda: now[0])) as run,
            run.signing_peer("a") as a,
            run.signing_peer("b") as b,
            run.signing_peer("c") as (c, sign_c),
        ):
            await found_run(a[0], b[0])
            await commit_one([a, b], 0)
            round_id = (await a[0].view(lambda v: v.outer_step == 1 and v.round_id > 0)).round_id
            now[0] = 1.0  # the round is open: who reports now is not waited for
            await c.attend()
            await c.report(1)
            mine = Mine("c", sign_c._signer.public_key)
            for fragment, peers in ((1, (a, b)), (1, ((c, sign_c),)), (0, ((c, sign_c), a, b))):
                data = bytes(encode("fp32", delta(fragment)[fragment]).data)
                for peer, sign in peers:
                    header = sign(peer.header(round_id, 1, fragment, len(data)), memoryview(data))
                    assert (await peer.send(header, small_chunks(data))).complete
                    if peer is c:
                        mine = mine.with_signed(header).with_delivered(round_id, fragment)
            await c.view(lambda v: v.outer_step == 2)
            key = NoteKey.parse((await c.receive(Welcome)).log_key)
            manifest, found["receipt"] = await fetch(c, 2, 0)
            found["expected"] = Expected(
                key=key,
                run_id=folder.run_id,
                schema_hash=SCHEMA.schema_hash,
                seen=NOTHING_SEEN,
                manifest=manifest,
                before="",
                mine=mine,
            )

    asyncio.run(scenario())
    _, entry = check_receipt(found["receipt"], found["expected"])
    assert entry["unmerged_fragments"] == {"c": [1]} and entry["unmerged"] == []
    assert [sorted(one["verdicts"]) for one in entry["fragments"]] == [["a", "b", "c"], ["a", "b"]]
    assert verified(folder.path).commits == 2


def test_what_was_sent_for_an_earlier_round_is_not_merged_in_a_later_one(told: Told) -> None:
    earlier = json.loads(told.lines[-2])

    def merge_the_earlier_one(entry: dict[str, Any]) -> None:
        entry["contributions"]["a"] = earlier["contributions"]["a"]

    def as_it_is_signed(entry: dict[str, Any]) -> None:
        merge_the_earlier_one(entry)
        for fragment in entry["fragments"]:
            fragment["verdicts"]["a"][3] = 1

    wrong = rewritten(told, merge_the_earlier_one)
    why = rf"fragment 0, rank 0 is to round {earlier['round_id']}, from outer step 1; merged was round .*max_staleness = 0"
    with pytest.raises(ReceiptFault, match=why):
        check_receipt(wrong, told.expected)
    stale = replace(told.expected, max_staleness=1, config_digest=earlier["config_digest"])
    with pytest.raises(ReceiptFault, match=r"has staleness 0 by its verdict, and 1 by what was signed"):
        check_receipt(wrong, stale)
    check_receipt(rewritten(told, as_it_is_signed), stale)
    # It was committed under a configuration that this peer no longer has.
    check_receipt(rewritten(told, as_it_is_signed), replace(told.expected, config_digest="0" * 64))


def test_a_receipt_that_does_not_fit_its_log_is_refused(told: Told) -> None:
    last, expected, size = told.last, told.expected, len(told.lines)
    wrong = (bytes(32), *last.inclusion[1:])
    other = LogSigner(told.signer.key.name, LogSigner.new_key())
    namesake = LogSigner("edit/another", LogSigner.new_key())
    forked = [*told.lines[:1], canonical({**json.loads(told.lines[1]), "reason": "another"}), *told.lines[2:]]
    for receipt, why in (
        (replace(last, index=last.index - 1), rf"is number {last.index}, the receipt says {last.index - 1}"),
        (replace(last, entry=told.lines[-2]), "is number"),
        (
            replace(last, entry=canonical({**json.loads(last.entry), "reason": "x"})),
            f"entry {last.index} is not in the log of {size}",
        ),
        (replace(last, inclusion=wrong), f"entry {last.index} is not in the log of {size} entries"),
        (replace(last, inclusion=last.inclusion[1:]), f"entry {last.index} is not in the log"),
        (
            replace(last, consistency=(bytes(32), *last.consistency[1:])),
            "does not begin with the 3 entries that this peer has seen",
        ),
        (replace(last, consistency=()), "does not begin with the 3 entries that this peer has seen"),
        (receipt_of(forked, told.signer, 3), "does not begin with the 3 entries that this peer has seen"),
        (receipt_of(told.lines[:2], told.signer, 3), "has 2 entries now, this peer has seen 3: entries were removed"),
        (receipt_of(told.lines, other, 3), "not signed with the key that this peer knows: no known key has signed it"),
        (receipt_of(told.lines, namesake, 3), "not signed with the key that this peer knows"),
        (replace(last, checkpoint=last.checkpoint.replace("\n4\n", "\n5\n")), "is not of this text"),
        (replace(last, checkpoint=""), "the note has no signatures"),
        (replace(last, seen={}), "a has seen another log of 3 entries"),
        (replace(last, entry=b"{"), "no entry of a commit"),
        (replace(last, entry=b"[1]"), "no entry of a commit"),
    ):
        with pytest.raises(ReceiptFault, match=why):
            check_receipt(receipt, expected)


def test_a_head_that_another_peer_has_signed_and_the_log_does_not_begin_with_is_refused(told: Told) -> None:
    def show_b_another_log(entry: dict[str, Any]) -> None:
        root, key = leaf_hash(b"another"), told.signer.key
        head = SeenHead(3, root, signature_of(told.signer.sign(3, root), key))
        given = entry["contributions"]["b"]
        told.sign_b._seen = lambda: head
        for values in given["parts"]:
            header = ContributionHeader(
                run_id=told.expected.run_id,
                round_id=values[2],
                outer_step=values[3],
                peer_id="b",
                fragment_id=values[0],
                schema_hash=SCHEMA.schema_hash,
                inner_steps=values[5],
                tokens=values[6],
                codec=values[7],
                numel=values[8],
                total_bytes=values[9],
                attempt=values[4],
            )
            data = memoryview(bytes(encode("fp32", delta(2)[values[0]]).data))
            values[12] = base64.b64encode(told.sign_b(header, data).signature).decode()
        given["seen"] = [[3, base64.b64encode(root).decode(), base64.b64encode(head.signature).decode()]]

    with pytest.raises(ReceiptFault, match=f"b has seen another log of 3 entries, with the root {leaf_hash(b'another').hex()}"):
        check_receipt(rewritten(told, show_b_another_log), told.expected)


def test_the_key_of_a_member_that_the_peer_knows_is_compared(told: Told) -> None:
    key = base64.b64decode(json.loads(told.last.entry)["contributions"]["b"]["key"])
    check_receipt(told.last, replace(told.expected, members={"b": key_hash(key), "z": "0" * 64}))
    with pytest.raises(ReceiptFault, match="names another key of b than the one that this peer knows"):
        check_receipt(told.last, replace(told.expected, members={"b": ("0" * 64, "1" * 64)}))


def test_what_is_too_large_or_no_receipt_is_refused(told: Told) -> None:
    message = receipt_to_pb(told.last)
    for name, value, why in (
        ("entry", bytes(MAX_ENTRY_BYTES + 1), "an entry of"),
        ("inclusion", [bytes(32)] * (MAX_PROOF_HASHES + 1), "hashes of a proof"),
        ("consistency", [bytes(31)], "not of 32 bytes"),
        ("seen", [data_pb2.SeenProof(size=i + 1) for i in range(MAX_SEEN_PROOFS + 1)], "proofs of heads"),
        ("checkpoint", "x" * (64 << 10 | 1), "a checkpoint of"),
        ("index", 1 << 63, "index is"),
    ):
        wrong = data_pb2.LogReceipt()
        wrong.CopyFrom(message)
        wrong.ClearField(name)  # type: ignore[arg-type]
        wrong.MergeFrom(data_pb2.LogReceipt(**{name: value}))  # type: ignore[arg-type]
        with pytest.raises(Exception, match=why) as error:
            receipt_from_pb(wrong)
        assert type(error.value).__name__ == "RemoteProtocolError"


# ---- the peer's folder -------------------------------------------------------------------------------------------------------


def opened(home: Path, told: Told, failures: list[str]) -> Receipts:
    home.mkdir(exist_ok=True)
    expected = told.expected
    return Receipts.open(home, told.signer.key.text(), expected.run_id, expected.schema_hash, expected.mine, failures.append)


def take(receipts: Receipts, told: Told, step: int) -> None:
    receipts.accept(told.manifests[step], receipt_to_pb(told.receipts[step]), receipts.head)
    asyncio.run(receipts.save())


def test_receipts_are_kept_over_restarts_and_verified_offline(told: Told, tmp_path: Path) -> None:
    home, failures = tmp_path / "home", list[str]()
    take(opened(home, told, failures), told, 0)
    with (home / "receipts.jsonl").open("ab") as file:
        file.write(b'{"torn')  # a process that was killed while it wrote
    receipts = opened(home, told, failures)
    assert receipts.head.size == 2
    for step in (1, 2):
        take(receipts, told, step)
    found = verify_kept(home)
    assert (found.receipts, found.first_step, found.last_step, found.head) == (3, 1, 3, receipts.head) and not failures
    assert opened(home, told, failures).head == receipts.head
    path = home / "receipts.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    other = LogSigner(told.signer.key.name, LogSigner.new_key()).key.text()
    for damaged, key, why in (
        (lines[:1] + lines[2:], "", "line 2: follows a head of 3 entries, the line before has 2"),
        ([lines[0].replace(b'"index":1', b'"index":0'), *lines[1:]], "", "line 1: entry 0 is not in the log of 2 entries"),
        (lines, other, "line 1: no known key has signed it"),
        ([*lines, b"{}\n"], "", "line 4: 'note'"),
        ([*lines, b"[1]\n"], "", "line 4: not a JSON object"),
    ):
        path.write_bytes(b"".join(damaged))
        with pytest.raises(ReceiptFault, match=why):
            verify_kept(home, key)


def test_receipts_of_another_format_are_refused(told: Told, tmp_path: Path) -> None:
    home = tmp_path / "home"
    take(opened(home, told, []), told, 0)
    path = home / "receipts.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"format":1', b'"format":2'))
    for read in (lambda: opened(home, told, []), lambda: verify_kept(home)):
        with pytest.raises(FormatError, match="format 2, this software reads format 1"):
            read()


def test_of_many_receipts_the_last_ones_are_kept(told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_receipts, "_MOST_KEPT", 2)
    receipts = opened(tmp_path / "home", told, [])
    for step in range(STEPS):
        take(receipts, told, step)
    found = verify_kept(tmp_path / "home")
    assert (found.receipts, found.first_step, found.last_step, found.head) == (1, 3, 3, receipts.head)
    assert opened(tmp_path / "home", told, []).head == receipts.head


def test_what_the_disk_refuses_is_written_with_the_next(
    told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    receipts = opened(tmp_path / "home", told, [])

    def full(descriptor: int, data: object, at: int) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(kept_lines.os, "pwrite", full)
        for step in range(2):
            take(receipts, told, step)
    assert [record.message.count("No space left") for record in caplog.records] == [1]
    take(receipts, told, 2)
    assert verify_kept(tmp_path / "home").receipts == 3


def test_a_head_is_cosigned_once_it_is_on_disk_and_again_after_a_restart(told: Told, tmp_path: Path) -> None:
    home, failures, cosigner = tmp_path / "home", list[str](), Cosigner(member_key())
    receipts = replace(opened(home, told, failures), cosigner=cosigner)
    receipts.accept(told.manifests[0], receipt_to_pb(told.receipts[0]), receipts.head)
    assert receipts.cosigned() is None
    (home / "receipts.jsonl").mkdir()  # in the way
    asyncio.run(receipts.save())
    assert receipts.cosigned() is None
    (home / "receipts.jsonl").rmdir()
    take(receipts, told, 1)
    said = receipts.cosigned()
    assert said is not None and said.head.size == 3 and receipts.cosigned() is said
    again = replace(opened(home, told, failures), cosigner=cosigner).cosigned()
    assert again is not None and again.head == said.head


def test_the_command_verifies_what_is_kept(told: Told, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = tmp_path / "home"
    receipts = opened(home, told, [])
    with pytest.raises(ConfigError, match=r"receipts\.jsonl: is missing"):
        app(["audit", "verify", "--home", str(home)], standalone_mode=False)
    for step in range(STEPS):
        take(receipts, told, step)
    app(["audit", "verify", "--home", str(home)], standalone_mode=False)
    said = capsys.readouterr().out
    assert "3 receipts, outer steps 1 to 3: verified" in said and f"root {receipts.head.root.hex()}" in said
    app(["audit", "verify", "--home", str(home), "--key", told.signer.key.text(), "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["entries"] == len(told.lines)
    with pytest.raises(ConfigError, match="--key: not the public key of a log"):
        app(["audit", "verify", "--home", str(home), "--key", "x"], standalone_mode=False)


def test_a_receipt_that_does_not_fit_is_kept_and_the_peer_does_not_start_again(told: Told, tmp_path: Path) -> None:
    home, failures = tmp_path / "home", list[str]()
    receipts = opened(home, told, failures)
    take(receipts, told, 0)
    lie = receipt_of(told.lines[:1], told.signer, 0)
    with pytest.raises(
        ReceiptFault, match=r"outer step 2: the log has 1 entries now, this peer has seen 2.*receipt-fault.json"
    ):
        receipts.accept(told.manifests[1], receipt_to_pb(lie), receipts.head)
    kept = json.loads((home / FAULT).read_text())
    assert kept["seen"]["note"] == told.receipts[0].checkpoint and kept["came"]["checkpoint"] == lie.checkpoint
    assert len(failures) == 1 and "entries were removed" in failures[0]
    with pytest.raises(ReceiptFault, match=r"receipt-fault.json: a receipt did not fit"):
        verify_kept(home)
    with pytest.raises(Exception, match=r"receipt-fault.json: a receipt of the audit log did not fit") as error:
        opened(home, told, failures)
    assert error.value.exit_code == 3  # type: ignore[attr-defined]


def test_an_update_without_a_receipt_is_refused_and_one_that_came_late_is_asked_for_again(told: Told, tmp_path: Path) -> None:
    receipts = opened(tmp_path / "home", told, [])
    before = receipts.head
    take(receipts, told, 0)
    with pytest.raises(TransportError, match="asked for again"):
        receipts.accept(told.manifests[1], receipt_to_pb(told.receipts[1]), before)
    with pytest.raises(ReceiptFault, match="the update brings no receipt"):
        receipts.accept(told.manifests[1], None, receipts.head)


def test_the_first_key_that_is_said_counts(told: Told, tmp_path: Path) -> None:
    key, origin = told.signer.key.text(), log_origin(told.expected.run_id)
    assert pinned_key(tmp_path, key, origin).text() == key == (tmp_path / "log.vkey").read_text().strip()
    other = LogSigner(told.signer.key.name, LogSigner.new_key()).key.text()
    for said, why in ((other, "knows another key of the run's audit log"), ("", "does not say the log's key")):
        with pytest.raises(Exception, match=why):
            pinned_key(tmp_path, said, origin)
    new = tmp_path / "new"
    new.mkdir()
    for said, why in (
        ("x", "not the public key of a log"),
        (LogSigner("edit/b", LogSigner.new_key()).key.text(), "the log edit/b"),
        (LogSigner(f"{origin}/1", LogSigner.new_key()).key.text(), f"the log {origin}/1, this one's is {origin}"),
    ):
        with pytest.raises(Exception, match=why):
            pinned_key(new, said, origin)
    assert not (new / "log.vkey").exists()


def test_a_snapshot_that_the_log_does_not_lead_on_from_is_found(told: Told, tmp_path: Path) -> None:
    receipts = opened(tmp_path / "home", told, [])
    receipts.at(0, "0" * 64)
    with pytest.raises(ReceiptFault, match=r"theta before outer step 1 has the digest .* 000000000000 at this peer"):
        receipts.accept(told.manifests[0], receipt_to_pb(told.receipts[0]), receipts.head)


def test_bytes_of_an_update_are_those_of_the_log_unless_thetas_digest_is_compared_before_they_are_used(
    told: Told, tmp_path: Path
) -> None:
    entry = json.loads(told.receipts[0].entry)
    logged = {one["fragment"]: one["update"] for one in entry["fragments"]}
    assert None not in logged.values()

    def hashes(name: str, *, lazily: bool = False, at: int | None = None) -> dict[int, str | None]:
        receipts = opened(tmp_path / name, told, [])
        receipts.lazily = lazily
        if at is not None:
            receipts.at(at, told.manifests[0].digest)
        return receipts.accept(told.manifests[0], receipt_to_pb(told.receipts[0]), receipts.head)

    assert hashes("by forwards", lazily=True) == logged
    assert hashes("asked again", at=1) == logged  # by a region that reads what the run above has subtracted since
    assert hashes("next") == dict.fromkeys(logged)
