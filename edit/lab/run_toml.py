"""Write a run.toml from settings, with the coordinator's checks."""

from __future__ import annotations

from collections.abc import Mapping

from edit.config.run import RunConfig

__all__ = ["Setting", "Settings", "to_toml"]

Plain = str | int | float | bool | tuple[str, ...]
Setting = Plain | Mapping[str, Plain | Mapping[str, Plain]]
Settings = Mapping[str, Setting | Mapping[str, Setting]]


def to_toml(settings: Settings) -> str:
    """Return the settings as TOML. Raises ConfigError when they are no valid RunConfig."""
    RunConfig.from_mapping(settings)
    plain = [f"{key} = {_value(value)}" for key, value in settings.items() if not isinstance(value, Mapping)]
    tables = [
        "\n".join([f"\n[{key}]", *(f"{name} = {_value(inner)}" for name, inner in value.items())])
        for key, value in settings.items()
        if isinstance(value, Mapping)
    ]
    return "\n".join([*plain, *tables]) + "\n"


def _value(value: Setting) -> str:
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_value(key)} = {_value(inner)}' for key, inner in value.items())} }}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return f"[{', '.join(_value(item) for item in value)}]"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return repr(value)
