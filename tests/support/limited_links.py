"""Whether this machine can make links of a limited rate: tests that need them are skipped where it cannot."""

import pytest

from edit.errors import ConfigError
from edit.lab.network import Network

__all__ = ["needs_limited_links"]


def _refusal() -> str:
    try:
        with Network(["tried"], 1000.0):
            return ""
    except ConfigError as error:
        return str(error)


_WHY = _refusal()
needs_limited_links = pytest.mark.skipif(bool(_WHY), reason=_WHY)
