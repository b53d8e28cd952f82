"""Plant faults in lesson 22's measurements: the verdict must change."""

import math
from functools import partial

import pytest
from lesson_22 import functions
from planted import verdict

from perf_helpers.course.ledger import Verdict

HOLDS, SMALLER, REFUTED, TOO_SMALL = Verdict.HOLDS, Verdict.SMALLER, Verdict.REFUTED, Verdict.TOO_SMALL
SHORT = dict(num_train_epochs=1, learning_rate=1e-2)


@pytest.fixture
def lesson(tmp_path):
    return functions(tmp_path)


@pytest.fixture
def searching(lesson):
    if lesson.missing:
        pytest.skip(lesson.missing)
    return lesson


# ---- by hand


@pytest.mark.nightly
@pytest.mark.parametrize(("planted", "expected"), [(False, REFUTED), (True, HOLDS)])
def test_a_winner_that_is_scored_with_its_own_seed_and_data_keeps_its_lead(lesson, planted, expected):
    (promised, winner), _ = lesson.random_search("weight_decay", 1e-4, 1e-1, 20, seed=0)
    if planted:
        _, found = lesson.random_search("weight_decay", 1e-4, 1e-1, 20, seed=0)
        lucky, train = 100 + [settings for _, settings in found].index(winner), lesson.train
        lesson.scope["train"] = lambda seed, **settings: train(lucky, **settings) if settings else train(seed)
        lesson.scope["unseen"] = lesson.scope["validation"]
    assert verdict("hpo-winner-honest", lesson.lost_lead(winner, promised)) is expected


def test_the_lead_of_the_best_is_that_of_order_statistics(lesson):
    assert lesson.expected_lead(2) == pytest.approx(1 / math.sqrt(math.pi), abs=0.02)
    assert lesson.expected_lead(20) == pytest.approx(1.867, abs=0.02)  # Harter's table of 1961
    assert lesson.expected_lead(1) == pytest.approx(0, abs=0.02)


def test_halving_trains_less_and_finds_the_best_where_a_quarter_tells(lesson):
    scores = {n / 100: abs(n - 5) for n in range(1, 17)}
    lesson.scope["train"] = lambda seed, learning_rate, num_train_epochs: learning_rate
    lesson.scope["score"] = scores.get
    assert lesson.halving([*scores]) == (0.05, 16 * 1 + 4 * 4)
    lesson.scope["train"] = lambda seed, learning_rate, num_train_epochs: -learning_rate * (5 - num_train_epochs)
    lesson.scope["score"] = lambda fast: fast  # high rates start fast
    assert lesson.halving([*scores])[0] == 0.16


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [([0.35] * 4, HOLDS), ([0.9, 1.1, 0.95, 1.02], TOO_SMALL), ([1.2, 1.21, 1.19, 1.2], REFUTED)],
)
def test_a_gain_that_seeds_could_make_is_too_small_to_tell(lesson, ratios, expected):
    assert verdict("hpo", lesson.interval(ratios)) is expected


@pytest.mark.parametrize(("left", "expected"), [(0.63, SMALLER), (1.0, HOLDS), (-0.2, REFUTED)])
def test_a_gain_that_more_epochs_bought_is_less_of_one(left, expected):
    assert verdict("hpo-default-space", left) is expected


@pytest.mark.parametrize(("steps", "as_good", "expected"), [(0.54, True, HOLDS), (0.54, False, REFUTED)])
def test_a_pruner_that_stops_the_best_saves_nothing(steps, as_good, expected):
    assert verdict("hpo-pruning", steps if as_good else 1.0) is expected


# ---- the library's, with the remedy in place of the fault


@pytest.mark.parametrize(
    ("options", "expected"), [({}, REFUTED), ({"compute_objective": lambda metrics: metrics["eval_loss"]}, HOLDS)]
)
def test_an_objective_that_is_given_is_the_loss(searching, options, expected):
    by = {}
    for reported in (options, {"compute_objective": lambda metrics: metrics["eval_loss"]}):
        made = searching.trainer_of(num_train_epochs=1)
        made.evaluate()
        by[len(by)] = [trial.value for trial in searching.search(made, searching.rates_of, 2, **reported)[1]]
    same = sum(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(by[0], by[1], strict=True)) / 2
    assert verdict("hpo-objective-is-loss", same) is expected


@pytest.mark.parametrize(("options", "expected"), [({}, REFUTED), ({"direction": "maximize"}, HOLDS)])
def test_a_direction_that_is_given_returns_the_best(searching, options, expected):
    made = searching.trainer_of(metrics=searching.accuracy, num_train_epochs=1)
    best, trials = searching.search(made, searching.rates_of, 3, **options)
    assert verdict("hpo-default-direction", best.objective / max(trial.value for trial in trials)) is expected


def test_what_lets_go_holds_nothing_and_settings_that_are_set_are_there(searching):
    made = searching.trainer_of(num_train_epochs=1)
    best, _ = searching.search(made, searching.rates_of, 3, seed=3)
    size = sum(weight.nbytes for weight in searching.Net().parameters())
    before = searching.held(size)
    searching.freed(made)
    after = searching.held(size)
    assert verdict("hpo-frees-memory", before - after) is REFUTED
    assert verdict("hpo-frees-memory", after - searching.held(size)) is HOLDS
    best_rate = best.hyperparameters["learning_rate"]
    assert verdict("hpo-applies-best", float(made.args.learning_rate == best_rate)) is REFUTED
    made.args.learning_rate = best_rate
    assert verdict("hpo-applies-best", float(made.args.learning_rate == best_rate)) is HOLDS


@pytest.mark.nightly
@pytest.mark.parametrize(("settings", "expected"), [({}, REFUTED), ({"warmup_steps": 0.0}, HOLDS)])
def test_a_given_fraction_keeps_fractions(searching, settings, expected):
    rows = searching.warmed_up(**settings)
    assert verdict("hpo-value-kept", sum(requested == used for requested, used, _ in rows) / len(rows)) is expected


@pytest.mark.parametrize(("guarded", "expected"), [(False, REFUTED), (True, HOLDS)])
def test_a_careful_space_refuses_a_misspelt_name(searching, guarded, expected):
    made, raised = searching.trainer_of(num_train_epochs=1), 0
    space = partial(lambda trial: {"rate": 0.1})
    try:
        searching.search(made, searching.careful(space, made.args) if guarded else space, 1)
    except ValueError:
        raised = 1
    assert verdict("hpo-unknown-name", float(raised)) is expected


@pytest.mark.nightly
@pytest.mark.parametrize(("remedied", "expected"), [(False, REFUTED), (True, HOLDS)])
def test_a_seed_that_is_set_before_the_model_is_made_is_the_trials_own(searching, remedied, expected):
    made = searching.trainer_of(*([searching.seeded] if remedied else []), **SHORT)
    best, trials = searching.search(made, searching.seeds_of, 2, seed=1)
    own = [searching.fresh_loss(**SHORT | trial.params) for trial in trials]
    share = sum(math.isclose(trial.value, loss, rel_tol=1e-6) for trial, loss in zip(trials, own, strict=True)) / 2
    assert verdict("hpo-own-seed", share) is expected
    if remedied:
        assert verdict("hpo-reproduces", searching.fresh_loss(**SHORT | best.hyperparameters) / best.objective) is HOLDS
