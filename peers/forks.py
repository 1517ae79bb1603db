"""What a user's loop forks beside gRPC's threads, as a DataLoader does its workers. Imported before gRPC.

With gRPC's own support of forks, on by default, some of them abort (1.85: `next_worker->state == KICKED`), and up to half of
the passes over the data fail. A worker makes no call, so it needs none.
"""

from __future__ import annotations

import os
import sys

__all__ = ["GRPC_CAME_FIRST"]

_SWITCH = "GRPC_ENABLE_FORK_SUPPORT"  # gRPC reads it once, when it is imported

GRPC_CAME_FIRST = "grpc" in sys.modules and _SWITCH not in os.environ
os.environ.setdefault(_SWITCH, "0")
