"""Cut off the network: with this module on PYTHONPATH, every Python process can reach only this machine.

Each attempt to reach another machine is refused, and appended to the file that OFFLINE_ATTEMPTS names.
"""

import os
import socket
import sys

_LOCAL = ("127.", "::1", "localhost", "0.0.0.0", "::", "10.")


def _refuse(host):
    if host is None or str(host).startswith(_LOCAL) or host in ("", socket.gethostname()):
        return
    if path := os.environ.get("OFFLINE_ATTEMPTS"):
        with open(path, "a") as file:
            file.write(f"{host} by {' '.join(sys.argv)[:200]}\n")
    raise OSError(f"the network is cut off: {host}")


class _Socket(socket.socket):
    def connect(self, address):
        if self.family in (socket.AF_INET, socket.AF_INET6):
            _refuse(address[0])
        return super().connect(address)

    def connect_ex(self, address):
        if self.family in (socket.AF_INET, socket.AF_INET6):
            _refuse(address[0])
        return super().connect_ex(address)


_getaddrinfo = socket.getaddrinfo


def _resolve(host, *arguments, **options):
    _refuse(host.decode() if isinstance(host, bytes) else host)
    return _getaddrinfo(host, *arguments, **options)


if os.environ.get("OFFLINE_ATTEMPTS"):
    socket.socket = _Socket
    socket.getaddrinfo = _resolve
