"""The history of results of course runs.

An exact value, e.g. of bytes, is listed at each change. A noisy value, e.g. of seconds, is summarized by medians.
"""

import json

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
    assert change.differences == ["torch: 2.12 -> 2.13"] and line.median is None


@pytest.mark.parametrize(
    ("values", "before", "latest"),
    [
        ([1.0, 2.0, 4.0], None, 2.0),
        ([9.0, 1.0, 1.1, 1.0, 5.0, 1.0, 1.4, 1.5, 1.4, 0.1, 1.4], 1.0, 1.4),  # odd runs move no median
        ([1.0, *[2.0] * 8], None, 2.0),  # a median of fewer than five says little
    ],
)
def test_a_line_with_noise_has_the_medians_of_five_runs_and_no_changes(tmp_path, values, before, latest):
    for number, value in enumerate(values):
        kept(tmp_path, number, decision("ratio", value=value, interval=[value * 0.95, value * 1.05]))
    line = lines_of(tmp_path)["claim", "ratio"]
    assert (line.median_before, line.median, line.changes) == (before, latest, [])


def test_the_largest_shift_comes_first(tmp_path):
    for number in range(10):
        later = number >= 5
        values = {"steady": 3.0, "slower": 2.0 - later, "faster": 1.0 + 0.1 * later}
        kept(tmp_path, number, *(decision(id, value=x, interval=[x, x]) for id, x in values.items()))
    (found,), _ = history.read(tmp_path)
    assert [line.id for line in found.noisy] == ["slower", "faster", "steady"]


def test_machines_and_profiles_have_histories_of_their_own_and_damaged_files_are_named(tmp_path):
    kept(tmp_path, 0), kept(tmp_path, 1, machine="another"), kept(tmp_path, 2, profile="t4")
    (tmp_path / "other.json").write_text('{"lessons": []}')
    (tmp_path / "cut.json").write_text('{"schema": 1, "lessons": [')
    histories, unread = history.read(tmp_path)
    assert len(histories) == 3 and len(unread) == 1 and "cut.json" in unread[0]
    with pytest.raises(ValueError, match="name a folder"):
        history.read(tmp_path / "nothing")


def test_the_page_has_every_line_with_its_picture_and_its_changes_or_medians(tmp_path):
    for number in range(3):
        runs = [a_run(moved_by("activations", number)), a_run(name="<steady>")]
        kept(tmp_path / "nights", number, decision("a"), decision("noisy", interval=[0.4, 0.6]), runs=runs)
    history.write(tmp_path / "nights", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 4 and "00_a/&lt;steady&gt;" in page and "<steady>" not in page
    texts = ("00_a/vanilla", "Median of five", "lines without a change", "&lt;steady&gt;")
    places = [page.index(text) for text in texts]
    assert places == sorted(places)
    assert "1,001" in page and "1 of 3 exact lines changed" in page
