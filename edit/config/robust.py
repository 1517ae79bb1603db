"""The section [robust]: how contributions are combined where some organisations may be hostile."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from edit.config.validation import Between, OneOf, check_bounds, require, within

__all__ = ["RULES", "RobustConfig"]

_ORGANISATION = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MOST_ANCHORS = 64

RULES = ("none", "geometric_median", "centered_clip", "multi_krum", "clip", "median", "trimmed_mean")


@dataclass(frozen=True, slots=True, kw_only=True)
class RobustConfig:
    """The section [robust]: how contributions are combined where some peers may be hostile (docs/robust-merging.md).

    The penalty finds broken peers; a hostile peer keeps its norm plausible. If any peer may be hostile, use the rule
    geometric_median, and set `hostile` to a third of the peers, rounded down. Peers whose names agree up to the first dot
    belong to one organisation, and count as one.
    """

    # `none`: the mean, with the weights of the section [penalty]. `geometric_median` (arXiv 1912.13445), `centered_clip`
    # (arXiv 2012.10333), `multi_krum` (arXiv 1703.02757) and `clip` (each contribution shortened to the median length) weigh
    # contributions as a whole; `median` and `trimmed_mean` (arXiv 1803.01498) go element by element.
    rule: Annotated[str, OneOf(*RULES)] = "none"
    # f: how many organisations may be hostile. A round with good contributions from fewer than 2 f + 1 organisations
    # (multi_krum: 2 f + 3) is rolled back.
    hostile: Annotated[int, Between(0, 1000)] = 0
    # `nnm`: each contribution is first replaced by the mean of its nearest ones (arXiv 2302.01772); `none`.
    mixing: Annotated[str, OneOf("nnm", "none")] = "nnm"
    # Scale all contributions to their median length, but none to more than 4 times its length. Otherwise a short contribution
    # has an advantage, because it is near all others.
    equalise: bool = True
    # `fragment`: each fragment has weights of its own, and is merged as soon as it is complete. `model`: contributions are
    # weighed as one vector of all fragments of an outer step, so that all have the same weights; nothing is merged before the
    # round closes. Not with aggregators.addresses and [swarm]. docs/robust-merging.md compares the two.
    scope: Annotated[str, OneOf("fragment", "model")] = "fragment"
    # The distance from the centre to which centered_clip shortens; 0: the median distance.
    radius: Annotated[float, Between(0, 1e12)] = 0.0
    # `none`: all are trusted alike. `anchors`: each contribution is weighed by its cosine to the mean contribution of
    # `anchors`, and scaled to the length of that mean; one that points away from it has no weight (FLTrust, arXiv 2012.13995).
    # It replaces the rule. `loss`: a contribution counts in proportion to how much the last ones of its peer lowered the loss
    # on the data of a scorer (`edit-peer score`). It works with the rules that weigh contributions as a whole, and without one.
    trust: Annotated[str, OneOf("none", "anchors", "loss")] = "none"
    # The organisations that are trusted with trust = "anchors": the names of their peers up to the first dot. A fragment is
    # rolled back if none of them has contributed well to it.
    anchors: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_bounds("robust.", self)
        if self.anchored:
            rule = 'must be none with robust.trust = "anchors", which replaces it'
            require(self.rule == "none", "robust.rule", self.rule, rule)
            rule = 'must name at least one organisation with robust.trust = "anchors"'
            require(bool(self.anchors), "robust.anchors", list(self.anchors), rule)
        if self.scored:
            rule = f'must not be {self.rule} with robust.trust = "loss": element by element, no contribution has a weight'
            require(not self.by_element, "robust.rule", self.rule, rule)
        for name in self.anchors:
            rule = "must be the name of an organisation: 1 to 64 letters, digits, '-' or '_', as the names of its peers begin"
            require(_ORGANISATION.fullmatch(name) is not None, "robust.anchors", name, rule)
        twice = next((name for name in self.anchors if self.anchors.count(name) > 1), None)
        require(twice is None, "robust.anchors", twice, "must not be named twice")
        within("robust.anchors (their number)", len(self.anchors), 0, _MOST_ANCHORS)
        if self.rule not in ("none", "clip"):
            rule = f'must be at least 1 with robust.rule = "{self.rule}": the number of peers that may be hostile'
            require(self.hostile >= 1, "robust.hostile", self.hostile, rule)

    @property
    def anchored(self) -> bool:
        """Whether contributions are weighed by their cosine to those of the anchors."""
        return self.trust == "anchors"

    @property
    def scored(self) -> bool:
        """Whether contributions are weighed by what scorers say of those before them."""
        return self.trust == "loss"

    @property
    def enabled(self) -> bool:
        """Whether anything of this section replaces the weights of the penalty."""
        return self.rule != "none" or self.trust != "none"

    @property
    def of_model(self) -> bool:
        """Whether contributions are weighed by all fragments of an outer step together."""
        return self.scope == "model" and self.enabled and not self.by_element

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
