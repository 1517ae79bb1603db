"""[governance]: who may approve, and how many must; what cannot keep approvals is refused by name, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from edit.config.run import RunConfig
from edit.errors import ConfigError

HASH = "a" * 64
AUDIT: Mapping[str, Any] = {"audit": {"enabled": True}}
BOTH: Mapping[str, Any] = {"approvers": ["basel", "delft", "oslo"], "needed": 2}


def test_it_is_off_and_leaves_the_configuration_as_it_was() -> None:
    config = RunConfig()
    assert not config.governance.enabled and "governance" not in config.to_json()


def test_approvers_are_names_with_or_without_the_hash_of_a_key() -> None:
    section = {"approvers": ["basel", f"delft sha256:{HASH}"], "needed": 1}
    config = RunConfig.from_mapping({**AUDIT, "governance": section})
    assert config.governance.names == ("basel", "delft") and config.governance.keys == {"delft": HASH}
    assert RunConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({**AUDIT, "governance": {"approvers": ["a"]}}, "governance.needed = 0: must be between 1 and 1, the number of gov"),
        ({**AUDIT, "governance": {**BOTH, "needed": 4}}, "governance.needed = 4: must be between 1 and 3, the number of gov"),
        ({**AUDIT, "governance": {"needed": 1}}, "governance.needed = 1: must be 0, or absent, without governance.approvers: "),
        ({**AUDIT, "governance": {"needed": 33}}, "governance.needed = 33: must be between 0 and 32"),
        (
            {**AUDIT, "governance": {"approvers": ["a", f"a sha256:{HASH}"], "needed": 1}},
            "governance.approvers = 'a': must not be named twice: each approver counts once",
        ),
        (
            {**AUDIT, "governance": {"approvers": ["a b"], "needed": 1}},
            "governance.approvers = 'a b': must be the name of a mem",
        ),
        (
            {**AUDIT, "governance": {"approvers": ["operator"], "needed": 1}},
            "governance.approvers = 'operator': must be another member: changes are the operator's, and others approve them",
        ),
        (
            {**AUDIT, "governance": {"approvers": [f"a{i}" for i in range(33)], "needed": 1}},
            "governance.approvers (their number) = 33: must be at most 32 names",
        ),
        (
            {"governance": BOTH},
            "governance.approvers = ('basel', 'delft', 'oslo'): needs audit.enabled = true: approvals are entries of the",
        ),
        ({"swarm": {}, "governance": BOTH}, "must be empty with [swarm]: its configuration is fixed"),
        (
            {"aggregators": {"addresses": ["b.example:7710"]}, "governance": BOTH},
            "must be empty with aggregators.addresses: each aggregator keeps a log, and approvals stand in one",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(sections: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_mapping(sections)
    assert message in str(caught.value) and "\n" not in str(caught.value)
