"""Founds a swarm in the folder of its first member, from files: run.toml, schema.json, peer.key and the first parameters.

Each step can be repeated, and a kill between any two leaves what the same call completes:

1. authority/run.json names the run; 2. the authority, whose key is written last; 3. peer.pem and ca.pem; 4. the parts, then
council.json, which says that the swarm exists; 5. the file of the first parameters is removed.
"""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

import torch
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from aggregator.security.authority import Authority, load_key
from aggregator.security.certificates import public_hash
from aggregator.storage.state_folder import lock_folder
from aggregator.swarm.admission import root_of
from aggregator.swarm.host import found_swarm, merging
from aggregator.swarm.host_folder import AUTHORITY_FORMAT, Settings, authority_folder, run_of
from aggregator.swarm.member_folder import MemberFolder
from edit import plugins
from edit.config.plugins import AGREED
from edit.config.run import RunConfig
from edit.durable_files import names_in, write_atomic, write_json
from edit.errors import ConfigError, StorageError
from edit.fragments.schema import Schema
from edit.merging.outer_state import OuterState
from edit.plain_text import reason_of
from editpb.identity import Identity

__all__ = ["found"]


def found(path: Path, peer_id: str, theta: Path, *, now: float) -> str:
    """Found the swarm, or complete what was begun; return its run id. Raises ConfigError, StorageError.

    Args:
        path: the founder's folder.
        peer_id: the founder.
        theta: the first parameters: flat fp32 tensors of the model's fragments, named by their numbers (safetensors).
        now: unix seconds.
    """
    lock = lock_folder(path, "another process uses this folder")
    try:
        return _found(path, peer_id, theta, now)
    finally:
        os.close(lock)


def _found(path: Path, peer_id: str, theta: Path, now: float) -> str:
    settings, config = Settings.load(path), RunConfig.from_toml(path / "run.toml")
    plugins.admit(config, plugins.pinned(config), AGREED)
    schemas = settings.schemas(config)
    authority = _authority(path, config.name, now)
    identity = Identity(authority.run_id, "peer", peer_id)
    folder = MemberFolder(path)
    if not folder.founded:
        _certify(path, authority, identity, now)
        first = _first_parameters(theta, [schema for _, schema in schemas])
        for part in (path / name for name in names_in(path, "part-*")):  # of a founding that was not completed
            shutil.rmtree(part)
        found_swarm(
            authority.run_id,
            peer_id,
            config,
            folder,
            [OuterState(schema, merging(config), part) for (_, schema), part in zip(schemas, first, strict=True)],
            incarnation=int(now * 1000),
            config_hash=settings.config_hash,
            lease_s=settings.swarm(config).lease_s,
            root=root_of(authority.issuer.certificate),
            key=public_hash(x509.load_pem_x509_certificate((path / "peer.pem").read_bytes())),
        )
    theta.unlink(missing_ok=True)
    return authority.run_id


def _authority(path: Path, name: str, now: float) -> Authority:
    folder = authority_folder(path)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be made ({error.strerror})") from error
    if not (folder / "run.json").exists():
        write_json(folder / "run.json", {"run_id": f"{name}-{secrets.token_hex(4)}"}, version=AUTHORITY_FORMAT)
    run_id = run_of(path)
    if not (folder / "ca.key").exists():
        return Authority.create(folder, run_id, now=now)
    return Authority.load(folder, run_id)


def _certify(path: Path, authority: Authority, identity: Identity, now: float) -> None:
    key = load_key(path / "peer.key")
    certificate = authority.enrol(identity, key.public_key(), now=now)
    write_atomic(path / "ca.pem", x509.load_der_x509_certificate(authority.ca_der).public_bytes(serialization.Encoding.PEM))
    write_atomic(path / "peer.pem", certificate.public_bytes(serialization.Encoding.PEM))


def _first_parameters(file: Path, schemas: list[Schema]) -> list[list[Tensor]]:
    """Return the first parameters of each part. Raises ConfigError when they do not fit the model."""
    try:
        found = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file}: cannot be read ({reason_of(error)})") from error
    parts, number = [], 0
    for schema in schemas:
        part = [found.get(str(number + i)) for i in range(len(schema.fragments))]
        number += len(part)
        parts.append([_checked(tensor, fragment.numel) for tensor, fragment in zip(part, schema.fragments, strict=True)])
    return parts


def _checked(tensor: Tensor | None, numel: int) -> Tensor:
    if tensor is None or tensor.shape != (numel,) or tensor.dtype != torch.float32 or not bool(tensor.isfinite().all()):
        raise ConfigError("the first parameters do not fit the model, or are not finite")
    return tensor
