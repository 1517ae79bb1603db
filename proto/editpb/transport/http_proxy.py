"""Which HTTP proxy a connection goes through, by CONNECT: what the environment says, as for other programs.

    grpc_proxy, https_proxy, http_proxy     http://[USER:PASSWORD@]HOST:PORT; the first that is set counts, also in upper case
    no_grpc_proxy, no_proxy                 hosts that are reached directly: names, with all below them, addresses, networks, *;
                                            each also as HOST:PORT, *.NAME and with a dot at its end

What is on this machine is always reached directly. gRPC would read the same variables, but would take a proxy also to reach
this machine, and none at all, without a word, when it cannot read its address.
"""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Mapping
from functools import lru_cache
from urllib.parse import quote, unquote, urlsplit

from edit.errors import ConfigError
from editpb.invitation import is_loopback

__all__ = ["proxy_for", "through"]

_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_DIRECT = ("no_grpc_proxy", "no_proxy")
_log = logging.getLogger(__name__)


def proxy_for(address: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the proxy's URL, or '' when HOST:PORT is reached directly. Raises ConfigError for a proxy that is none."""
    url, place, name = _found(address, environment)
    if url:
        _tell(name, place)
    return url


def through(address: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return what an error says of the way to HOST:PORT, after that: '' where it is reached directly. Raises as `proxy_for`."""
    url, place, name = _found(address, environment)
    return f" (through the HTTP proxy {place}, which the environment's {name} names)" if url else ""


def _found(address: str, environment: Mapping[str, str]) -> tuple[str, str, str]:
    """Return the proxy's URL, its HOST:PORT and the variable that names it; '' each when HOST:PORT is reached directly."""
    name, given = _first(_PROXIES, environment)
    host = address.rpartition(":")[0].strip("[]").lower().rstrip(".")
    if not given or _is_here(host) or _is_direct(host, _first(_DIRECT, environment)[1]):
        return "", "", ""
    return *_checked(name, given), name


def _first(names: tuple[str, ...], environment: Mapping[str, str]) -> tuple[str, str]:
    for name in (spelled for each in names for spelled in (each, each.upper())):
        if value := environment.get(name, "").strip():
            return name, value
    return names[0], ""


@lru_cache(16)
def _checked(name: str, given: str) -> tuple[str, str]:
    """Return the URL as gRPC takes it, and HOST:PORT of the proxy. What is said of a wrong one has no password in it."""
    try:
        given.encode()
        parts = urlsplit(given if "://" in given else f"http://{given}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port, parts = None, None, None
    if parts is None or not host or not port:
        raise ConfigError(f"the environment's {name}: must be http://HOST:PORT, or http://USER:PASSWORD@HOST:PORT")
    if parts.scheme != "http":
        raise ConfigError(
            f"the environment's {name} is a proxy of kind {parts.scheme[:20]}; only http://HOST:PORT is supported, by CONNECT"
        )
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    user = quote(unquote(parts.username or ""), safe="")
    secret = f":{quote(unquote(parts.password), safe='')}" if parts.password is not None else ""
    return f"http://{user}{secret}@{place}" if user else f"http://{place}", place


@lru_cache(16)
def _tell(name: str, place: str) -> None:
    _log.info("other machines are reached through the HTTP proxy %s, which the environment's %s names", place, name)


def _is_direct(host: str, entries: str) -> bool:
    return any(_fits(host, entry.strip().lower()) for entry in entries.split(","))


def _fits(host: str, entry: str) -> bool:
    place, _, port = entry.rpartition(":")
    if port.isdecimal() and (":" not in place or place.endswith("]")):  # else these are the last digits of an IPv6 address
        entry = place
    if entry == "*":
        return True
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry.strip("[]"), strict=False)
    except ValueError:  # one of them is a name
        name = entry.removeprefix("*").strip(".")
        return bool(name) and (host == name or host.endswith(f".{name}"))


def _is_here(host: str) -> bool:
    """Return whether this is loopback, in any spelling, or the address of everything, which leads there, too."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return is_loopback(host)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback or address.is_unspecified
