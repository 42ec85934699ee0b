"""How methods look: every method has an entry of its own, that stands out from the ground and with colour blindness."""

from itertools import combinations

import numpy as np
import pytest

from hatrack.methods import METHODS
from hatrack.reporting.looks import HUES, METHOD_LOOKS, REFERENCE_LOOKS, look, told_apart, variants

# Machado, Oliveira and Fernandes 2009, severity 1: what is seen with protanopia, deuteranopia and tritanopia (linear RGB)
BLIND = {
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def linear(colour: str) -> np.ndarray:
    values = np.array([int(colour[k : k + 2], 16) for k in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(one: str, two: str) -> float:
    bright, dark = sorted((float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (one, two)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def oklab(rgb: np.ndarray) -> np.ndarray:
    """Björn Ottosson's OKLab, in which distances are about those that are seen."""
    lms = np.cbrt([[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
                   [0.0883024619, 0.2817188376, 0.6299787005]] @ rgb.clip(0, 1))  # fmt: skip
    return np.array([[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099],
                     [0.0259040371, 0.7827717662, -0.8086757660]]) @ lms  # fmt: skip


def test_every_method_has_a_look_of_its_own() -> None:
    assert set(METHOD_LOOKS) | set(REFERENCE_LOOKS) == set(METHODS)
    assert len({(look(name).colour, look(name).marker) for name in METHODS}) == len(METHODS)


def test_methods_that_keep_masks_and_are_compared_most_often_have_a_hue_each() -> None:
    """By markers alone a newcomer could not tell them apart; all hues are far apart with colour blindness, see below."""
    hues = [METHOD_LOOKS[name][0] for name in ("hat", "pmask", "packnet", "lora", "sgd", "ewc")]
    assert len(set(hues)) == len(HUES) == 6


def test_a_look_depends_on_the_name_alone() -> None:
    assert look("mymethods:Mine") == look("mymethods:Mine")
    assert look("mymethods:Mine").marker in ("hex", "star"), "no method of the package has these"
    assert not {"hex", "star"} & {marker for _, marker in METHOD_LOOKS.values()}


def test_variants_differ_from_their_method_and_from_each_other() -> None:
    assert len({look("hat", k) for k in range(10)}) == 10


def test_a_variant_has_no_marker_of_another_method_of_its_colour() -> None:
    assert look("sgd", 1).marker != look("stable-sgd").marker
    for name, (hue, _) in METHOD_LOOKS.items():
        others = {marker for other, (of, marker) in METHOD_LOOKS.items() if of == hue and other != name}
        assert others.isdisjoint({look(name, k).marker for k in range(5)})


def test_rows_of_one_hue_alone_have_a_colour_each() -> None:
    rows = {str(k): "sgd" for k in range(6)} | {"stable": "stable-sgd", "all": "joint"}
    found = told_apart(rows)
    assert (
        len({one.colour for one in found.values()}) == len({one.dark for one in found.values()}) == 8 - 1
    )  # "joint" and the 7th
    assert len({(one.colour, one.marker) for one in found.values()}) == 8
    assert found["0"] == look("sgd")
    for mixed in ({**rows, "hat": "hat"}, {"0": "sgd", "1": "sgd"}):
        assert told_apart(mixed) == variants(mixed)


@pytest.mark.parametrize("name", [*METHODS, "a:B"])
def test_marks_stand_out_from_the_ground(name: str) -> None:
    """WCAG 1.4.11 asks for a contrast of 3 for graphical objects."""
    assert contrast(look(name).colour, "#ffffff") >= 3
    assert contrast(look(name).dark, "#11161b") >= 3


@pytest.mark.parametrize("ground", [0, 1])
@pytest.mark.parametrize("kind", BLIND)
def test_methods_with_the_same_marker_are_told_apart_with_colour_blindness(kind: str, ground: int) -> None:
    for one, two in combinations(HUES, 2):
        seen = [oklab(np.array(BLIND[kind]) @ linear(HUES[hue][ground])) for hue in (one, two)]
        assert np.linalg.norm(seen[0] - seen[1]) > 0.06, f"{one} and {two}"
    control = [oklab(np.array(BLIND["deutan"]) @ linear(c)) for c in ("#a46a00", "#7f7a00")]
    assert np.linalg.norm(control[0] - control[1]) < 0.06, "the test can fail: two that are hard to tell apart"
