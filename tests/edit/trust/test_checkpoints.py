"""Signed notes and checkpoints: the published examples, and everything that a forger would change."""

from __future__ import annotations

import base64

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st

from edit.errors import ConfigError
from edit.trust.checkpoints import (
    MOST_NOTE_BYTES,
    MOST_SIGNATURES,
    Checkpoint,
    Cosigner,
    LogSigner,
    NoteKey,
    open_note,
    parse_checkpoint,
    signature_line,
    signatures_under,
)
from edit.trust.merkle import EMPTY_ROOT, leaf_hash

# (key, text, signature): the examples of c2sp.org/signed-note and of golang.org/x/mod/sumdb/note. The first id stands as
# 530d903d in the specification, which its own note contradicts: its signature names 530d903a, the hash of the key.
PUBLISHED = [
    (
        "example.com/foo+530d903a+AekyeRrm56hApGFkyQR4ZCbV54Id2LKaANYcrnKv3U2k",
        "This is an example message.\n",
        "Uw2QOkn8srV1yJGh2VYRlL1Tnagv1YEq6TfXppzi2ONncAlTgK7Ztg1ERYNZXsYjOBH3mFXmRKuwHjG1Yu72IneyaQM=",
    ),
    (
        "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW",
        "If you think cryptography is the answer to your problem,\nthen you don't know what your problem is.\n",
        "x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6KE6RyyBwJnAM=",
    ),
]
# (name, type and public key, key id, text, signature) of two logs that sign with ECDSA P-256, type 0x02: Sigstore's Rekor, and
# that of Android's Pixel 6, as note/note_verifier_test.go of github.com/transparency-dev/formats has them.
_P256 = "AjBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IAB"  # what such keys begin with
PUBLISHED_ECDSA = [
    (
        "rekor.sigstore.dev",
        _P256 + "NhtmPtrWm3U1eQXBogSMdGvXwBcK5AW5i0hrZLOC96l+smGNM7nwZ4QvFK/4sueRoVj//QP22Ni4Qt9DPfkWLc=",
        "c0d23d6a",
        "Rekor\n798034\nf+7CoKgXKE/tNys9TTXcr/ad6U/K3xvznmzew9y6SP0=\n",
        "wNI9ajBEAiARInWIWyCdyG27CO6LPnPekyw20qO0YJfoaPaowGp/XgIgc+qEHS3+GKVClgqq20uDLet7MCoTURUCRdxwWBHHufk=",
    ),
    (
        "pixel6_transparency_log",
        _P256 + "N+4x0Jk1yTwvLFI9A4NDdGZcX0aiWVdWM5XJVy0M4VWD3AvyW5Q6Hs9A0mcDkpUoYgn+KKPNzFC0H3nN3q6JQ8=",
        "91c16e30",
        "DEFAULT\n10\nbsWRucJU5xJPHb5eBdOm6+DM+VelCZBuvtI3sHERJ9Y=\n",
        "kcFuMDBFAiEAhqMAP8P6qf6QxtUJhzMhbN+MbZ9dwfUHzGQJmffJHtoCIGD0cNe47dHWBoPwYdgBCepB06/+g5O1FmYjXl06owL4",
    ),
]
PEM = LogSigner.new_key()
SIGNER = LogSigner("edit/run-1", PEM)
ROOT = leaf_hash(b"entry")


def member_key() -> bytes:
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(pem, form, serialization.NoEncryption())


@pytest.mark.parametrize(("vkey", "text", "signature"), PUBLISHED)
def test_published_notes_verify(vkey: str, text: str, signature: str) -> None:
    key = NoteKey.parse(vkey)
    assert key.text() == vkey
    assert open_note(f"{text}\n— {key.name} {signature}\n", [key]) == (text, (key,))


@pytest.mark.parametrize(("name", "public", "key_id", "text", "signature"), PUBLISHED_ECDSA)
def test_published_checkpoints_of_p256_keys_verify(name: str, public: str, key_id: str, text: str, signature: str) -> None:
    key, note = NoteKey.of_member(name, base64.b64decode(public)[1:]), f"{text}\n— {name} {signature}\n"
    assert key.key_id.hex() == key_id
    assert open_note(note, [key]) == (text, (key,)) and parse_checkpoint(text).text() == text
    assert note == f"{text}\n" + "".join(signature_line(*each) for each in signatures_under(note))
    for place in range(len(note)):
        wrong = note[:place] + ("A" if note[place] != "A" else "B") + note[place + 1 :]
        with pytest.raises(ValueError):
            open_note(wrong, [key])


@given(st.data())
def test_a_flipped_bit_anywhere_is_found(data: st.DataObject) -> None:
    note = SIGNER.sign(3, ROOT).encode()
    place, bit = data.draw(st.integers(0, len(note) - 1)), data.draw(st.integers(0, 7))
    wrong = note[:place] + bytes([note[place] ^ (1 << bit)]) + note[place + 1 :]
    with pytest.raises(ValueError):
        open_note(wrong, [SIGNER.key])


def test_a_checkpoint_says_what_was_signed_and_the_same_head_has_the_same_note() -> None:
    note = SIGNER.sign(3, ROOT)
    assert note == LogSigner("edit/run-1", PEM).sign(3, ROOT)
    text, _ = open_note(note, [NoteKey.parse(SIGNER.key.text())])
    assert parse_checkpoint(text) == Checkpoint("edit/run-1", 3, ROOT)
    assert parse_checkpoint(Checkpoint("edit/r", 0, EMPTY_ROOT).text()).size == 0


def test_a_member_cosigns_with_the_key_of_its_certificate() -> None:
    note = SIGNER.sign(3, ROOT)
    pem = member_key()
    text, _ = open_note(note, [SIGNER.key])
    private = serialization.load_pem_private_key(pem, None)
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    member = NoteKey.of_member("ana", private.public_key().public_bytes(serialization.Encoding.DER, form))
    both = note + signature_line("ana", member.key_id, Cosigner(pem).sign(text))
    assert open_note(both, [SIGNER.key, member]) == (text, (SIGNER.key, member))
    assert open_note(both, [SIGNER.key]) == (text, (SIGNER.key,))  # of whom it does not know it says nothing
    assert [each[:2] for each in signatures_under(both)] == [(key.name, key.key_id) for key in (SIGNER.key, member)]
    forged = note + signature_line("ana", member.key_id, Cosigner(pem).sign("another text\n"))
    with pytest.raises(ValueError, match="the signature of ana is not of this text"):
        open_note(forged, [SIGNER.key, member])


def test_a_stranger_with_the_name_of_the_log_has_signed_nothing() -> None:
    note = LogSigner("edit/run-1", LogSigner.new_key()).sign(3, ROOT)
    with pytest.raises(ValueError, match="no known key"):
        open_note(note, [SIGNER.key])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "edit/r\n3\n",
        f"edit/r\n03\n{Checkpoint('r', 3, ROOT).text().split()[2]}\n",
        f"edit/r\n-3\n{Checkpoint('r', 3, ROOT).text().split()[2]}\n",
        f"edit/r\n٣\n{Checkpoint('r', 3, ROOT).text().split()[2]}\n",
        f"edit/r\n{1 << 63}\n{Checkpoint('r', 3, ROOT).text().split()[2]}\n",
        f"edit/r\n\n{Checkpoint('r', 3, ROOT).text().split()[2]}\n",
        f"edit r\n3\n{Checkpoint('r', 3, ROOT).text().split()[2]}\n",
        "edit/r\n3\nAAAA\n",
        "edit/r\n3\nno base64\n",
        Checkpoint("r", 3, ROOT).text() + "extension\n",
    ],
)
def test_what_is_no_checkpoint_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_checkpoint(text)


@pytest.mark.parametrize(
    "note",
    [
        "",
        "text\n",
        "\n\n— a AAAA\n",
        "text\n\n— a AAAA",
        "text\n\n- edit/run-1 AAAAAAAA\n",
        "text\n\n— edit/run-1 AAAA\n",
        "text\t\n\n— edit/run-1 AAAAAAAA\n",
        b"text \xff\n\n",
        "x" * MOST_NOTE_BYTES + SIGNER.sign(3, ROOT),
        SIGNER.sign(3, ROOT) + SIGNER.sign(3, ROOT).split("\n\n")[1] * MOST_SIGNATURES,
    ],
)
def test_what_is_no_note_is_refused(note: str | bytes) -> None:
    with pytest.raises(ValueError):
        open_note(note, [SIGNER.key])


@pytest.mark.parametrize("vkey", ["", "a", "a+00000000+AAAA", PUBLISHED[0][0].replace("530d903a", "530d903d"), "a b+1+AAAA"])
def test_what_is_no_key_is_refused(vkey: str) -> None:
    with pytest.raises(ValueError):
        NoteKey.parse(vkey)


def test_a_key_of_another_kind_signs_no_log() -> None:
    with pytest.raises(ConfigError, match="not Ed25519"):
        LogSigner("edit/r", member_key())
    with pytest.raises(ConfigError, match="cannot be read"):
        LogSigner("edit/r", b"nonsense")
    with pytest.raises(ConfigError, match="not ECDSA P-256"):
        Cosigner(PEM)
    with pytest.raises(ConfigError, match="cannot be read"):
        Cosigner(b"nonsense")
    with pytest.raises(ConfigError, match="origin"):
        LogSigner("edit/a run", PEM)
