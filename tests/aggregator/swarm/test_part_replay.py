"""What the owner of a part keeps, merged once more from its folder, and what that finds."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from aggregator import audit_replay
from aggregator.storage.kept_contributions import Kept, KeptContributions, UndecidedError, load_kept
from aggregator.storage.state_folder import contributions_of
from aggregator.storage.store import Store
from aggregator.swarm.commands import app
from aggregator.swarm.engine_store import EngineStore, Proposal
from aggregator.swarm.member_folder import MemberFolder
from aggregator.swarm.replication import PartReplica
from edit.config.run import RunConfig
from edit.errors import ConfigError, RefusedError
from edit.lab.council.parts_on_disk import RUN, merged_round, outer_state
from edit.rounds.work_claims import Work
from editpb.audit_log import LogFault
from tests.aggregator.swarm.test_part_logs import certify, grown, of_two_parts, take_step
from tests.aggregator.swarm.test_verification import contribute
from tests.support.council.audited import audited_toml, merged
from tests.support.council.hosts import Hosts, hosts, schema_of
from tests.support.council.replicated_table import SETTINGS
from tests.support.loops import run_held
from tests.support.served import WAIT_S


def toml() -> str:
    return audited_toml(keep=3)


def command(verb: str, home: Path, *words: object) -> None:
    app(["audit", verb, str(home), *map(str, words)], standalone_mode=False)


def replay(capsys: pytest.CaptureFixture[str], home: Path, *words: object) -> str:
    command("replay", home, *words)
    return capsys.readouterr().out


async def kept(swarm: Hosts) -> list[str]:
    """Take five outer steps; the owner ends after the third. Returns who owned the part at each."""
    await grown(swarm)
    owners = []
    for step in (1, 2, 3, 4, 5):
        await take_step(swarm, step)
        owners.append(swarm.record.parts[0].owner)
        if step == 3:
            await swarm.stop(owners[-1])
            await swarm.until(lambda: swarm.owner() is not None, passes=1.0)
    return owners


def test_owners_keep_what_they_merged_and_it_gives_the_commits_once_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    owners = list[str]()

    async def body() -> None:
        async with hosts(tmp_path, config=RunConfig.from_text(toml().encode(), "run.toml")) as swarm:
            owners.extend(await kept(swarm))

    run_held(body())
    first, second = owners[0], owners[-1]
    assert first != second
    for name in "abc":
        (tmp_path / name / "run.toml").write_text(toml())
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / first, copy)
    for home, steps in ((copy, (1, 2, 3)), (tmp_path / second, (4, 5))):
        for step in steps:
            assert f"part 0, outer step {step}: " in replay(capsys, home, "--step", step)
    (said,) = json.loads(replay(capsys, tmp_path / second, "--json", "--part", 0))
    assert (said["part"], said["outer_step"], said["peers"], said["shards"]) == (0, 5, ["p", "q"], 4)
    with pytest.raises(
        ConfigError, match=f"outer step 3 are not kept; here are those to 4 to 5; {first} owned part 0 then: replay it"
    ):
        replay(capsys, tmp_path / second, "--step", 3)
    with pytest.raises(ConfigError, match=r"no log in .* has outer step 9"):
        replay(capsys, copy, "--step", 9)
    with pytest.raises(ConfigError, match=r"--part 1: .* has the parts 0"):
        replay(capsys, copy, "--part", 1)
    (third,) = {*"abc"} - {first, second}
    with pytest.raises(
        ConfigError, match=rf"part-0: no contributions are kept here; {second} owned part 0 then: .* of {second}$"
    ):
        replay(capsys, tmp_path / third)
    command("export", copy, tmp_path / "exported")
    with pytest.raises(ConfigError, match=f"exported/part-0: no contributions are kept here; {first} owned part 0 then"):
        replay(capsys, tmp_path / "exported", "--step", 3)
    folder = contributions_of(MemberFolder(copy).part(0))
    _damage(folder, 2)
    with pytest.raises(LogFault, match="is kept with other bytes than were signed"):
        replay(capsys, copy, "--step", 2)
    shutil.rmtree(folder / "step-00000001")
    (folder / "step-00000003").rename(folder / "step-00000001")
    with pytest.raises(ConfigError, match=f"is of a round that came to nothing; {first} owned part 0 then: replay it"):
        replay(capsys, copy, "--step", 1)
    (copy / "run.toml").unlink()
    with pytest.raises(ConfigError, match=rf"copy: has no run\.toml, .*; {first} owned part 0 then"):
        replay(capsys, copy, "--step", 2)
    (copy / "run.toml").write_text(audited_toml(keep=0))
    with pytest.raises(ConfigError, match=r"run\.toml: audit\.keep_contributions = 0: no member keeps what a replay merges"):
        replay(capsys, copy, "--step", 2)
    (copy / "run.toml").write_text(toml().replace("lr = 0.7", "lr = 0.6"))
    with pytest.raises(ConfigError, match=r"a replay needs the run\.toml of then"):
        replay(capsys, copy, "--step", 2)


def test_a_part_of_ones_own_that_is_not_merged_once_more_is_an_error_and_one_of_another_member_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Part 0 is as the log says, and of part 1 nothing is kept."""
    home, real = tmp_path / "home", audit_replay.replay_part
    of_two_parts(home, steps=1)
    done = audit_replay.Replayed(outer_step=1, digest="0" * 64, peers=("p", "q"), shards=4, bytes=1, less=())

    def first(home: Path, part: int, *given: Any) -> audit_replay.Replayed:
        return done if part == 0 else real(home, part, *given)

    monkeypatch.setattr(audit_replay, "replay_part", first)
    for member, raises in (("", True), ("b", False), ("a", True)):
        if member:
            certify(home, member)
        for words in ((), ("--json",)):
            if raises:
                with pytest.raises(ConfigError, match=r"^part 1: .*part-1: no contributions are kept here"):
                    command("replay", home, *words)
            else:
                command("replay", home, *words)
            said = capsys.readouterr().out
            if words:
                rows = [(row["part"], row["merged"], row.get("elsewhere")) for row in json.loads(said)]
                assert rows == [(0, True, None), (1, False, not raises)]
            else:
                assert "part 0, outer step 1: 1 bytes of 2 peers merged once more" in said
                assert ("part 1 was not merged once more: " in said) != raises
        if not raises:
            with pytest.raises(ConfigError, match=r"part 1: .*; a owned part 1 then: replay it in the folder of a"):
                command("replay", home, "--part", 1)

    def differs(home: Path, part: int, *given: Any) -> audit_replay.Replayed:
        if part == 0:
            raise LogFault("it leads to another digest")
        return real(home, part, *given)

    monkeypatch.setattr(audit_replay, "replay_part", differs)
    with pytest.raises(LogFault, match=r"^part 0: it leads to another digest; part 1: .*no contributions are kept here$"):
        command("replay", home)


def test_a_part_whose_log_has_no_such_outer_step_is_an_error_where_it_may_be_ones_own_or_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    of_two_parts(home, steps=2)
    of_two_parts(tmp_path / "behind", steps=1)
    shutil.rmtree(home / "part-1")
    shutil.copytree(tmp_path / "behind" / "part-1", home / "part-1")
    done = audit_replay.Replayed(outer_step=2, digest="0" * 64, peers=("p", "q"), shards=4, bytes=1, less=())
    monkeypatch.setattr(audit_replay, "replay_part", lambda *given: done)
    for member in ("", "a"):
        if member:
            certify(home, member)
        for words in ((), ("--part", 1)):
            if member and not words:
                command("replay", home, "--step", 2)
                assert "part 1 was not merged once more: no log in " in capsys.readouterr().out
            else:
                with pytest.raises(ConfigError, match=r"part 1: no log in .*part-1 has outer step 2"):
                    command("replay", home, "--step", 2, *words)


def _damage(folder: Path, step: int) -> None:
    """One bit of a contribution, in a file that is whole."""
    shards = load_kept(folder, step, schema_of(0))
    wrong = bytearray(shards[0].data)
    wrong[0] ^= 1
    again = KeptContributions(folder, 3)
    for fragment_id in {one.header.fragment_id for one in shards}:
        these = [one for one in shards if one.header.fragment_id == fragment_id]
        again.add(1, fragment_id, [Kept(one.header, one.work, wrong if one is shards[0] else one.data) for one in these])
    shutil.rmtree(folder / f"step-{step:08d}")
    (folder / "pending").rename(folder / f"step-{step:08d}")


def test_what_an_owner_proposed_and_others_did_not_take_is_not_kept(tmp_path: Path) -> None:
    async def body() -> None:
        async with hosts(tmp_path, config=RunConfig.from_text(toml().encode(), "run.toml")) as swarm:
            await grown(swarm)
            await take_step(swarm, 1)
            owner = swarm.record.parts[0].owner
            store = swarm.running[owner].parts[0].replica._engine
            assert store is not None and store._entries is not None
            commit = store._entries.commit
            store._entries.commit = lambda *given: commit(*given).replace('"unmerged":[]', '"unmerged":["b"]')  # type: ignore
            await contribute(swarm, 2)
            await swarm.until(lambda: swarm.record.parts[0].owner != owner, passes=1.0)
            await take_step(swarm, 2)
            folders = {name: contributions_of(swarm.folder(name).part(0)) for name in "abc"}
            having = {name for name, folder in folders.items() if (folder / "step-00000002").exists()}
            assert having == {swarm.record.parts[0].owner}

    run_held(body())


@pytest.mark.parametrize("became", ["its own", "another", "refused"])
@pytest.mark.parametrize("restarted", [False, True])
def test_what_an_owner_proposed_is_kept_when_it_goes_until_another_round_is_the_outer_step(
    tmp_path: Path, became: str, restarted: bool
) -> None:
    folder, proposals = contributions_of(tmp_path), Queue[Proposal]()
    store = Store(tmp_path, SETTINGS, RUN, kept=KeptContributions(folder, 3))
    replica = PartReplica(RUN, 0, SETTINGS, store)
    replica.found(outer_state(SETTINGS, 0))
    other = replica.offer(2, 2_000_001, "all in", 30, merged_round(replica.outer, 2, 2))
    engine = replica.serve(tmp_path, proposals.put)
    records, signed = merged(replica.outer, 1, SETTINGS, {})

    def commit(engine: EngineStore) -> None:  # as `RoundRunner` does
        assert engine.kept is not None
        for record in records:
            i = record.fragment_id
            engine.kept.add(1, i, [Kept(one, Work(2, 10), bytes(one.total_bytes)) for one in signed[i]])
            engine.begin_fragment(1, record).result()
        with engine.kept.committing(1):
            engine.append_commit(1, 1, "all in", tokens=20)

    with ThreadPoolExecutor(1) as worker:
        committing = worker.submit(commit, engine)
        offer = replica.made(1, proposal := proposals.get(timeout=WAIT_S))
        if became == "refused":
            replica.refuse(offer.update.id, "nobody has heard of it")
        else:
            replica.hold(offer, proposal.records)
        replica.cease("grant 1 is over")
        with pytest.raises(RefusedError) as raised:
            committing.result(timeout=WAIT_S)
    assert isinstance(raised.value, UndecidedError) == folder.joinpath("step-00000001").exists() == (became != "refused")
    if restarted:
        store.close()
        store = Store(tmp_path, SETTINGS, RUN, kept=KeptContributions(folder, 3))
        replica = PartReplica(RUN, 0, SETTINGS, store)
    if became == "its own":
        replica.adopt(offer.update.id)
        assert len(load_kept(folder, 1, replica.outer.schema)) == 2 * len(records)
    else:
        replica.hold(other)
        replica.adopt(other.update.id)
        assert not folder.joinpath("step-00000001").exists()
    store.close()
