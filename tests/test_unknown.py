"""How Python and its libraries treat `Unknown`, a number that is not known, and `Assumed`, one that is assumed."""

import collections
import json
import math
import pickle

import pytest

from trainmem.unknown import Assumed, NeedsValues, Unknown, is_measured


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
