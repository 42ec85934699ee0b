"""Styles and layout of the figures: colours, contrast, ids, labels and file names."""

import numpy as np
from matplotlib.colors import to_rgb

from hatrack.regime import Regime
from hatrack.reporting.drawing import MUTED, PALETTE, TEXT, LineStyle, cell_colours, line_styles, slugs, task_colours
from hatrack.reporting.figures import draw_lines, move_apart
from hatrack.reporting.looks import contrast, look
from hatrack.reporting.svg import inline_svg, on_dark
from hatrack.reporting.tables import settings
from tests.helpers.records import ACCURACY, make

EVERYTHING = [make(method, seed) for method, seed in ACCURACY]


def test_text_in_a_figure_that_looks_like_an_id_stays_as_it_is() -> None:
    text = inline_svg('<svg viewBox="0 0 1 1"><text id="a" x="1">id="a" url(#a)</text></svg>', "name", "what")
    assert text.startswith('<svg role="img" aria-label="what" viewBox="0 0 1 1"')
    assert text.endswith('<text id="name-a" x="1">id="a" url(#a)</text></svg>')


def test_colours_of_a_figure_have_a_dark_side() -> None:
    hat = look("hat", 1)
    text = inline_svg(f'<svg viewBox="0 0 1 1"><path style="fill: none; stroke: {hat.colour}"/></svg>', "name", "what")
    assert f"stroke: {hat.colour}; stroke: light-dark({hat.colour}, {hat.dark})" in text, "the first is for old browsers"
    for colour in (*task_colours(10), TEXT, MUTED):
        assert contrast(on_dark(colour), "#11161b") >= 3, colour


def test_a_method_has_one_colour_everywhere() -> None:
    soft = make(method="hat", method_options={"masks": "soft"})
    found = settings([*EVERYTHING, soft, make(regime=Regime(epochs=3))])
    styles = line_styles(found)
    assert set(styles) == {"sgd", "hat", "hat (masks=soft)", "joint", "random"}
    assert len({style.colour for style in styles.values()}) == 5


def test_numbers_can_be_read_on_every_colour() -> None:
    def light(colour: str) -> float:
        parts = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in to_rgb(colour)]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    for value in np.linspace(0, 1, 101):
        for faded in (False, True):
            dark, bright = sorted(map(light, cell_colours(float(value), 0.2, faded)))
            assert (bright + 0.05) / (dark + 0.05) >= 4.5  # WCAG AA


def test_beside_a_name_stands_a_piece_of_its_line() -> None:
    looks = {"a": LineStyle("#112233", "--", "s"), "b": LineStyle("#445566", "-.", "")}
    values = {"a": [np.array([0.2, 0.1])], "b": [np.array([0.2, 0.9])]}
    (axes,) = draw_lines(values, looks, "title", least=0.1).axes
    pieces = axes.get_lines()[len(values) :]
    texts = {text.get_position()[1]: text.get_text() for text in axes.texts if text.get_text()}
    found = {
        texts[piece.get_ydata()[0]]: LineStyle(piece.get_color(), piece.get_linestyle(), piece.get_marker())
        for piece in pieces
    }
    assert found == looks


def test_eight_data_sets_have_a_colour_each() -> None:
    """As many as there are in the figure of single tasks of HAT's paper."""
    assert len(set(PALETTE)) >= 8


def test_names_beside_lines_do_not_touch() -> None:
    assert move_apart([1.0, 5.0], 1.0, 9.0) == [1.0, 5.0]
    assert move_apart([2.0, 2.0, 2.0], 1.0, 9.0) == [1.0, 2.0, 3.0]
    assert move_apart([2.0, 2.0, 2.0], 1.0, 2.5) == [0.5, 1.5, 2.5]
    assert move_apart([], 1.0, 0.0) == []


def test_file_names_are_plain_and_different() -> None:
    assert slugs(["hat (c=1.5)", "../x", "é", "ü", "hat c 1.5"]) == ["hat-c-1.5", "x", "unnamed", "unnamed-2", "hat-c-1.5-2"]
