"""The audit log of a real coordinator: signed contributions in, a log that verifies out, and every byte of it matters."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import grpc
import pytest
import torch

from aggregator.cli import app
from aggregator.storage.store import load_outer
from edit.errors import ConfigError
from edit.trust.checkpoints import LogSigner
from editpb.audit_log import LogFault, LogVerifier
from editpb.signed_contributions import ContributionSigner
from tests.support.served import SCHEMA, TOML, BarePeer, found_run, new_folder, served

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
    with pytest.raises(ConfigError, match="keeps no audit log"):
        command("verify", "--state", str(new_folder(tmp_path / "plain").path))
