"""The digest of the outer parameters: every bit counts, and so does where the fragments are cut."""

import torch
from blake3 import blake3

from edit.fragments.digest import combine, digest, fragment_hash


def test_the_digest_is_a_hash_of_the_fragments_hashes() -> None:
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0])
    hashes = [blake3(bytes.fromhex(text)).digest() for text in ("0000803f00000040", "00004040")]
    assert digest([a, b]) == blake3(b"".join(hashes)).hexdigest()


def test_the_digest_sees_the_last_bit_the_sign_of_zero_and_the_cut() -> None:
    theta = torch.tensor([1.0, 0.0, 3.0])
    nearby = theta.clone()
    nearby[0] = torch.nextafter(theta[0], torch.tensor(2.0))
    others = [[nearby], [torch.tensor([1.0, -0.0, 3.0])], [theta[:1], theta[1:]], [theta, torch.zeros(0)]]
    assert len({digest(one) for one in [[theta], *others]}) == 5
    assert digest([torch.stack([theta, theta], dim=1)[:, 0]]) == digest([theta]), "a strided view counts by its values"


def test_the_digest_is_combined_from_kept_hashes() -> None:
    theta = [torch.arange(4.0), torch.ones(2)]
    assert combine(fragment_hash(fragment) for fragment in theta) == digest(theta)
