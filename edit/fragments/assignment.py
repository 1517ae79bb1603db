"""Which fragments belong to which aggregator, when a run is spread over several.

The assignment is a pure function of the model's schema and the number of aggregators, so every process computes the same.
The fragments of an aggregator are neighbours in forward order. So the aggregators' fragments one after the other are the
model's, and the digest over all of them is the one that a single aggregator would have.
"""

from __future__ import annotations

from itertools import accumulate

from edit.errors import ConfigError
from edit.fragments.schema import Schema

__all__ = ["assign"]


def assign(schema: Schema, aggregators: int) -> tuple[range, ...]:
    """Return the fragment ids of each aggregator: neighbours, about as many elements each, none empty.

    No aggregator has more elements than an equal share of them plus the largest fragment. Raises ConfigError when there are
    more aggregators than fragments.
    """
    count = len(schema.fragments)
    if not 1 <= aggregators <= count:
        raise ConfigError(
            f"aggregators.addresses: {aggregators} aggregators with the coordinator, but the model has {count} fragments, and "
            f"each needs one; name at most {count - 1}"
        )
    before = [0, *accumulate(fragment.numel for fragment in schema.fragments)]  # elements before each fragment, and all
    cuts = [0]
    for number in range(1, aggregators):
        possible = range(cuts[-1] + 1, count - (aggregators - number) + 1)
        cuts.append(min(possible, key=lambda cut: abs(before[cut] * aggregators - before[-1] * number)))
    return tuple(map(range, cuts, [*cuts[1:], count]))
