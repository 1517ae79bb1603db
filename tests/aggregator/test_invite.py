"""What `edit-coordinator invite` says of the addresses in an invitation."""

import errno
import os
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from aggregator.cli import app
from edit.errors import ConfigError
from editpb.invitation import MAX_ENDPOINTS, Invitation, is_endpoint

LOOPBACK = "only this machine reaches these addresses"


@pytest.mark.parametrize(
    ("advertise", "reachable"),
    [
        (["127.0.0.1", "localhost"], False),
        (["[::1]"], False),
        (["::1"], False),
        (["2001:db8::7"], True),
        (["127.0.0.1", "train.example"], True),
        (["10.0.0.7"], True),
        ([f"host-{number}.example" for number in range(MAX_ENDPOINTS)], True),
    ],
)
def test_invite_names_the_addresses_and_says_when_only_this_machine_reaches_them(
    tmp_path: Path, advertise: list[str], reachable: bool
) -> None:
    run_toml = tmp_path / "run.toml"
    run_toml.write_text(f'[model]\nname = "entry:mine"\n[server]\nlisten = "0.0.0.0:7700"\nadvertise = {advertise}\n')
    assert CliRunner().invoke(app, ["init", "--state", f"{tmp_path}/s", "--config", str(run_toml)]).exit_code == 0
    said = CliRunner().invoke(app, ["invite", "--state", f"{tmp_path}/s", "a"])
    assert said.exit_code == 0
    enrol = Invitation.decode(said.stdout.strip()).enrol
    assert f"redeemed at {', '.join(enrol)}" in said.stderr
    assert [endpoint.rpartition(":")[0].strip("[]") for endpoint in enrol] == [host.strip("[]") for host in advertise]
    assert all(map(is_endpoint, enrol)), "an IPv6 address in brackets"
    assert (LOOPBACK not in said.stderr) == reachable


def test_an_invitation_that_could_not_be_printed_is_withdrawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CliRunner().invoke(app, ["init", "--state", f"{tmp_path}/s"]).exit_code == 0

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(typer, "echo", full)
    assert isinstance(CliRunner().invoke(app, ["invite", "--state", f"{tmp_path}/s", "a"]).exception, OSError)
    assert not list((tmp_path / "s" / "invitations").iterdir())


def test_where_stdout_is_closed_nobody_is_invited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CliRunner().invoke(app, ["init", "--state", f"{tmp_path}/s"]).exit_code == 0
    monkeypatch.setattr("sys.stdout", None)
    with pytest.raises(ConfigError, match="stdout is closed"):
        app(["invite", "--state", f"{tmp_path}/s", "a"], standalone_mode=False)
    assert not list((tmp_path / "s").glob("invitations/*"))


@pytest.mark.parametrize(("trust", "said"), [("none", True), ("loss", False)])
def test_an_invitation_for_a_scorer_says_when_the_run_has_no_use_of_one(tmp_path: Path, trust: str, said: bool) -> None:
    run_toml = tmp_path / "run.toml"
    run_toml.write_text(f'[model]\nname = "entry:mine"\n[robust]\ntrust = "{trust}"\n')
    assert CliRunner().invoke(app, ["init", "--state", f"{tmp_path}/s", "--config", str(run_toml)]).exit_code == 0
    result = CliRunner().invoke(app, ["invite", "--state", f"{tmp_path}/s", "judge", "--role", "scorer"])
    assert result.exit_code == 0 and Invitation.decode(result.stdout.strip()).identity.role == "scorer"
    assert ("a scorer has nothing to do in this run" in result.stderr) == said
