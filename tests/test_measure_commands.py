"""The benchmark of the commands gets the folders of several builds, and must run each build's own code."""

from scripts import script


def test_a_build_runs_its_own_code(tmp_path):
    measure_commands = script("measure_commands")
    for name in ("old", "new"):
        package = tmp_path / name / "perf_helpers"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "cli.py").write_text(f"print({name!r})")
    words = ["-m", "perf_helpers.cli"]
    outputs = [measure_commands.seconds_of(str(tmp_path / name), words, str(tmp_path))[1] for name in ("old", "new")]
    assert outputs == ["old\n", "new\n"]
