"""Drive JupyterLab in headless Chromium: a server on a folder of notebooks, a page with one of them open, and
axe-core's findings on a page.
"""

import contextlib
import functools
import http.server
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import nbformat
import pytest

from trainmem.records import Store

SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "notebook-extension/tracker": {"windowingMode": "none"},  # else cells out of sight have no outputs on the page
}
KEEP_WIDGETS = {"saveState": True}
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]


def chromium() -> str | None:
    """Return the path of the browser: $CHROMIUM, or an executable on the path; None if there is none."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


# The standard, and what axe-core calls good practice: headings in order, all text in a landmark, no empty header.
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


def violations(page, within: str = "html", apart: tuple[tuple[str, str], ...] = ()) -> list[str]:
    """Return axe-core's findings in a part of a page, one line each.

    The test is skipped if the package axe-playwright-python is missing, except in CI.

    Args:
        page: the browser page.
        within: CSS selector of the part.
        apart: findings to ignore, as (id of an axe rule, text in the HTML of the element); for other projects' markup.
    """
    if not os.environ.get("CI"):
        pytest.importorskip("axe_playwright_python", reason="no axe-core: pip install axe-playwright-python")
    from axe_playwright_python.sync_playwright import Axe

    options = {"runOnly": RULES, "resultTypes": ["violations"]}
    found = Axe().run(page, context=within, options=options).response["violations"]
    return [
        f"{rule['id']}: {node['failureSummary'].splitlines()[1].strip()} {node['html'][:200]}"
        for rule in found
        for node in rule["nodes"]
        if not any(rule["id"] == name and words in node["html"] for name, words in apart)
    ]


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serve the files of a folder without printing a log."""

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def served(folder: Path):
    """Yield the address at which a folder's files are served; it ends with a slash."""
    handler = functools.partial(Quiet, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class Server:
    """Run JupyterLab on a folder.

    `home` is the folder for its settings and the learner's files, so that the user's own files are not touched.
    """

    def __init__(self, folder: Path, home: Path):
        settings = {f"@jupyterlab/{name}": content for name, content in SETTINGS.items()}
        for name, content in (settings | {"@jupyter-widgets/jupyterlab-manager/plugin": KEEP_WIDGETS}).items():
            file = home / "settings" / f"{name}.jupyterlab-settings"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(content))
        own = {
            "JUPYTERLAB_SETTINGS_DIR": "settings",
            "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
            "JUPYTER_CONFIG_DIR": "config",
            "JUPYTER_RUNTIME_DIR": "runtime",
            "PERF_HELPERS_HOME": "perf_helpers",
        }
        self.runs = Store(home / own["PERF_HELPERS_HOME"] / "runs.jsonl")
        options = ["--no-browser", "--allow-root", "--ip=127.0.0.1", "--port=0", f"--ServerApp.root_dir={folder}"]
        options += ["--IdentityProvider.token=", "--ServerApp.disable_check_xsrf=True"]
        options += ["--LabApp.expose_app_in_browser=True"]
        self.folder, self._log = folder, []
        environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
        environment["OMP_NUM_THREADS"] = "1"  # nothing is measured here, and threads that wait for each other spin
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options],
            env=environment | {name: str(home / part) for name, part in own.items()},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for line in self._process.stderr:
            self._log.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+/", line):
                self.address = found[0]
                break
        else:
            raise RuntimeError(f"JupyterLab did not start:\n{''.join(self._log)}")
        threading.Thread(target=lambda: self._log.extend(self._process.stderr), daemon=True).start()

    def end_kernels(self) -> None:
        for kernel in json.load(urllib.request.urlopen(f"{self.address}api/kernels")):
            request = urllib.request.Request(f"{self.address}api/kernels/{kernel['id']}", method="DELETE")
            urllib.request.urlopen(request).close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.end_kernels()
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)


class Notebook:
    """A notebook that is open in a browser page, with an idle kernel.

    Args:
        server: the JupyterLab server whose folder has the notebook.
        page: the browser page that opens it.
        name: path of the notebook in the server's folder.
    """

    def __init__(self, server: Server, page, name: str):
        self.page, self.file = page, server.folder / name
        page.goto(f"{server.address}lab/tree/{name}?reset")
        page.get_by_text("| Idle").first.wait_for(timeout=90_000)
        page.locator(".jp-Notebook .jp-Cell").first.wait_for(timeout=30_000)
        self.command("application:toggle-left-area")

    def command(self, name: str, **arguments) -> None:
        """Run a command of JupyterLab, e.g. "notebook:run-all-cells", as its menus do, and wait for its end.

        `arguments`: the command's arguments.
        """
        call = "([name, given]) => window.jupyterapp.commands.execute(name, given).then(() => null)"
        self.page.evaluate(call, [name, arguments])

    def trust(self) -> None:
        """Show the widgets whose state is in the file, as a reader does by clicking "Trust"."""
        self.page.evaluate("() => { window.jupyterapp.commands.execute('notebook:trust') }")
        self.page.locator(".jp-Dialog").get_by_role("button", name="Trust").click()

    def run_all(self) -> None:
        """Run all cells and wait until the last one has ended."""
        self.command("notebook:run-all-cells")
        self.wait_idle()

    def run(self, cell: int) -> None:
        """Run the cell number `cell`, counted from 0, and wait until it has ended."""
        self.select(cell)
        self.command("notebook:run-cell")
        self.wait_idle()

    def select(self, cell: int) -> None:
        self.cell(cell).locator(".jp-InputPrompt").click()

    def type(self, cell: int, text: str) -> None:
        """Replace the text of the cell number `cell`, counted from 0, by keyboard."""
        self.cell(cell).locator(".cm-content").click()
        self.page.keyboard.press("Control+A")
        self.page.keyboard.insert_text(text)
        self.page.keyboard.press("Escape")

    def cell(self, number: int):
        return self.page.locator(".jp-Notebook .jp-Cell").nth(number)

    def outputs(self, number: int):
        return self.cell(number).locator(".jp-Cell-outputArea")

    def wait_idle(self) -> None:
        self.page.get_by_text("| Idle").first.wait_for(timeout=0)

    def saved(self):
        """Save the notebook and return it as read from its file."""
        before = self.file.stat().st_mtime_ns
        self.command("docmanager:save")
        while self.file.stat().st_mtime_ns == before:
            time.sleep(0.1)
        return nbformat.read(self.file, as_version=4)
