"""A trimmed mean: of each element, the largest and smallest values are left out before the mean (Yin et al., arXiv 1803.01498).

run.toml:   [outer]
            merger = "entry:trimmed"
            merger_options = { trim = 0.25 }
"""

import torch

PIECE = 1 << 16  # elements at a time


class TrimmedMean:
    """Leave out the share `trim` of the contributions at both ends; the weights of the penalty count for who is in at all."""

    def __init__(self, config):
        """config: the section [outer], an `edit.OuterConfig`."""
        self.trim = float(config.merger_options.get("trim", 0.25))
        if not 0 <= self.trim < 0.5:
            raise ValueError(f"outer.merger_options.trim = {self.trim}: must be at least 0 and below 0.5")

    def combine(self, contributions, weights, fragment):
        """contributions: each, called, gives fp32 [fragment.numel]; they come in the order of their peers' names."""
        vectors = [read() for read in contributions]
        cut = int(self.trim * len(vectors))
        merged = torch.empty(fragment.numel)
        for start in range(0, fragment.numel, PIECE):
            values = torch.stack([vector[start : start + PIECE] for vector in vectors]).sort(dim=0).values
            kept = values[cut : len(vectors) - cut]
            total = kept[0].clone()
            for row in kept[1:]:  # in this order on every machine
                total += row
            merged[start : start + PIECE] = total / len(kept)
        return merged
