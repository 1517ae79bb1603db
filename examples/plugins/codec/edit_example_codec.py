"""Ternary values: each element of a block becomes 0, plus or minus one magnitude, in 2 bits; 2.125 bits with blocks of 256.

run.toml:   [codec]
            up = "entry:ternary"            # or "entry:ternary:block=512"
"""

import torch

PLACES = torch.tensor([1, 4, 16, 64], dtype=torch.uint8)  # of four digits in a byte


class Ternary:
    """One block: its magnitude in fp32, then four elements in each byte (0, 1: +, 2: -)."""

    def __init__(self, spec):
        """spec: an `edit.CodecSpec`; its options are what stands behind the name."""
        self.granule = int(dict(spec.options).get("block", 256))
        self.block_bytes = 4 + self.granule // 4

    def encode(self, blocks):
        """fp32 [rows, granule] to uint8 [rows, block_bytes]. Integers and single fp32 operations: equal on every machine."""
        scale = blocks.abs().amax(dim=1, keepdim=True)  # NaN and Inf come through
        large = blocks.abs() > scale * 0.5
        digits = large.to(torch.uint8) * torch.where(blocks < 0, 2, 1).to(torch.uint8)
        packed = (digits.view(len(blocks), -1, 4) * PLACES.to(blocks.device)).sum(dim=2, dtype=torch.uint8)
        return torch.cat([(scale * 0.75).view(torch.uint8), packed], dim=1)

    def decode(self, data):
        """uint8 [rows, block_bytes] to fp32 [rows, granule]. The bytes may be anything: no index is taken from them."""
        scale = data[:, :4].contiguous().view(torch.float32)
        digits = data[:, 4:].unsqueeze(2).div(PLACES.to(data.device), rounding_mode="floor") & 3
        if bool((digits == 3).any()):
            raise ValueError("there is no digit 3")
        sign = (digits == 1).to(torch.float32) - (digits == 2).to(torch.float32)
        return sign.view(len(data), -1) * scale
