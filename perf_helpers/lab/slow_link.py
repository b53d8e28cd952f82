"""Two hosts on one machine, joined by a link of a chosen speed: what a slow interconnect does, without a second
machine.

Each host is a network namespace of Linux, and the link a pair of virtual Ethernet devices with a token bucket in front
of either end. For a delay there is a third namespace between them, in which a thread of ours holds frames back (few
kernels of virtual machines have netem, Linux's own way). A namespace lives as long as a process in it: here a `cat`
that reads from this process and so ends with it, whatever ends it. It is also the first process of a process namespace,
with which the kernel ends all others.
Nothing has a name outside of the two namespaces, and nothing is left behind.
"""

import contextlib
import functools
import os
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

_COMMANDS = ("unshare", "nsenter", "ip", "tc")
_DEVICE, _PORT = "link0", 29400  # both exist in the namespaces only
_ADDRESSES = ("10.0.0.1", "10.0.0.2")
_CLONE_NEWNET = 0x40000000
_EVERY_PROTOCOL, _SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 3, 263, 15, 23  # linux/if_packet.h


class Unavailable(OSError):
    """This machine, or this user, cannot make a link; the text says what is missing."""


@dataclass(frozen=True)
class Link:
    """Two hosts and what joins them."""

    holders: tuple[int, int]  # ids of the processes that keep the hosts' namespaces
    megabits_per_second: float | None  # in either direction; None: as fast as the machine copies
    addresses: tuple[str, str] = _ADDRESSES  # of the hosts, for each other
    device: str = _DEVICE  # by which a host reaches the other one

    def on(self, host: int, *command: str) -> list[str]:
        """A command that carries out another one on a host, e.g. for `subprocess.Popen`.

        It sees no network but the link. What it starts ends with the link, if not before.

        Args:
            host: 0 or 1.
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
def link(megabits_per_second: float | None = None, delay_seconds: float | None = None) -> Iterator[Link]:
    """Two hosts with a link between them, until the end of the `with`.

    Args:
        megabits_per_second: speed in either direction, 10^6 bits a second; None: as fast as the machine can copy.
        delay_seconds: how much later at least each frame arrives, however many are under way; None: at once.

    Raises:
        Unavailable: this needs Linux, root, and the commands of util-linux and iproute2.
        ValueError: the speed or the delay is no positive number.
    """
    rate = megabits_per_second
    for name, value in {"megabits_per_second": rate, "delay_seconds": delay_seconds}.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
            raise ValueError(f"{name}={value!r}: give a positive number, or None for no limit")
    if lacking := _lacking():
        raise Unavailable(lacking)
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(_namespace()) for _ in range(2))
        cables = [(first, _DEVICE, second, _DEVICE)]
        if delay_seconds:
            middle = stack.enter_context(_namespace())
            cables = [(first, _DEVICE, middle, "end0"), (second, _DEVICE, middle, "end1")]
        for one, its, other, others in cables:
            _do("ip", "link", "add", its, "netns", str(one), "type", "veth", "peer", others, "netns", str(other))
        if delay_seconds:
            stack.enter_context(_held_back(middle, delay_seconds))
        for address, host in zip(_ADDRESSES, (first, second), strict=True):
            within = ("nsenter", "--target", str(host), "--net")
            _do(*within, "ip", "address", "add", f"{address}/24", "dev", _DEVICE)
            _do(*within, "ip", "link", "set", "lo", "up")
            _do(*within, "ip", "link", "set", _DEVICE, "up")
            if rate is not None:
                limit = ("tbf", "rate", f"{round(rate * 1e6)}bit", "burst", "128kb", "latency", "50ms")
                _do(*within, "tc", "qdisc", "add", "dev", _DEVICE, "root", *limit)
        yield Link((first, second), rate)


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


@contextlib.contextmanager
def _held_back(middle, delay):
    """Meanwhile a thread in the namespace of `middle` hands each frame on to the other end after `delay` seconds."""
    for end in ("end0", "end1"):
        _do("nsenter", "--target", str(middle), "--net", "ip", "link", "set", end, "up")
    over = threading.Event()
    thread = threading.Thread(target=_hold_back, args=(middle, delay, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _hold_back(middle, delay, over):
    with open(f"/proc/{middle}/ns/net") as namespace:
        _enter(namespace.fileno())  # this thread alone
    ends, waiting = [socket.socket(socket.AF_PACKET, socket.SOCK_RAW) for _ in range(2)], deque()
    for number, end in enumerate(ends):
        end.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)  # long frames and their unfinished checksums pass as they are
        end.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
        end.bind((f"end{number}", _EVERY_PROTOCOL))
    while not over.is_set():
        wait = waiting[0][0] - time.monotonic() if waiting else 0.1
        for end in select.select(ends, [], [], max(0, wait))[0]:
            waiting.append((time.monotonic() + delay, ends[end is ends[0]], end.recv(2**17)))
        while waiting and waiting[0][0] <= time.monotonic():
            _, end, frame = waiting.popleft()
            end.send(frame)


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
