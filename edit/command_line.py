"""How every command ends: an error is one line and its own exit code; a bug is a traceback and exit code 70."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

from edit.errors import EditError

__all__ = ["run_command"]


def run_command(program: str, command: Callable[[], object]) -> None:
    """Run a command line and exit.

    Exit codes: 0 success, 2 configuration, 3 refused, 4 evicted, 69 not reachable, 70 bug, 130 Ctrl-C.
    """
    try:
        command()
    except EditError as error:
        print(f"{program}: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception:  # the outermost frame: any other exception is a bug
        traceback.print_exc()
        sys.exit(70)
