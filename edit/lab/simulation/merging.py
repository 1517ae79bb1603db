"""Merge for real: every contribution is a small vector, measured and merged by `edit.merging.mergers` with the run's [penalty].

A vector's length follows sqrt(inner steps), as a random walk's does, with a lognormal spread of 0.1; a damaged one is NaN or a
thousand times too long.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from edit.config.run import PenaltyConfig
from edit.fragments.schema import FragmentSpec, TensorSpec
from edit.lab.simulation.accounting import Share
from edit.merging.merge import Measured, MergeRule, measure
from edit.merging.mergers import EditMerger
from edit.merging.penalty import NormStatistics
from edit.records import EncodedTensor, Verdict

__all__ = ["SyntheticMerger"]

NUMEL = 8  # of a vector: verdicts and weights depend on norms only
SPREAD = 0.1
DAMAGE = 1000.0


class SyntheticMerger:
    """Draws the vectors, and keeps the norm statistics. damaged: the share of the contributions that are damaged."""

    def __init__(self, config: PenaltyConfig, damaged: float, seed: int) -> None:
        self._merger = EditMerger(config)
        self._damaged = damaged
        self._random = np.random.default_rng(seed)
        self._statistics: dict[int, dict[str, NormStatistics]] = {}

    def rejected(self, fragment_id: int, shares: Mapping[str, Share]) -> frozenset[str]:
        """Merge; return the peers whose contribution has a verdict other than OK."""
        before = self._statistics.setdefault(fragment_id, {})
        fragment = FragmentSpec(fragment_id=fragment_id, name="vector", tensors=(TensorSpec(name="vector", shape=(NUMEL,)),))
        contributions = [self._measured(peer_id, share) for peer_id, share in shares.items()]
        merged = self._merger.merge(fragment, contributions, before, MergeRule())
        before.update(merged.statistics)
        return frozenset(each.peer_id for each in merged.verdicts if each.verdict is not Verdict.OK)

    def _measured(self, peer_id: str, share: Share) -> Measured:
        steps = share.until - share.after
        vector = self._random.standard_normal(NUMEL).astype(np.float32)
        length = math.sqrt(steps) * math.exp(SPREAD * self._random.standard_normal())
        if self._random.random() < self._damaged:
            length *= math.nan if self._random.random() < 0.5 else DAMAGE
        vector *= np.float32(length) / np.float32(np.linalg.norm(vector))
        payload = EncodedTensor("fp32", NUMEL, vector.tobytes())
        return Measured(peer_id, steps, steps, measure(payload), payload)
