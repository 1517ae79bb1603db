"""`python -m edit.lab.compare.one_trial`: a trial as JSON on stdin, its row of results as JSON on stdout."""

from __future__ import annotations

import sys

from edit.errors import EditError
from edit.lab.compare.trial import Trial, run_trial
from edit.plain_text import json_text

if __name__ == "__main__":
    try:
        print(json_text(run_trial(Trial.from_json(sys.stdin.read()))))  # noqa: T201
    except EditError as error:
        sys.exit(str(error))
