"""The journal keeps a learner's work in order, even if lines are damaged; a guess counts only if it precedes the
answer.
"""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from perf_helpers import learner_log
from perf_helpers.course.learner_log import Entry
from trainmem.records import Store

LESSON = "05_gradient_accumulation"


@pytest.fixture
def lab(tmp_path):
    return SimpleNamespace(lesson=LESSON, store=Store(tmp_path / "runs.jsonl"))


def entry(kind, key="peak", lesson=LESSON, date="2026-11-21T10:00:00+00:00", **content):
    return Entry(kind, lesson, key, content, date)


def guess(value, **fields):
    return entry("guess", guess=value, unit="%", **fields)


def revealed(measured, guess=None, **fields):
    return entry("revealed", measured=measured, guess=guess, estimate=None, unit="%", **fields)


def test_what_was_kept_is_read_in_order_and_lies_beside_the_runs(lab, tmp_path):
    assert learner_log.of(lab).read() == []
    learner_log.keep(lab, "guess", "peak", guess=40.0, unit="%")
    learner_log.keep(lab, "finished", claims={"accumulation-memory": "holds"})
    first, second = learner_log.of(lab).read()
    assert (first.kind, first.lesson, first.key, first.content) == ("guess", LESSON, "peak", {"guess": 40, "unit": "%"})
    assert second.content == {"claims": {"accumulation-memory": "holds"}} and second.date >= first.date
    assert [path.name for path in tmp_path.glob("[!.]*")] == ["journal.jsonl"]


WHOLE = '{"kind": "%s", "lesson": "", "key": "", "date": "", "content": %s}'
DAMAGED = ['{"kind": "guess", "les', "[1]", '"guess"', "7", "\0", '{"kind": "guess"}', WHOLE % ("guess", "{}")]


@pytest.mark.parametrize("line", [*DAMAGED, WHOLE % ("guess", "5"), WHOLE % ("gues", '{"guess": 1, "unit": ""}')])
def test_a_damaged_line_is_reported_and_skipped(lab, line):
    learner_log.keep(lab, "guess", "a", guess=1.0, unit="MB")
    with learner_log.of(lab).path.open("a") as file:
        file.write(line)  # and no newline: a writer died here
    learner_log.keep(lab, "guess", "b", guess=2.0, unit="MB")
    with pytest.warns(UserWarning, match="line 2 is damaged"):
        assert [kept.key for kept in learner_log.of(lab).read()] == ["a", "b"]


def test_a_journal_that_cannot_be_written_stops_nothing(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    lab = SimpleNamespace(lesson=LESSON, store=Store(tmp_path / "file" / "runs.jsonl"))
    learner_log.keep(lab, "exercise", "sum", status="right")
    assert "PERF_HELPERS_HOME" in capsys.readouterr().err


def test_a_recipe_that_an_earlier_version_kept_can_be_read(lab):
    old = {"peak_bytes": 50, "speed": None, "arguments": {"optim": "sgd"}, "machine": "here"}
    learner_log.of(lab).append(entry("board", "small", **old))
    assert [kept.content for kept in learner_log.of(lab).read()] == [old]


def test_an_entry_says_what_it_lacks():
    with pytest.raises(ValueError, match="give unit"):
        entry("guess", guess=1)
    with pytest.raises(ValueError, match="choose from guess"):
        entry("guesses", guess=1)


def test_reset_forgets_everything(lab):
    learner_log.keep(lab, "exercise", "sum", status="right")
    learner_log.of(lab).reset()
    assert learner_log.of(lab).read() == []
    learner_log.of(lab).reset()  # twice is fine


def test_the_latest_guess_counts_until_the_measurement_is_revealed():
    entries = [guess(30), guess(40), guess(5, lesson="06"), guess(6, key="speed")]
    assert learner_log.counted_guess(entries, LESSON, "peak") == learner_log.guess(entries, LESSON, "peak") == 40
    entries += [revealed(50, 40), guess(50)]
    assert learner_log.counted_guess(entries, LESSON, "peak") == 40
    assert learner_log.guess(entries, LESSON, "peak") == 50


def test_nothing_counts_that_was_first_guessed_after_the_fact():
    entries = [revealed(50), guess(50), revealed(50)]
    assert learner_log.counted_guess(entries, LESSON, "peak") is None
    assert learner_log.history(entries) == []


def test_history_has_each_question_once_in_the_order_of_revealing():
    later, earlier = "06_gradient_checkpointing", LESSON
    entries = [
        *(guess(90, lesson=later), guess(40, lesson=earlier), guess(1, key="never")),
        *(revealed(60, 90, lesson=later), revealed(50, 40, lesson=earlier)),
        revealed(61, 90, lesson=later),  # the lesson was run again
    ]
    scored = learner_log.history(entries)
    assert [(each.lesson, each.guess, each.measured) for each in scored] == [(later, 90, 60), (earlier, 40, 50)]
    assert [each.error for each in scored] == [0.5, 0.2]


def test_the_instructors_script_reads_a_class(tmp_path, monkeypatch, capsys):
    (tmp_path / "class").mkdir()
    journal = learner_log.Journal(tmp_path / "class" / "ada.jsonl")
    for each in (guess(40), revealed(50, 40), entry("question", "why", choice="b", right=True)):
        journal.append(each)
    page = Path(__file__).parents[2] / "notebooks" / "INSTRUCTOR.md"
    (script,) = (text for text in re.findall(r"```python\n(.*?)```", page.read_text(), re.S) if "Journal" in text)
    monkeypatch.chdir(tmp_path)
    exec(script, {})
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("ada, 05 peak: said 40") and first.endswith("off by 20%") and second.endswith("{'b': 1}")


def test_an_error_around_zero_is_a_distance():
    assert learner_log.off(0.25, 0) == 0.25 and learner_log.off(-3, -2) == 0.5


def test_progress_keeps_the_best_outcome_and_the_first_choice():
    entries = [
        *(entry("exercise", "sum", status=status) for status in ("wrong", "right", "not attempted")),
        entry("exercise", "cut", status="not attempted"),
        *(entry("question", "why", choice=choice, right=right) for choice, right in ((None, None), ("a", False))),
        entry("question", "why", choice="b", right=True),
        entry("question", "how", choice=None, right=None),
        *(guess(40), revealed(50, 40), revealed(7, key="speed")),
        entry("finished", "", claims={"x": "holds"}),
        entry("finished", "", claims={"x": "refuted", "y": "holds"}, date="2026-11-22T10:00:00+00:00"),
        entry("exercise", "sum", lesson="00_start_here", status="wrong"),
    ]
    progress = learner_log.progress(entries)
    assert list(progress) == ["00_start_here", LESSON]
    lesson = progress[LESSON]
    assert lesson.exercises == {"sum": "right", "cut": "not attempted"}
    assert lesson.questions == {"why": False, "how": None}
    assert lesson.errors == {"peak": 0.2, "speed": None}
    assert lesson.finished.startswith("2026-11-22") and lesson.claims == {"x": "refuted", "y": "holds"}
    assert progress["00_start_here"].finished is None


def test_the_latest_choice_is_found():
    entries = [entry("question", "why", choice=choice, right=None) for choice in (None, "a", "b")]
    assert learner_log.choice(entries, LESSON, "why") == "b"
    assert learner_log.choice(entries[:1], LESSON, "why") is learner_log.choice([], LESSON, "why") is None
