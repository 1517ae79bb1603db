"""What the ranks of a replica tell each other; one process needs no communication."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from edit.errors import ConfigError, TransportError
from edit.replica.ranks import ALONE, Ranks
from tests.support.ranks import at_every_rank


def fail(error: Exception) -> Any:
    raise error


def heard(call: Any) -> str:
    """What a call ends with, as one line."""
    try:
        return str(call())
    except (ConfigError, TransportError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def everything() -> dict[str, Any]:
    ranks = Ranks.world()
    me, size = ranks.rank, ranks.size
    own = torch.arange(float(me + 1))
    return {
        "leads": ranks.leads,
        "lead": heard(lambda: ranks.lead(lambda: f"from {me}")),
        "lead fails": heard(lambda: ranks.lead(lambda: fail(ConfigError(f"at {me}")))),
        "together": heard(lambda: ranks.together(lambda: f"by {me}")),
        "one fails": heard(lambda: ranks.together(lambda: fail(TransportError(f"at {me}")) if me == 1 else me)),
        "two fail": heard(lambda: ranks.together(lambda: fail(ValueError(f"at {me}")) if me else me)),
        "all": ranks.all([True, me != 1, False]),
        "collect": ranks.collect(me * me),
        "same": heard(lambda: ranks.same("the weather", "fine")),
        "not the same": heard(lambda: ranks.same("the weather", "wet" if me == 2 else "fine")),
        "gather": [ranks.gather(own, [1, 2, 3], to=to) for to in range(size)],
        "nothing to gather": ranks.gather(own[:0], [0, 0, 0]),
        "hand": [ranks.transfer(own if me == 2 else None, 3, 2, target) for target in (0, 1)],
    }


def test_ranks_agree(tmp_path: Path) -> None:
    seen = at_every_rank(everything, 3, tmp_path)
    for me, one in enumerate(seen):
        assert one["leads"] is (me == 0) and one["lead"] == "from 0" and one["lead fails"] == "ConfigError: at 0"
        assert one["together"] == f"by {me}" and one["one fails"] == "TransportError: at 1"
        assert one["two fail"] == "ValueError: at 1"
        assert one["all"] == [True, False, False] and one["collect"] == [0, 1, 4] and one["same"] == "None"
        assert one["not the same"] == (
            "ConfigError: the ranks of this replica disagree on the weather: rank 0 has fine, rank 2 wet"
        )
        for to, parts in enumerate(one["gather"]):
            assert (parts is not None) is (me == to)
            assert parts is None or [part.tolist() for part in parts] == [[0.0], [0.0, 1.0], [0.0, 1.0, 2.0]]
        assert (one["nothing to gather"] is not None) is (me == 0)
        assert [None if part is None else part.tolist() for part in one["hand"]] == [
            [0.0, 1.0, 2.0] if me == target else None for target in (0, 1)
        ]


def test_one_process_is_a_replica_of_one_rank() -> None:
    own = torch.arange(3.0)
    assert not dist.is_initialized() and Ranks.world() is ALONE and ALONE.leads
    assert ALONE.lead(lambda: 1) == ALONE.together(lambda: 1) == 1
    assert ALONE.all([True, False]) == [True, False] and ALONE.collect("x") == ["x"]
    ALONE.same("anything", object())
    assert ALONE.gather(own, [3]) == [own] and ALONE.transfer(own, 3, 0, 0) is None
    with pytest.raises(TransportError, match="cut"):
        ALONE.together(lambda: fail(TransportError("cut")))
