"""A table of values as CSV: step, name, value. A restart goes on with the same file.

command line:   edit-peer run --tracker entry:table --allow table ...
"""

import csv


class Table:
    """Lives in a thread of its own: it may wait for a disk or a network, and what it raises is logged once."""

    def __init__(self, run):
        """run: an `edit.trackers.TrackedRun`: run_id, run_name, member, folder, first_step, settings, options."""
        run.folder.mkdir(parents=True, exist_ok=True)
        name = f"{run.run_id}-{run.member}.csv"
        self.file = (run.folder / name).open("a", newline="", buffering=1)
        self.rows = csv.writer(self.file)

    def log(self, step, values):
        """Write values by name: numbers, and words such as a verdict. step: inner steps at a peer, outer at a coordinator."""
        self.rows.writerows([step, name, value] for name, value in values.items())

    def close(self):
        """Called once, at the end."""
        self.file.close()
