"""The bound that a site sets on its contributions: of all fragments together, masked or not."""

from __future__ import annotations

import math

import pytest
import torch

from edit.codecs.error_feedback import ErrorFeedback
from edit.collective import CompositeCollective
from edit.config.run import PenaltyConfig
from edit.errors import ConfigError
from edit.fragments.digest import digest
from edit.merging.norms import norm_of_encoded
from edit.records import Contribution, Snapshot
from edit.replica.replica import Replica
from edit.trust.mask_grid import BLOCK
from edit.trust.mask_plan import FragmentPlan
from edit.worker.config import WorkerConfig
from edit.worker.contribution import ContributionMaker, SentTensors
from edit.worker.exchange import Pending
from edit.worker.masked import GridStaging
from edit.worker.schedule import Work
from tests.support.models import TinyTransformer


class Sent:
    """Keeps what is contributed."""

    def __init__(self) -> None:
        self.contributions: list[Contribution] = []

    def contribute(self, contribution: Contribution) -> None:
        self.contributions.append(contribution)


def contributed(clip: float, masked: bool, broken: float = 0.0) -> tuple[list[float], list[Contribution]]:
    """The norm of each fragment, as it is claimed or measured, and what was sent. broken: is added to one parameter."""
    model = TinyTransformer(seed=3)
    replica = Replica(model)
    theta = replica.local()
    replica.start(Snapshot(0, digest(theta), tuple(theta)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
        next(model.parameters()).view(-1)[0] += broken
    feedback = ErrorFeedback("fp32", replica.layout.owned, changing=masked)
    grid = GridStaging(replica, feedback, PenaltyConfig()) if masked else None
    fragments = replica.schema.fragments
    if grid is not None:
        scales = [bytes([256 - 12]) * -(-fragment.numel // BLOCK) for fragment in fragments]  # steps of 2^-12
        grid.begin(
            FragmentPlan(fragment_id=i, bits=32, limit=1 << 20, exponents=each, reference=0.0) for i, each in enumerate(scales)
        )
    sent, pending = Sent(), Pending(outer_step=0, began=0, fragments=tuple(range(len(fragments))), work=Work(1, 1))
    maker = ContributionMaker(replica, feedback, sent, WorkerConfig(masked=masked), None, grid, clip)  # type: ignore[arg-type]
    maker.contribute(pending, SentTensors(), send=True)
    norms = [norm_of_encoded(one.payload) if one.norm is None else one.norm for one in sent.contributions]
    return norms, sent.contributions


@pytest.mark.parametrize("masked", [False, True])
def test_all_fragments_together_are_as_long_as_allowed(masked: bool) -> None:
    free, _ = contributed(0.0, masked)
    bounded, _ = contributed(0.5, masked)
    assert math.hypot(*free) > 0.5 and math.hypot(*bounded) == pytest.approx(0.5, rel=1e-5)
    assert bounded == pytest.approx([norm * 0.5 / math.hypot(*free) for norm in free], rel=1e-5), "the direction stays"
    assert contributed(100.0, masked)[0] == free, "what is short enough is not touched"


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_contribution_that_is_not_finite_brings_nothing_but_that(broken: float) -> None:
    norms, sent = contributed(0.5, masked=False, broken=broken)
    assert [norm for norm in norms if norm != 0] == pytest.approx([math.nan], nan_ok=True) and len(sent) > 1


def test_a_model_in_parts_has_no_bound() -> None:
    with pytest.raises(ConfigError, match=r"protect\.clip = 0\.5: the model is in 2 parts, with a contribution to each"):
        CompositeCollective([Sent(), Sent()], 0.5)  # type: ignore[list-item]
