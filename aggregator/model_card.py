"""A model card by the audit log of a run: README.md as the Hugging Face Hub reads it, with a header of YAML.

What members wrote stands in it as text: nothing of it is markup.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from aggregator.provenance import Past, read_past, share_of, utc
from edit.errors import ConfigError
from edit.plain_text import printable
from edit.trust.checkpoints import NoteKey
from editpb.audit_log import Usage

__all__ = ["model_card"]

_DOUBTFUL = (
    "Doubtful: a consent by a key that has signed no contribution of that participant; what it says of data is left out."
)
_MARKUP = "\\`*_{}[]()<>#+-.!|~&:@$^=/\"'"


def model_card(lines: Iterable[bytes], key: NoteKey, head: str) -> str:
    """Return the text of the card.

    Args:
        lines: the entries that the head is signed for.
        key: of the log.
        head: the signed note.

    Raises LogFault; ConfigError before the first commit.
    """
    past = read_past(lines, key)
    log = past.log
    if not log.commits:
        raise ConfigError("the log has no commit yet, so there is no model to say something of")
    model = past.configurations[-1].values["model"]["name"]
    tags = ["federated-learning", "local-sgd"]
    header = [f"model_name: {json.dumps(log.run_id)}", f"tags: {json.dumps(tags)}"]
    header += ["library_name: transformers"] if model.startswith("hf:") else []
    merged = sum(one.tokens for one in log.usage.values())
    whose = _text(log.run_id + share_of(past))
    continued = ", ".join(map(str, log.continued))
    return "\n".join(
        [
            "---",
            *header,
            "---",
            "",
            f"# {_text(log.run_id)}",
            "",
            f"The outer parameters of outer step {log.outer_step} of the run {whose}, model {_text(model)}.",
            f"Each participant trained on data of its own, from {utc(past.begun)} to {utc(past.ended)}. Written from the audit",
            "log of the run by `edit-coordinator audit card`. Tokens, and what is said of data, each participant says itself.",
            *([f"The log lacks commits before it begins, or goes on, at outer steps {continued}."] if continued else []),
            "",
            "## Who took part",
            "",
            "| participant | outer steps | tokens | share | consented | data |",
            "| --- | --- | --- | --- | --- | --- |",
            *(_row(past, peer) for peer in sorted(log.usage.keys() | log.consents.keys())),
            "",
            f"{merged:,} tokens in all{' of the commits in the log' if continued else ''}.",
            *([_DOUBTFUL] if log.doubtful_consents else []),
            "",
            "## Privacy",
            "",
            _privacy(past),
            "",
            "## Configuration",
            "",
            *(
                f"- SHA-256 `{one.digest}`, from outer step {one.since} on{': below' if one is past.configurations[-1] else ''}"
                for one in past.configurations
            ),
            "",
            "```json",
            json.dumps(past.configurations[-1].values, indent=1, sort_keys=True).replace("`", "\\u0060"),
            "```",
            "",
            "## Audit",
            "",
            f"Digest of the outer parameters `{log.digest}`; of those that the log begins with `{past.first_digest}`.",
            f"The log's key is `{key.text()}`, its signed head:",
            "",
            "```",
            head.rstrip("\n"),
            "```",
            "",
        ]
    )


def _text(words: str) -> str:
    """Return what somebody wrote as Markdown that shows it as it is."""
    return "".join(f"&#{ord(char)};" if char in _MARKUP else char for char in printable(words))


def _row(past: Past, peer: str) -> str:
    log = past.log
    usage, consent = log.usage.get(peer, Usage()), log.confirmed_consents.get(peer)
    said = []
    if consent is not None and consent.data:
        licence = f"licence {consent.data.licence}" if consent.data.licence else ""
        manifest = f"manifest sha256:{consent.data.manifest}" if consent.data.manifest else ""
        said = list(filter(None, (consent.data.statement, licence, manifest)))
    cells = (
        _text(peer),
        str(usage.outer_steps),
        f"{usage.tokens:,}",
        f"{usage.share / log.commits:.1%}",
        "yes" if consent is not None else "doubtful" if peer in log.consents else "",
        _text("; ".join(said)),
    )
    return f"| {' | '.join(cells)} |"


def _privacy(past: Past) -> str:
    """Return what holds under every configuration that the run has had."""
    found = [one.values.get("privacy", {}) for one in past.configurations]
    levels = {one.get("level", "none") for one in found}
    if levels == {"none"}:
        return "No differential privacy."
    if len(levels) > 1 or past.log.continued:
        return "No differential privacy of the whole run: not all of it is in the log, or its configuration changed."
    (level,) = levels
    epsilon, delta = (max(float(one.get(name, 0.0)) for one in found) for name in ("epsilon_max", "delta"))
    whose = "for the data of each participant, which counts it and stops before it is exceeded" if level == "example" else ""
    said = f"Differential privacy, `privacy.level = {json.dumps(level)}`: epsilon at most {epsilon:g} at delta {delta:g}"
    return f"{said}{', ' if whose else ''}{whose}."
