"""A host that does not train, and what its site allows."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edit.config.run import RunConfig
from edit.errors import ConfigError
from peers.cli import app
from peers.identity.policy import digest_of
from peers.swarm import host_policy
from peers.swarm.host_policy import check_host
from tests.peers.swarm.test_daemon import member
from tests.support.council.audited import audited_toml

PARAMETERS = 5_000


@pytest.fixture(autouse=True)
def _asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What the host's program is asked: it answers, and brings the settings."""
    asked = list[list[str]]()

    def parameters_of(home: Path, arguments: list[str]) -> int:
        asked.append(arguments)
        (home / "run.toml").write_text(audited_toml())
        return PARAMETERS

    monkeypatch.setattr(host_policy, "parameters_of", parameters_of)
    return asked


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ("[limits]\nmax_parameters = 5_000\nuntil = 2999-01-01\n[require]\naudit = true\nmin_peers = 2", ""),
        ("[protect]\nclip = 1.0\nhide = ['loss']\n[data]\nstatement = 'notes'", ""),
        ("[limits]\nmax_parameters = 4_999", r"limits\.max_parameters = 4999: the run's model has 5000"),
        ('[limits]\nmodels = ["hf:*"]', r"limits\.models .*this host does not start"),
        ("[limits]\nuntil = 2020-01-01", r"limits\.until = 2020-01-01: that is over; this host does not start"),
        ("[limits]\nmax_gb_per_day = 5", "a member of a swarm serves its parts to others, too"),
        ("[require]\nmin_peers = 3", r"require\.min_peers = 3: the run has rounds\.quorum = 2; this host does not start"),
        ("[require]\nsecagg = true", r"require\.secagg = true"),
        ("[accept]", "nobody at this site has consented to the run's configuration sha256:"),
        ("[accept]\nruns = 7", r"policy\.toml: "),
    ],
)
@pytest.mark.parametrize("told", [True, False])
def test_a_host_starts_only_if_its_site_allows_the_settings(
    tmp_path: Path, policy: str, why: str, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """told: whether the folder has the run's settings."""
    caplog.set_level(logging.INFO)
    home = member(tmp_path)
    (home / "policy.toml").write_text(policy)
    if not told:
        (home / "run.toml").unlink()
    if why:
        with pytest.raises(ConfigError, match=why):
            check_host(home, [])
        return
    check_host(home, [])
    (line,) = [each.message for each in caplog.records if each.name == "peers"]
    assert line.startswith(f"{home}/policy.toml allows it; [protect] and [data] have no effect")


def test_a_site_without_a_policy_and_a_consent_has_no_say_and_one_with_a_consent_has(
    tmp_path: Path, _asked: list[list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    home = member(tmp_path)
    check_host(home, ["--listen", "127.0.0.1:0"])
    digest = digest_of(RunConfig.from_toml(home / "run.toml").to_json())
    assert CliRunner().invoke(app, ["consent", "--home", str(home), "--accept", digest]).exit_code == 0
    check_host(home, [])
    assert not _asked and not [each for each in caplog.records if each.name == "peers"]
    (home / "run.toml").write_text(audited_toml().replace("lr = 0.7", "lr = 0.5"))
    with pytest.raises(ConfigError, match=r"not the one that this site consented to: outer\.lr = 0\.5 \(was 0\.7\)"):
        check_host(home, [])


def test_a_host_is_asked_for_no_consent_where_the_run_wants_one_of_those_who_train(tmp_path: Path) -> None:
    home = member(tmp_path)
    (home / "run.toml").write_text(f"{audited_toml()}[membership]\nconsent = true\n")
    (home / "policy.toml").write_text("[require]\naudit = true\n")
    check_host(home, [])


def test_the_hosts_program_is_told_what_the_host_will_be(tmp_path: Path, _asked: list[list[str]]) -> None:
    home = member(tmp_path)
    (home / "run.toml").unlink()
    (home / "policy.toml").write_text("[require]\naudit = true\n")
    check_host(home, ["--seed=a=127.0.0.1:7000"])
    assert _asked == [["--seed=a=127.0.0.1:7000"]]
