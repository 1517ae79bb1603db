"""Where a gRPC server listens: at every address of a name, or not at all.

gRPC itself is content with one of them, also where another program listens at the others, to which clients may then connect.
"""

from __future__ import annotations

import errno
import ipaddress
import socket

import grpc

from edit.errors import ConfigError

__all__ = ["listen_at"]

# The machine has no such address, as without IPv6; EINVAL: a link-local one without its interface.
_NOT_HERE = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EINVAL)


def listen_at(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials) -> int:
    """Have a server listen at HOST:PORT; return the port. Port 0 chooses one, the same at each address of a name.

    Raises ConfigError, which begins with the address: in use, not of this machine, or a name that is not known.
    """
    host, _, wanted = address.rpartition(":")
    port = int(wanted)
    try:
        for found in _addresses(host, port):
            port = server.add_secure_port(f"{found}:{port}", credentials)
    except RuntimeError as error:
        raise ConfigError(f"{address} cannot be bound; is the port in use?") from error
    except (OSError, UnicodeError) as error:
        why = (error.strerror if isinstance(error, OSError) else "") or error
        raise ConfigError(f"{address} cannot be bound ({why}); is the port in use?") from error
    return port


def _addresses(host: str, port: int) -> list[str]:
    """Return the addresses of a host that this machine has, all of them free; an address stays as it is. Raises OSError."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        places = dict.fromkeys((family, to) for family, _, _, _, to in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    else:
        return [host]
    found, refused = [], OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
    for family, place in places:
        try:
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC
                probe.bind(place)
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
            refused = error
        else:
            scope = f"%{place[3]}" if len(place) > 3 and place[3] else ""  # of a link-local one, which is no address without
            found.append(f"[{place[0]}{scope}]" if family == socket.AF_INET6 else str(place[0]))
    if not found:
        raise refused
    return found
