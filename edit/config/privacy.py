"""The section [privacy]: differential privacy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from edit.config.validation import Between, OneOf, check_bounds, require

__all__ = ["PrivacyConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyConfig:
    """The section [privacy]: noise that bounds what the model tells of one example, or organisation (docs/privacy.md)."""

    # `example`: each peer trains by DP-SGD (arXiv 1607.00133): the gradient of each example is clipped, and noise is added,
    # before anything is computed from it; it needs the extra `dp`. `organisation`: the coordinator, which is trusted, clips
    # each organisation's contribution and adds noise to their sum, before anybody else sees it. `none`: no noise.
    level: Annotated[str, OneOf("none", "example", "organisation")] = "none"
    # The probability with which the bound by epsilon may fail; below 1 / examples of each peer, or below n0 ** -1.1 (see
    # `denominator`). Required.
    delta: Annotated[float, Between(0, 0.1)] = 0.0
    # The largest epsilon: of each peer, over all its starts, which stops before the step that would exceed it; or of the run,
    # which ends before the outer step that would. Required.
    epsilon_max: Annotated[float, Between(0, 1000)] = 0.0
    # z: the standard deviation of the noise over `clip`. Required.
    noise_multiplier: Annotated[float, Between(0, 1e6)] = 0.0
    # The largest norm of one example's gradient; or S, that of one organisation's contribution to an outer step, over all
    # fragments.
    clip: Annotated[float, Between(1e-6, 1e6)] = 1.0
    # `poisson`: each example is in each step by chance, independently, on average inner.batch_size * inner.accumulation of
    # them; which ones is secret. `shuffle`: every pass takes each example once, in a step
    # that is drawn for it; the noise then counts once for each pass.
    sampling: Annotated[str, OneOf("poisson", "shuffle")] = "poisson"
    # What an example is: `sequence`: model.context + 1 tokens of the data in order, or a row of your own loop's dataset;
    # `document`: a row too, of which each has all of a document, so not with the packed data of `edit-peer run`.
    unit: Annotated[str, OneOf("sequence", "document")] = "sequence"
    # n0: the sum of the organisations' contributions is divided by this, however many there are. 0: rounds.start_peers.
    denominator: Annotated[int, Between(0, 1 << 20)] = 0
    # Train also where the noise of an outer step is more than 10 times as long as the longest contribution.
    accept_noise: bool = False

    def __post_init__(self) -> None:
        check_bounds("privacy.", self)
        if self.level == "none":
            return
        with_level = f'with privacy.level = "{self.level}"'
        names = ("delta", "epsilon_max", *(("noise_multiplier",) if self.of_examples else ()))
        for name in names:
            require(getattr(self, name) > 0, f"privacy.{name}", getattr(self, name), f"must be given, above 0, {with_level}")
        rule = f"must be at least 0.3 {with_level}: less noise has no bound that means anything"
        given = self.noise_multiplier > 0 or self.of_examples  # where it is not, RunConfig says which one fits
        require(not given or self.noise_multiplier >= 0.3, "privacy.noise_multiplier", self.noise_multiplier, rule)

    @property
    def of_examples(self) -> bool:
        """Whether peers train by DP-SGD."""
        return self.level == "example"

    @property
    def of_organisations(self) -> bool:
        """Whether the coordinator adds noise to the sum of clipped contributions."""
        return self.level == "organisation"
