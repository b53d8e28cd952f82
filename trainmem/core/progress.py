"""Progress bars for work of more than a second, shown in a notebook's front end or a terminal."""

import contextlib
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar

_hidden: ContextVar[bool] = ContextVar("hidden", default=False)
_open = threading.Lock()  # held while a bar is shown: a terminal has room for one, so work inside it shows none


@contextlib.contextmanager
def hidden(wanted: bool = True) -> Iterator[None]:
    """Hide all progress bars inside this context: in a notebook that a program executes, bars would stay at 0 %.

    `wanted`: whether to hide the bars; False: change nothing.
    """
    token = _hidden.set(wanted or _hidden.get())
    try:
        yield
    finally:
        _hidden.reset(token)


@contextlib.contextmanager
def bar(name: str, total: int | None = None, unit: str = "step", quiet: bool = False, **options) -> Iterator:
    """Yield a tqdm bar that is shown in this context and disappears at its end.

    The bar stays hidden in threads other than the main one, while another bar is shown, and if there is neither a
    notebook nor a terminal.

    Args:
        name: text before the bar.
        total: number of units; None: not known.
        unit: the name of what is counted, e.g. "step".
        quiet: show no bar.
        options: passed to tqdm.
    """
    from tqdm.auto import tqdm

    has_viewer = "ipykernel" in sys.modules or sys.stderr.isatty()
    own = threading.current_thread() is threading.main_thread()
    seen = has_viewer and own and not (quiet or _hidden.get()) and _open.acquire(blocking=False)
    shown = tqdm(total=total, desc=name, unit=unit, leave=False, disable=not seen, file=sys.stderr, **options)
    try:
        yield shown
    finally:
        if seen:
            _open.release()
            shown.update((total or shown.n) - shown.n)  # tqdm would leave a bar short of its total on screen, in red
            shown.close()


def percent(name: str):
    """Return a context with a tqdm bar called `name` from 0 to 100 %, see `bar`.

    Call `update` on the bar with the percent to add.
    """
    return bar(name, 100, bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}")


class BarText:
    """Show text on the tqdm bar of one experiment: steps, samples per second, and the peak memory once it is known.

    Args:
        bar: the bar.
        samples: samples per step; None: not known, so no speed is shown.
    """

    def __init__(self, bar, samples: int | None):
        self._bar, self._peak, self._samples = bar, "", samples

    def on_step(self, number: int) -> None:
        self._bar.update(number - self._bar.n)
        rate = self._bar.format_dict["rate"]
        speed = f"{rate * self._samples:.3g} samples/s" if rate and self._samples else ""
        self._bar.set_postfix_str(", ".join(filter(None, (speed, self._peak))))

    def measured(self, peak_bytes: int | None) -> None:
        self._peak = f"peak {peak_bytes / 1e6:,.0f} MB" if peak_bytes else ""
        self._bar.reset()  # its clock is for the timed steps alone
