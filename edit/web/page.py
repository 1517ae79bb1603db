"""A status as HTML: the live page, the parts of it that are sent again, or one file that needs nothing else.

All three come from the same templates. A file has its style, scripts and data inside, and a policy that has their hashes.
"""

from __future__ import annotations

import hashlib
import os
import stat
from base64 import b64encode
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from edit.durable_files import write_atomic
from edit.errors import ConfigError, StorageError
from edit.plain_text import json_text
from edit.web import view
from editpb.run_status import RunStatus

__all__ = [
    "PARTS",
    "STATIC",
    "charts_json",
    "render_live",
    "render_notice",
    "render_page",
    "render_part",
    "round_json",
    "write_page",
]

STATIC = Path(__file__).with_name("static")
PARTS = ("summary", "members", "council", "key", "rounds", "events", "settings", "leaving")  # each has a template
_SCRIPTS = ("vendor/uplot.min.js", "page.js")
_STYLES = ("vendor/uplot.min.css", "page.css")


def render_page(status: RunStatus) -> str:
    """Return the page of a run as one file: report.html. It shows the run as it stood, and asks for nothing."""
    styles, scripts = [_inline(name) for name in _STYLES], [_inline(name) for name in _SCRIPTS]
    rounds = {report.round_id: view.round_details(report) for report in status.rounds}
    return _page(
        status,
        live=False,
        styles=[Markup(text) for text in styles],
        scripts=[Markup(text) for text in scripts],
        policy=(
            f"default-src 'none'; base-uri 'none'; form-action 'none'; "
            f"style-src {_hashes(styles)}; script-src {_hashes(scripts)}"
        ),
        rounds_data=_data(rounds),
    )


def write_page(out: Path, status: RunStatus) -> None:
    """Write the page that `render_page` returns to a file; an older one stays where this one cannot be written.

    Raises ConfigError.
    """
    page = render_page(status).encode()
    try:
        mode = out.stat().st_mode if out.exists() else stat.S_IFREG | 0o644
        if stat.S_ISREG(mode):  # of a link, what it leads to is replaced
            file, old = Path(os.path.realpath(out)), out.exists()
            write_atomic(file, page, mode=0o600 if old else stat.S_IMODE(mode), shared=True)
            if old:  # whatever the umask is
                file.chmod(stat.S_IMODE(mode))
        else:
            out.write_bytes(page)  # a pipe, or the terminal
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written ({error.strerror})") from error
    except StorageError as error:
        raise ConfigError(str(error)) from error


def render_live(status: RunStatus, *, problem: str = "", csrf: str = "", viewer: str = "") -> str:
    """Return the page as it stands, which then follows the run.

    Args:
        problem: why nothing newer comes.
        csrf: what orders must carry; empty: the page has no buttons for them.
        viewer: who looks at it.
    """
    return _page(status, live=True, problem=problem, csrf=csrf, viewer=viewer)


def render_part(name: str, status: RunStatus, *, problem: str = "", csrf: str = "") -> str:
    """Return one of PARTS."""
    return _environment().get_template(f"{name}.html").render(**_values(status, problem, csrf, live=True))


def render_notice(title: str, text: str, refresh: str = "") -> str:
    """Return a page of one sentence. refresh: where browsers go next."""
    return _environment().get_template("notice.html").render(title=title, text=text, refresh=refresh)


def charts_json(status: RunStatus) -> str:
    """Return what page.js draws the charts from, as one line."""
    return _data(view.charts(status))


def round_json(status: RunStatus, round_id: int) -> str | None:
    """Return what is shown of a round, or None if it is not known any more."""
    return next((_data(view.round_details(report)) for report in status.rounds if report.round_id == round_id), None)


def _page(status: RunStatus, *, live: bool, problem: str = "", csrf: str = "", **more: Any) -> str:
    values = _values(status, problem, csrf, live)
    return _environment().get_template("page.html").render(**values, charts_data=Markup(charts_json(status)), **more)


def _values(status: RunStatus, problem: str, csrf: str, live: bool) -> dict[str, Any]:
    return {"status": status, "view": view, "overview": view.overview(status, problem), "csrf": csrf, "live": live}


def _data(value: object) -> Markup:
    """Return JSON that can stand inside <script>: nothing in it begins a tag."""
    return Markup(json_text(value).replace("<", "\\u003c"))


@cache
def _environment() -> Environment:
    folder = FileSystemLoader(Path(__file__).with_name("templates"))
    return Environment(loader=folder, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


@cache
def _inline(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def _hashes(texts: list[str]) -> str:
    return " ".join(f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts)
