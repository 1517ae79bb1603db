"""A member that trains: which settings it cannot train with, and what its site allows."""

import json
import time
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from typer.testing import CliRunner

from aggregator.security.authority import Authority
from aggregator.storage.state_folder import StateFolder
from edit.config.run import RunConfig
from edit.errors import ConfigError
from edit.trust.signatures import Signer
from editpb.identity import Identity
from editpb.seen_entries import SeenBy, SeenEntry, seen_file, seen_line
from peers.cli import app
from peers.identity.peer_folder import PeerFolder
from peers.identity.policy import digest_of
from peers.swarm import daemon
from peers.swarm.daemon import check_ranks, check_settings
from tests.support.council.audited import audited_toml
from tests.support.served import new_folder


def test_a_member_of_several_ranks_is_refused_with_gossip() -> None:
    gossip = RunConfig.from_mapping({"outer": {"algorithm": "gossip"}})
    for config, size in ((gossip, 1), (RunConfig(), 2)):
        check_ranks(config, size)
    with pytest.raises(ConfigError, match=r"needs members of one rank each, and this one has 2"):
        check_ranks(gossip, 2)


def member(tmp_path: Path) -> Path:
    """The folder of a member of a swarm, as it is once its host was told the settings."""
    home = tmp_path / "home"
    enrol(new_folder(tmp_path / "run"), home)
    (home / "run.toml").write_text(audited_toml())
    return home


def enrol(run: StateFolder, home: Path) -> None:
    """As joining does; with a new key, if there is none."""
    authority = Authority.load(run.path, run.run_id)
    folder, identity = PeerFolder(home), Identity(run.run_id, "peer", "a")
    certificate = authority.issuer.issue(identity, folder.make_key().public_key(), lifetime_s=3600, now=time.time())
    der = serialization.Encoding.DER
    ca = x509.load_pem_x509_certificate((run.path / "ca.pem").read_bytes())
    folder.store(identity, (), certificate.public_bytes(der), ca.public_bytes(der))


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ("", ""),
        ("[require]\naudit = true\nmin_peers = 2", ""),
        ("[require]\nmin_peers = 3", r"require\.min_peers = 3: the run has rounds\.quorum = 2"),
        ('[limits]\nmodels = ["hf:*"]', r"limits\.models"),
        ("[limits]\nmax_gb_per_day = 5", "a member of a swarm serves its parts to others, too"),
        ("[require]\ngovernance = true", "the run has no governance"),
        ("[accept]", "nobody at this site has consented to the run's configuration sha256:"),
    ],
)
def test_a_member_does_not_start_with_settings_that_its_site_does_not_allow(tmp_path: Path, policy: str, why: str) -> None:
    home = member(tmp_path)
    (home / "policy.toml").write_text(policy)
    if not why:
        check_settings(home)
        return
    with pytest.raises(ConfigError, match=why):
        check_settings(home)
    (home / "run.toml").unlink()
    check_settings(home)  # its host will be told; then the peer looks


def test_a_site_with_a_policy_looks_at_the_settings_before_its_host_joins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, asked = member(tmp_path), list[list[str]]()
    settings = (home / "run.toml").read_text()
    (home / "run.toml").unlink()

    def parameters_of(folder: Path, arguments: list[str]) -> int:
        asked.append(arguments)
        (folder / "run.toml").write_text(settings)
        return 1

    monkeypatch.setattr(daemon, "parameters_of", parameters_of)
    assert daemon._allowed(home, ["--seed=b=b:1"]) == ["--seed=b=b:1"] and not asked, "without a policy its host is told"
    (home / "policy.toml").write_text("[require]\ngovernance = true\n")
    with pytest.raises(ConfigError, match="the run has no governance"):
        daemon._allowed(home, ["--seed=b=b:1"])
    (home / "policy.toml").write_text("[require]\naudit = true\n")
    assert daemon._allowed(home, []) == [] and asked == [["--seed=b=b:1"]], "they are asked for once"


def test_a_site_consents_to_the_settings_of_a_swarm_in_its_folder_and_to_no_others(tmp_path: Path) -> None:
    home = member(tmp_path)
    (home / "policy.toml").write_text("[accept]\n")
    digest = digest_of(RunConfig.from_toml(home / "run.toml").to_json())
    said = CliRunner().invoke(app, ["consent", "--home", str(home), "--accept", digest])
    assert said.exit_code == 0 and f"configuration {digest}" in said.output and "a swarm, without a coordinator" in said.output
    check_settings(home)
    (home / "run.toml").write_text(audited_toml().replace("lr = 0.7", "lr = 0.5"))
    with pytest.raises(ConfigError, match=r"not the one that this site consented to: outer\.lr = 0\.5 \(was 0\.7\)"):
        check_settings(home)


def test_a_member_does_not_start_with_what_another_has_seen_of_the_audit_log(tmp_path: Path) -> None:
    home = member(tmp_path)
    folder, run_id = PeerFolder(home), PeerFolder(home).load(swarm=True).run_id
    signer, seen = Signer(folder.key()), SeenEntry(1, bytes(32), bytes(32))
    for name, why in (
        ("a", ""),
        ("b", r"receipts-part-0\.jsonl: line 1 cannot be used: b has seen it, of part 0 .* this is a"),
    ):
        seen_file(home, 0).write_bytes(seen_line(SeenBy(run_id, name, 0), seen, signer) + b"\n")
        if not why:
            check_settings(home)
            continue
        with pytest.raises(ConfigError, match=why):
            check_settings(home)


def test_a_member_with_a_new_key_goes_on_from_what_it_has_seen_with_the_earlier_one(tmp_path: Path) -> None:
    run, home = new_folder(tmp_path / "run"), tmp_path / "home"
    enrol(run, home)
    (home / "run.toml").write_text(audited_toml())
    folder, by = PeerFolder(home), SeenBy(run.run_id, "a", 0)

    def line(step: int) -> bytes:
        return seen_line(by, SeenEntry(step, bytes(32), bytes(32)), Signer(folder.key())) + b"\n"

    first = line(1)
    (home / "peer.key").unlink()
    enrol(run, home)
    seen_file(home, 0).write_bytes(first + line(2))
    check_settings(home)
    (home / "earlier.pem").unlink()
    with pytest.raises(ConfigError, match=r"line 1 cannot be used: it is not signed with a key of this peer; .*move it away"):
        check_settings(home)


def test_a_command_for_a_run_with_a_coordinator_says_that_this_is_the_folder_of_a_swarms_member(tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["audit", "verify", "--home", str(member(tmp_path))]).exception
    assert isinstance(said, ConfigError)
    assert "its run is a swarm, whose logs lie there: edit-peer swarm audit verify --home " in str(said)


def test_what_leaves_the_site_is_told_before_the_member_was_let_in(tmp_path: Path) -> None:
    home = member(tmp_path)
    (home / "policy.toml").write_text('[protect]\nhide = ["device"]')
    (home / "run.toml").write_text("[audit]\nenabled = true\n[swarm]\n")
    told = CliRunner().invoke(app, ["explain", "--home", str(home)])
    assert told.exit_code == 0, told.exception
    assert "contributions, if it trains" in told.stdout and "all without device (protect.hide)" in told.stdout
    assert "audit log of every member" in told.stdout and "Not sent: the training data" in told.stdout
    assert {"sent", "not_sent"} == json.loads(CliRunner().invoke(app, ["explain", "--json", "--home", str(home)]).stdout).keys()
    (home / "run.toml").unlink()
    for command in ("explain", "consent"):
        said = CliRunner().invoke(app, [command, "--home", str(home)]).exception
        assert isinstance(said, ConfigError) and "the run's settings are not here yet; other members tell" in str(said)
