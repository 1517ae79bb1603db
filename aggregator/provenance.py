"""Where a model comes from, by the audit log of its run: a statement of in-toto with the predicate of SLSA.

It repeats what the log says, in the form that tools for supply chains read; whoever has the log can check each line of it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

import edit
from edit.errors import ConfigError
from edit.trust.checkpoints import NoteKey
from editpb.audit_log import LogVerifier
from editpb.messages import Consent

__all__ = ["PAYLOAD_TYPE", "provenance_of"]

PAYLOAD_TYPE = "application/vnd.in-toto+json"
_STATEMENT, _PREDICATE = "https://in-toto.io/Statement/v1", "https://slsa.dev/provenance/v1"
_BUILD, _BUILDER = "urn:edit-localsgd:training:v1", f"urn:edit-localsgd:coordinator:{edit.__version__}"
_DIGEST = "editOuterParameters"  # the name of the digest of outer parameters, as `edit-coordinator status` shows it


def provenance_of(lines: Iterable[bytes], key: NoteKey, head: bytes, files: Sequence[Path]) -> dict[str, Any]:
    """Return the statement.

    Args:
        lines: the entries that the head is signed for.
        key: of the log.
        head: the signed note.
        files: of the model, as `edit-coordinator export` wrote them, which become subjects, too.

    Raises LogFault; ConfigError before the first commit, for a file that cannot be read, and for an export of another model.
    """
    log, begun, ended, configurations, first = LogVerifier(key, signatures=False), 0, 0, list[dict[str, Any]](), {}
    for line in lines:
        entry = log.take(line)
        if "config" in entry:
            configurations.append({"sha256": entry["config_digest"], "fromOuterStep": log.outer_step})
            text = str(entry["config"])
        if entry["kind"] == "genesis":
            begun, first = int(entry["time"]), {"outerStep": log.outer_step, "digest": log.digest}
        if entry["kind"] == "commit":
            ended = int(entry["time"])
    if not log.commits:
        raise ConfigError("--provenance: the log has no commit yet")
    name = f"{log.run_id} at outer step {log.outer_step}"
    return {
        "_type": _STATEMENT,
        "subject": [{"name": name, "digest": {_DIGEST: log.digest}}, *(_file(path, log) for path in files)],
        "predicateType": _PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": _BUILD,
                "externalParameters": {
                    "configuration": json.loads(text),
                    "configurations": configurations,
                    "initialParameters": first,
                },
                "internalParameters": {},
                "resolvedDependencies": [
                    _data(log.run_id, peer, consent) for peer, consent in sorted(log.consents.items()) if consent.data
                ],
            },
            "runDetails": {
                "builder": {"id": _BUILDER},
                "metadata": {"invocationId": log.run_id, "startedOn": _time(begun), "finishedOn": _time(ended)},
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
    for name, wanted in (("run_id", log.run_id), ("digest", log.digest)):
        if origin.get(name, wanted) != wanted:
            raise ConfigError(f"--of {path}: says {name} {origin[name][:12]}, the log ends with {wanted[:12]}; export it anew")
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


def _time(unix: int) -> str:
    return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
