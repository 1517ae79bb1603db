"""The page of a run: what `edit-coordinator web` and `edit-peer web` show, from nothing but RunStatus records.

Owns: what the page says and how it looks, who may see it, its server. Must not know: where the records come from (each side's
command gives it an iterator of them), torch. It is a process of its own: whatever becomes of it, the run does not notice.
In reading order:

page       a status as HTML: the live page, its parts, or one file that needs nothing else
view       what the page says, worked out from a status; no HTML
feed       the newest status, for everybody who watches
access     who may see the page, and who may give orders
app        the routes
serve      the process: address, TLS, signals

Needs the extra `web`, except `view`.
"""

from edit.errors import ConfigError

__all__ = ["check_installed"]


def check_installed() -> None:
    """Raise ConfigError where the extra `web` is not installed."""
    try:
        import jinja2  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"the page needs {error.name}: pip install 'edit-localsgd[web]'") from error
