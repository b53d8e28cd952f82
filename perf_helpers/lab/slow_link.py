"""Simulate two hosts on one machine, with a link of a chosen speed and delay between them.

Each host is a Linux network namespace. The link is a pair of virtual Ethernet devices with a token bucket at each end.
Few kernels have netem, Linux's module for delays. Therefore a thread of this process delays each frame in a third
namespace. A namespace exists while a process runs in it: here a `cat`, which reads from this process and ends when this
process ends. The namespaces have no names, so nothing has to be removed afterwards.
"""

import contextlib
import ctypes
import functools
import os
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from trainmem.texts import positive

_DEVICE, _PORT, _ADDRESSES = "link0", 29400, ("10.0.0.1", "10.0.0.2")  # they exist inside the namespaces only
_CLONE_NEWNET = 0x40000000


class Unavailable(OSError):
    """This machine or this user cannot set up a simulated network link; the message names what is missing."""


@dataclass(frozen=True)
class Link:
    """Two simulated hosts on this machine that a network link connects; `join` moves this process to one of them."""

    holders: tuple[int, int]  # ids of the processes that keep the two hosts' namespaces alive

    def join(self) -> None:
        """Move this process to the host of its rank: even ranks to the first host, odd ranks to the second.

        Call it before `init_process_group` in a rank that torch's launcher started. The process stays on its host.
        """
        rank = int(os.environ["RANK"])
        with open(f"/proc/{self.holders[rank % 2]}/ns/net") as namespace:
            _enter(namespace.fileno())
        os.environ |= {"MASTER_ADDR": _ADDRESSES[0], "MASTER_PORT": str(_PORT), "GLOO_SOCKET_IFNAME": _DEVICE}
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # no host can reach the launcher's store


@contextlib.contextmanager
def link(megabits_per_second: float | None = None, delay_seconds: float | None = None) -> Iterator[Link]:
    """Yield two hosts with a link between them; they end with the `with` block.

    Args:
        megabits_per_second: speed in each direction, in 10^6 bits per second; None: as fast as the machine can copy.
        delay_seconds: least delay of each frame, whatever the traffic; None: no delay.

    Raises:
        Unavailable: the machine is not Linux, the user is not root, or util-linux or iproute2 is missing.
        ValueError: the speed or the delay is not a positive number.
    """
    rate = megabits_per_second
    for name, value in {"megabits_per_second": rate, "delay_seconds": delay_seconds}.items():
        positive(name, 1 if value is None else value)
    if lacking := _lacking():
        raise Unavailable(lacking)
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(_namespace()) for _ in range(2))
        middle = stack.enter_context(_namespace()) if delay_seconds else None
        ends = [(first, middle, "end0"), (second, middle, "end1")] if delay_seconds else [(first, second, _DEVICE)]
        for one, other, name in ends:
            _do("ip", "link", "add", _DEVICE, "netns", str(one), "type", "veth", "peer", name, "netns", str(other))
            _do("nsenter", "--target", str(other), "--net", "ip", "link", "set", name, "up")
        if delay_seconds:
            threading.Thread(target=_hold_back, args=(middle, delay_seconds), daemon=True).start()
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
    """Return why no simulated network link can be made on this machine; None if a trial link could be made."""
    try:
        with link(100):
            return None
    except Unavailable as reason:
        return str(reason)


def bytes_sent() -> int | None:
    """Return the bytes, headers included, that this rank has sent through its network device; None if not reported.

    The device is the one through which gloo connects to the other ranks, in the namespace of this process.
    """
    device = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    with contextlib.suppress(OSError, StopIteration), open("/proc/thread-self/net/dev") as file:
        return int(next(line.split(":")[1].split() for line in file if line.strip().startswith(f"{device}:"))[8])
    return None


def _lacking() -> str | None:
    if not sys.platform.startswith("linux"):
        return "needs Linux to make a slow link"
    if os.geteuid() != 0:
        return "needs root to make a slow link"
    absent = ", ".join(name for name in ("unshare", "nsenter", "ip", "tc") if shutil.which(name) is None)
    return f"needs the commands {absent} to make a slow link" if absent else None


@contextlib.contextmanager
def _namespace() -> Iterator[int]:
    """Yield the id of a process that keeps a new network namespace alive; raise Unavailable if it does not start."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = ["unshare", "--net", "sh", "-c", "echo ready && exec cat"]
    with subprocess.Popen(command, **pipes, start_new_session=True) as holder:  # its end closes the pipes and waits
        if not holder.stdout.readline():
            raise Unavailable(_reason("unshare", holder.communicate()[1]))
        yield holder.pid


def _hold_back(middle, delay):
    """Forward each frame between the hosts after `delay` seconds; `middle`: id of a process in the third namespace."""
    with open(f"/proc/{middle}/ns/net") as namespace:
        _enter(namespace.fileno())  # moves only this thread
    ends, waiting = [socket.socket(socket.AF_PACKET, socket.SOCK_RAW) for _ in range(2)], []
    for number, end in enumerate(ends):
        for option in (15, 23):  # PACKET_VNET_HDR passes unfinished checksums on; PACKET_IGNORE_OUTGOING
            end.setsockopt(263, option, 1)  # SOL_PACKET; these numbers are in linux/if_packet.h
        end.bind((f"end{number}", 3))  # ETH_P_ALL
    with contextlib.suppress(OSError):  # the hosts' network devices are gone
        while True:
            wait = max(0, waiting[0][0] - time.monotonic()) if waiting else None
            for end in select.select(ends, [], [], wait)[0]:
                waiting.append((time.monotonic() + delay, ends[end is ends[0]].send, end.recv(2**17)))
            while waiting and waiting[0][0] <= time.monotonic():
                _, send, frame = waiting.pop(0)
                send(frame)


def _do(*command: str) -> None:
    completed = subprocess.run(command, capture_output=True)
    if completed.returncode:
        name = next(word for word in command if word in ("ip", "tc"))
        raise Unavailable(_reason(name, completed.stderr))


def _reason(name: str, errors: bytes) -> str:
    lines = errors.decode(errors="replace").strip().splitlines() or ["no reason given"]
    return f"needs permission to make a slow link; {name} printed: {lines[0]}"


def _enter(descriptor: int) -> None:
    """Enter a file descriptor's namespace by setns(2), which Python 3.11 lacks; raise OSError if that is refused."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
