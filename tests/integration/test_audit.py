"""The audit log of a real coordinator: signed contributions in, a log that verifies out, and every byte of it matters."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from aggregator.audit_verification import verified_log
from aggregator.cli import app
from aggregator.control.status import run_status
from aggregator.storage.store import load_outer
from edit.errors import ConfigError, StorageError
from edit.fragments.digest import digest
from edit.merging.outer_state import OuterState, Staged
from edit.trust.canonical import canonical, parse_canonical
from edit.trust.checkpoints import LogSigner
from edit.trust.envelopes import open_envelope
from editpb.audit_log import LogFault, LogVerifier
from editpb.consents import signed_consent
from editpb.control_messages import peer_message_to_pb
from editpb.messages import DataStatement
from editpb.signed_contributions import ContributionSigner
from tests.support.encoded import encode
from tests.support.loops import until
from tests.support.served import SCHEMA, TOML, BarePeer, found_run, new_folder, served, small_chunks, theta

AUDITED = TOML + "[audit]\nenabled = true\n"


def delta(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [0.1 * torch.randn(fragment.numel, generator=generator) for fragment in SCHEMA.fragments]


async def commit_one(peers: list[tuple[BarePeer, ContributionSigner]], step: int) -> None:
    first, _ = peers[0]
    view = await first.view(lambda v: v.outer_step == step and v.round_id > 0)
    for seed, (peer, sign) in enumerate(peers):
        await peer.contribute_signed(sign, view.round_id, step, delta(seed))
    for peer, _ in peers:
        await peer.view(lambda v: v.outer_step == step + 1)
        await peer.report(step + 1)


def verified(path: Path, key: str = "") -> LogVerifier:
    log = LogVerifier()
    for line in (path / "audit-log.jsonl").read_bytes().splitlines():
        log.take(line)
    log.check_head((path / "audit-log.head").read_bytes())
    return log


def test_the_log_of_a_run_verifies_over_restarts_and_says_what_was_merged(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", start=2, toml=AUDITED)

    async def scenario() -> None:
        async with served(folder) as run, run.signing_peer("a") as a, run.signing_peer("b") as b:
            await found_run(a[0], b[0])
            for step in range(2):
                await commit_one([a, b], step)
            log = verified(folder.path)
            assert run_status(run.coordinator.run).audit == f"{len(log.tree)} entries, head {log.tree.root().hex()[:16]}"
        async with served(folder, kill=True) as run, run.signing_peer("a") as a, run.signing_peer("b") as b:
            for peer, _ in (a, b):
                await peer.attend()
                await peer.report(2)
            await commit_one([a, b], 2)

    asyncio.run(scenario())
    outer = load_outer(folder)
    log = verified(folder.path)
    assert (log.commits, log.outer_step, log.digest, log.verified) == (3, 3, outer.digest, 12)
    assert log.run_id == folder.run_id and log.continued == []
    for peer in ("a", "b"):
        usage = log.usage[peer]
        assert (usage.outer_steps, usage.tokens, usage.missing, dict(usage.verdicts)) == (3, 30, 0, {"ok": 6})
        assert usage.share == pytest.approx(1.5)


@pytest.mark.parametrize("merging", ["", 'merging = "arrivals"\n'])
def test_what_was_carried_over_verifies_with_the_staleness_that_its_verdict_says(tmp_path: Path, merging: str) -> None:
    toml = AUDITED.replace("[rounds]\n", f"[rounds]\nmax_staleness = 1\n{merging}")
    if merging:
        toml = toml.replace("start_peers = {start}\nquorum = {quorum}\nfloor_s = 1000.0\nceiling_s = 1000.0\n", "")
    folder = new_folder(tmp_path / "run", start=2, toml=toml)

    async def scenario() -> None:
        async with served(folder) as run, run.signing_peer("a") as (a, sign_a), run.signing_peer("b") as (b, sign_b):
            first = (await found_run(a, b)).round_id
            await b.contribute_signed(sign_b, first, 0, delta(9)[:1])
            await b.disconnect()  # lost: the round closes without b
            await a.contribute_signed(sign_a, first, 0, delta(1))
            view = await a.view(lambda v: v.outer_step == 1 and v.round_id > first)
            await a.report(1)
            await b.open_stream()
            data = bytes(encode("fp32", delta(9)[1]).data)
            header = sign_b(b.header(first, 0, 1, len(data)), memoryview(data))
            await b.send(header, small_chunks(data))
            if not merging:
                await a.contribute_signed(sign_a, view.round_id, 1, delta(2))
            await a.view(lambda v: v.outer_step == 2)

    asyncio.run(scenario())
    log = verified(folder.path)
    assert log.commits == 2 and log.usage["b"].outer_steps == 1
    lines = (folder.path / "audit-log.jsonl").read_bytes().splitlines()
    entry = parse_canonical(lines[-1])
    assert {one["verdicts"]["b"][3] for one in entry["fragments"]} == {1}
    for change, why in (
        (lambda: entry["fragments"][0]["verdicts"]["b"].__setitem__(3, 0), "has staleness 0 by its verdict, and 1 by what"),
        (lambda: entry["contributions"]["b"]["parts"][0].__setitem__(3, -1), r"merged was .* rounds\.max_staleness = 1"),
    ):
        change()
        log = LogVerifier()
        with pytest.raises(LogFault, match=f"entry 2: the contribution of b to fragment 0, rank 0 .*{why}"):
            for line in (*lines[:-1], canonical(entry)):
                log.take(line)


def test_a_contribution_to_another_round_than_was_merged_is_found(tmp_path: Path) -> None:
    """The coordinator is killed while a round is open: what comes again is signed for the round that is open then."""
    folder = new_folder(tmp_path / "run", start=2, toml=AUDITED)

    async def scenario() -> None:
        async with served(folder, kill=True) as run, run.signing_peer("a") as a, run.signing_peer("b") as b:
            await found_run(a[0], b[0])
            await commit_one([a, b], 0)
            view = await a[0].view(lambda v: v.outer_step == 1 and v.round_id > 0)
            await a[0].contribute_signed(a[1], view.round_id, 1, delta(0)[:1])  # not all of it: b's end closes no round
        async with served(folder) as run, run.signing_peer("a") as a, run.signing_peer("b") as b:
            for peer, _ in (a, b):
                await peer.attend()
                await peer.report(1)
            await commit_one([a, b], 1)

    asyncio.run(scenario())
    assert verified(folder.path).commits == 2
    lines = (folder.path / "audit-log.jsonl").read_bytes().splitlines()
    before, entry = map(parse_canonical, lines[-2:])
    earlier = before["contributions"].pop("a")
    for fragment in before["fragments"]:
        del fragment["verdicts"]["a"]
    log = LogVerifier()
    for line in (lines[0], canonical(before)):
        log.take(line)
    entry["contributions"]["a"], entry["root"] = earlier, log.tree.root().hex()
    with pytest.raises(LogFault, match=r"entry 2: the contribution of a .* from outer step 0; merged was round .* = 0"):
        log.take(canonical(entry))


def test_the_outer_step_of_a_commit_is_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = new_folder(tmp_path / "run", toml=AUDITED)
    computed: list[tuple[int, bool]] = []
    go_through = OuterState._go_through

    def counted(self: OuterState, i: int, *args: Any, in_place: bool, **how: Any) -> Staged | None:
        computed.append((i, in_place))
        return go_through(self, i, *args, in_place=in_place, **how)

    async def scenario() -> None:
        async with served(folder) as run, run.signing_peer("a") as a:
            await found_run(a[0])
            await commit_one([a], 0)
            run.coordinator.run.rounds._bytes_per_s = 1e12  # contributions come in fast: nothing is staged ahead
            monkeypatch.setattr(OuterState, "_go_through", counted)
            await commit_one([a], 1)

    asyncio.run(scenario())
    assert computed == [(0, True), (1, True)] and verified(folder.path).digest == load_outer(folder).digest


def test_a_contribution_without_a_good_signature_is_refused_and_never_in_the_log(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=AUDITED)

    async def scenario() -> None:
        async with served(folder) as run, run.signing_peer("a") as (a, sign), run.signing_peer("b") as (b, _):
            view = await found_run(a)
            await b.attend()
            for wrong, why in (
                ({"signature": b"", "public_key": b"", "payload_blake3": b""}, "is not signed"),
                ({"tokens": 11}, "not of what"),
            ):
                with pytest.raises(grpc.aio.AioRpcError, match=why):
                    await a.contribute_signed(sign, view.round_id, 0, delta(0), **wrong)
            with pytest.raises(grpc.aio.AioRpcError, match="another key than its certificate's"):
                await b.contribute_signed(sign, view.round_id, 0, delta(0))

    asyncio.run(scenario())
    assert verified(folder.path).commits == 0


def test_a_run_without_an_audit_has_no_log(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run")

    async def scenario() -> None:
        async with served(folder) as run, run.peer("a") as a:
            view = await found_run(a)
            await a.contribute(view.round_id, 0, delta(0))
            await a.view(lambda v: v.outer_step == 1)

    asyncio.run(scenario())
    assert not list(folder.path.glob("audit*")) and not (folder.path / "log.key").exists()


def test_every_byte_of_log_and_head_matters_and_the_entry_is_named(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=AUDITED)

    async def scenario() -> None:
        async with served(folder) as run, run.signing_peer("a") as a:
            await found_run(a[0])
            for step in range(2):
                await commit_one([a], step)

    asyncio.run(scenario())
    data, head = (folder.path / "audit-log.jsonl").read_bytes(), (folder.path / "audit-log.head").read_bytes()
    key = verified(folder.path).key
    ends = [i for i, byte in enumerate(data) if byte == ord("\n")]
    for place in range(0, len(data), 17):  # each place alone takes the verification of a log
        entry = sum(end < place for end in ends)
        wrong = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        log = LogVerifier(key)
        with pytest.raises(LogFault, match=rf"entry ({entry}|{entry + 1})\b"):
            for line in wrong.split(b"\n")[:-1] if wrong.endswith(b"\n") else wrong.split(b"\n"):
                log.take(line)
            log.check_head(head)
    for place in range(len(head)):
        log = LogVerifier(key)
        for line in data.splitlines():
            log.take(line)
        with pytest.raises(LogFault, match="head"):
            log.check_head(head[:place] + bytes([head[place] ^ 1]) + head[place + 1 :])


def test_the_commands_verify_sum_up_and_export_and_name_what_was_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = new_folder(tmp_path / "run", toml=AUDITED)

    async def scenario() -> None:
        async with served(folder) as run, run.signing_peer("a") as a:
            await found_run(a[0])
            await commit_one([a], 0)

    asyncio.run(scenario())

    def command(*words: str) -> str:
        app(["audit", *words], standalone_mode=False)
        return capsys.readouterr().out

    key = verified(folder.path).key
    assert key is not None
    assert "2 entries, 1 commits, 2 signatures: verified" in command("verify", "--state", str(folder.path))
    assert "100.0%" in command("usage", "--state", str(folder.path))
    out = tmp_path / "copy"
    assert "2 entries, outer step 1" in command("export", str(out), "--state", str(folder.path))
    said = json.loads(command("verify", "--state", str(out), "--key", key.text(), "--json"))
    assert (said["commits"], said["signatures"], said["signed_entries"]) == (1, 2, 2)
    assert json.loads(command("usage", "--state", str(out), "--json"))["a"]["tokens"] == 10

    assert "2 signatures (those of" not in command("verify", "--state", str(out), "--sample", "5")  # there is but one commit
    assert "signatures left out" in command("verify", "--state", str(out), "--hashes")
    with pytest.raises(ConfigError, match="--sample: has no effect with --hashes"):
        command("verify", "--state", str(out), "--hashes", "--sample", "5")

    other = LogSigner(key.name, LogSigner.new_key()).key.text()
    with pytest.raises(LogFault, match="entry 0: the log says that its key is"):
        command("verify", "--state", str(out), "--key", other)
    path = out / "audit-log.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"reason":"', b'"reason":"x', 1))
    with pytest.raises(LogFault, match=r"audit-log\.jsonl: entry 1 was changed"):
        command("verify", "--state", str(out))
    with pytest.raises(ConfigError, match="cannot be read"):
        command("verify", "--state", str(tmp_path / "nowhere"))
    plain = new_folder(tmp_path / "plain").path
    with pytest.raises(ConfigError, match="keeps no audit log"):
        command("verify", "--state", str(plain))
    (plain / "audit-log.head").write_bytes((out / "audit-log.head").read_bytes())
    with pytest.raises(ConfigError, match=r"audit-log\.jsonl: cannot be read \(No such file"):
        command("verify", "--state", str(plain))
    (out / "ca.pem").write_bytes(b"")
    with pytest.raises(StorageError, match=r"ca\.pem: is damaged"):
        command("verify", "--state", str(out))


@pytest.mark.parametrize(("command", "out"), [("export", "copy"), ("card", "card.md")])
def test_a_log_that_grows_while_it_is_verified_is_copied_as_it_was_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, out: str
) -> None:
    folder, then = new_folder(tmp_path / "run", toml=AUDITED), tmp_path / "then"

    async def scenario() -> None:
        async with served(folder) as run, run.signing_peer("a") as a:
            await found_run(a[0])
            await commit_one([a], 0)
            shutil.copytree(folder.path, then, ignore=shutil.ignore_patterns(".*.tmp"))
            await commit_one([a], 1)

    def grows(*args: Any, **options: Any) -> LogVerifier:
        log = verified_log(*args, **options)
        for name in ("audit-log.jsonl", "audit-log.head"):
            shutil.copy(folder.path / name, then / name)
        return log

    asyncio.run(scenario())
    head = (then / "audit-log.head").read_text()
    monkeypatch.setattr("aggregator.audit_commands.verified_log", grows)
    app(["audit", command, str(tmp_path / out), "--state", str(then)], standalone_mode=False)
    if command == "card":
        assert head.splitlines()[2] in (tmp_path / out).read_text()  # the root
    else:
        assert (tmp_path / out / "audit-log.head").read_text() == head
        assert verified(tmp_path / out).commits == 1


def test_provenance_says_what_the_log_says_and_is_signed_with_its_key(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", start=2, toml=AUDITED)
    out, model = tmp_path / "out", tmp_path / "model.safetensors"

    async def scenario() -> None:
        async with served(folder) as run, run.signing_peer("a") as a, run.signing_peer("b") as b:
            welcome = await a[0].attend()
            await a[0].view(lambda view: view.found)
            data = DataStatement("notes", "c" * 64, "DUA-17")
            config = hashlib.sha256(welcome.config_json.encode()).hexdigest()
            said = signed_consent(folder.run_id, "a", config, "", a[1]._signer, data)
            await a[0]._call.write(peer_message_to_pb(said))
            await until(lambda: run.coordinator.run.consents)
            await b[0].attend()
            await a[0].found(theta())
            for peer in (a[0], b[0]):
                await peer.report(0)
            await commit_one([a, b], 0)

    asyncio.run(scenario())
    result = CliRunner().invoke(app, ["export", "--state", str(folder.path), "--out", str(model)])
    assert result.exit_code == 0, result.output
    options = ["--state", str(folder.path), "--provenance", "--of", str(model)]
    result = CliRunner().invoke(app, ["audit", "export", str(out), *options])
    assert result.exit_code == 0, result.output
    log = verified(out)
    assert log.key is not None
    said = json.loads(open_envelope((out / "provenance.json").read_bytes(), "application/vnd.in-toto+json", log.key))
    assert (said["_type"], said["predicateType"]) == ("https://in-toto.io/Statement/v1", "https://slsa.dev/provenance/v1")
    assert [subject["digest"] for subject in said["subject"]] == [
        {"editOuterParameters": log.digest},
        {"sha256": hashlib.sha256(model.read_bytes()).hexdigest()},
    ]
    build, run = said["predicate"]["buildDefinition"], said["predicate"]["runDetails"]
    parameters = build["externalParameters"]
    assert parameters["configuration"] == json.loads(folder.config().to_json())
    assert parameters["initialParameters"] == {"outerStep": 0, "digest": digest(theta())}
    (dependency,) = build["resolvedDependencies"]
    assert dependency["digest"] == {"sha256": "c" * 64}
    assert dependency["annotations"] == {"peer": "a", "statement": "notes", "licence": "DUA-17"}
    assert run["metadata"]["invocationId"] == folder.run_id
    assert run["metadata"]["startedOn"] <= run["metadata"]["finishedOn"] and run["metadata"]["startedOn"].endswith("Z")
    assert base64.b64decode(run["byproducts"][0]["content"]) == (out / "audit-log.head").read_bytes()

    result = CliRunner().invoke(app, ["audit", "card", str(tmp_path / "model" / "README.md"), "--state", str(folder.path)])
    assert result.exit_code == 0, result.output
    card = (tmp_path / "model" / "README.md").read_text()
    assert card.startswith(f'---\nmodel_name: "{folder.run_id}"\n') and f"`{log.digest}`" in card
    assert "| a | 1 | 10 | 50.0% | yes | notes; licence DUA&#45;17; manifest sha256&#58;" in card
    assert "| b | 1 | 10 | 50.0% |  |  |" in card and "20 tokens in all." in card and "No differential privacy." in card
    assert (out / "audit-log.head").read_text().strip() in card
    again = CliRunner().invoke(app, ["audit", "card", str(tmp_path / "model" / "README.md"), "--state", str(folder.path)])
    assert isinstance(again.exception, ConfigError) and "exists; name a new file" in str(again.exception)

    def refused(*words: str) -> str:
        failed = CliRunner().invoke(app, ["audit", "export", str(tmp_path / "no"), *words])
        assert isinstance(failed.exception, ConfigError) and not (tmp_path / "no").exists()
        return str(failed.exception)

    save_file({"w": torch.zeros(1)}, tmp_path / "other.safetensors", {"run_id": folder.run_id, "digest": "0" * 64})
    other = ["--state", str(folder.path), "--provenance", "--of", str(tmp_path / "other.safetensors")]
    assert "other.safetensors: says digest 000000000000, the log ends with" in refused(*other)
    assert "log.key: is missing" in refused("--state", str(out), "--provenance")
    assert "--of: has no effect without --provenance" in refused("--state", str(folder.path), "--of", str(model))
