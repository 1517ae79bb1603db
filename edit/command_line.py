"""How every command of this project ends: one line and the error's own exit code, or a traceback and 70 for a bug."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

from edit.errors import EditError

__all__ = ["run_command"]


def run_command(program: str, command: Callable[[], object]) -> None:
    """Run a command line to its end and exit: 0 ok, 2 configuration, 3 refused, 4 evicted, 70 bug, 130 Ctrl-C."""
    try:
        command()
    except EditError as error:
        print(f"{program}: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception:  # the outermost frame: whatever arrives here is a bug, and says so with its exit code
        traceback.print_exc()
        sys.exit(70)
