"""Dry runs of pip: installing the package where Colab's libraries are already installed, and from the files of our
environments.
"""

import json
import subprocess
from pathlib import Path

import environments
import pytest
import yaml

ROOT = Path(__file__).parents[1]
# As preinstalled elsewhere, all older than what is tested here: within the ranges of pyproject.toml.
PREINSTALLED = {
    "torch": "2.12.1",
    "numpy": "2.2.6",
    "transformers": "5.15.0",
    "ipywidgets": "7.7.1",
    "ipython": "7.34.0",
}


def would_install(folder, where, *words, **versions):
    """Return the names of the packages that pip would install; nothing is installed.

    Args:
        folder: folder in which to make an environment like this one, but without this project.
        where: the folder in which pip is called.
        words: what to install, as for pip.
        versions: {package: the version that pip finds recorded in the environment, instead of the real one}.
    """
    python = environments.make(folder / "venv", ("perf-helpers",), **versions)
    command = [python, "-m", "pip", "install", "--dry-run", "--quiet", "--report", folder / "report.json", *words]
    done = subprocess.run(command, cwd=where, capture_output=True, text=True)
    if "No matching distribution found for hatchling" in done.stderr:
        pytest.skip("without a network the package cannot be built")
    assert done.returncode == 0, done.stderr
    return {each["metadata"]["name"] for each in json.loads((folder / "report.json").read_text())["install"]}


@pytest.mark.nightly
def test_installed_packages_are_left_as_they_are(tmp_path):
    assert would_install(tmp_path, tmp_path, f"{ROOT}[course]", **PREINSTALLED) == {"perf-helpers"}


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["environment.yml", "binder/environment.yml"])
def test_the_part_of_an_environment_that_is_pip_s_resolves_and_leaves_it_too(name, tmp_path):
    """pip resolves the pip requirements of an environment file, and would install only this project. pip is called as
    conda calls it: with a requirements file, in the folder of the environment file.
    """
    *_, last = yaml.safe_load((ROOT / name).read_text())["dependencies"]
    (tmp_path / "requirements.txt").write_text("\n".join(last["pip"]))
    found = would_install(tmp_path, (ROOT / name).parent, "-r", tmp_path / "requirements.txt", **PREINSTALLED)
    assert found == {"perf-helpers"}


@pytest.mark.nightly
def test_what_is_too_old_is_replaced_and_what_is_not_is_left(tmp_path):
    found = would_install(tmp_path, tmp_path, f"{ROOT}[course]", **PREINSTALLED | {"transformers": "5.10.0"})
    assert {"perf-helpers", "transformers"} <= found and not {"torch", "numpy", "ipywidgets"} & found
