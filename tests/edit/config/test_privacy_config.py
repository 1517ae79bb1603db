"""[privacy] level = "organisation": every setting that would let something out past the noise is refused by name, and why."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from edit.config.gaussian import gaussian_epsilon, gaussian_multiplier
from edit.config.run import RunConfig
from edit.errors import ConfigError

PRIVACY = {"level": "organisation", "delta": 1e-5, "epsilon_max": 4.0, "noise_multiplier": 12.0}
BASE: Mapping[str, Any] = {"penalty": {"enabled": False}, "privacy": PRIVACY}
ON = 'with privacy.level = "organisation": '


def reason(**sections: Mapping[str, Any]) -> str:
    together = {name: {**BASE.get(name, {}), **values} for name, values in sections.items()}
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_mapping({**BASE, **together})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_it_is_a_configuration_and_divides_by_the_peers_at_the_start() -> None:
    config = RunConfig.from_mapping({**BASE, "rounds": {"start_peers": 7}})
    assert config.privacy.of_organisations and not config.privacy.of_examples and config.denominator == 7
    assert RunConfig.from_mapping({**BASE, "privacy": {**PRIVACY, "denominator": 3}}).denominator == 3
    assert RunConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"penalty": {"enabled": True}}, "penalty.enabled = True: must be false " + ON),
        ({"penalty": {"weighting": "tokens"}}, "penalty.weighting = 'tokens': must be \"uniform\" " + ON),
        ({"robust": {"rule": "clip"}}, "robust.rule = 'clip': must be \"none\" " + ON),
        (
            {"secagg": {"enabled": True}, "rounds": {"quorum": 3, "start_peers": 3}},
            "secagg.enabled = True: must be false " + ON,
        ),
        (
            {"rounds": {"merging": "arrivals", "max_staleness": 4}},
            "rounds.merging = 'arrivals': must be \"rounds\" " + ON,
        ),
        ({"rounds": {"max_staleness": 1}}, "rounds.max_staleness = 1: must be 0 " + ON),
        ({"outer": {"direction": "rda"}}, "outer.direction = 'rda': must be \"mean\" " + ON),
        ({"outer": {"correct": "heloco"}}, "outer.correct = 'heloco': must be \"none\" " + ON),
        ({"outer": {"merger": "entry:mine"}}, "outer.merger = 'entry:mine': must be \"mean\" " + ON),
        ({"membership": {"share_losses": True}}, "membership.share_losses = True: must be false " + ON),
        (
            {"aggregators": {"addresses": ["b.example:7710"]}},
            "aggregators.addresses = ('b.example:7710',): must be absent " + ON,
        ),
        ({"swarm": {}}, "swarm = '[swarm]': must be absent " + ON),
        ({"inner": {"batch_growth": 8, "accumulation": 2}}, "inner.batch_growth = 8: must be 1 " + ON),
        ({"sync": {"mode": "eager"}}, "sync.mode = 'eager': must not be eager " + ON),
        ({"privacy": {"epsilon_max": 0.0}}, 'privacy.epsilon_max = 0.0: must be given, above 0, with privacy.level = "org'),
        ({"privacy": {"delta": 0.0}}, 'privacy.delta = 0.0: must be given, above 0, with privacy.level = "organisation"'),
        ({"privacy": {"noise_multiplier": 0.1}}, "privacy.noise_multiplier = 0.1: must be at least 0.3 with privacy.level"),
        ({"privacy": {"sampling": "shuffle"}}, 'privacy.sampling has no effect with privacy.level = "organisation"; remove it'),
        ({"privacy": {"unit": "sequence"}}, 'privacy.unit has no effect with privacy.level = "organisation"; remove it'),
    ],
)
def test_what_goes_past_the_noise_is_refused_by_name(sections: dict[str, Any], message: str) -> None:
    found = reason(**sections)
    assert found.startswith(message)
    assert not message.endswith(ON) or len(found) > len(message) + 10, "it says why"


def test_delta_must_be_below_what_gives_a_member_away() -> None:
    most = f"{16**-1.1:.3g}"
    found = reason(rounds={"start_peers": 16}, privacy={"delta": 0.05})
    assert found.startswith(f"privacy.delta = 0.05: must be below {most} = 16 ** -1.1 (rounds.start_peers = 16) with privacy.")
    assert "(privacy.denominator = 20)" in reason(privacy={"delta": 0.05, "denominator": 20})


def test_where_the_noise_is_not_given_what_fits_is_said() -> None:
    found = reason(privacy={"noise_multiplier": 0.0}, sync={"outer_steps": 100})
    assert found.startswith('privacy.noise_multiplier = 0: must be given with privacy.level = "organisation": 10.8')
    said = float(found.split('"organisation": ')[1].split(" ")[0])
    assert "fits sync.outer_steps = 100 and privacy.epsilon_max = 4" in found
    assert gaussian_multiplier(4.0, 1e-5, 100) <= said and gaussian_epsilon(1e-5, 100, said) <= 4.0
    assert gaussian_epsilon(1e-5, 100, said - 0.02) > 4.0


def test_a_budget_that_allows_no_outer_step_is_refused() -> None:
    found = reason(privacy={"noise_multiplier": 1.0})
    cost = gaussian_epsilon(1e-5, 1, 1.0)
    assert (
        found == f"privacy.epsilon_max = 4.0: is below {cost:.4g}, which one outer step costs with privacy.noise_multiplier = 1"
    )


def test_what_a_run_with_privacy_of_examples_sends_is_what_it_was() -> None:
    """Its digest is what sites have consented to."""
    of_examples = {"level": "example", "delta": 1e-6, "epsilon_max": 8.0, "noise_multiplier": 1.0}
    sent = json.loads(RunConfig.from_mapping({"privacy": of_examples}).to_json())["privacy"]
    assert sent == {**of_examples, "clip": 1.0, "sampling": "poisson", "unit": "sequence"}
    assert "privacy" not in json.loads(RunConfig().to_json())
    with pytest.raises(ConfigError, match=r"privacy\.denominator has no effect with privacy\.level = \"example\"; remove it"):
        RunConfig.from_mapping({"privacy": {**of_examples, "denominator": 3}})
