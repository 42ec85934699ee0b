"""What the terminal says when runs have ended: guessing, ties, and full layers by name."""

from dataclasses import replace

from hatrack.experiments.record import Record
from hatrack.reporting.endings import endings
from hatrack.reporting.tables import settings
from tests.helpers.records import make

LAYERS = [{"name": "2.weight", "title": "linear 1, 50 units"}, {"name": "5.weight", "title": "linear 2, 50 units"}]


def said(*records: Record) -> list[str]:
    (setting,) = settings(list(records))
    return endings(setting)


def with_usage(record: Record, **shares: float) -> Record:
    layers = [{**layer, "weights": 1, "used": [], "own": [], "shared_by": []} for layer in LAYERS]
    usage = [{}, {name.removeprefix("l"): share for name, share in shares.items()}]
    return replace(record, usage=usage, weights_used={"tasks": [], "layers": layers})


def test_methods_that_are_tied_are_named():
    near = [make("sgd", seed, [[0.9, 0.1], [0.8 + 0.02 * (seed % 2), 0.8]]) for seed in range(3)]
    also = [make("hat", seed, [[0.9, 0.1], [0.81, 0.8]]) for seed in range(3)]
    far = [make("ewc", seed, [[0.9, 0.1], [0.1, 0.4 + 0.001 * seed]]) for seed in range(3)]
    assert "tied for the highest accuracy: hat and sgd" in said(*near, *also, *far)
    assert not [line for line in said(*also, *far) if line.startswith("tied")]


def test_a_method_that_only_guesses_is_named():
    guesses = [make("ewc", seed, [[1 / 3, 1 / 3], [1 / 3, 1 / 3]]) for seed in range(2)]
    assert [line for line in said(*guesses) if line.startswith("caution: ewc is no better than guessing")]
    assert not [line for line in said(make("hat", 0), make("hat", 1)) if "guessing" in line]


def test_full_layers_are_named_once_for_all_seeds():
    full = [with_usage(make("hat", seed), l2=0.99, l5=0.5 + 0.2 * seed) for seed in range(2)]
    (line,) = [line for line in said(*full) if "fullest" in line]
    assert line == (
        "hat: the fullest layer, linear 1, 50 units, is 99% taken; under 5% is free in linear 1, 50 units: "
        "a wider network or a larger c leaves more room"
    )
    (plain,) = [line for line in said(with_usage(make("sgd", 0), l2=0.99)) if "fullest" in line]  # which has no c
    assert plain.endswith("is free in linear 1, 50 units: a wider network leaves more room")
    some = [with_usage(make("hat", seed), l2=0.2, l5=0.5 + 0.2 * seed) for seed in range(2)]
    assert [line for line in said(*some) if "fullest" in line] == [
        "hat: the fullest layer, linear 2, 50 units, is 60% taken"
    ]
    assert not [line for line in said(make("sgd", 0)) if "fullest" in line]


def test_no_control_character_reaches_the_terminal():
    layers = [{**LAYERS[0], "title": "a\x1b[31mb", "weights": 1, "used": [], "own": [], "shared_by": []}]
    record = replace(make("hat", 0), usage=[{}, {"2": 0.5}], weights_used={"tasks": [], "layers": layers})
    assert "\x1b" not in "".join(said(record))
