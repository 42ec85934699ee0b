"""Options with numbers that are too large, too small or none: one line and exit code 2, or a run that takes no harm."""

import re

import pytest

from hatrack import BENCHMARKS, METHODS, NETWORKS, Regime, Run
from hatrack.cli.options import flag
from hatrack.options import LARGEST, LARGEST_WHOLE, Parameter, check, parameters
from tests.helpers.fuzzing import program

BEYOND = ("1e39", "1e300", str(10**39), "-1e39", str(-(10**39)), "9" * 5000, "nan", "inf", "-inf")
LONG = ("epochs", "retrain", "generations", "patience", "tasks")  # a large number means a long run, or is refused by a range
TABLES = {"method": METHODS, "benchmark": BENCHMARKS, "network": NETWORKS}


def numeric(parameter: Parameter) -> bool:
    return "int" in str(parameter.type) or "float" in str(parameter.type)


def every_option() -> dict[str, tuple[list[str], Parameter]]:
    """Every numeric option by a name, with the words of a run that has it."""
    found = {}
    for kind, table in TABLES.items():
        for name in table:
            words = ["smnist", "sgd"]
            words = [name, "sgd"] if kind == "benchmark" else ["smnist", name] if kind == "method" else words
            network = ["--network", name] if kind == "network" else []
            for parameter in parameters(table.find(name)).values():
                found[f"{name} {flag(parameter.name)}"] = ([*words, *network], parameter)
    for entry in (Regime, Run):
        for parameter in parameters(entry).values():
            found[flag(parameter.name)] = (["smnist", "sgd"], parameter)
    return {name: case for name, case in found.items() if numeric(case[1])}


OPTIONS = every_option()


@pytest.mark.parametrize("share", [3, pytest.param(1, marks=pytest.mark.slow)])  # of the numbers: a third, and all
@pytest.mark.parametrize("name", OPTIONS)
def test_numbers_beyond_all_ranges_are_refused(name, share, tmp_path):
    words, parameter = OPTIONS[name]
    beyond = BEYOND if parameter.type is float else (*BEYOND, str(2**31), str(2**63))
    for value in beyond[list(OPTIONS).index(name) % share :: share]:
        outcome = program("run", *words, flag(parameter.name), value, "--out", str(tmp_path))
        assert outcome.code == 2, value
        assert re.fullmatch(r"hatrack: [^\x00-\x1f]{10,400}\n", outcome.error), value
        assert flag(parameter.name) in outcome.error, value
    assert not list(tmp_path.iterdir())


SMALL = [
    "--data",
    "sample",
    "--batch",
    "250",
    "--device",
    "cpu",
    "--epochs",
    "1",
    "--train-examples",
    "50",
    "--engine",
    "eager",
]
OPEN = [name for name, (words, p) in OPTIONS.items() if words[0] == "smnist" and p.option.high is None]
RUNS = [name for name in OPEN if not any(word in OPTIONS[name][1].name for word in LONG)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:joint is first fitted after:UserWarning")  # --at is larger than the number of tasks
@pytest.mark.parametrize("name", RUNS)
def test_the_largest_number_of_a_range_ends_in_a_record_or_in_one_line(name, tmp_path):
    words, parameter = OPTIONS[name]
    own = [] if words[2:] else ["--widths", "8", *(["--network", "mlp"])]
    given = [word for word in SMALL if word]
    option = flag(parameter.name)
    if option in given:
        place = given.index(option)
        del given[place : place + 2]
    value = str(LARGEST if parameter.type is float else LARGEST_WHOLE)
    outcome = program("run", *words, *own, *given, option, value, "--out", str(tmp_path))
    assert outcome.code in (0, 2), outcome.error
    assert outcome.code == 0 or "hatrack: " in outcome.error


def test_ranges_hold_for_python_too():
    for value in (1e39, 10**40, float("inf")):
        with pytest.raises(ValueError, match=r"lr must be .*, not"):
            Regime(lr=value)
    with pytest.raises(ValueError, match="epochs must be at most 2147483647, not 2147483648"):
        Regime(epochs=2**31)
    with pytest.raises(ValueError, match=r"widths must be at most 2147483647"):
        check(NETWORKS["mlp"], {"widths": (5, 2**63)})
    assert Regime(epochs=LARGEST_WHOLE, lr=LARGEST).lr == LARGEST
