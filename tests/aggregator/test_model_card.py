"""The model card: what members wrote is text, and privacy is claimed only where it holds for the whole run."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from aggregator.model_card import _privacy, _text
from aggregator.provenance import Configured, Past, read_past
from edit.config.run import RunConfig
from edit.trust.checkpoints import LogSigner
from edit.trust.merkle import MerkleTree, leaf_hash
from editpb.audit_log import LogFault, LogVerifier, entry_line, genesis_entry, log_origin
from editpb.part_entries import begins_line, genesis_line

PRIVATE = {"privacy": {"level": "example", "epsilon_max": 8.0, "delta": 1e-5}}
STRICTER = {"privacy": {"level": "example", "epsilon_max": 4.0, "delta": 1e-6}}


def past(*configurations: dict[str, Any], continued: int = 0) -> Past:
    found = Past(LogVerifier(), configurations=[Configured("", 0, each) for each in configurations])
    found.log.continued.extend(range(continued))
    return found


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (past({}), "No differential privacy."),
        (past(PRIVATE), "epsilon at most 8 at delta 1e-05"),
        (past(PRIVATE, STRICTER), "epsilon at most 8 at delta 1e-05"),
        (past({}, PRIVATE), "No differential privacy of the whole run"),
        (past(PRIVATE, continued=1), "No differential privacy of the whole run"),
    ],
)
def test_privacy_is_claimed_only_where_every_configuration_has_it(found: Past, words: str) -> None:
    assert words in _privacy(found)


@pytest.mark.parametrize("words", ["<script>", "a | b", "[x](https://y.example)", "`x`", "**x**", "a\n# b", "&lt;", "@all"])
def test_what_members_wrote_is_no_markup(words: str) -> None:
    shown = _text(words)
    assert not set(shown.replace("&#", "").replace(";", "")) & set("<>|[]()`*\n@/:") and "# " not in shown


@pytest.mark.parametrize(
    "text", ["{}", '{"model": 1}', '{"model": {"name": 1}}', '{"model": {"name": "gpt"}, "aggregators": []}']
)
def test_a_configuration_without_what_is_shown_of_it_is_a_fault(text: str) -> None:
    key = LogSigner(log_origin("run"), LogSigner.new_key()).key
    entry = genesis_entry("run", key, RunConfig(), "a" * 64, 0, "0" * 64)
    entry |= {"config": text, "config_digest": hashlib.sha256(text.encode()).hexdigest()}
    with pytest.raises(LogFault, match="entry 0: its configuration names no model, or its aggregators are none"):
        read_past([entry_line(MerkleTree(), 0, entry)], key)


CONTINUED: dict[str, Any] = {"kind": "continued", "outer_step": 3, "digest": "1" * 64}
ANOTHER = '{"model": {"name": "never trained"}}'


@pytest.mark.parametrize(
    "more", [{"config": "x"}, {"config": None}, {"config": ANOTHER, "config_digest": "f" * 64}], ids=["text", "null", "another"]
)
def test_a_configuration_where_none_belongs_is_a_fault(more: dict[str, object]) -> None:
    key, tree = LogSigner(log_origin("run"), LogSigner.new_key()).key, MerkleTree()
    lines = [entry_line(tree, 0, genesis_entry("run", key, RunConfig(), "a" * 64, 0, "0" * 64))]
    tree.append(leaf_hash(lines[0]))
    assert len(read_past([*lines, entry_line(tree, 1, CONTINUED)], key).configurations) == 1
    with pytest.raises(LogFault, match="entry 1: is of the kind continued, and names a configuration"):
        read_past([*lines, entry_line(tree, 1, {**CONTINUED, **more})], key)


def test_a_configuration_that_is_no_text_is_a_fault() -> None:
    key = LogSigner(log_origin("run"), LogSigner.new_key()).key
    entry = genesis_entry("run", key, RunConfig(), "a" * 64, 0, "0" * 64)
    with pytest.raises(LogFault, match="entry 0: its configuration names no model"):
        read_past(
            [entry_line(MerkleTree(), 0, {**entry, "config": {}, "config_digest": hashlib.sha256(b"{}").hexdigest()})], key
        )


def test_the_log_of_a_part_of_a_swarm_is_a_fault() -> None:
    key = LogSigner(log_origin("run"), LogSigner.new_key()).key
    begins = begins_line("run", 0, RunConfig(), "a" * 64, 0, "0" * 64, [bytes(32)])
    for line in (genesis_line("run", 0, RunConfig(), "a" * 64, "0" * 64), begins):
        with pytest.raises(LogFault, match="the log is of a part of a swarm"):
            read_past([line], key)
