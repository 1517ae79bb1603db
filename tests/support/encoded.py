"""The codecs that tests go through, and vectors that are hard for them.

A vector of a test that has no model is encoded as a fragment of one tensor.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from edit.codecs import codec, codec_names
from edit.codecs.residuals import Residual
from edit.config.codec import CodecSpec
from edit.fragments.shards import Shard
from edit.records import EncodedTensor
from tests.support.layouts import fragment

# Every codec, and some with options: small blocks, an odd k (bits are left over in every chunk).
SPECS = (
    *codec_names(),
    "int4:block=64",
    "e3m0:block=64",
    "stat2:block=64,range=6",
    "sign:block=64",
    "topk:k=7",
    "top1:of=128",
    "sdd:columns=32,rank=2",
)
FAMILIES = ("bf16", "int8", "int4", "stat2", "sign", "topk", "sdd")
"""One of each way to encode, for tests that train."""
LOSSY = tuple(text for text in SPECS if not codec(text).lossless)


def encode(name: str, flat: Tensor) -> EncodedTensor:
    """The flat vector, encoded by the codec of that name."""
    return codec(name).encode(flat, fragment((flat.numel(),)))


def whole_shards(*numels: int) -> list[Shard]:
    """What a peer that is not sharded holds of fragments of so many elements."""
    return [Shard(fragment((numel,))) for numel in numels]


def cut(encoded: EncodedTensor, shard: Shard) -> EncodedTensor:
    """What a rank with this shard is sent of an encoded fragment."""
    return codec(encoded.codec).cut(encoded, shard)


def decode_shard(encoded: EncodedTensor, shard: Shard) -> Tensor:
    """What a rank with this shard decodes of what it was sent."""
    return codec(encoded.codec).decode_shard(encoded, shard)


def special(numel: int) -> Tensor:
    """What `finite` has; Inf, and NaNs of several bits: more of them than a sparse codec sends of a chunk."""
    flat, where = finite(numel), torch.arange(6) * numel // 7
    flat[where[:2]] = torch.tensor([math.inf, -math.inf])
    flat.view(torch.int32)[where[2:]] = torch.tensor([-1, 0x7F800001, 0x7FC00000, -0x400000], dtype=torch.int32)
    some = numel // 2 + torch.arange(numel // 20)
    flat.view(torch.int32)[some] = 0x7FC00000 + some.to(torch.int32)
    return flat


def finite(numel: int) -> Tensor:
    """Every magnitude of fp32, subnormals and both zeros, halfway values, more of one largest magnitude than is sent."""
    generator = torch.Generator().manual_seed(numel)
    exponents = torch.randint(-149, 127, (-(-numel // 200),), generator=generator).repeat_interleave(200)[:numel]
    flat = torch.ldexp(torch.randn(numel, generator=generator), exponents)
    some = torch.randint(numel, (numel // 4 + 1,), generator=generator)
    flat[some] = flat[some].sign() * 0.5 * flat[some[0]]
    flat[torch.randint(numel, (numel // 9 + 1,), generator=generator)] = -0.0
    flat[numel // 3 :: 5] = flat.abs().max() * torch.where(torch.rand(numel, generator=generator)[numel // 3 :: 5] < 0.5, 1, -1)
    return flat


def assert_equal_but_for_the_bits_of_nans(name: str, numel: int, ours: bytes, theirs: bytes) -> None:
    """For bf16 and fp16, of which NaN they make depends on the device, and on the CPU's instructions."""
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(CodecSpec.parse(name).name)
    if kind is None or not numel:
        assert ours == theirs
        return
    ours_, theirs_ = (torch.frombuffer(bytearray(data), dtype=torch.int16) for data in (ours, theirs))
    same_nan = ours_.view(kind).isnan() & theirs_.view(kind).isnan()
    assert bool((same_nan | (ours_ == theirs_)).all())


def elements(residual: Residual) -> Tensor:
    """All that a residual holds, flat fp32."""
    return torch.cat([torch.empty(0), *(piece for _, piece in residual.pieces())])
