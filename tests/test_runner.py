"""The runner of measuring scripts, benchmarks/runner.py: a measurement continues where it was stopped, repeats rows on
request, and records its setup.
"""

import json

import pytest
from scripts import script


@pytest.fixture
def runner(tmp_path, monkeypatch):
    module = script("runner")
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    return module


@pytest.fixture
def squares(runner):
    """Return a function that makes a `Measurement` whose rows are the squares of 0, 1, 2, ...

    The function has two attributes: the list `requests` has the numbers measured so far. A test adds a number to the
    set `stops` to interrupt the measurement at this number, as Ctrl-C would.
    """
    requested, stops = [], set()

    def measure(cases, options):
        for name, number in cases.items():
            if number in stops:
                raise KeyboardInterrupt
            requested.append(number)
            yield name, {"square": number**2 * options.times}

    def made(**more):
        cases = lambda options: {str(number): number for number in range(options.count)}  # noqa: E731
        conclude = lambda rows, options: {"sum": sum(row["square"] for row in rows)}  # noqa: E731
        options = {"count": 4, "times": 1}
        return runner.Measurement("Squares.", "squares.json", cases, measure, conclude, options, **more)

    made.requests, made.stops = requested, stops
    return made


def record(runner):
    return json.loads((runner.RESULTS / "squares.json").read_text())


def test_a_record_has_its_rows_its_conclusion_and_its_stamp(runner, squares, capsys):
    assert squares().main([]) == 0
    made = record(runner)
    assert made["rows"] == [{"square": 0}, {"square": 1}, {"square": 4}, {"square": 9}] and made["sum"] == 14
    assert made["machine"] and made["versions"]["torch"] and made["date"].startswith("20")
    printed = capsys.readouterr()
    assert json.loads(printed.out)["sum"] == 14 and '4 of 4, 3: {"square": 9}' in printed.err


def test_an_option_is_a_number_a_switch_or_several_words(runner):
    options = {"count": 4, "fast": False, "pythons": []}
    made = runner.Measurement("Squares.", "squares.json", dict, dict, dict, options)
    requested = made.parsed(["--count", "3", "--fast", "--pythons", "bin/python", "old/bin/python"])
    assert (requested.count, requested.fast, requested.pythons) == (3, True, ["bin/python", "old/bin/python"])
    requested = made.parsed([])
    assert (requested.count, requested.fast, requested.pythons) == (4, False, [])


@pytest.mark.nightly
def test_what_was_stopped_goes_on_and_writes_no_record_before_its_end(runner, squares):
    squares.stops.add(2)
    with pytest.raises(KeyboardInterrupt):
        squares().main([])
    assert not (runner.RESULTS / "squares.json").exists() and squares.requests == [0, 1]
    squares.stops.clear()
    assert squares().main([]) == 0
    assert squares.requests == [0, 1, 2, 3] and record(runner)["sum"] == 14
    squares().main([])
    assert squares.requests == [0, 1, 2, 3] * 2, "it had come to its end: this is another one"


@pytest.mark.nightly
def test_rows_of_other_options_are_not_taken_over(runner, squares):
    squares.stops.add(2)
    with pytest.raises(KeyboardInterrupt):
        squares().main([])
    squares.stops.clear()
    squares().main(["--times", "2"])
    assert squares.requests == [0, 1, 0, 1, 2, 3] and record(runner)["sum"] == 28


@pytest.mark.nightly
def test_some_rows_are_measured_again_and_without_a_name_it_only_concludes(runner, squares, monkeypatch):
    squares().main([])
    squares.requests.clear()
    squares().main(["--times", "3", "--rows", "2", "3*"])
    before = record(runner)
    assert squares.requests == [2, 3] and [row["square"] for row in before["rows"]] == [0, 1, 12, 27]
    assert before["again"] == ["2", "3"]
    monkeypatch.setattr(runner, "now", lambda: "2126-01-01")
    squares().main(["--rows"])
    assert squares.requests == [2, 3] and record(runner) == before, "of the day on which it was measured"


@pytest.mark.nightly
def test_rows_that_are_new_among_the_cases_are_measured_too(runner, squares):
    squares().main(["--count", "2"])
    squares.requests.clear()
    squares().main(["--rows"])
    assert squares.requests == [2, 3] and record(runner)["sum"] == 14


def test_a_function_is_called_in_a_python_of_its_own(runner):
    assert runner.elsewhere("os", "getpid") != runner.elsewhere("os", "getpid")
    assert runner.elsewhere("os", "getenv", "ASKED", ASKED="yes") == "yes"
