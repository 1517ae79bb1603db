"""The section [robust]: how contributions are combined where some organisations may be hostile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from edit.config.validation import Between, OneOf, check_bounds, require

__all__ = ["RULES", "RobustConfig"]

RULES = ("none", "geometric_median", "centered_clip", "multi_krum", "clip", "median", "trimmed_mean")


@dataclass(frozen=True, slots=True, kw_only=True)
class RobustConfig:
    """The section [robust]: how contributions are combined where some peers may be hostile (docs/robust-merging.md).

    The penalty is for peers that are broken; a peer that means harm keeps its norm plausible. Recommended where any peer may
    be hostile: the rule geometric_median, with a third of the peers as hostile, rounded down. Peers whose names are alike up
    to the first dot are of one organisation, and count as one.
    """

    # `none`: the mean, by the weights of the section [penalty]. `geometric_median` (arXiv 1912.13445), `centered_clip`
    # (arXiv 2012.10333), `multi_krum` (arXiv 1703.02757) and `clip` (each contribution shortened to the median length) weigh
    # contributions as a whole; `median` and `trimmed_mean` (arXiv 1803.01498) go element by element.
    rule: Annotated[str, OneOf(*RULES)] = "none"
    # f: how many organisations may be hostile. A round with good contributions of fewer than 2 f + 1 (multi_krum: 2 f + 3) is
    # rolled back.
    hostile: Annotated[int, Between(0, 1000)] = 0
    # `nnm`: each contribution is first replaced by the mean of its nearest ones (arXiv 2302.01772); `none`.
    mixing: Annotated[str, OneOf("nnm", "none")] = "nnm"
    # Make all contributions as long as their median, at most 4 times as long: else a short one is near all others.
    equalise: bool = True
    # The distance from the centre to which centered_clip shortens; 0: the median distance.
    radius: Annotated[float, Between(0, 1e12)] = 0.0

    def __post_init__(self) -> None:
        check_bounds("robust.", self)
        if self.rule not in ("none", "clip"):
            rule = f'must be at least 1 with robust.rule = "{self.rule}": the number of peers that may be hostile'
            require(self.hostile >= 1, "robust.hostile", self.hostile, rule)

    @property
    def by_element(self) -> bool:
        """Whether the rule goes element by element, so that no contribution has one coefficient."""
        return self.rule in ("median", "trimmed_mean")

    @property
    def least(self) -> int:
        """The number of good contributions that the rule needs."""
        if self.rule in ("none", "clip"):
            return 1
        return 2 * self.hostile + (3 if self.rule == "multi_krum" else 1)
