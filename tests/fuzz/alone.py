"""A network namespace that holds loopback and nothing else.

Fuzzed bodies name addresses, and whoever is told of a worker or of a bootstrap host calls it, wherever `0.0.0.1` or
`http://1/` may lead. In here it leads nowhere.
"""

import ctypes
import fcntl
import os
import socket
import struct

CLONE_NEWNET = 0x4000_0000
SIOCGIFFLAGS, SIOCSIFFLAGS = 0x8913, 0x8914
IFF_UP = 0x1
INTERFACE_FLAGS = struct.Struct("16sH14x")


def leave_the_network() -> str:
    """Move this thread, and whatever it starts from now on, into such a namespace; else the reason why it stays."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        return f"a network namespace of its own was refused: {os.strerror(ctypes.get_errno())}"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = fcntl.ioctl(any_socket, SIOCGIFFLAGS, INTERFACE_FLAGS.pack(b"lo", 0))
        flags = INTERFACE_FLAGS.unpack(asked)[1]
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, INTERFACE_FLAGS.pack(b"lo", flags | IFF_UP))
    return ""
