"""The run's outer parameters as a folder that transformers' `from_pretrained` loads.

Owns: how such a folder comes to be whole or not at all. Must not know: rounds, peers; what is in the folder is `edit.hf`'s.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from aggregator.state_folder import StateFolder
from aggregator.store import load_outer, named_parameters, origin
from edit import hf
from edit.errors import ConfigError

__all__ = ["export_pretrained"]


def export_pretrained(folder: StateFolder, out: Path) -> tuple[int, str]:
    """Write theta of an `hf:` run as the new folder `out`; returns (outer step, digest). run.json in it names its origin.

    Raises ConfigError (also for another kind of model, and when `out` is not empty), StorageError.
    """
    outer = load_outer(folder)
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(f"--out {out}: exists and is not an empty folder; give a new one")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        hf.save(folder.config().model, named_parameters(outer), temporary)
        (temporary / "run.json").write_text(json.dumps(origin(folder, outer), indent=1), encoding="utf-8")
        temporary.replace(out)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written ({error.strerror})") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return outer.outer_step, outer.digest
