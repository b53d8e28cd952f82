"""How Python and its libraries treat `Unknown`, a number that is not known, and `Assumed`, one that is assumed."""

import collections
import json
import math
import pickle
import sys

import pytest

from trainmem.unknown import Assumed, NeedsValues, Unknown, is_measured, passing_answer


@pytest.mark.parametrize("indent", [None, 2])
def test_an_unknown_number_can_be_written_as_json(indent):
    # With `indent`, `json` finds NaN by `number != number`.
    assert json.loads(json.dumps({"loss": Unknown()}, indent=indent))["loss"] != 0
    with pytest.raises(NeedsValues):
        bool(Unknown() != 1.0)
    with pytest.raises(NeedsValues):
        bool(Unknown() != Unknown())


def test_an_assumed_number_is_finite_so_that_a_first_loss_is_the_best_so_far():
    best, worst = float("inf"), -math.inf
    loss = Assumed()
    assert loss < best and loss <= best and loss > worst and loss != best and best > loss
    assert not (loss > best or loss == best or loss < worst)
    assert min(best, loss) is loss and max(worst, loss) is loss


def test_an_assumed_number_is_ordinary_and_each_comparison_with_it_is_false():
    answers = collections.Counter()
    loss = Assumed(answers)
    assert [loss < 2, loss > 0, loss == 1, loss != loss, min(3.0, loss) < 2, loss <= 2.0] == [False] * 6
    assert answers.total() >= 6
    assert loss != None and loss not in ["assumed"]  # noqa: E711, no number
    assert (math.isfinite(loss), math.isnan(loss), int(loss), float(loss), bool(loss)) == (True, False, 1, 1.0, True)
    assert all(isinstance(each, Assumed) for each in (loss + 1, 2 / loss, -loss, round(loss, 3), loss**2))
    assert round(loss) == 1 and math.exp(loss) == math.e and sum([loss, loss]) / 2 is loss
    assert f"{loss:.4f}" == str(loss) == "assumed" and not is_measured(loss)
    assert json.loads(json.dumps([loss], indent=1)) == [1.0] == json.loads(json.dumps([loss]))
    assert isinstance(pickle.loads(pickle.dumps(loss)), Assumed)


class Query:
    """Pass each check that needs the truth value of this object; raise an error if no check needs it."""

    def __bool__(self) -> bool:
        if (answer := passing_answer(sys._getframe(1))) is None:
            raise NotImplementedError
        return answer


# As text, because pytest would rewrite `assert`.
CHECKS = """
def checked(query, known=True):
    assert query, f"{query} is wrong"
    if not query:
        raise ValueError("wrong")
    if known and not bool(query):
        message = "%s is wrong" % query
        raise ValueError(message) from None
    if query:
        pass_on = known
    else:
        raise ValueError(", ".join(str(each) for each in (query, known)))
    assert known is None or query
    return pass_on

def unwanted(query):
    if query or query is None:
        raise ValueError(f"unwanted: {query!r:>3}")
    assert not query

def checked_by_a_function(query):
    assert is_so(query)
    if not is_so(query):
        raise ValueError

def is_so(query):
    return bool(query)
"""
CHOICES = """
def chosen(query):
    return 1 if query else 2

def counted(query):
    for _ in range(2):
        if query:
            break
    else:
        raise ValueError

def is_so(query):
    return bool(query)
"""


def functions(source):
    names = {}
    exec(source, names)
    return [each for each in names.values() if callable(each)]


def test_a_check_is_passed_by_the_answer_that_raises_no_error():
    for check in functions(CHECKS)[:-1] * 20:  # the last one only returns; often, so that Python adapts its code
        check(Query())


@pytest.mark.parametrize("function", functions(CHOICES))
def test_a_choice_is_no_check(function):
    with pytest.raises(NotImplementedError):
        bool(function(Query()))


def test_an_assumed_number_passes_checks():
    answers, loss = collections.Counter(), Assumed()
    loss.answers = answers
    if not loss < 9:
        raise ValueError("too large")
    if loss > 100 or loss < 0:
        raise ValueError("out of range")
    assert [*answers] == ["checks, passed"] and answers.total() == 3
