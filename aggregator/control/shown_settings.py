"""A run's settings as a status has them: by name, with their defaults."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from edit.config.run import RunConfig
from editpb.run_status import Setting

__all__ = ["settings_of"]


def settings_of(config: RunConfig) -> tuple[Setting, ...]:
    """Return every setting that members know, in the order of its name, with its default; also those that `to_json` omits."""
    default = RunConfig.from_mapping({} if config.swarm is None else {"swarm": {}})
    values, defaults = (dict(_flat(asdict(each))) for each in (config, default))
    return tuple(
        Setting(name=name, value=json.dumps(values.get(name)), default=json.dumps(defaults.get(name)))
        for name in sorted(values.keys() | defaults.keys())
        if not name.startswith("server.")
    )


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value and not before:
            yield from _flat(value, f"{key}.")
        else:
            yield before + key, value
