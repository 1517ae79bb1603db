"""The folder of a member: what the council must have on disk, and a folder for each part.

council.json   `edit.council.record.Saved`: the term, the vote, the newest record; private
part-N/        the journal and the checkpoints of part N (`aggregator.storage.store`)
port           the port of this host, when the system chose it
started        the number of the last start: milliseconds since 1970, or more
phi/           with gossip: this member's outer parameters, as a part's
settling/      with gossip: what the owner that settles gets of the others, while it does
engine-N/      what an engine of part N writes beside them; nothing of it is needed again

The peer that trains in the same folder keeps its checkpoints there (checkpoints/, unless it was given another folder), and what
it has seen of the audit logs (receipts-part-N.jsonl).
"""

from __future__ import annotations

from pathlib import Path

from edit.council.record import MOST_COUNT, Saved
from edit.durable_files import names_in, write_atomic
from edit.errors import StorageError
from editpb.seen_entries import SEEN_FILES

__all__ = ["MemberFolder"]


class MemberFolder:
    """The files of one member. path: exists, and is locked by who writes."""

    def __init__(self, path: Path) -> None:
        self._path, self._council = path, path / "council.json"
        self._port, self._started = path / "port", path / "started"

    @property
    def path(self) -> Path:
        """The folder."""
        return self._path

    def part(self, part: int) -> Path:
        """Return the folder of a part."""
        return self._path / f"part-{part}"

    @property
    def phi(self) -> Path:
        """The folder of this member's outer parameters, with gossip."""
        return self._path / "phi"

    @property
    def settling(self) -> Path:
        """The folder of what others sent to settle."""
        return self._path / "settling"

    def engine(self, part: int) -> Path:
        """Return the folder of a part's engine."""
        return self._path / f"engine-{part}"

    def of_lineage(self) -> list[Path]:
        """Return the files and folders that a member must not have when it joins another lineage; council.json is the last.

        What the peer has counted of its privacy budget is not among them: what was spent in a lost lineage stays spent.
        """
        patterns = ("part-*", "engine-*", "phi", "settling", "checkpoints", SEEN_FILES)
        return [*(self._path / name for pattern in patterns for name in names_in(self._path, pattern)), self._council]

    def port(self) -> int:
        """Return the port of last time, or 0."""
        port = _number(self._port)
        return port if port < 1 << 16 else 0

    def keep_port(self, port: int) -> None:
        """Take note of the port. Raises StorageError."""
        if port != self.port():
            write_atomic(self._port, str(port).encode())

    def start(self, unix_s: float) -> int:
        """Return the number of this start: larger than all before with this folder, and than one before `unix_s` with a copy.

        unix_s: seconds since 1970, by the clock here. Raises StorageError.
        """
        number = max(int(unix_s * 1000), _number(self._started) + 1)
        write_atomic(self._started, str(number).encode())
        return number

    @property
    def founded(self) -> bool:
        """Whether the member has said anything yet, or founded its swarm."""
        return self._council.exists()

    def save(self, saved: Saved) -> None:
        """Carry out a Save: on disk when this returns. Raises StorageError; then the member may say nothing more."""
        write_atomic(self._council, saved.encode(), mode=0o600)

    def saved(self) -> Saved | None:
        """Return what was saved last, or None in a folder that is new. Raises StorageError for damage, FormatError.

        A folder without council.json and with parts has lost what its member said: it is damaged, not new. A member whose disk
        was lost comes back with an empty folder, in another incarnation.
        """
        try:
            return Saved.decode(self._council.read_bytes(), self._council)
        except FileNotFoundError:
            if names_in(self._path, "part-*"):
                raise StorageError(f"{self._council}: is missing beside the parts; join anew with an empty folder") from None
            return None
        except OSError as error:
            raise StorageError(f"{self._council}: cannot be read ({error.strerror})") from error


def _number(file: Path) -> int:
    """Return the number in a file that may be missing; 0 for anything else."""
    try:
        number = int(file.read_bytes())
    except (OSError, ValueError):
        return 0
    return number if 0 < number < MOST_COUNT else 0
