"""The members that an operator knows: the line of each, and a file of lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from edit.errors import ConfigError
from edit.trust.signatures import Signer, key_hash
from peers.carriers.hub.masking import MaskFolder
from peers.identity.known_members import fingerprint, read_members
from tests.support.keys import member_key

HASH = "0123456789abcdef" * 4


def test_the_line_of_each_member_is_read_back(tmp_path: Path) -> None:
    pems = {name: member_key() for name in ("a", "site.b")}
    file = tmp_path / "members"
    file.write_text("# ours\n\n" + "\n".join(fingerprint(name, pem) for name, pem in pems.items()) + f"\nc {HASH}\n")
    assert read_members(file) == {name: (key_hash(Signer(pem).public_key),) for name, pem in pems.items()} | {"c": (HASH,)}


def test_the_last_of_several_keys_is_the_present_one(tmp_path: Path) -> None:
    file, other = tmp_path / "members", HASH[::-1]
    file.write_text(f"a {HASH}\nb {HASH}\na {other}\n")
    assert read_members(file) == {"a": (HASH, other), "b": (HASH,)}
    assert MaskFolder(tmp_path / "revealed.json", read_members(file)).pinned == {"a": other, "b": HASH}
    file.write_text(f"a {HASH}\na {other}\na {HASH}\n")
    assert read_members(file) == {"a": (other, HASH)}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a", "line 1 is not NAME sha256:HASH"),
        (f"a {HASH}\nb sha256:12", "line 2 is not NAME"),
        ("\n".join(f"p{i} {HASH}" for i in range(65)), "65 members"),
        (None, "cannot be read"),
    ],
)
def test_what_is_no_list_of_members_is_refused(tmp_path: Path, text: str | None, why: str) -> None:
    file = tmp_path / "members"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=why):
        read_members(file)
