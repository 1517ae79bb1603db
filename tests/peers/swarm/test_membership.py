"""Founding a swarm, killed between any two of its writes; and where a member serves by default."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from aggregator.security.authority import Authority
from aggregator.swarm.admission import invite
from aggregator.swarm.founding import found as found_parts
from aggregator.swarm.host_folder import HostFolder, Settings
from aggregator.swarm.member_folder import MemberFolder
from edit import durable_files
from edit.config import run
from edit.config.auto import OuterChoice
from edit.config.presets import PRESETS, founding_text
from edit.config.run import RunConfig
from edit.errors import ConfigError, EditError, RefusedError, RemoteProtocolError, TransportError
from editpb.invitation import Invitation, guest_key
from peers.cli import app
from peers.identity.enrolment import UntrustedServerError, join
from peers.identity.peer_folder import PeerFolder
from peers.swarm import cli, daemon, invitations, membership
from peers.swarm.cli import _check_same
from peers.swarm.membership import Founding, Place, found, is_member
from peers.training.options import PeerOptions

RUN = """
name = "small"
[model]
layers = 1
width = 8
heads = 1
context = 8
[swarm]
parts = 2
"""
MOST_WRITES = 40


class Killed(BaseException):
    """As a SIGKILL ends a process: nothing is cleaned up that a `finally` does not."""


@pytest.fixture
def founding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Founding:
    """In this process, what another one does."""

    def ask(verb: str, home: Path, name: str, theta: Path) -> None:
        assert verb == "found"
        found_parts(home, name, theta, now=time.time())

    monkeypatch.setattr(membership, "ask", ask)
    run_toml = tmp_path / "run.toml"
    run_toml.write_text(RUN)
    return Founding(run_toml=run_toml, name="a")


def check_founded(home: Path) -> None:
    config = RunConfig.from_toml(home / "run.toml")
    enrolled, saved = PeerFolder(home).load(time.time(), swarm=True), MemberFolder(home).saved()
    assert saved is not None and saved.record is not None
    assert saved.record.run_id == enrolled.run_id and list(saved.record.members) == ["a"]
    assert saved.record.config_hash == Settings.load(home).config_hash and len(saved.record.parts) == 2
    assert all(any(MemberFolder(home).part(part).glob("step-*.safetensors")) for part in range(2))
    assert [ids for ids, _ in Settings.load(home).schemas(config)] and not (home / membership.THETA).exists()
    secret = [home / "peer.key", home / "authority" / "ca.key", home / "council.json"]
    assert {path.stat().st_mode & 0o777 for path in secret} == {0o600} and home.stat().st_mode & 0o777 == 0o700
    HostFolder(advertise="127.0.0.1", listen="127.0.0.1:7700").save(home)
    made = invite(home, "b", hours=1, now=time.time())
    assert made.swarm is not None and made.swarm.hosts == {"a": ("127.0.0.1:7700",)}


def test_founding_that_is_killed_after_any_write_is_completed_by_the_same_command(
    tmp_path: Path, founding: Founding, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = durable_files.rename
    for writes in range(MOST_WRITES):
        home, left = tmp_path / f"home-{writes}", writes

        def count(source: Path, target: Path) -> None:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            rename(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(durable_files, "rename", count)
            try:
                found(home, founding)
                break
            except Killed:
                assert not is_member(home)
        found(home, founding)
        assert is_member(home)
        check_founded(home)
    else:
        pytest.fail("it never got through")
    assert writes > 10
    check_founded(home)


def test_founding_goes_on_with_the_same_settings_only(tmp_path: Path, founding: Founding) -> None:
    found(tmp_path / "a", founding)
    founding.run_toml.write_text(RUN.replace("small", "other"))
    with pytest.raises(ConfigError, match=r"founded here with another run\.toml"):
        found(tmp_path / "a", founding)


def test_after_an_error_in_run_toml_the_mended_file_founds_in_the_same_folder(tmp_path: Path, founding: Founding) -> None:
    founding.run_toml.write_text(RUN.replace("parts = 2", "parts = 9"))
    with pytest.raises(ConfigError, match=r"swarm\.parts = 9: the model has 3 fragments"):
        found(tmp_path / "a", founding)
    founding.run_toml.write_text(RUN)
    found(tmp_path / "a", founding)
    check_founded(tmp_path / "a")


def test_a_swarm_is_founded_with_the_settings_of_the_command_line(tmp_path: Path, founding: Founding) -> None:
    home, given = tmp_path / "a", replace(founding, settings=("sync.every=7",))
    found(home, given)
    found(home, given)
    assert RunConfig.from_toml(home / "run.toml").sync.every == 7
    assert RunConfig.from_toml(founding.run_toml).sync.every != 7
    _check_same(home, founding.run_toml, None, ["sync.every=7"])
    _check_same(home, None, None, ["sync.every=7"])
    for run_toml, settings in ((founding.run_toml, []), (None, ["sync.every=8"])):
        with pytest.raises(ConfigError, match=r"has another run\.toml"):
            _check_same(home, run_toml, None, settings)


@pytest.mark.covering
@pytest.mark.parametrize("also", ["", "[sync]\nouter_steps = 156\n[outer]\npreset = 'auto'\n"])
@pytest.mark.parametrize("name", [name for name, one in PRESETS.items() if not one.only_harness])
def test_a_swarm_is_founded_with_a_preset(tmp_path: Path, founding: Founding, name: str, also: str) -> None:
    founding.run_toml.write_text(RUN.replace("layers = 1", "layers = 4") + also)
    home, given = tmp_path / "a", replace(founding, preset=name, settings=("inner.lr=4.5e-3",))
    found(home, given)
    found(home, given)
    config = RunConfig.from_toml(home / "run.toml")
    for section, keys in PRESETS[name].settings.items():
        for key, value in keys.items():
            if (section, key) == ("sync", "every"):
                assert config.sync.stretches[-1][1] == value
            else:
                assert getattr(getattr(config, section), key) == value, (section, key)
    assert config.inner.lr == 4.5e-3
    if name == "muloco-warmup" and also:
        assert config.sync.milestones == ((120, 30),)
    for run_toml in (founding.run_toml, None):
        _check_same(home, run_toml, name, given.settings)
        for preset, settings in ((name, ["inner.lr=1e-3"]), ("muloco" if name == "diloco" else "diloco", given.settings)):
            with pytest.raises(ConfigError, match=r"has another run\.toml"):
                _check_same(home, run_toml, preset, settings)


def test_who_founds_is_told_the_steps_and_the_outer_optimizer(
    tmp_path: Path, founding: Founding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "run_member", lambda options, prepare, serving: prepare())
    told = [
        CliRunner().invoke(
            app, ["swarm", "start", str(founding.run_toml), "--data", ".", "--home", str(tmp_path / home), *words]
        )
        for home, words in (("a", ["--preset", "muloco-warmup", "--set", "sync.outer_steps=156"]), ("b", []), ("b", []))
    ]
    assert [one.exit_code for one in told] == [0, 0, 0] and not any(one.stdout for one in told)
    assert told[0].stderr == "steps       156 outer steps: 120 with H 1, 36 with H 30; 1200 inner steps\n"
    assert told[1].stderr == f"outer       {RunConfig.from_toml(tmp_path / 'b' / 'run.toml').outer.chosen}\n"
    assert not told[2].stderr, "only who founds it is told"


def test_a_preset_that_no_swarm_can_have_is_refused(tmp_path: Path, founding: Founding) -> None:
    with pytest.raises(ConfigError, match=r"run\.toml: preset gpa: edit-lab compare has it, a run cannot"):
        found(tmp_path / "a", replace(founding, preset="gpa"))
    with pytest.raises(ConfigError, match=r"run\.toml: preset mulco: there is none; did you mean muloco\?"):
        found(tmp_path / "a", replace(founding, preset="mulco"))
    assert not (tmp_path / "a" / "run.toml").exists()


def test_what_auto_chooses_is_in_the_bytes_that_all_members_get(
    tmp_path: Path, founding: Founding, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = RUN + "[sync]\nouter_steps = 50 # short\nevery = 30\n"
    founding.run_toml.write_text(steps + "[outer]\nlr = 0.3\nmomentum = 0.2\n")
    home, settings = tmp_path / "a", ("outer.preset=auto",)
    given = replace(founding, settings=settings)
    found(home, given)
    found(home, given)
    config, text = RunConfig.from_toml(home / "run.toml"), (home / "run.toml").read_text()
    assert (config.outer.optimizer, config.outer.lr, config.outer.momentum) == ("nesterov", 0.7, 0.6)
    assert config.outer.chosen.startswith("nesterov 0.7 / 0.6: 50 outer steps of each fragment, H 30")
    assert "outer_steps = 50 # short" in text and founding.run_toml.read_text().endswith("momentum = 0.2\n")
    _check_same(home, founding.run_toml, None, settings)
    with pytest.raises(ConfigError, match=r"has another run\.toml"):
        _check_same(home, founding.run_toml, None, ["outer.lr=0.5"])
    with pytest.raises(ConfigError, match=r"outer\.chosen was written when another swarm was founded; remove it"):
        found(tmp_path / "b", replace(founding, run_toml=home / "run.toml"))

    founding.run_toml.write_text(steps.replace("50", "30") + '[outer]\npreset = "auto"\n')
    found(tmp_path / "c", founding)
    _check_same(tmp_path / "c", founding.run_toml, None, [])
    auto = founding.run_toml.read_text()
    for number, same in enumerate((auto + "\n", auto + "\n\n", auto + "  ", auto + "# a note\n", auto.replace("\n", "\r\n"))):
        founding.run_toml.write_bytes(same.encode())
        _check_same(tmp_path / "c", founding.run_toml, None, [])
        kept = tmp_path / str(number)
        kept.mkdir()
        (kept / "run.toml").write_text(founding_text(same, ()))
        _check_same(kept, founding.run_toml, None, [])
    founding.run_toml.write_text(auto.replace("every = 30", "every = 31"))
    with pytest.raises(ConfigError, match=r"has another run\.toml"):
        _check_same(tmp_path / "c", founding.run_toml, None, [])

    def other_version(**_: object) -> OuterChoice:
        return OuterChoice("nesterov", 0.1, 0.1, "another version of this package would choose this")

    monkeypatch.setattr(run, "choose_outer", other_version)
    assert RunConfig.from_toml(home / "run.toml") == config
    short = RunConfig.from_toml(tmp_path / "c" / "run.toml").outer
    assert (short.lr, short.momentum) == (0.7, 0.6) and short.chosen.startswith("nesterov 0.7 / 0.6: 30 outer steps")


def test_only_what_a_setting_makes_ineffective_gives_way_to_it(tmp_path: Path, founding: Founding) -> None:
    founding.run_toml.write_text(RUN + "[sync]\ndelay = 2\n")
    with pytest.raises(ConfigError, match=r"sync\.delay has no effect with sync\.mode"):
        found(tmp_path / "a", replace(founding, settings=("outer.preset=auto", 'sync.mode="blocking"')))
    founding.run_toml.write_text(RUN + '[outer]\npreset = "auto"\n')
    with pytest.raises(ConfigError, match=r"outer\.lr has no effect with outer\.preset"):
        found(tmp_path / "a", replace(founding, settings=("outer.lr=0.5",)))
    assert not (tmp_path / "a" / "run.toml").exists()


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (RUN.replace("[swarm]\nparts = 2", ""), r"has no section \[swarm\]"),
        (RUN + "[server]\n", r"\[server\] has no effect with \[swarm\]"),
        (RUN.replace("parts = 2", "parts = 9"), r"swarm\.parts = 9: the model has 3 fragments"),
        (RUN + "[sync]\ntokens = 5\n", r"sync\.tokens = 5: must be 0 with swarm\.parts"),
        (RUN.replace("parts = 2", "lease_s = 0.1"), r"swarm\.lease_s = 0\.1: must be at least twice"),
    ],
)
def test_settings_that_no_swarm_can_have(tmp_path: Path, founding: Founding, text: str, wrong: str) -> None:
    founding.run_toml.write_text(text)
    with pytest.raises(ConfigError, match=wrong):
        found(tmp_path / "a", founding)
    assert not is_member(tmp_path / "a")


@pytest.mark.parametrize(
    ("place", "seeds", "told"),
    [
        (Place(), [], ["--listen", "127.0.0.1:0", "--advertise", "127.0.0.1"]),
        (Place(), [("a", "127.0.0.1:7")], ["--listen", "127.0.0.1:0", "--advertise", "127.0.0.1", "--seed=a=127.0.0.1:7"]),
        (Place(), [("a", "192.0.2.1:7")], ["--listen", "127.0.0.1:0", "--advertise", "", "--seed=a=192.0.2.1:7"]),
        (Place(advertise="me.example"), [], ["--listen", "0.0.0.0:0", "--advertise", "me.example"]),
        (Place(advertise="[2001:db8::1]"), [], ["--listen", "[::]:0", "--advertise", "[2001:db8::1]"]),
        (Place(listen="192.0.2.9:7700"), [], ["--listen", "192.0.2.9:7700", "--advertise", "192.0.2.9"]),
    ],
)
def test_where_a_new_member_serves(tmp_path: Path, place: Place, seeds: Any, told: list[str]) -> None:
    assert place.arguments(tmp_path, seeds) == told


def test_where_a_member_serves_stays_unless_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "host.json").write_text("{}")
    assert Place().arguments(tmp_path) == []
    with pytest.raises(ConfigError, match="--advertise HOST"):
        Place(listen="0.0.0.0:7700").arguments(tmp_path)


def test_an_invitation_to_a_swarm_is_read_as_it_was_written_and_is_for_swarms_only(tmp_path: Path, founding: Founding) -> None:
    found(tmp_path / "a", founding)
    HostFolder(advertise="127.0.0.1", listen="127.0.0.1:1").save(tmp_path / "a")
    now = time.time()
    made = invite(tmp_path / "a", "b", hours=1, now=now)
    assert Invitation.decode(made.encode(), now) == made
    assert guest_key(made.token).private_numbers() == guest_key(made.token).private_numbers()
    with pytest.raises(ConfigError, match="an invitation to a swarm; redeem it with: edit-peer swarm join"):
        join(made.encode(), tmp_path / "b", now)
    with pytest.raises(RefusedError, match="expired"):
        join(made.encode(), tmp_path / "b", now + 3601, swarm=True)
    assert not (tmp_path / "b").exists()


def test_what_a_host_is_told_beside_its_place(tmp_path: Path) -> None:
    place = Place(
        advertise="", dht_peers=("/ip4/192.0.2.1/tcp/1/p2p/x", "/ip4/192.0.2.2/tcp/1/p2p/y"), max_mbit=2.5, hours="1:00-2:00"
    )
    words = place.arguments(tmp_path)
    assert words[words.index("--max-mbit") + 1] == "2.5" and words[words.index("--hours") + 1] == "1:00-2:00"
    assert [word for word in words if word.startswith("--dht")] == [f"--dht-peers={each}" for each in place.dht_peers]
    with pytest.raises(ConfigError, match="--hours"):
        Place(hours="night").arguments(tmp_path)


def test_where_nobody_answers_that_an_invitation_names_the_dht_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or where somebody else has its address by now; if the search fails then, its certificate is what is told of."""
    authority = Authority.create(tmp_path, "run", now=time.time())
    text = authority.invite_to_swarm("b", hosts={"a": ("127.0.0.1:1",)}, lifetime_s=60.0, now=time.time()).encode()
    tried, asked = list[object](), list[object]()
    silence: EditError = TransportError("no answer")
    failing: EditError | None = None

    def redeem(invitation: str, home: Path, now: float, *, swarm: bool, observes: bool) -> None:
        access = Invitation.decode(invitation).swarm
        assert access is not None
        tried.append(access.hosts)
        if access.hosts["a"] == ("127.0.0.1:1",):
            raise silence

    def ask(*words: object, told: str) -> list[str]:
        if failing is not None:
            raise failing
        asked.append((*words, told))
        return ["a=127.0.0.1:7", "a=[::1]:7", "c=h:8"]

    monkeypatch.setattr(invitations, "join", redeem)
    monkeypatch.setattr(invitations, "ask", ask)
    home = tmp_path / "home"
    home.mkdir()
    with pytest.raises(TransportError, match="no answer"):
        membership.enter(home, text)
    assert not asked
    seeds = membership.enter(home, f"{text}\n", ("/maddr",))
    found = {"a": ("127.0.0.1:7", "[::1]:7"), "c": ("h:8",)}
    assert seeds == [("a", "127.0.0.1:7"), ("a", "[::1]:7"), ("c", "h:8")] and tried[1:] == [{"a": ("127.0.0.1:1",)}, found]
    assert asked == [("seek-members", home / "seeking", "--dht-peers=/maddr", f"{text}\n")]
    silence = UntrustedServerError("of another authority, or the clock is wrong")
    assert membership.enter(home, text, ("/maddr",)) == seeds and len(asked) == 2
    failing = TransportError("the DHT does not know of any member")
    with pytest.raises(UntrustedServerError, match="the clock is wrong"):
        membership.enter(home, text, ("/maddr",))
    silence = TransportError("no answer")
    with pytest.raises(TransportError, match="the DHT does not know"):
        membership.enter(home, text, ("/maddr",))


def test_a_member_goes_on_where_an_invitation_cannot_be_redeemed(
    tmp_path: Path, founding: Founding, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The command of a service may name one for ever. Where the certificate is over, nothing could go on."""
    home, now = tmp_path / "home", time.time()
    found(home, founding)
    HostFolder(advertise="127.0.0.1", listen="127.0.0.1:7700").save(home)
    invited = invite(home, "a", hours=1, now=now)
    seeds = [("a", "127.0.0.1:7700")]
    (home / membership.REDEEMED).write_bytes(b"0" * 64)  # another one
    assert membership.enter(home, replace(invited, expires=int(now) - 60).encode()) == seeds
    assert "the invitation is not used: the invitation expired" in caplog.text and "a goes on as before" in caplog.text
    failures: list[EditError] = [
        ConfigError("another join is under way"),
        RefusedError("it was used"),
        TransportError("no answer"),
        RemoteProtocolError("of b"),
    ]
    failing = failures[0]

    def redeem(*words: object, swarm: bool, observes: bool) -> None:
        raise failing

    monkeypatch.setattr(invitations, "join", redeem)
    for failing in failures:
        caplog.clear()
        assert membership.enter(home, invited.encode()) == seeds
        assert f"the invitation is not used: {failing}; a goes on as before" in caplog.text
    monkeypatch.setattr(time, "time", lambda: now + 2 * 366 * 86400)
    for failing in failures:
        with pytest.raises(type(failing), match=str(failing)):
            membership.enter(home, invited.encode())


def test_an_observers_invitation_makes_its_folder_and_says_how_to_look_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority.create(tmp_path, "run", now=time.time())
    access = {"a": ("127.0.0.1:1", "[::1]:1"), "b": ("h:2",)}
    invited = authority.invite_to_swarm("eye", role="observer", hosts=access, lifetime_s=60.0, now=time.time())
    home, joined, asked = tmp_path / "her home", list[object](), list[object]()
    home.mkdir()

    def join(*words: object, swarm: bool, observes: bool) -> None:
        joined.append((*words[:2], swarm, observes))

    monkeypatch.setattr(invitations, "join", join)
    monkeypatch.setattr(invitations, "ask", lambda *words: asked.append(words))
    told = CliRunner().invoke(app, ["join", invited.encode(), "--home", str(home)], catch_exceptions=False)
    assert told.exit_code == 0, told.output
    assert told.output == (
        f"eye is an observer of run {invited.identity.run_id}; folder {home}\nnext: edit-peer swarm watch --home '{home}'\n"
        f"or, as a page in the browser: edit-peer swarm web --home '{home}'\n"
    )
    assert joined == [(invited.encode(), home, True, True)]
    assert asked == [("observe", home, "--seed=a=127.0.0.1:1", "--seed=a=[::1]:1", "--seed=b=h:2")]
    assert home.stat().st_mode & 0o777 == 0o700


def test_the_first_invitation_is_printed_by_the_first_start_that_serves(
    tmp_path: Path, founding: Founding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The site consents after the swarm was founded, where the run asks for that."""
    home, printed, refused = tmp_path / "home", list[str](), [True, False, False]

    def run_member(options: PeerOptions, prepare: Callable[[], list[str]], serving: Callable[[], None]) -> None:
        prepare()
        if refused.pop(0):
            raise ConfigError("nobody at this site has consented")
        (options.home / "host.json").write_text("{}")  # as its host does
        serving()

    monkeypatch.setattr(daemon, "run_member", run_member)
    monkeypatch.setattr(cli, "_print_invitation", lambda home, name, hours: printed.append(name))
    words = ["swarm", "start", str(founding.run_toml), "--data", str(tmp_path), "--home", str(home), "--invite", "b"]
    ended = [CliRunner().invoke(app, words).exception for _ in range(3)]
    assert isinstance(ended[0], ConfigError) and ended[1:] == [None, None] and printed == ["b"]


def test_a_swarm_is_not_founded_in_a_coordinators_folder(tmp_path: Path, founding: Founding) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match="is the folder of a coordinator; choose another --home"):
        found(home, founding)
    assert [path.name for path in home.iterdir()] == ["run.json"]


def test_a_folder_that_cannot_be_made_private_is_refused_before_a_key_lies_in_it(
    tmp_path: Path, founding: Founding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is somebody else's, as a container's volume may be."""

    def chmod(self: Path, mode: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Path, "chmod", chmod)
    with pytest.raises(
        ConfigError, match=r"cannot be made a private folder \(Operation not permitted\); choose another --home"
    ):
        found(tmp_path / "home", founding)
    assert not list((tmp_path / "home").iterdir())


def test_what_cannot_be_read_is_said_in_one_line(tmp_path: Path, founding: Founding) -> None:
    home = tmp_path / "home"
    found(home, founding)
    with pytest.raises(ConfigError, match=r"cannot be read \(Is a directory\)"):
        membership.same_run(home, tmp_path, None, ())
    (home / "run.toml").unlink()
    with pytest.raises(ConfigError, match=r"cannot be read \(No such file"):
        membership.same_run(home, None, None, ())
    with pytest.raises(ConfigError, match=r"cannot be read \(File name too long\)"):
        membership.has_served(tmp_path / ("x" * 300))
