"""Ports on loopback that nobody listens on."""

import random
import socket

from baton_cli.errors import CliError
from baton_cli.layout import HOST

# Below the range from which Linux gives ports to outgoing connections, so that a process which is down for a restart
# does not lose its port to one of them.
FIRST_PORT, LAST_PORT = 20_000, 32_000
TRIES_MAX = 2_000


def is_free(port: int) -> bool:
    """Whether a server could listen on `port` now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def free_ports(count: int, *, taken: int) -> list[int]:
    """`count` different free ports, without `taken`; random, so that two commands at once rarely meet. Raises CliError."""
    found: set[int] = set()
    for _ in range(TRIES_MAX):
        if len(found) == count:
            return sorted(found)
        port = random.randint(FIRST_PORT, LAST_PORT)
        if port != taken and is_free(port):
            found.add(port)
    raise CliError(f"cannot find {count} free ports between {FIRST_PORT} and {LAST_PORT}")
