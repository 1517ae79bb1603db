"""Which trackers the command line names: `--tracker NAME` and `--tracker-option NAME.KEY=VALUE`, built in or plug-ins."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edit import plugins
from edit.config.overrides import options_of
from edit.config.plugins import PREFIX, is_entry
from edit.errors import ConfigError, EditError, PluginError
from edit.trackers.background import BackgroundTracker, Trackers
from edit.trackers.base import TrackedRun, Tracker

__all__ = ["BUILT_IN", "NO_TRACKERS", "TrackerChoice"]

# The package that each needs, which is the name of its module here and of the extra that installs it.
BUILT_IN = ("tensorboard", "wandb", "mlflow", "trackio")
Options = Mapping[str, str | int | float | bool]


def _register(module: str) -> None:
    @plugins.built_in("trackers", module)
    def _(run: TrackedRun) -> Tracker:  # imports it, and the package with it
        tracker: Tracker = importlib.import_module(f"edit.trackers.{module}").make(run)
        return tracker


for _module in BUILT_IN:
    _register(_module)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerChoice:
    """The trackers of one process, checked; none is imported yet."""

    names: tuple[str, ...] = ()
    options: Mapping[str, Options] = field(default_factory=dict)  # by tracker
    allowed: frozenset[str] = frozenset()

    @classmethod
    def of(cls, names: Sequence[str], options: Sequence[str], allowed: frozenset[str]) -> TrackerChoice:
        """Return what the options say. Raises ConfigError: an unknown tracker, a package that is missing, a wrong option."""
        for name in names:
            if is_entry(name):
                plugins.check("trackers", name.removeprefix(PREFIX), allowed)
            elif name not in BUILT_IN:
                raise ConfigError(f"--tracker {name}: must be one of {', '.join(BUILT_IN)}, or entry:NAME, a plug-in")
            elif importlib.util.find_spec(name) is None:
                raise ConfigError(f"--tracker {name} needs the package {name}: pip install 'edit-localsgd[{name}]'")
        by_tracker: dict[str, list[str]] = {name.removeprefix(PREFIX): [] for name in names}
        for each in options:
            tracker, dot, setting = each.partition(".")
            if not dot or "=" in tracker or tracker not in by_tracker:
                raise ConfigError(f"--tracker-option {each}: must be NAME.KEY=VALUE, where --tracker names NAME")
            by_tracker[tracker].append(setting)
        found = {tracker: options_of(f"--tracker-option {tracker}:", given) for tracker, given in by_tracker.items()}
        return cls(names=tuple(dict.fromkeys(names)), options=found, allowed=allowed)

    def open(self, run_id: str, run_name: str, member: str, folder: Path, settings: Mapping[str, Any]) -> Trackers:
        """Return the trackers, each in a thread of its own; a plug-in is imported here. folder: has one of each tracker.

        Raises ConfigError, PluginError when a plug-in cannot be loaded.
        """
        makers = [(name, self._maker(name)) for name in self.names]

        def making(name: str, make: Callable[[TrackedRun], Tracker]) -> Callable[[int], Tracker]:
            own = name.removeprefix(PREFIX)

            def made(first_step: int) -> Tracker:
                return make(
                    TrackedRun(
                        run_id=run_id,
                        run_name=run_name,
                        member=member,
                        folder=folder / own,
                        first_step=first_step,
                        settings=settings,
                        options=self.options.get(own, {}),
                    )
                )

            return made

        return Trackers([BackgroundTracker(name, making(name, make)) for name, make in makers])

    def _maker(self, name: str) -> Callable[[TrackedRun], Tracker]:
        plugin, maker = plugins.resolve("trackers", name, self.allowed)
        if plugin.built_in:
            return maker

        def make(run: TrackedRun) -> Tracker:
            with plugins.blame(plugin, EditError):  # not PluginError: what it needs may be back later
                tracker: Tracker = maker(run)
            for method in ("log", "close"):
                if not callable(getattr(tracker, method, None)):
                    raise PluginError(f"{plugin}: gave a {type(tracker).__name__} without a method {method}")
            return tracker

        return make


NO_TRACKERS = TrackerChoice()
