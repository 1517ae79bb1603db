"""Which fragments an outer step exchanges: all of them, or one group after the other (Streaming DiLoCo).

Source: arXiv 2501.18512, section 2.2.
"""

from __future__ import annotations

from edit.errors import ConfigError

__all__ = ["fragments_due"]


def fragments_due(outer_step: int, fragments: int, groups: int, pattern: str) -> tuple[int, ...]:
    """Return the fragment ids that the advance FROM `outer_step` exchanges: group `outer_step mod groups`, ascending.

    Each of the P groups is exchanged every H inner steps, H / P inner steps after the one before. pattern: `sequential`:
    neighbouring fragments form a group; `strided`: every P-th fragment. One group: all fragments, each outer step.
    Raises ConfigError when there are more groups than fragments.
    """
    if not 1 <= groups <= fragments:
        raise ConfigError(f"sync.groups = {groups}: the model has {fragments} fragments, so at most {fragments} groups")
    group = outer_step % groups
    if pattern == "strided":
        return tuple(range(group, fragments, groups))
    return tuple(i for i in range(fragments) if i * groups // fragments == group)
