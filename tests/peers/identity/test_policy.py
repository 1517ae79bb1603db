"""What a site allows: each key of policy.toml refuses by its name, and a consent is to one configuration of one run."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from edit.config.run import RunConfig
from edit.errors import ConfigError
from editpb.identity import Identity
from peers.identity.policy import NO_POLICY, Consent, SitePolicy, changes, digest_of
from tests.support.keys import member_key

IDENTITY = Identity("run1", "peer", "a")
KEY = member_key()
NOW = datetime.datetime(2026, 11, 23, 12, tzinfo=datetime.UTC).timestamp()


def config(**sections: Any) -> RunConfig:
    return RunConfig.from_mapping({"rounds": {"start_peers": 3, "quorum": 3}, **sections})


NOISY = {
    "penalty": {"enabled": False},
    "privacy": {"level": "organisation", "epsilon_max": 8.0, "delta": 1e-5, "noise_multiplier": 8.0},
}


def policy(home: Path, text: str | None = None, identity: Identity = IDENTITY) -> SitePolicy:
    if text is not None:
        (home / "policy.toml").write_text(text)
    return SitePolicy.load(home, identity, lambda: KEY, lambda: NOW)


def check(found: SitePolicy, run: RunConfig) -> None:
    found.check(run.to_json(), run)


@pytest.mark.parametrize(
    ("text", "sections", "message"),
    [
        ('[limits]\nmodels = ["hf:*"]', {}, "limits.models = ['hf:*']: the run trains builtin:gpt"),
        ("[limits]\nuntil = 2026-11-22", {}, "limits.until = 2026-11-22: that is over"),
        ("[require]\nsecagg = true", {}, "require.secagg = true: the run has secagg.enabled = false"),
        ("[require]\nmin_peers = 4", {}, "require.min_peers = 4: the run has rounds.quorum = 3"),
        ("[require]\naudit = true", {}, "require.audit = true: the run has audit.enabled = false"),
        ("[require]\ngovernance = true", {}, "require.governance = true: the run has no governance.approvers"),
        ('[require]\nprivacy = "example"', {}, 'require.privacy = "example": the run has privacy.level = "none"'),
        ('[require]\nprivacy = "organisation"', {}, 'require.privacy = "organisation": the run has privacy.level = "none"'),
        ('[require]\nprivacy = "example"', NOISY, 'require.privacy = "example": the run has privacy.level = "organisation"'),
        (
            '[require]\nprivacy = "organisation"\nepsilon_max = 4',
            NOISY,
            "require.epsilon_max = 4: the run has privacy.epsilon_max = 8",
        ),
        (
            '[require]\nprivacy = "example"\nepsilon_max = 4',
            {"privacy": {"level": "example", "epsilon_max": 8.0, "delta": 1e-5, "noise_multiplier": 1.0}},
            "require.epsilon_max = 4: the run has privacy.epsilon_max = 8",
        ),
        (
            "[protect]\nclip = 0.5",
            {"aggregators": {"addresses": ["b.example:7700"]}},
            "protect.clip = 0.5: the run's model is in 2 parts, with a contribution to each",
        ),
        (
            "[limits]\nmax_gb_per_day = 5",
            {"swarm": {}},
            "limits.max_gb_per_day = 5: a member of a swarm serves its parts to others, too",
        ),
        (
            "[protect]\nclip = 0.5",
            {"swarm": {}},
            "protect.clip = 0.5: the run's model is in 4 parts, with a contribution to each",
        ),
        (
            "[protect]\nclip = 0.5",
            {"swarm": {"parts": 1}, "outer": {"algorithm": "gossip"}, "rounds": {"start_peers": 3}},
            'protect.clip = 0.5: with outer.algorithm = "gossip" partners swap parameters, which are not shortened',
        ),
    ],
)
def test_each_key_refuses_by_its_name(tmp_path: Path, text: str, sections: dict[str, Any], message: str) -> None:
    found = policy(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        check(found, config(**sections))
    assert str(error.value) == f"{tmp_path / 'policy.toml'}: {message}; this peer does not take part"


def test_noise_of_the_coordinator_is_what_a_site_may_ask_for(tmp_path: Path) -> None:
    found = policy(tmp_path, '[require]\nprivacy = "organisation"\nepsilon_max = 8')
    check(found, config(**NOISY))


def test_what_it_allows_passes(tmp_path: Path) -> None:
    text = (
        '[limits]\nmodels = ["builtin:*"]\nuntil = 2026-11-23\nmax_parameters = 100\n'
        '[require]\nsecagg = true\nmin_peers = 3\naudit = true\nprivacy = "example"\nepsilon_max = 8.0\n'
    )
    private = {"level": "example", "epsilon_max": 8.0, "delta": 1e-5, "noise_multiplier": 1.0}
    found = policy(tmp_path, text)
    check(found, config(secagg={"enabled": True}, audit={"enabled": True}, privacy=private))
    found.check_parameters(100)
    with pytest.raises(ConfigError, match=r"limits\.max_parameters = 100: the run's model has 101; this peer does"):
        found.check_parameters(101)
    check(NO_POLICY, config())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[limit]\n", "limit: unknown key; did you mean limits?"),
        ("[require]\nsecaggs = true", "require.secaggs: unknown key; did you mean require.secagg?"),
        ("[require]\nsecagg = 1", "require.secagg: must be bool, not int"),
        ("[require]\nmembers = 'members.txt'", "require.members = 'members.txt': has no effect without require.secagg"),
        ("[require]\nepsilon_max = 8.0", "require.epsilon_max = 8.0: has no effect without require.privacy"),
        ('[require]\nprivacy = "organization"', 'require.privacy = \'organization\': must be "example" or "organisation"'),
        ('[limits]\nuntil = "2026"', "limits.until: must be date, not str"),
        (
            "[limits]\nuntil = 2027-01-01T00:00:00Z",
            "limits.until = 2027-01-01 00:00:00+00:00: must be a day such as 2027-01-01",
        ),
        ("[limits]\nuntil = 2027-01-01 12:00:00", "limits.until = 2027-01-01 12:00:00: must be a day such as 2027-01-01"),
        ("[limits]\nmax_parameters = -1", "limits.max_parameters = -1: must not be negative"),
        ('[accept]\nruns = ["abc"]', "accept.runs = 'abc': must be sha256: and 64 hexadecimal digits"),
        ("[limits]\nmax_gb_per_day = -1.0", "limits.max_gb_per_day = -1.0: must be a number, and not negative"),
        ('[data]\nmanifest = "abc"', "data.manifest = 'abc': must be sha256: and 64 hexadecimal digits"),
        ('[data]\nlicence = "a\\nb"', "data.licence = 'a\\nb': must be one printable line of at most 512 characters"),
        ("[protect]\nclip = -1.0", "protect.clip = -1.0: must be a number, and not negative"),
        ("[protect]\nclip = nan", "protect.clip = nan: must be a number, and not negative"),
        ('[protect]\nhide = ["tokens"]', "protect.hide = 'tokens': must be of loss, tokens_per_s, step_s, device, metrics"),
        ("[require", "is not TOML"),
        (f"[limits]\nmax_parameters = {'1' * 5000}", "is not TOML: an integer has too many digits"),
    ],
)
def test_a_policy_that_says_something_else_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        policy(tmp_path, text)
    assert str(error.value).startswith(f"{tmp_path / 'policy.toml'}: {message}")


def consented(home: Path, run: RunConfig, identity: Identity = IDENTITY) -> None:
    Consent.give(identity, run.to_json(), "", KEY).save(home)


def test_with_the_section_accept_nobody_takes_part_unasked(tmp_path: Path) -> None:
    run = config()
    with pytest.raises(
        ConfigError, match=f"nobody at this site has consented to the run's configuration {digest_of(run.to_json())}"
    ):
        check(policy(tmp_path, "[accept]"), run)
    check(policy(tmp_path, f'[accept]\nruns = ["{digest_of(run.to_json())}"]'), run)
    consented(tmp_path, run)
    check(policy(tmp_path, "[accept]"), run)


def test_a_consent_is_to_one_configuration_and_to_what_may_change_unasked(tmp_path: Path) -> None:
    manual = {"preset": "manual"}  # else the outer optimizer would follow H
    consented(tmp_path, config(outer=manual))
    check(policy(tmp_path), config(outer=manual))
    other = config(sync={"every": 7}, membership={"lease_s": 99.0}, outer=manual)
    with pytest.raises(ConfigError) as error:
        check(policy(tmp_path), other)
    was = config()
    assert str(error.value) == (
        "the run's configuration is not the one that this site consented to: "
        f"membership.lease_s = 99.0 (was {was.membership.lease_s}), sync.every = 7 (was {was.sync.every}); "
        f"look at it with: edit-peer consent --home {tmp_path}"
    )
    with pytest.raises(ConfigError, match=r"consented to: sync\.every = 7 \(was [0-9]+\); look"):
        check(policy(tmp_path, '[accept]\nauto = ["membership.*"]'), other)
    check(policy(tmp_path, '[accept]\nauto = ["membership.*", "sync.every"]'), other)


def test_the_members_are_those_that_the_policy_names(tmp_path: Path) -> None:
    assert policy(tmp_path).members({"b": ("0" * 64,)}, "--members") == {"b": ("0" * 64,)}
    (tmp_path / "members.txt").write_text(f"c sha256:{'1' * 64}\n")
    found = policy(tmp_path, '[require]\nsecagg = true\nmembers = "members.txt"\n')
    assert found.members(None, "--members") == {"c": ("1" * 64,)}
    with pytest.raises(ConfigError, match=r"^--members: .*policy.toml names the members \(require\.members\); leave it out$"):
        found.members({}, "--members")


def test_many_changes_are_counted(tmp_path: Path) -> None:
    consented(tmp_path, config())
    values = json.loads(config().to_json())
    text = json.dumps(values | {"new": {f"key{i:02}": i for i in range(15)}})
    with pytest.raises(ConfigError, match=r"new\.key11 = 11 \(was null\), and 3 more; look"):
        policy(tmp_path).check(text, config())


def test_a_consent_to_another_run_is_none(tmp_path: Path) -> None:
    consented(tmp_path, config(), Identity("run2", "peer", "a"))
    assert policy(tmp_path).consent is None
    with pytest.raises(ConfigError, match="nobody at this site has consented"):
        check(policy(tmp_path, "[accept]"), config())


def test_a_consent_that_was_changed_or_is_anothers_is_refused(tmp_path: Path) -> None:
    consented(tmp_path, config())
    path = tmp_path / "consent.json"
    whole = path.read_text()
    for wrong, why in (
        (whole.replace('\\"every\\": ', '\\"every\\": 1'), "is not signed with this peer's key"),
        (whole.replace('"run1"', '"run9"'), "is not signed with this peer's key"),
        (whole[:-20], "is damaged"),
        ("{}", "is damaged"),
    ):
        assert wrong != whole
        path.write_text(wrong)
        with pytest.raises(ConfigError, match=f"consent.json: {why}"):
            policy(tmp_path)
    path.write_text(whole)
    with pytest.raises(ConfigError, match="is not signed with this peer's key"):
        SitePolicy.load(tmp_path, IDENTITY, member_key)


def test_what_differs_is_named_with_both_values() -> None:
    before, after = config(), config(sync={"every": 3}, codec={"fragments": {"embedding*": {"up": "fp32"}}})
    found = changes(before.to_json(), after.to_json())
    assert found[-1] == f"sync.every = 3 (was {before.sync.every})" and found[0].startswith("codec.fragments")
    assert changes(before.to_json(), before.to_json()) == []
