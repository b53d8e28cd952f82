"""Fixtures and hooks for every test module: figures need no screen, and displayed objects can be inspected."""

import os
import signal
import subprocess
import types
from collections import Counter

import matplotlib
import pytest

# A shell's background job ignores Ctrl-C, and what is started here would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["PERF_HELPERS_ANSWERS"] = "0"  # a stored answer would hide a fault; tests of stored answers turn them on
matplotlib.use("Agg")  # here only: a kernel that inherited MPLBACKEND would show no pictures in the lessons


def pytest_collection_modifyitems(items):
    """Add the markers that follow from a test's fixtures and folder; pytest passes the tests as `items`.

    The first n cases of a test with the marker `daily(n)` run every day; its other cases are marked as nightly. Folders
    whose tests take long come first.
    """
    items.sort(key=lambda item: item.path.parent.name not in ("rehearsal", "estimate", "lab", "advise"))
    cases = Counter()
    for item in items:
        if "chromium" in item.fixturenames:
            item.add_marker("browser")
        if "website" in item.path.parts:
            item.add_marker("site")
        if "lab" in item.fixturenames:
            item.add_marker("process")
        if daily := item.get_closest_marker("daily"):
            cases[test := (item.parent, item.originalname)] += 1
            if cases[test] > daily.args[0]:
                item.add_marker("nightly")


@pytest.fixture
def shown(monkeypatch):
    """Return the list of displayed objects, in order."""
    displayed = []
    monkeypatch.setattr("IPython.display.display", lambda *objects, **_: displayed.extend(objects))
    return displayed


def _copied(module, **changes):
    """Return a copy of a library's module in which the names in `changes` have other values.

    The caller puts the copy into one module of this project only, so other threads still use the original.
    """
    twin = types.ModuleType(module.__name__)
    vars(twin).update(vars(module), **changes)
    return twin


@pytest.fixture
def copied():
    return _copied


@pytest.fixture
def disk(tmp_path):
    """Yield a function (size, mount options) that mounts a small disk, e.g. of "64k", and returns its folder.

    A later call can mount it again with other options, e.g. "remount", "ro". The test is skipped if the disk
    cannot be mounted.
    """
    folder = tmp_path / "a disk"

    def mount(size, *options):
        folder.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", ",".join([f"size={size}", *options]), "tmpfs", folder]
        if os.geteuid() or subprocess.run(command).returncode:
            pytest.skip("a disk can only be mounted by root, and not in every container")
        return folder

    yield mount
    subprocess.run(["umount", "-l", folder], stderr=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def chromium():
    """Yield a browser for all tests of a module."""
    import browser
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=browser.chromium(), args=browser.FLAGS)
        yield opened
        opened.close()
