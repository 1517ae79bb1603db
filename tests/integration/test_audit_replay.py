"""Contributions that a coordinator keeps, merged once more from its folder or a copy, and what that finds."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from aggregator import audit_commands
from aggregator.audit_replay import Replayed, replay_step
from aggregator.cli import app
from aggregator.storage.journal import Journal
from aggregator.storage.kept_contributions import Kept, KeptContributions, kept_files, load_kept, step_folder
from aggregator.storage.log_key import open_log_key
from aggregator.storage.state_folder import StateFolder
from aggregator.storage.store import load_outer
from edit.config.run import RunConfig
from edit.errors import ConfigError, StorageError
from edit.merging.merge import Measured, Merged
from edit.merging.outer_state import OuterState
from edit.rounds.work_claims import Work
from edit.trust.canonical import canonical, parse_canonical
from edit.trust.merkle import MerkleTree, leaf_hash
from editpb.audit_log import PART, LogFault, log_origin
from tests.integration.test_audit import AUDITED, commit_one, delta, verified
from tests.integration.test_seen_heads import contribute
from tests.support.served import SCHEMA, TOML, found_run, new_folder, served

KEEPS = AUDITED + "keep_contributions = 3\n"
PENALTY = KEEPS.replace("enabled = false", "enabled = true").replace("lr = 1.0", "lr = 0.7")
SETTINGS = {
    "mean": KEEPS,
    "penalty, int8 records": PENALTY.replace('down = "fp32"', 'down = "int8"\nrecord = "int8"'),
    "robust": KEEPS + '[robust]\nrule = "geometric_median"\nhostile = 1\n',
    "robust by the model": KEEPS + '[robust]\nrule = "geometric_median"\nhostile = 1\nscope = "model"\n',
}
SETTINGS = {
    name: toml.replace("checkpoint_every = 3", "checkpoint_every = 3\nkeep_checkpoints = 2") for name, toml in SETTINGS.items()
}


def trained(folder: StateFolder, steps: int, since: int = 0, kill: bool = True) -> None:
    """Commit outer steps of three peers; the coordinator is killed at the end, or stops."""

    async def scenario() -> None:
        async with (
            served(folder, kill=kill) as run,
            run.signing_peer("a") as a,
            run.signing_peer("b") as b,
            run.signing_peer("c") as c,
        ):
            if since:
                for peer, _ in (a, b, c):
                    await peer.attend()
                    await peer.report(since)
            else:
                await found_run(a[0], b[0], c[0])
            for step in range(since, steps):
                await commit_one([a, b, c], step)

    asyncio.run(scenario())


def replay(folder: StateFolder, step: int) -> Replayed:
    return replay_step(folder.path, step, len(verified(folder.path).tree))


def invoked(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["audit", *map(str, arguments)])
    return result.exit_code, str(result.exception or result.output)


@pytest.mark.parametrize("toml", SETTINGS.values(), ids=list(SETTINGS))
def test_what_is_kept_gives_the_commit_once_more_over_kills(tmp_path: Path, toml: str) -> None:
    folder = new_folder(tmp_path / "run", start=3, quorum=3, toml=toml)
    trained(folder, 2)
    trained(folder, 5, since=2)
    assert sorted(path.name for path in folder.contributions.glob("step-*")) == [f"step-{n:08d}" for n in (3, 4, 5)]
    for step in (3, 4, 5):
        done = replay(folder, step)
        assert (done.peers, done.shards, done.less) == (("a", "b", "c"), 6, ())
    assert done.digest == load_outer(folder).digest
    with pytest.raises(StorageError, match=r"the contributions to outer step 2 are not kept; here are those to 3 to 5"):
        replay(folder, 2)
    with pytest.raises(ConfigError, match="has no commit to outer step 6"):
        replay(folder, 6)


def test_what_is_kept_gives_the_commits_once_more_over_stops_which_add_checkpoints(tmp_path: Path) -> None:
    often = "checkpoint_every = 20\nkeep_checkpoints = 2"
    toml = AUDITED.replace("checkpoint_every = 3", often) + "keep_contributions = 20\n"
    folder = new_folder(tmp_path / "run", start=3, quorum=3, toml=toml)
    for since, steps in ((0, 2), (2, 3), (3, 4)):
        trained(folder, steps, since, kill=False)
    for step in (1, 2, 3, 4):
        assert replay(folder, step).peers == ("a", "b", "c")


def test_somebody_else_replays_a_copy_without_any_key_of_the_run(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", start=3, quorum=3, toml=KEEPS)
    trained(folder, 4)
    copy, key = tmp_path / "copy", verified(folder.path).key
    assert key is not None
    code, said = invoked("export", copy, "--state", folder.path, "--step", 3)
    assert code == 0, said
    assert sorted(str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()) == [
        "audit-log.head",
        "audit-log.jsonl",
        "audit-log.key",
        "ca.pem",
        "contributions/step-00000003/fragment-00000",
        "contributions/step-00000003/fragment-00001",
        "outer/step-00000000.journal",
        "outer/step-00000000.safetensors",
        "run.json",
        "run.toml",
    ]
    code, said = invoked("replay", "--step", 3, "--state", copy, "--key", key.text())
    assert code == 0
    assert "outer step 3: 3,660 bytes of 3 peers merged once more: the same verdicts, update and digest" in said
    code, said = invoked("replay", "--step", 3, "--state", copy, "--json")
    assert json.loads(said)["digest"] == json.loads((copy / "audit-log.jsonl").read_bytes().splitlines()[3])["after"]
    code, said = invoked("replay", "--step", 4, "--state", copy)
    assert code != 0 and "are not kept" in said


def test_a_coordinator_that_merged_something_else_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log, its journal and its update agree with one another; only the contributions do not give that merge."""
    folder = new_folder(tmp_path / "run", start=3, quorum=3, toml=KEEPS)
    honest = OuterState.reduce

    def favours_a(self: OuterState, fragment_id: int, contributions: Sequence[Measured]) -> Merged:
        merged = honest(self, fragment_id, contributions)
        if self.outer_step == 1 and fragment_id == 1 and merged.merged is not None:
            merged = replace(merged, merged=merged.merged * 1.001)
        return merged

    with monkeypatch.context() as patched:
        patched.setattr(OuterState, "reduce", favours_a)
        trained(folder, 3)
    assert replay(folder, 1).outer_step == 1
    assert replay(folder, 3).outer_step == 3
    with pytest.raises(
        LogFault, match=r"outer step 2, fragment 1: merged once more, the merged pseudo-gradient is \w+, the log"
    ):
        replay(folder, 2)
    code, said = invoked("replay", "--step", 2, "--state", folder.path)
    assert code != 0 and "the merged pseudo-gradient" in said
    code, said = invoked("replay", "--state", folder.path)
    assert code == 0 and "outer step 3" in said


def kept_steps(folder: StateFolder) -> list[str]:
    return sorted(path.name for path in folder.contributions.glob("step-*"))


def test_a_commit_that_the_disk_refuses_takes_no_kept_step_and_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = new_folder(tmp_path / "run", toml=AUDITED + "keep_contributions = 1\n")
    seen = list[list[str]]()

    def refused(*_: object, **__: object) -> None:
        seen.append(kept_steps(folder))
        raise StorageError("the journal cannot be written (No space left on device)")

    async def scenario() -> None:
        async with served(folder) as run, run.signing_peer("a") as (a, sign):
            await found_run(a)
            await commit_one([(a, sign)], 0)
            view = await a.view(lambda v: v.outer_step == 1 and v.round_id > 0)
            with monkeypatch.context() as patched:
                patched.setattr(Journal, "append_commit", refused)
                await a.contribute_signed(sign, view.round_id, 1, delta(0))
                await a.view(lambda v: v.round_id > view.round_id)
            assert kept_steps(folder) == ["step-00000001"]
            assert len(load_kept(folder.contributions, 1, SCHEMA)) == len(SCHEMA.fragments)
            await commit_one([(a, sign)], 1)

    asyncio.run(scenario())
    assert seen == [["step-00000001", "step-00000002"]], "a kill just then would not take those of outer step 1"
    assert kept_steps(folder) == ["step-00000002"] and replay(folder, 2).peers == ("a",)


def test_a_start_removes_kept_steps_that_were_not_committed_or_are_too_old(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", toml=AUDITED + "keep_contributions = 1\n")

    async def scenario() -> None:
        async with served(folder, kill=True) as run, run.signing_peer("a") as a:
            await found_run(a[0])
            for step in range(2):
                await commit_one([a], step)
        for step in (1, 3):
            shutil.copytree(step_folder(folder.contributions, 2), step_folder(folder.contributions, step))
        async with served(folder):
            assert kept_steps(folder) == ["step-00000002"]

    asyncio.run(scenario())


def changed(folder: StateFolder, step: int, change: Callable[[list[Kept]], list[Kept]]) -> None:
    """Write what is kept of fragment 1 anew."""
    kept = [one for one in load_kept(folder.contributions, step, SCHEMA) if one.header.fragment_id == 1]
    scratch = KeptContributions(folder.path / "scratch", 1)
    scratch.add(0, 1, change(kept))
    (folder.path / "scratch/pending/fragment-00001").replace(kept_files(folder.contributions, step)[1])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda kept: kept[1:], "the contribution of a to fragment 1, rank 0 is in the log, and is not kept"),
        (lambda kept: [*kept, kept[0]], "the contribution of a to fragment 1, rank 0 is kept, and is not the one that the log"),
        (
            lambda kept: [replace(kept[0], data=bytes(len(kept[0].data))), *kept[1:]],
            "the contribution of a to fragment 1, rank 0 is kept with other bytes than were signed",
        ),
        (
            lambda kept: [replace(kept[0], header=replace(kept[0].header, tokens=99)), *kept[1:]],
            "the contribution of a to fragment 1, rank 0 is kept with a header that its peer has not signed",
        ),
        (
            lambda kept: [replace(kept[0], header=replace(kept[0].header, signature=bytes(64))), *kept[1:]],
            "is kept, and is not the one that the log names",
        ),
        (lambda kept: [replace(kept[0], work=Work(2, 11)), *kept[1:]], "counted for more than its peer claimed"),
        (lambda kept: [replace(kept[0], work=Work(3, 10)), *kept[1:]], "counted for more than its peer claimed"),
    ],
    ids=["gone", "twice", "bytes", "header", "signature", "tokens", "inner steps"],
)
def test_what_is_kept_must_be_what_the_log_names(tmp_path: Path, change: Callable[[list[Kept]], list[Kept]], why: str) -> None:
    folder = new_folder(tmp_path / "run", start=3, quorum=3, toml=KEEPS)
    trained(folder, 1)
    changed(folder, 1, change)
    with pytest.raises(LogFault, match=why):
        replay(folder, 1)


@pytest.mark.parametrize(("field", "value"), [("inner_steps", 100_000), ("tokens", 1_000_000), ("codec", "sign")])
def test_what_the_log_says_of_a_contribution_must_be_what_its_peer_signed(tmp_path: Path, field: str, value: object) -> None:
    """The log holds together up to a head that its key has signed: without this entry's signatures nothing shows it."""
    folder = new_folder(tmp_path / "run", start=3, quorum=3, toml=KEEPS)
    trained(folder, 1)
    path, tree, lines = folder.path / "audit-log.jsonl", MerkleTree(), list[bytes]()
    for line in path.read_bytes().splitlines():
        entry = parse_canonical(line)
        if entry["kind"] == "commit":
            for part in entry["contributions"]["b"]["parts"]:
                part[PART.index(field)] = value
        lines.append(canonical({**entry, "root": tree.root().hex()}))
        tree.append(leaf_hash(lines[-1]))
    signer = open_log_key(folder.path, log_origin(folder.run_id))
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    (folder.path / "audit-log.head").write_text(signer.sign(len(tree), tree.root()))
    code, said = invoked("replay", "--step", 1, "--state", folder.path)
    assert code != 0 and re.search(
        "of b to fragment [01], rank 0: the log says other things of it than its peer has signed", said
    )


def test_damage_and_other_settings_are_told_apart_from_lies(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", start=3, quorum=3, toml=KEEPS)
    trained(folder, 1)
    file, toml = kept_files(folder.contributions, 1)[0], folder.run_toml.read_text()
    folder.run_toml.write_text(toml.replace("every = 2", "every = 3"))
    with pytest.raises(ConfigError, match="outer step 1 was committed under another configuration"):
        replay(folder, 1)
    folder.run_toml.write_text(toml)
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(StorageError, match="fragment-00000: is damaged"):
        replay(folder, 1)


def test_a_commit_waits_for_what_is_kept(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "run", start=1, toml=KEEPS)

    async def scenario() -> None:
        async with served(folder) as run, run.signing_peer("a") as a:
            await found_run(a[0])
            folder.contributions.write_text("a file stands in the way")
            view = await a[0].view(lambda v: v.round_id > 0)
            await contribute(*a, view.round_id)  # one fragment: nothing of the other is merged
            await a[0].view(lambda v: "contributions cannot be kept" in v.last_reason)
            folder.contributions.unlink()
            await commit_one([a], 0)

    asyncio.run(scenario())
    assert replay(folder, 1).peers == ("a",)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("[audit]\nkeep_contributions = 1\n", "audit.keep_contributions has no effect with audit.enabled = false"),
        (
            KEEPS.replace(TOML, "").replace("3", "4"),
            r"audit.keep_contributions = 4: must be at most 3 \(storage.checkpoint_every",
        ),
        (KEEPS.replace(TOML, "") + "[secagg]\nenabled = true\n", "must be 0 with secagg.enabled"),
    ],
)
def test_a_run_that_cannot_keep_them_is_refused(tmp_path: Path, more: str, why: str) -> None:
    toml = TOML.format(start=3, quorum=3) + more
    if "secagg" in more:
        toml = toml.replace('up = "fp32"\n', "")
    path = tmp_path / "run.toml"
    path.write_text(toml)
    with pytest.raises(ConfigError, match=why):
        RunConfig.from_toml(path)


@pytest.mark.parametrize("at", ["audit-log.jsonl", "audit-log.head", "journal"])
def test_an_export_that_broke_off_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    folder, out = new_folder(tmp_path / "run", start=3, quorum=3, toml=KEEPS), tmp_path / "out"
    trained(folder, 3)
    words = ["audit", "export", str(out), "--state", str(folder.path), "--step", "3"]
    write, copy = audit_commands.write_atomic, audit_commands.shutil.copyfile

    def full(path: Path, data: bytes, *, shared: bool) -> None:
        if path.name == at:
            raise StorageError(f"{path}: cannot be written (No space left on device)")
        write(path, data, shared=shared)

    def full_too(source: Path, target: Path) -> object:
        if target.suffix == f".{at}":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return copy(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(audit_commands, "write_atomic", full)
        patch.setattr(audit_commands.shutil, "copyfile", full_too)
        assert "No space left on device" in str(CliRunner().invoke(app, words).exception)
    assert (out / "run.json").exists()
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 0, again.exception
    assert replay_step(out, 3, len(verified(out).tree)).outer_step == 3
