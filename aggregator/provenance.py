"""Where a model comes from, by the audit log of its run: a statement of in-toto with the predicate of SLSA.

It repeats what the log says, in the form that tools for supply chains read; whoever has the log can check each line of it.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

import edit
from edit.errors import ConfigError
from edit.plain_text import parse_json
from edit.trust.checkpoints import NoteKey
from editpb.audit_log import LogFault, LogVerifier, log_origin
from editpb.messages import Consent

__all__ = ["PAYLOAD_TYPE", "Past", "provenance_of", "read_past", "share_of", "utc"]

PAYLOAD_TYPE = "application/vnd.in-toto+json"
_STATEMENT, _PREDICATE = "https://in-toto.io/Statement/v1", "https://slsa.dev/provenance/v1"
_BUILD, _BUILDER = "urn:edit-localsgd:training:v1", f"urn:edit-localsgd:coordinator:{edit.__version__}"
_DIGEST = "editOuterParameters"  # the name of the digest of outer parameters, as `edit-coordinator status` shows it


@dataclass(frozen=True, slots=True)
class Configured:
    """A configuration that the run has had."""

    digest: str  # SHA-256 of its text, hex
    since: int  # the outer step from which on
    values: Mapping[str, Any]


@dataclass(slots=True)
class Past:
    """What a log says of a run. Times in seconds since 1970, by the coordinator's clock."""

    log: LogVerifier
    begun: int = 0
    ended: int = 0  # of the last commit
    first_step: int = 0  # of the outer parameters with which the log begins
    first_digest: str = ""
    configurations: list[Configured] = field(default_factory=list)


def read_past(lines: Iterable[bytes], key: NoteKey) -> Past:
    """Return what the entries of a log say. Raises LogFault; the signatures of contributions are not looked at."""
    past = Past(LogVerifier(key, signatures=False))
    for line in lines:
        entry = past.log.take(line)
        if past.log.part is not None:
            raise LogFault("the log is of a part of a swarm, and no coordinator's")
        if entry["kind"] in ("genesis", "config"):
            values = _settings(entry)
            past.configurations.append(Configured(entry["config_digest"], past.log.outer_step, values))
        if entry["kind"] == "genesis":
            past.begun, past.first_step, past.first_digest = int(entry["time"]), past.log.outer_step, past.log.digest
        if entry["kind"] == "commit":
            past.ended = int(entry["time"])
    return past


def _settings(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of an entry. Raises LogFault where it lacks what is shown of it."""
    values: Mapping[str, Any] = parse_json(str(entry["config"]))
    sections = [values.get(name, {}) for name in ("model", "aggregators")]
    if not all(isinstance(each, Mapping) for each in sections) or not isinstance(sections[0].get("name"), str):
        raise LogFault(f"entry {entry['index']}: its configuration names no model, or its aggregators are none")
    return values


def share_of(past: Past) -> str:
    """Return which share of the model a log is of, as `, fragments of aggregator 1`; '' where there is one aggregator."""
    further = past.configurations[-1].values.get("aggregators", {}).get("addresses", ())
    key = past.log.key
    number = key.name.removeprefix(log_origin(past.log.run_id)).lstrip("/") if key is not None else ""
    return f", fragments of aggregator {number or 0}" if further else ""


def provenance_of(lines: Iterable[bytes], key: NoteKey, head: bytes, files: Sequence[Path]) -> dict[str, Any]:
    """Return the statement.

    Args:
        lines: the entries that the head is signed for.
        key: of the log.
        head: the signed note.
        files: of the model, as `edit-coordinator export` wrote them, which become subjects, too.

    Raises LogFault; ConfigError before the first commit, for a file that cannot be read, and for an export of another model.
    """
    past = read_past(lines, key)
    log = past.log
    if not log.commits:
        raise ConfigError("--provenance: the log has no commit yet")
    name = f"{log.run_id}{share_of(past)} at outer step {log.outer_step}"
    return {
        "_type": _STATEMENT,
        "subject": [{"name": name, "digest": {_DIGEST: log.digest}}, *(_file(path, log) for path in files)],
        "predicateType": _PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": _BUILD,
                "externalParameters": {
                    "configuration": past.configurations[-1].values,
                    "configurations": [{"sha256": one.digest, "fromOuterStep": one.since} for one in past.configurations],
                    "initialParameters": {"outerStep": past.first_step, "digest": past.first_digest},
                },
                "internalParameters": {},
                "resolvedDependencies": [
                    _data(log.run_id, peer, consent) for peer, consent in sorted(log.confirmed_consents.items()) if consent.data
                ],
            },
            "runDetails": {
                "builder": {"id": _BUILDER},
                "metadata": {"invocationId": log.run_id, "startedOn": utc(past.begun), "finishedOn": utc(past.ended)},
                "byproducts": [
                    {
                        "name": "head of the audit log",
                        "mediaType": "text/plain",
                        "content": base64.b64encode(head).decode(),
                        "digest": {"sha256": hashlib.sha256(head).hexdigest()},
                    }
                ],
            },
        },
    }


def _data(run_id: str, peer: str, consent: Consent) -> dict[str, Any]:
    """Return what a site says of its data."""
    said = {"peer": peer, "statement": consent.data.statement, "licence": consent.data.licence}
    found: dict[str, Any] = {
        "name": f"data of {peer}",
        "uri": f"urn:edit-localsgd:data:{run_id}:{peer}",
        "annotations": {key: value for key, value in said.items() if value},
    }
    return {**found, "digest": {"sha256": consent.data.manifest}} if consent.data.manifest else found


def _file(path: Path, log: LogVerifier) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"--of {path}: cannot be read ({error.strerror})") from error
    origin = _origin(path)
    if (said := origin.get("run_id", log.run_id)) != log.run_id:
        raise ConfigError(f"--of {path}: says run_id {said[:12]}, the log is of {log.run_id[:12]}")
    digests = origin.get("digests", origin.get("digest", log.digest))  # of each share of the model; each has a log
    if log.digest not in digests.split(", "):
        raise ConfigError(f"--of {path}: says digest {digests[:12]}, the log ends with {log.digest[:12]}; export it anew")
    return {"name": path.name, "digest": {"sha256": digest}}


def _origin(path: Path) -> dict[str, str]:
    """Return what an export says of its origin; nothing for other files."""
    if path.suffix != ".safetensors":
        return {}
    try:
        with safe_open(path, "np") as tensors:
            return tensors.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"--of {path}: is not a file of safetensors ({error})") from error


def utc(unix: int) -> str:
    """Return a time as `2026-11-23T12:00:00Z`."""
    return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
