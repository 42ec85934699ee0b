"""Checks of what a file contains: correct values pass, and an error names the place and what was expected."""

import math

import pytest

from hatrack.files import schema

ADDRESS = schema.fields({"street": schema.text, "number": schema.number(1, whole=True)}, {"floor": schema.number(-3, 100)})
PERSON = schema.fields({"name": schema.line, "homes": schema.items(ADDRESS, least=1), "tags": schema.table(schema.plain)})
ANN = {"name": "Ann", "homes": [{"street": "High", "number": 3, "floor": 1.5}], "tags": {"a": [1, None, "x"], "b": True}}


def test_correct_values_pass():
    PERSON("", ANN)
    PERSON("", {**ANN, "later": object()})
    schema.matrix(schema.number(), 2)("m", [[1, 2.5], [3, -4]])
    schema.number(finite=False, null=True)("n", math.nan)
    schema.number(finite=False, null=True)("n", None)
    schema.number()("n", -schema.LARGEST)
    schema.number()("n", schema.LARGEST)
    schema.items(schema.text)("l", [])
    schema.items(schema.text, 2)("l", ["a", "b"])
    schema.line("l", "x" * 1000)


@pytest.mark.parametrize(
    ("check", "value", "expected"),
    [
        (schema.number(), None, "v must be a number, not None"),
        (schema.number(null=True), "x", "v must be a number or null, not 'x'"),
        (schema.number(finite=False), None, "v must be a number, not None"),
        (schema.items(schema.text, 2), ["a"], r"v must be a list of 2, not \['a'\]"),
        (schema.items(schema.text, 2), ["a", "b", "c"], r"v must be a list of 2, not \['a', 'b', 'c'\]"),
        (schema.items(schema.text), ["a", 1], r"v\[1\] must be a text, not 1"),
        (schema.matrix(schema.number(), 2), [[1, 2], [3, "x"]], r"v\[1\]\[1\] must be a number, not 'x'"),
        (schema.line, "x" * 1001, "v must be a line of text, not 'xxx"),
    ],
)
def test_wrong_values(check, value, expected):
    with pytest.raises(ValueError, match=f"^{expected}"):
        check("v", value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({}, "name is missing"),
        ([], r"the whole must be a table of names and values, not \[\]"),
        ({**ANN, "name": "a\nb"}, r"name must be a line of text, not 'a\\nb'"),
        ({**ANN, "name": "x" * 2000}, r"name must be a line of text, not 'x+\.\.\.x+'$"),
        ({**ANN, "homes": []}, r"homes must be a list of at least 1, not \[\]"),
        ({**ANN, "homes": [{"number": 1}]}, r"homes\[0\]\.street is missing"),
        ({**ANN, "homes": [{"street": "x", "number": 0}]}, r"homes\[0\]\.number must be a whole number from 1, not 0"),
        ({**ANN, "homes": [{"street": "x", "number": 1.0}]}, r"homes\[0\]\.number must be a whole number from 1, not 1.0"),
        ({**ANN, "homes": [{"street": "x", "number": True}]}, r"homes\[0\]\.number must be a whole number from 1, not True"),
        (
            {**ANN, "homes": [{"street": "x", "number": 10**400}]},
            r"homes\[0\]\.number must be a whole number from 1, not 10",
        ),
        (
            {**ANN, "homes": [{"street": "x", "number": 1, "floor": math.nan}]},
            r"floor must be a number from -3 to 100, not nan",
        ),
        ({**ANN, "tags": {"a": {}}}, r"tags\.a must be a text, a number or a list of them, not {}"),
        ({**ANN, "tags": {"a": [[]]}}, r"tags\.a must be"),
        ({**ANN, "tags": {"k" * 5000: {}}}, r"tags\.k+\.\.\.k+ must be"),
    ],
)
def test_errors_name_the_place_and_the_value(value, expected):
    with pytest.raises(ValueError, match=expected) as caught:
        PERSON("", value)
    assert len(str(caught.value)) < 200
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [[[1, 2]], [[1, 2], [3]], [1, 2], "text", None, [[1, 2], [3, 4], [5, 6]]])
def test_wrong_matrices(value):
    with pytest.raises(ValueError, match="m must be a 2 x 2 matrix of numbers"):
        schema.matrix(schema.number(), 2)("m", value)


def test_a_closed_mapping_has_no_other_names():
    check = schema.fields({"a": schema.flag}, closed=True)
    check("t", {"a": False})
    with pytest.raises(ValueError, match=r"t must be a table of a, not \['b'\]"):
        check("t", {"a": True, "b": 1})
    with pytest.raises(ValueError, match=r"t.a must be true or false, not 1"):
        check("t", {"a": 1})
