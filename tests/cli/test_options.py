"""Options: read from signatures, checked, and named when they are wrong."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest

from hatrack import METHODS, NETWORKS, Method, Record, Regime, Run
from hatrack.__main__ import main
from hatrack.benchmarks import BENCHMARKS
from hatrack.options import Option, check, check_value, choose, nearest, offered, parameters
from tests.helpers.commands import SHORT


def function(
    images,
    plain: int = 3,
    *,
    rate: Annotated[float, Option("a rate", above=0, high=1)] = 0.5,
    count: Annotated[int, Option("a count", low=1)] = 2,
    kind: Annotated[Literal["round", "square"], Option("a kind")] = "round",
    size: Annotated[Literal[2, 5], Option("a size")] = 2,
    flag: Annotated[bool, Option("a flag")] = False,
    title: Annotated[str, Option("a title")] = "",
    widths: Annotated[tuple[int, ...], Option("some widths", low=1)] = (4, 4),
    limit: Annotated[float | None, Option("a limit", low=0)] = None,
    other: Annotated[int, "not an option"] = 1,
):
    check(function, locals())


def test_the_table_of_options_is_ones_own():
    """It is read once; what a caller does with it changes nothing for the next one."""
    parameters(function).clear()
    assert "rate" in parameters(function)


def test_parameters_are_those_with_an_option():
    found = parameters(function)
    assert list(found) == ["rate", "count", "kind", "size", "flag", "title", "widths", "limit"]
    assert found["rate"].type is float
    assert found["rate"].default == 0.5
    assert found["rate"].option == Option("a rate", above=0, high=1)
    assert found["kind"].choices == ("round", "square")
    assert found["rate"].choices == ()


def test_parameters_of_classes():
    class Thing:
        def __init__(self, net, *, c: Annotated[float, Option("weight", low=0)] = 0.75):
            pass

    @dataclass
    class Data:
        name: str
        size: Annotated[int, Option("size", low=1)] = 3

    assert parameters(Thing)["c"].default == 0.75
    assert list(parameters(Data)) == ["size"]


def test_a_class_without_a_constructor_of_its_own_has_its_parents_options():
    class Plain(Method):  # as a method without hyper-parameters would be written
        pass

    class Parent:
        def __init__(self, *, c: Annotated[float, Option("weight", low=0)] = 0.75):
            pass

    class Child(Parent):
        pass

    assert parameters(Plain) == {}
    assert list(parameters(Child)) == ["c"]


@pytest.mark.parametrize("entry", [*METHODS.values(), *NETWORKS.values(), *BENCHMARKS.values(), Regime])
def test_every_option_has_a_help_text_and_a_valid_default(entry):
    for parameter in parameters(entry).values():
        assert parameter.option.help
        check_value(parameter, parameter.default)


@pytest.mark.parametrize(
    "values",
    [
        {"rate": 1}, {"rate": 1.0}, {"rate": 1e-9}, {"count": 1}, {"kind": "square"}, {"size": 5}, {"flag": True},
        {"title": "x"}, {"widths": (1,)}, {"widths": ()}, {"limit": None}, {"limit": 0}, {"limit": 2.5},
    ],
)  # fmt: skip
def test_values_that_are_allowed(values):
    function(None, **values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rate": 0}, "rate must be greater than 0, not 0"),
        ({"rate": -1.5}, "rate must be greater than 0, not -1.5"),
        ({"rate": 1.01}, "rate must be at most 1, not 1.01"),
        ({"rate": math.nan}, "rate must be a finite number, not nan"),
        ({"rate": math.inf}, "rate must be a finite number, not inf"),
        ({"rate": "fast"}, "rate must be a number, not 'fast'"),
        ({"rate": True}, "rate must be a number, not True"),
        ({"rate": None}, "rate must be a number, not None"),
        ({"count": 0}, "count must be at least 1, not 0"),
        ({"count": 2.0}, "count must be a whole number, not 2.0"),
        ({"count": True}, "count must be a whole number, not True"),
        ({"count": "2"}, "count must be a whole number, not '2'"),
        ({"kind": "sqare"}, "kind must be one of 'round', 'square', not 'sqare'"),
        ({"kind": ["round"]}, r"kind must be one of 'round', 'square', not \['round'\]"),
        ({"size": 3}, "size must be one of 2, 5, not 3"),
        ({"size": 2.0}, "size must be one of 2, 5, not 2.0"),
        ({"flag": 1}, "flag must be true or false, not 1"),
        ({"title": 1}, "title must be a text, not 1"),
        ({"widths": (3, 0)}, "widths must be at least 1, not 0"),
        ({"widths": (3, 2.5)}, r"widths must be whole numbers.*, not \(3, 2.5\)"),
        ({"widths": 3}, "widths must be whole numbers.*, not 3"),
        ({"limit": -1}, "limit must be at least 0, not -1"),
        ({"limit": "x"}, "limit must be a number.*, not 'x'"),
    ],
)
def test_values_that_are_not(values, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        function(None, **values)


def test_a_number_too_large_for_a_float():
    for digits in (400, 5000):
        with pytest.raises(ValueError, match=r"count must be at most 2147483647, not \S.{1,80}$"):
            function(None, count=10**digits)
    with pytest.raises(ValueError, match="rate must be at most 1"):
        function(None, rate=10**400)
    with pytest.raises(ValueError, match=r"lr must be at most 3.4e\+38"):
        Regime(lr=10**400)


def test_other_names_are_passed_over():
    check(function, {"unknown": 1, "plain": "x", "count": 3})


def test_choose():
    table = {"sgd": 1, "hat": 2, "frozen": 3}
    assert choose("method", "hat", table) == 2
    with pytest.raises(ValueError, match=r"no method 'frozn'; did you mean 'frozen'[?] There are: frozen, hat, sgd"):
        choose("method", "frozn", table)
    with pytest.raises(ValueError, match="no method 'xyz'; there are: frozen, hat, sgd"):
        choose("method", "xyz", table)


@pytest.mark.parametrize(
    ("wrong", "right"), [("HAT", "hat"), ("Frozen", "frozen"), ("digits_and_clothes", "digits-and-clothes")]
)
def test_nearest_sees_through_case_and_dashes(wrong, right):
    assert f"did you mean {right!r}?" in nearest(wrong, [*METHODS, *BENCHMARKS])


def test_nearest_of_none():
    assert "none" in nearest("smax", [])  # a method without options: the message does not end in an empty list


def test_a_retired_option_is_read_from_specs_and_not_offered(capsys):
    """The benchmarks' `augment` of older records, whose place the regime's has taken."""
    assert "augment" in parameters(BENCHMARKS["cifar"])
    assert "augment" not in offered(BENCHMARKS["cifar"])
    old = Run("cifar", "sgd", benchmark_options={"augment": True})
    assert Run.from_spec(old.spec) == old
    plain = Run("cifar", "sgd")
    assert plain.spec["benchmark_options"]["augment"] is False  # in the names of all records of the benchmark
    assert "augment" not in plain.spec["regime"]
    assert Run("cifar", "sgd", regime=Regime(augment="crop-flip")).spec["regime"]["augment"] == "crop-flip"
    assert main(["list", "cifar"]) == 0
    assert "augment" not in capsys.readouterr().out
    assert main(["run", "cifar", "sgd", "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("--augment") == 1
    assert "none|crop-flip" in shown
    for words in (["--augment"], ["--augment", "crops"], ["--no-augment"]):
        assert main(["run", "cifar", "sgd", *words]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_the_command_line_augments(tmp_path):
    words = ["run", "digits-and-clothes", "sgd", "--network", "mlp", *SHORT[:-2], "--device", "cpu", "--out"]
    assert main([*words, str(tmp_path / "plain")]) == 0
    assert main([*words, str(tmp_path / "cropped"), "--augment", "crop-flip"]) == 0
    plain, cropped = (Record.load(next((tmp_path / name).glob("*.json"))) for name in ("plain", "cropped"))
    assert cropped.spec.regime["augment"] == "crop-flip"
    assert cropped.curves[0].epochs[0].loss > plain.curves[0].epochs[0].loss
