"""Figures for papers: which there are, their names, sizes and fonts, and what is said if there is nothing to draw."""

import re
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from hatrack.cli.group import main
from hatrack.experiments import metrics
from hatrack.reporting.paper_figures import forgetting_after, paper_figures
from tests.helpers.many_records import many
from tests.helpers.records import make, save


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("runs"), many(5, 2, 4, epochs=2))


def test_names_stay_the_same_when_records_are_added(folder: Path, tmp_path: Path) -> None:
    one = {path.name for path in paper_figures(save(tmp_path, many(2, 2, 4, epochs=2)), "matrix", "png")}
    all_of_them = {path.name for path in paper_figures(folder, "matrix", "png", tmp_path / "other")}
    assert one < all_of_them
    assert all(re.fullmatch(r"digits-and-clothes-[0-9a-f]{6}-matrix-[a-z]+\.png", name) for name in all_of_them)


@pytest.mark.parametrize("kind", ["accuracy", "forgetting", "capacity"])
def test_a_figure_is_one_column_wide(folder: Path, tmp_path: Path, kind: str) -> None:
    (path, *_) = paper_figures(folder, kind, "png", tmp_path)  # type: ignore[arg-type]
    image = matplotlib.image.imread(path)
    assert image.shape[1] == round(3.4 * 300)
    assert len(np.unique(image[..., :3] @ [1.0, 10.0, 100.0])) > 20, "colours"


def test_fonts_are_embedded(folder: Path, tmp_path: Path) -> None:
    (pdf,) = paper_figures(folder, "accuracy", "pdf", tmp_path)
    content = pdf.read_bytes()
    assert b"/FontFile2" in content
    assert b"/Type3" not in content
    assert content == paper_figures(folder, "accuracy", "pdf", tmp_path / "again")[0].read_bytes(), "the same bytes"
    (svg,) = paper_figures(folder, "accuracy", "svg", tmp_path)
    assert "<text" not in svg.read_text(), "letters are outlines"


def test_forgetting_after_every_number_of_tasks() -> None:
    table = np.array([[0.9, 0.1, 0.1], [0.7, 0.8, 0.1], [0.6, 0.5, 0.9]])
    assert forgetting_after(table) == pytest.approx([0.9 - 0.7, ((0.9 - 0.6) + (0.8 - 0.5)) / 2])
    assert forgetting_after(table)[-1] == pytest.approx(metrics.forgetting(table))


def test_a_sweep_is_drawn(tmp_path: Path) -> None:
    runs = [make("hat", seed, method_options={"c": c}) for c in (0.75, 1.5) for seed in (0, 1)]
    (path,) = paper_figures(save(tmp_path, runs), "sweep", "png")
    assert path.name.startswith("hat-on-digits-and-clothes-")


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = str(save(tmp_path, [make("sgd")]))
    assert main(["figure", runs, "capacity"]) == 2
    assert "hat, pmask and packnet" in capsys.readouterr().err
    assert main(["figure", runs, "acuracy"]) == 2
    assert "accuracy" in capsys.readouterr().err
    assert main(["figure", runs, "accuracy", "--format", "gif"]) == 2
    assert main(["figure", runs, "accuracy", "--format", "svg"]) == 0
    assert list((tmp_path / "figures").glob("*-accuracy.svg"))
