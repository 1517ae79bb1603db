"""Signed heads of a log: C2SP signed notes (c2sp.org/signed-note) with a checkpoint as text (c2sp.org/tlog-checkpoint).

A note is a text, an empty line, and signature lines "— NAME BASE64(key id | signature)". The text of a checkpoint is the log's
origin, its size and its root. The log signs with Ed25519 (type 0x01); a member that cosigns, with the P-256 key of its
certificate (type 0x02, ECDSA over SHA-256, in DER).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from edit.errors import ConfigError
from edit.trust.merkle import HASH_BYTES
from edit.trust.signatures import ECDSA_SHA256

__all__ = [
    "ED25519_BYTES",
    "MOST_DER_BYTES",
    "MOST_NOTE_BYTES",
    "MOST_SIGNATURES",
    "Checkpoint",
    "Cosigner",
    "LogSigner",
    "NoteKey",
    "open_note",
    "parse_checkpoint",
    "signature_line",
    "signature_of",
    "signatures_under",
]

MOST_NOTE_BYTES = 64 << 10
MOST_SIGNATURES = 256  # lines of a note: the log's, and those of as many members
_MOST_SIZE = (1 << 63) - 1
ED25519_BYTES = 64  # of a log's signature
MOST_DER_BYTES = 72  # of a member's
_ED25519, _ECDSA = 1, 2
_KEY_ID_BYTES = 4
_DASH = "\N{EM DASH} "
_RAW = serialization.Encoding.Raw, serialization.PublicFormat.Raw


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a log says of itself: so many leaves, under this root."""

    origin: str  # of the log, as `edit/RUN_ID`: it is the name of its key, too
    size: int
    root: bytes  # 32 bytes

    def text(self) -> str:
        """Return the text that is signed."""
        return f"{self.origin}\n{self.size}\n{base64.b64encode(self.root).decode()}\n"


@dataclass(frozen=True, slots=True)
class NoteKey:
    """A public key that notes are verified with."""

    name: str
    kind: int  # the signature type: 1 Ed25519, 2 ECDSA
    public: bytes  # Ed25519: 32 bytes; ECDSA: SubjectPublicKeyInfo in DER

    @classmethod
    def parse(cls, vkey: str) -> NoteKey:
        """Return the key of a text `NAME+KEY ID IN HEX+BASE64(type | Ed25519 public key)`. Raises ValueError."""
        name, _, rest = vkey.partition("+")
        key_id, _, encoded = rest.partition("+")
        data = _decoded(encoded)
        if not _is_name(name) or len(data) != 33 or data[0] != _ED25519:
            raise ValueError("not the public key of a log, NAME+ID+KEY")
        key = cls(name, _ED25519, data[1:])
        if key_id != key.key_id.hex():
            raise ValueError(f"the key id of {name} is {key.key_id.hex()}, the text says another one")
        return key

    @classmethod
    def of_member(cls, name: str, public_key: bytes) -> NoteKey:
        """Return the key of a member that cosigns. public_key: of its certificate, SubjectPublicKeyInfo in DER."""
        if not _is_name(name):
            raise ValueError("the name of a key has neither spaces nor +")
        return cls(name, _ECDSA, public_key)

    @property
    def key_id(self) -> bytes:
        """The first four bytes of the key's hash."""
        if self.kind == _ECDSA:
            return hashlib.sha256(self.public).digest()[:_KEY_ID_BYTES]
        return hashlib.sha256(self.name.encode() + b"\n" + bytes([self.kind]) + self.public).digest()[:_KEY_ID_BYTES]

    def text(self) -> str:
        """Return the text that `parse` reads, of an Ed25519 key."""
        return f"{self.name}+{self.key_id.hex()}+{base64.b64encode(bytes([self.kind]) + self.public).decode()}"

    def verifies(self, signature: bytes, text: str) -> bool:
        """Return whether the holder of this key has signed the text of a note."""
        return self.verifies_bytes(signature, text.encode())

    def pem(self) -> bytes:
        """Return an Ed25519 key as SubjectPublicKeyInfo in PEM, which other tools read."""
        pem, form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        return Ed25519PublicKey.from_public_bytes(self.public).public_bytes(pem, form)

    def verifies_bytes(self, signature: bytes, signed: bytes) -> bool:
        """Return whether the holder of this key has signed these bytes."""
        try:
            if self.kind == _ED25519:
                Ed25519PublicKey.from_public_bytes(self.public).verify(signature, signed)
            else:
                key = serialization.load_der_public_key(self.public)
                if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
                    return False
                key.verify(signature, signed, ECDSA_SHA256)
        except (InvalidSignature, ValueError, UnsupportedAlgorithm):
            return False
        return True


class LogSigner:
    """Signs the checkpoints of one log. Raises ConfigError unless `pem` is an unencrypted Ed25519 key."""

    def __init__(self, origin: str, pem: bytes) -> None:
        try:
            key = serialization.load_pem_private_key(pem, None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ConfigError("the log's key cannot be read; restore it from a copy") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise ConfigError("the log's key is not Ed25519; restore it from a copy")
        if not _is_name(origin):
            raise ConfigError(f"the log's origin {origin!r} has spaces or +")
        self._key = key
        self.key = NoteKey(origin, _ED25519, key.public_key().public_bytes(*_RAW))

    @staticmethod
    def new_key() -> bytes:
        """Return a new private key, in PEM."""
        pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        return Ed25519PrivateKey.generate().private_bytes(pem, form, serialization.NoEncryption())

    def sign_bytes(self, signed: bytes) -> bytes:
        """Return the signature of what is no note, and cannot be taken for one."""
        return self._key.sign(signed)

    def sign(self, size: int, root: bytes) -> str:
        """Return the signed note of a head. The same head has the same note."""
        text = Checkpoint(self.key.name, size, root).text()
        return f"{text}\n{signature_line(self.key.name, self.key.key_id, self._key.sign(text.encode()))}"


class Cosigner:
    """Signs the heads of logs with the key of a member's certificate. Raises ConfigError unless `pem` is a P-256 key."""

    def __init__(self, pem: bytes) -> None:
        try:
            key = serialization.load_pem_private_key(pem, None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ConfigError("the key that cosigns cannot be read") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
            raise ConfigError("the key that cosigns is not ECDSA P-256")
        self._key = key

    def sign(self, text: str) -> bytes:
        """Return the signature of a note's text, in DER: the same each time, where OpenSSL signs deterministically."""
        return self._key.sign(text.encode(), ECDSA_SHA256)


def signature_line(name: str, key_id: bytes, signature: bytes) -> str:
    """Return the line of a signature under a note's text, with its line end."""
    return f"{_DASH}{name} {base64.b64encode(key_id + signature).decode()}\n"


def signatures_under(note: str | bytes) -> tuple[tuple[str, bytes, bytes], ...]:
    """Return name, key id and signature of each line under a note, unverified. Raises ValueError for what is no note."""
    lines = map(_signature, _parts(note)[1])
    return tuple((name, data[:_KEY_ID_BYTES], data[_KEY_ID_BYTES:]) for name, data in lines)


def open_note(note: str | bytes, keys: Iterable[NoteKey]) -> tuple[str, tuple[NoteKey, ...]]:
    """Return a note's text, and which of these keys have signed it.

    Signatures of other keys are passed over. Raises ValueError when the note is malformed, too long, when none of the keys has
    signed it, or when a signature of one of them does not fit.
    """
    text, lines = _parts(note)
    known = {(key.name, key.key_id): key for key in keys}
    signed: list[NoteKey] = []
    for line in lines:
        name, data = _signature(line)
        key = known.get((name, data[:_KEY_ID_BYTES]))
        if key is None or key in signed:
            continue
        if not key.verifies(data[_KEY_ID_BYTES:], text):
            raise ValueError(f"the signature of {key.name} is not of this text")
        signed.append(key)
    if not signed:
        raise ValueError("no known key has signed it")
    return text, tuple(signed)


def signature_of(note: str | bytes, key: NoteKey) -> bytes:
    """Return the signature of this key under a note that `open_note` has opened with it. Raises ValueError: there is none."""
    for name, key_id, signature in signatures_under(note):
        if (name, key_id) == (key.name, key.key_id):
            return signature
    raise ValueError(f"{key.name} has not signed it")


def parse_checkpoint(text: str) -> Checkpoint:
    """Return what the text of a note says. Raises ValueError unless it is a checkpoint's, without extensions."""
    lines = text.split("\n")
    if len(lines) != 4 or lines[3] or not _is_name(lines[0]):
        raise ValueError("not a checkpoint: origin, size, root")
    origin, size, root = lines[:3]
    if not (size.isascii() and size.isdigit() and len(size) < 20) or (size[0] == "0" and size != "0") or int(size) > _MOST_SIZE:
        raise ValueError("the size of a checkpoint is no number")
    if len(decoded := _decoded(root)) != HASH_BYTES:
        raise ValueError(f"the root of a checkpoint has {len(decoded)} bytes")
    return Checkpoint(origin, int(size), decoded)


def _parts(note: str | bytes) -> tuple[str, list[str]]:
    if len(note) > MOST_NOTE_BYTES:
        raise ValueError(f"the note has more than {MOST_NOTE_BYTES} bytes")
    try:
        decoded = note.decode() if isinstance(note, bytes) else note
    except UnicodeDecodeError:
        raise ValueError("the note is not UTF-8") from None
    if any(ord(each) < 32 and each != "\n" for each in decoded):
        raise ValueError("the note has control characters")
    before, separator, after = decoded.rpartition("\n\n")
    if not separator or not before or not after.endswith("\n"):
        raise ValueError("the note has no signatures")
    lines = after[:-1].split("\n")
    if len(lines) > MOST_SIGNATURES:
        raise ValueError(f"the note has more than {MOST_SIGNATURES} signatures")
    return before + "\n", lines


def _signature(line: str) -> tuple[str, bytes]:
    name, separator, encoded = line.removeprefix(_DASH).partition(" ")
    if not line.startswith(_DASH) or not separator or not _is_name(name) or len(data := _decoded(encoded)) <= _KEY_ID_BYTES:
        raise ValueError("a signature line of the note is malformed")
    return name, data


def _decoded(text: str) -> bytes:
    """Return the bytes of base64 as this module writes it. Raises ValueError for any other text of the same bytes."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("not base64") from None
    if base64.b64encode(data).decode() != text:
        raise ValueError("not base64 in its one form")
    return data


def _is_name(name: str) -> bool:
    return bool(name) and "+" not in name and not any(each.isspace() for each in name)
