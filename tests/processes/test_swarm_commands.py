"""`edit-peer swarm start | join | host | invite` as a user types them."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import aggregator.swarm.commands
from aggregator.storage.store import Store
from aggregator.swarm.host import merging
from aggregator.swarm.member_folder import MemberFolder
from aggregator.swarm.replication import PartReplica
from edit.config.run import RunConfig
from edit.council.record import Phase, Record
from edit.errors import ConfigError
from edit.fragments.digest import digest
from edit.lab.council.replicated import same
from edit.lab.run_toml import to_toml
from editpb.invitation import Invitation
from peers.identity.policy import digest_of
from tests.support.daemons import Daemon, Site, call, children, small, torchrun
from tests.support.fork_server import Forked

pytestmark = pytest.mark.timeout(400)


def settings(outer_steps: int, start_peers: int = 1, quorum: int = 1, exact: bool = False) -> dict[str, Any]:
    """Of a hub; in a swarm without the section server.

    exact: nothing is lost with an owner but time: no record leaves anything out, and no peer is cut off and trains on.
    """
    sync, rounds = {"every": 4, "outer_steps": outer_steps}, {"start_peers": start_peers, "quorum": quorum}
    more: dict[str, Any] = {"codec": {"up": "fp32", "down": "fp32"}, "membership": {"heartbeat_s": 10.0, "lease_s": 100.0}}
    return dict(small("swarm", sync=sync, rounds=rounds, **(more if exact else {})))


class Swarm:
    """Members in folders of their own, as commands."""

    def __init__(
        self,
        path: Path,
        parts: int = 2,
        gossip: Mapping[str, Any] | None = None,
        sections: Mapping[str, Any] | None = None,
        **run: Any,
    ) -> None:
        self.path, self.daemons = path, dict[str, Daemon]()
        tables = settings(**run)
        del tables["server"]
        tables["swarm"] = {"parts": parts, "discovery": "addresses"}
        if gossip:
            tables |= {"outer": {"algorithm": "gossip"}, "gossip": gossip}
            tables["rounds"] = {"start_peers": tables["rounds"]["start_peers"]}
        (path / "run.toml").write_text(to_toml(tables | dict(sections or {})))
        (path / "text.py").write_bytes(Path(json.__file__).read_bytes())

    def _trains(self, name: str, verb: str, *arguments: object, ranks: int = 1) -> Daemon:
        launcher = torchrun(ranks) if ranks > 1 else []
        data = ["--data", self.path / "text.py", "--threads", 1, "--home", self.path / name]
        self.daemons[name] = Daemon(*launcher, "peers", "swarm", verb, *data, *arguments)
        return self.daemons[name]

    def start(self, name: str = "a", *arguments: object, ranks: int = 1) -> Daemon:
        return self._trains(name, "start", self.path / "run.toml", "--name", name, "--invite", "", *arguments, ranks=ranks)

    def join(self, name: str, *arguments: object, ranks: int = 1) -> Daemon:
        return self._trains(name, "join", self.invitation(name), *arguments, ranks=ranks)

    def host(self, name: str, *arguments: object) -> Daemon:
        self.daemons[name] = Daemon("peers", "swarm", "host", self.invitation(name), "--home", self.path / name, *arguments)
        return self.daemons[name]

    def invitation(self, name: str) -> Path:
        """The file with a member's only invitation."""
        file = self.path / f"{name}.invitation"
        if not file.exists():
            invite(file, name, self.path / "a")
        return file

    def record(self, name: str) -> Record:
        saved = MemberFolder(self.path / name).saved()
        assert saved is not None and saved.record is not None
        return saved.record

    def states(self, part: int, *names: str) -> list[PartReplica]:
        """What lies in these folders of a part."""
        config, run_id = merging(RunConfig.from_toml(self.path / "run.toml")), self.record("a").run_id
        stores = [Store(MemberFolder(self.path / name).part(part), config, run_id) for name in names]
        replicas = [PartReplica(run_id, part, config, store) for store in stores]
        for store in stores:
            store.close()
        return replicas


def invite(file: Path, name: str, home: Path) -> None:
    """Write the invitation that a member's command prints."""
    with file.open("wb") as output:
        invited = Forked(["peers", "swarm", "invite", name, "--home", str(home)], output)
    code, said = invited.wait(), file.read_text()
    assert code == 0, said
    file.write_text(next(line for line in said.splitlines() if line.startswith("edit1.")))


@contextmanager
def swarm(path: Path, **named: Any) -> Iterator[Swarm]:
    made = Swarm(path, **named)
    ended = False
    try:
        yield made
        ended = True
    finally:
        for name, daemon in made.daemons.items():
            if daemon.process.poll() is None:
                daemon.kill()
            elif not daemon.ended:
                daemon.finish()
            if not ended:
                print(f"---- {name}\n{''.join(daemon.lines)}")


def test_three_commands_train_and_one_of_them_is_killed(tmp_path: Path) -> None:
    """Two train and one only hosts; who joined is killed with its host, and the others go on to the same bits, and end.

    Their audit logs are the same, too.
    """
    with swarm(tmp_path, outer_steps=30, start_peers=2, sections={"audit": {"enabled": True}}) as members:
        a = members.start()
        a.until("owns part")
        c = members.host("c")
        a.until("2 vote, of 2 members")
        b = members.join("b", "--throttle", 20, "--max-mbit", 100)
        a.until("3 vote, of 3 members")
        a.until("outer step 2,")
        b.until("outer step 2,")
        b.kill()
        assert a.finish() == 0 and c.finish() == 0
        assert "the run has finished at outer step 30" in a.last("the run has finished at")
        assert struct.unpack_from("<d", (tmp_path / "b" / "send-limit").read_bytes())[0] > 0, "it went by its bound"
        assert not (tmp_path / "a" / "send-limit").exists()
        assert members.record("a").phase is members.record("c").phase is Phase.FINISHED
        for part in range(2):
            one, other = (replica.snapshot() for replica in members.states(part, "a", "c"))
            assert one.metadata["outer_step"] == 30 and same(one, other)
            logs = [(tmp_path / name / f"part-{part}" / "audit-log.jsonl").read_bytes() for name in "ac"]
            assert logs[0] == logs[1] and len(logs[0].splitlines()) == 31
        verified = CliRunner().invoke(aggregator.swarm.commands.app, ["audit", "verify", str(tmp_path / "c")])
        assert verified.exit_code == 0 and verified.stdout.count("30 commits, each signed by the owner that it names") == 2
        assert any(one.metadata["digest"][:12] in line for line in a.lines)
        held, at_c = exported(tmp_path, "a"), exported(tmp_path, "c")
        assert held.keys() == at_c.keys() and all(torch.equal(held[name], at_c[name]) for name in held)
        assert exported(tmp_path, "a", "outer step 30, digest ").keys() == held.keys()
        with pytest.raises(ConfigError, match=r"^average\.kind = 'none': keeps no average"):
            exported(tmp_path, "a", "", "--averaged")
        (tmp_path / "c" / "part-1").rename(tmp_path / "c" / "part-9")
        with pytest.raises(ConfigError, match="has not received part 1 of the model yet"):
            exported(tmp_path, "c")


def exported(path: Path, member: str, said: str = "", *options: str) -> dict[str, torch.Tensor]:
    """What `export` writes of a member's folder, by tensor name. said: how it says which model it is."""
    out = path / f"{member}.safetensors"
    done = CliRunner().invoke(aggregator.swarm.commands.app, ["export", str(path / member), "--out", str(out), *options])
    if done.exception is not None:
        raise done.exception
    assert done.stdout.startswith(f"{out}: {said}")
    return load_file(out)


def test_two_members_gossip_to_the_end_and_settle_on_one_model(tmp_path: Path) -> None:
    """Neither begins before the other trains. Each of them ends with the model of the last settling on its disk."""
    with swarm(tmp_path, parts=1, outer_steps=8, start_peers=2, gossip={"settle_every": 3}) as members:
        a = members.start()
        a.until("1 of 2 peers train (rounds.start_peers)")
        b = members.join("b")
        assert b.finish() == 0, "".join(b.lines)  # first: a waits for it
        assert a.finish() == 0
        for one, partner in ((a, "b"), (b, "a")):
            assert any(f": paired with {partner}" in line for line in one.lines)
            assert "the run has finished at outer step 8" in one.last("the run has finished at")
        settled, other = (replica.snapshot() for replica in members.states(0, "a", "b"))
        assert settled.metadata["outer_step"] == 2 and same(settled, other)
        assert members.record("a").phase is members.record("b").phase is Phase.FINISHED
        assert all(settled.metadata["digest"][:12] in each.last("the run has finished at") for each in (a, b))
        assert exported(tmp_path, "b", f"settling 2, digest {settled.metadata['digest'][:12]}")


@pytest.mark.exhaustive
def test_a_founder_that_was_killed_goes_on_with_the_same_command_and_so_do_all(tmp_path: Path) -> None:
    """Rounds need both members; of two the older one goes on alone, and the other waits for it."""
    with swarm(tmp_path, outer_steps=6, start_peers=2, quorum=2) as members:
        a = members.start()
        a.until("owns part")
        b = members.join("b", "--throttle", 20)
        a.until("outer step 2,")
        a.kill()
        a = members.start()
        b.kill()
        b = members.join("b")  # with the invitation that was used
        assert a.finish() == 0 and b.finish() == 0
        digests = {daemon.last("the run has finished at").split("digest ")[1][:12] for daemon in (a, b)}
        assert len(digests) == 1
        modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "a").rglob("*.key")}
        assert modes and set(modes.values()) <= {0o400, 0o600} and (tmp_path / "a").stat().st_mode & 0o777 == 0o700


def test_one_signal_saves_and_ends_the_host_too(tmp_path: Path) -> None:
    with swarm(tmp_path, outer_steps=1000) as members:
        a = members.start()
        a.until("outer step 2,")
        (host,) = a.children()
        a.process.send_signal(signal.SIGINT)
        assert a.finish() == 0
        assert not Path(f"/proc/{host}").exists()
        assert "stopping as asked" in "".join(a.lines)
        a = members.start()
        a.until("resuming from")
        (host,) = a.children()
        os.kill(host, signal.SIGKILL)
        a.until("it is started again")
        a.until("owns part")
        (host,) = a.children()
        os.kill(host, signal.SIGTERM)
        assert a.finish() == 0 and "this member's host has ended" in "".join(a.lines)


@pytest.mark.exhaustive
def test_who_owns_is_killed_beside_a_member_that_nobody_can_dial(tmp_path: Path) -> None:
    """c dials out only: it trains, votes and holds, also when who owned and led is gone; it never owns a part or leads."""
    with swarm(tmp_path, outer_steps=1000, start_peers=2) as members:
        a = members.start()
        a.until("owns part")
        b = members.host("b")
        a.until("2 vote, of 2 members")
        c = members.join("c", "--advertise", "", "--throttle", 5)
        a.until("3 vote, of 3 members")
        c.until("outer step 2,")
        (own,) = [each for each in status(tmp_path / "c")["members"] if each["peer_id"] == "c"]
        assert own.pop("why").startswith("nobody can dial it, so it owns no part and does not lead")
        assert own.pop("state") in ("here", "late"), "how far it is depends on the moment"
        assert own == {"peer_id": "c", "voter": True, "owns": [], "addresses": [], "reachable": False}
        a.kill()
        b.until("owns part")
        reached = int(c.last("outer step ").split("outer step ")[1].split(",")[0])
        c.until(f"outer step {reached + 3},")
        told = status(tmp_path / "c")
        assert told["leader"] == "b" and {part["owner"] for part in told["parts"]} == {"b"}
        c.process.send_signal(signal.SIGINT)
        assert c.finish() == 0
        assert not any("owns part" in line for line in c.lines)
        b.process.send_signal(signal.SIGINT)
        assert b.finish() == 0


def status(home: Path) -> dict[str, Any]:
    """What `edit-peer swarm status --json` says."""
    return dict(json.loads(_command("status", home, "--json")))


def test_who_may_join_and_what_a_wrong_invitation_says(tmp_path: Path) -> None:
    with swarm(tmp_path, outer_steps=1000, start_peers=2) as members:
        members.start().until("owns part")
        b = members.host("b")
        b.until("2 vote, of 2 members")
        before = Invitation.decode(members.invitation("b").read_text())
        altered = dataclasses.replace(before, token="A" * 43)
        (tmp_path / "altered").write_text(altered.encode())
        expired = dataclasses.replace(before, expires=1)
        (tmp_path / "expired").write_text(expired.encode())
        for invitation, home, code, said in (
            (members.invitation("b"), "thief", 3, "used already, by another key"),
            (tmp_path / "altered", "x", 2, "the invitation is altered"),
            (tmp_path / "expired", "x", 3, "expired"),
            (tmp_path / "run.toml", "x", 2, "not an invitation"),
            (members.invitation("c"), "b", 3, "of another member than the invitation"),
        ):
            refused = Daemon("peers", "swarm", "host", invitation, "--home", tmp_path / home)
            assert refused.finish() == code and said in refused.lines[-1], refused.lines
        assert not (tmp_path / "x" / "identity.json").exists()
        told = Daemon("peers", "swarm", "join", "--home", tmp_path / "x", "--data", tmp_path / "text.py")
        assert told.finish() == 2 and "edit-peer swarm join INVITATION" in told.lines[-1]
        told = Daemon("peers", "run", "--home", tmp_path / "b", "--data", tmp_path / "text.py")
        assert told.finish() == 2 and "edit-peer swarm join" in told.lines[-1]
        asked = _command("status", tmp_path / "b")
        assert "a leads" in asked and "2 of 2 here" in asked and "the authority's key: a\n" in asked


def test_a_host_looks_at_its_sites_policy_before_it_joins(tmp_path: Path) -> None:
    with swarm(tmp_path, outer_steps=1000, start_peers=2) as members:
        members.start().until("owns part")
        home = tmp_path / "b"
        home.mkdir(mode=0o700)
        policy = home / "policy.toml"
        for text, said in (
            ("[require]\naudit = true\n", "b/policy.toml: require.audit = true: the run has audit.enabled = false; this host"),
            ("[limits]\nmax_parameters = 9\n", "b/policy.toml: limits.max_parameters = 9: the run's model has "),
            ("[accept]\n", "nobody at this site has consented to the run's configuration sha256:"),
        ):
            policy.write_text(text)
            refused = members.host("b")
            assert refused.finish() == 2 and said in refused.lines[-1], refused.lines
        assert "a alone votes" in _command("status", tmp_path / "a"), "it was no member yet"
        digest = digest_of(RunConfig.from_toml(home / "run.toml").to_json())
        consented = Daemon("peers", "consent", "--home", home, "--accept", digest)
        assert consented.finish() == 0, consented.lines
        b = Daemon("peers", "swarm", "host", "--home", home)
        members.daemons["b"] = b
        b.until("2 vote, of 2 members")
        assert any("policy.toml allows it; [protect] and [data] have no effect" in line for line in b.lines)


def test_a_member_with_a_copy_of_the_authoritys_key_lets_the_next_one_in(tmp_path: Path) -> None:
    with swarm(tmp_path, outer_steps=1000, start_peers=2) as members:
        members.start().until("owns part")
        b = members.host("b")
        b.until("2 vote, of 2 members")
        told = _command("share-authority", tmp_path / "a", "b")
        assert told == "b has a copy of the authority's key; in all: a, b\n"
        assert "b has a copy of the authority's key, and lets others in" in b.until("lets others in")
        invite(members.path / "d.invitation", "d", tmp_path / "b")
        d = members.host("d")
        d.until("3 vote, of 3 members")
        assert "d is enrolled" in b.until("d is enrolled")
        assert "the authority's key: a, b\n" in _command("status", tmp_path / "d")


def _command(*words: object) -> str:
    """What a command prints of those that `edit-peer swarm` leaves to another program, which is imported already."""
    return call(aggregator.swarm.commands.app, *words)


@pytest.mark.exhaustive
def test_two_ranks_beside_a_plain_member_take_the_outer_steps_of_a_hub_when_their_host_and_an_owner_is_killed(
    tmp_path: Path,
) -> None:
    """The founder has two ranks under torchrun; the host beside rank 0 leads, and owns at least one part, when it is killed."""
    run: dict[str, Any] = {"outer_steps": 8, "start_peers": 2, "quorum": 2, "exact": True}
    with Site(tmp_path / "hub", settings(**run)) as site:
        site.serve()
        site.enrol("a", "b")
        assert [peer.finish() for peer in (site.peer("a", ranks=2), site.peer("b"))] == [0, 0]
        hub = site.status()["digest"]
    (tmp_path / "swarm").mkdir()
    with swarm(tmp_path / "swarm", parts=3, **run) as members:
        a = members.start(ranks=2)
        a.until("owns part")
        c = members.host("c")
        a.until("2 vote, of 2 members")
        b = members.join("b")
        a.until("outer step 2,")
        assert any(part.owner == "a" for part in members.record("c").parts)
        (host,) = (host for rank in a.children() for host in children(rank))
        os.kill(host, signal.SIGKILL)
        a.until("it is started again")
        assert [daemon.finish() for daemon in (a, b, c)] == [0, 0, 0]
        parts = [members.states(part, "a", "b", "c") for part in range(3)]
        found = [digest([each for replica in of_one for each in replica.outer.theta]) for of_one in zip(*parts, strict=True)]
        assert found == [hub] * 3


def test_rank_0_is_killed_and_torchrun_starts_all_ranks_and_their_host_again(tmp_path: Path) -> None:
    with swarm(tmp_path, outer_steps=6, start_peers=2, quorum=2) as members:
        a = members.start()
        a.until("owns part")
        b = members.join("b", ranks=2)
        b.until("outer step 2,")
        os.kill(b.children()[0], signal.SIGKILL)
        b.until("resuming from")
        b.until("joined at outer step")
        assert [daemon.finish() for daemon in (a, b)] == [0, 0]
        assert len({daemon.last("the run has finished at").split("digest ")[1][:12] for daemon in (a, b)}) == 1
