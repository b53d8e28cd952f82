"""Two hosts on one machine, joined by a link of a chosen speed: what a slow interconnect does, without a second
machine.

Each host is a network namespace of Linux, and the link a pair of virtual Ethernet devices with a token bucket in front
of either end. A namespace lives as long as a process in it: here a `cat` that reads from this process and so ends with
it, whatever ends it. It is also the first process of a process namespace, with which the kernel ends all others.
Nothing has a name outside of the two namespaces, and nothing is left behind.
"""

import contextlib
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

_COMMANDS = ("unshare", "nsenter", "ip", "tc")
_DEVICE, _PORT = "link0", 29400  # both exist in the namespaces only
_ADDRESSES = ("10.0.0.1", "10.0.0.2")
_CLONE_NEWNET = 0x40000000


class Unavailable(OSError):
    """This machine, or this user, cannot make a link; the text says what is missing."""


@dataclass(frozen=True)
class Link:
    """Two hosts and what joins them."""

    holders: tuple[int, int]  # ids of the processes that keep the hosts' namespaces
    addresses: tuple[str, str] = _ADDRESSES  # of the hosts, for each other
    device: str = _DEVICE  # by which a host reaches the other one

    def on(self, host: int, *command: str) -> list[str]:
        """A command that carries out another one on host 0 or 1, e.g. for `subprocess.Popen`.

        It sees no network but the link. What it starts ends with the link, if not before.
        """
        spaces = f"/proc/{self.holders[host]}/ns"
        return ["nsenter", f"--net={spaces}/net", f"--pid={spaces}/pid_for_children", "--", *command]

    def join(self) -> None:
        """Move this rank to its host (even ranks to the first one, odd ranks to the second), to meet the others there.

        Call it in a rank that torch's launcher started, before `init_process_group`. The process stays there.
        """
        rank = int(os.environ["RANK"])
        with open(f"/proc/{self.holders[rank % 2]}/ns/net") as namespace:
            _enter(namespace.fileno())
        os.environ |= {"MASTER_ADDR": _ADDRESSES[0], "MASTER_PORT": str(_PORT), "GLOO_SOCKET_IFNAME": _DEVICE}
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # the launcher's own meeting point is on no host


@contextlib.contextmanager
def link(megabits_per_second: float | None = None) -> Iterator[Link]:
    """Two hosts with a link between them, until the end of the `with`.

    Args:
        megabits_per_second: speed in either direction, 10^6 bits a second; None: as fast as the machine can copy.

    Raises:
        Unavailable: this needs Linux, root, and the commands of util-linux and iproute2.
        ValueError: the speed is no positive number.
    """
    rate = megabits_per_second
    if rate is not None and (isinstance(rate, bool) or not isinstance(rate, int | float) or not rate > 0):
        raise ValueError(f"megabits_per_second={rate!r}: give a positive number, or None for no limit")
    if lacking := _lacking():
        raise Unavailable(lacking)
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(_namespace()) for _ in range(2))
        _do("ip", "link", "add", _DEVICE, "netns", str(first), "type", "veth", "peer", _DEVICE, "netns", str(second))
        for address, host in zip(_ADDRESSES, (first, second), strict=True):
            within = ("nsenter", "--target", str(host), "--net")
            _do(*within, "ip", "address", "add", f"{address}/24", "dev", _DEVICE)
            _do(*within, "ip", "link", "set", "lo", "up")
            _do(*within, "ip", "link", "set", _DEVICE, "up")
            if rate is not None:
                limit = ("tbf", "rate", f"{round(rate * 1e6)}bit", "burst", "128kb", "latency", "50ms")
                _do(*within, "tc", "qdisc", "add", "dev", _DEVICE, "root", *limit)
        yield Link((first, second))


@functools.cache
def missing() -> str | None:
    """What is missing to make a link here, in words; None where one could be made (one is, and is gone again)."""
    try:
        with link(100):
            return None
    except Unavailable as reason:
        return str(reason)


def bytes_sent() -> int | None:
    """Bytes, headers included, that this rank's network device has sent so far, the one through which it talks to the
    others: seen from the namespace that the process is in. None where the system does not tell."""
    device = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    try:
        with open("/proc/thread-self/net/dev") as file:
            fields = next(line.split(":")[1].split() for line in file if line.strip().startswith(f"{device}:"))
    except (OSError, StopIteration):
        return None
    return int(fields[8])


def _lacking() -> str | None:
    if not sys.platform.startswith("linux"):
        return "needs Linux to make a slow link"
    if os.geteuid() != 0:
        return "needs root to make a slow link"
    absent = [name for name in _COMMANDS if shutil.which(name) is None]
    return f"needs the commands {', '.join(absent)} to make a slow link" if absent else None


@contextlib.contextmanager
def _namespace() -> Iterator[int]:
    """A process in a network namespace of its own: its id. It ends when its input does."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = ["unshare", "--net", "--pid", "--fork", "--kill-child", "sh", "-c", "echo ready && exec cat"]
    with subprocess.Popen(command, **pipes, start_new_session=True) as holder:  # leaving it closes the pipes and waits
        if not holder.stdout.readline():
            raise Unavailable(_reason("unshare", holder.communicate()[1]))
        yield holder.pid


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True)
    if done.returncode:
        name = next(word for word in command if word in ("ip", "tc"))
        raise Unavailable(_reason(name, done.stderr))


def _reason(name: str, errors: bytes) -> str:
    lines = errors.decode(errors="replace").strip().splitlines() or ["no reason given"]
    return f"needs the right to make a slow link; {name} says: {lines[0]}"


def _enter(descriptor: int) -> None:
    """setns(2), which Python has from 3.12 on."""
    if hasattr(os, "setns"):
        return os.setns(descriptor, _CLONE_NEWNET)
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
