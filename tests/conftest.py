"""For every test module: figures need no screen, and displayed objects can be inspected."""

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
    """Give a test the markers that follow from what it uses, and the cases after its daily ones the nightly tier."""
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
    """Return the displayed objects, in order."""
    displayed = []
    monkeypatch.setattr("IPython.display.display", lambda *objects, **_: displayed.extend(objects))
    return displayed


def _copied(module, **changes):
    """A module of the library with these names changed, for one module of ours: the other threads keep theirs."""
    twin = types.ModuleType(module.__name__)
    vars(twin).update(vars(module), **changes)
    return twin


@pytest.fixture
def copied():
    return _copied


@pytest.fixture
def disk(tmp_path):
    """A function: a small disk, of a size such as "64k", or the same one mounted otherwise ("remount", "ro")."""
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
    """A browser, for the tests of a module."""
    import browser
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=browser.chromium(), args=browser.FLAGS)
        yield opened
        opened.close()
