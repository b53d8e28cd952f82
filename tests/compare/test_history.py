"""Course runs as lines over time: bytes change where they differ, a line with noise where it shifts."""

import json
import random

import pytest
from test_compare import MEMORY, a_run, moved_by
from toys import decision, results

from perf_helpers.compare import history


def kept(folder, number, *claims, **fields):
    folder.mkdir(exist_ok=True)
    data = results(*claims, **fields) | {"date": f"2026-01-{number + 1:02}T02:00:00+00:00"}
    (folder / f"{number:02}.json").write_text(json.dumps(data))


def lines_of(folder):
    (found,), unread = history.read(folder)
    assert not unread
    return {(line.kind, line.id): line for line in found.lines}


def test_a_byte_is_a_change_and_the_versions_stand_beside_it(tmp_path):
    for number, torch in enumerate(["2.12", "2.12", "2.13", "2.13"]):
        run = a_run(moved_by("activations", 1) if number >= 2 else MEMORY)
        kept(tmp_path, number, torch=torch, runs=[run])
    line = lines_of(tmp_path)["memory", "00_a/vanilla"]
    (change,) = line.changes
    assert (change.before, change.after, change.date[:10]) == (1000, 1001, "2026-01-03")
    assert change.differences == ["torch: 2.12 -> 2.13"]


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        (lambda number: 1.0, []),
        (lambda number: 0.0, []),
        (lambda number: 1.0 if number < 6 else 1.4, [6]),
        (lambda number: 1.4 if number == 6 else 1.0, []),  # one odd night
        (lambda number: 1.0 + 0.3 * (number >= 4) + 0.3 * (number >= 8), [4, 8]),
    ],
)
def test_a_line_with_noise_is_cut_where_its_mean_shifts(tmp_path, shape, changes):
    for seed in range(5):
        noise = random.Random(seed)
        folder = tmp_path / str(seed)
        for number in range(12):
            value = shape(number) * noise.gauss(1, 0.03)
            kept(folder, number, decision("ratio", value=value, interval=[value * 0.95, value * 1.05]))
        found = [int(change.date[8:10]) - 1 for change in lines_of(folder)["claim", "ratio"].changes]
        assert found == changes, seed


def test_too_few_points_tell_nothing_of_a_line_with_noise(tmp_path):
    for number, value in enumerate([1.0, 1.0, 2.0]):
        kept(tmp_path, number, decision("ratio", value=value, interval=[value, value]))
    assert not lines_of(tmp_path)["claim", "ratio"].changes


def test_machines_and_profiles_have_histories_of_their_own_and_damaged_files_are_named(tmp_path):
    kept(tmp_path, 0), kept(tmp_path, 1, machine="another"), kept(tmp_path, 2, profile="t4")
    (tmp_path / "other.json").write_text('{"lessons": []}')
    (tmp_path / "cut.json").write_text('{"schema": 1, "lessons": [')
    histories, unread = history.read(tmp_path)
    assert len(histories) == 3 and len(unread) == 1 and "cut.json" in unread[0]
    with pytest.raises(ValueError, match="name a folder"):
        history.read(tmp_path / "nothing")


def test_the_page_has_every_line_with_its_picture_and_its_changes(tmp_path):
    for number in range(3):
        runs = [a_run(moved_by("activations", number)), a_run(name="<steady>")]
        kept(tmp_path / "nights", number, decision("a"), runs=runs)
    history.write(tmp_path / "nights", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 3 and "00_a/&lt;steady&gt;" in page and "<steady>" not in page
    assert page.index("00_a/vanilla") < page.index("lines without a change") < page.index("&lt;steady&gt;")
    assert "1,001" in page and "1 of 3 lines changed" in page
