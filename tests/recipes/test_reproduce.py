"""`hatrack reproduce` from the command line, the quick version of every paper included."""

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from hatrack.cli.group import main
from hatrack.experiments.record import Record
from hatrack.experiments.spec import Run
from hatrack.recipes import RECIPES
from hatrack.recipes.grids import flatness_correlations
from hatrack.recipes.plots import draw, flatness_lines
from hatrack.recipes.quantities import distance_moved, forgetting_bound, largest_eigenvalue, loss_forgotten, summary
from hatrack.recipes.quick import quick_run
from hatrack.recipes.recipe import Part, Row
from hatrack.recipes.reproduce import carry_out, missing_rows, read_records
from hatrack.recipes.results import Records, Results
from hatrack.regime import Regime


def words(capsys):
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_the_recipes_are_listed(capsys):
    assert main(["reproduce"]) == 0
    out, _ = words(capsys)
    assert all(name in out for name in RECIPES)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("reproduce hat-2081", "did you mean 'hat-2018'"),
        ("reproduce pmask --only cifar11", "did you mean 'cifar10"),
        ("reproduce pmask --seeds x", "--seeds"),
        ("reproduce pmask --methods hta", "did you mean 'hat'"),
        ("reproduce pmask --only optimizer --methods pnn", "no row"),
        ("reproduce pmask --precision float8", "float8"),
        ("reproduce pmask --missing --page", "exclude"),
        ("reproduce pmask --parallel 0", "--parallel"),
    ],
)
def test_a_mistake_is_one_line(line, said, capsys, tmp_path):
    assert main([*line.split(), "--out", str(tmp_path)]) == 2
    _, err = words(capsys)
    assert said in err
    assert len(err.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_missing_tells_what_it_would_cost_and_runs_nothing(capsys, tmp_path):
    assert main(["reproduce", "pmask", "--only", "cifar10", "--missing", "--out", str(tmp_path)]) == 0
    out, _ = words(capsys)
    assert "0 of 8 rows are complete" in out
    assert not list(tmp_path.iterdir())


def test_the_rows_of_some_methods_alone(capsys, tmp_path):
    line = ["reproduce", "pmask", "--only", "cifar10", "--methods", "hat, sgd", "--missing", "--out", str(tmp_path)]
    assert main(line) == 0
    assert "0 of 2 rows are complete" in words(capsys)[0]


@pytest.mark.slow
def test_what_the_rows_of_one_method_left_is_run_later(capsys, tmp_path):
    line = ["reproduce", "others", "--quick", "--only", "every-method", "--out", str(tmp_path), "--device", "cpu"]
    assert main([*line, "--methods", "sgd"]) == 0
    assert {Record.load(path).spec.method for path in tmp_path.glob("quick/records/*.json")} == {"sgd"}
    assert "hat" in (tmp_path / "quick" / "others.html").read_text(), "the page has all rows"
    assert main([*line, "--methods", "sgd,hat"]) == 0
    assert {Record.load(path).spec.method for path in tmp_path.glob("quick/records/*.json")} == {"sgd", "hat"}


def test_page_runs_nothing(capsys, tmp_path):
    assert main(["reproduce", "pmask", "--page", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "pmask.html").exists()
    assert not (tmp_path / "records").exists()


@pytest.mark.slow
def test_a_part_runs_once_and_its_page_says_that_it_is_not_the_papers(capsys, tmp_path):
    line = ["reproduce", "pmask", "--quick", "--only", "optimizer", "--out", str(tmp_path), "--device", "cpu"]
    assert main(line) == 0
    records = sorted((tmp_path / "quick" / "records").glob("*.json"))
    assert len(records) == 2
    assert "This is the quick version" in (tmp_path / "quick" / "pmask.html").read_text()
    times = [path.stat().st_mtime_ns for path in records]
    assert main(line) == 0
    assert [path.stat().st_mtime_ns for path in records] == times
    assert main([*line, "--missing"]) == 0
    assert "2 of 2 rows are complete" in words(capsys)[0]


def test_parts_whose_data_are_missing_do_not_stop_the_others(tmp_path, monkeypatch, capsys):
    """A benchmark without its images is named in the end; the other runs have their records, and there is a page."""
    monkeypatch.setenv("HATRACK_DATA", str(tmp_path / "none"))
    small = quick_run(Run("smnist", "sgd"))
    rows = (Row("far away", Run("mixture", "sgd"), (0,)), Row("here", small, (0,)))
    part = Part("table", "A table", "", rows, (summary("accuracy"),))
    problems = carry_out([part], tmp_path, None, device="cpu")
    assert len(problems) == 1
    assert "svhn" in problems[0]
    assert [path.stem for path in (tmp_path / "records").glob("*.json")] == [small.name]


@pytest.mark.slow
def test_the_flatness_of_a_part_is_measured_once(tmp_path, monkeypatch):
    """Its rows are missing until it is measured, also if their runs have records already."""
    small = replace(quick_run(Run("rmnist", "sgd")), regime=Regime(epochs=1, batch=200))
    columns = (largest_eigenvalue(), distance_moved(), loss_forgotten(), forgetting_bound())
    plain = Part("plain", "", "", (Row("one", small, (0,)),))
    curved = Part("curved", "", "", (Row("one", small, (0,)),), columns, plots=(flatness_lines(),), flatness=True)
    assert carry_out([plain], tmp_path, None, device="cpu") == []
    assert [item.seeds for item in missing_rows([plain, curved], read_records(tmp_path))] == [[0]]
    assert carry_out([plain, curved], tmp_path, None, device="cpu") == []
    records = read_records(tmp_path)
    assert not missing_rows([plain, curved], records)
    results = Results(curved, records)
    (found,) = results.flatness_of("one")
    means = [results.mean("one", quantity) for quantity in columns]
    assert means == [np.mean(found.top), np.mean(found.moved), found.forgetting[0][-1], found.bounds[0][-1]]
    assert draw(curved.plots[0], results, "figure").png.startswith(b"\x89PNG")
    assert flatness_correlations(results).rows[0][1] == "no correlation of 2 pairs"
    assert flatness_correlations(Results(curved, Records())) is None
    monkeypatch.setattr("hatrack.recipes.reproduce.measure_run", lambda *_, **__: pytest.fail("measured again"))
    assert carry_out([curved], tmp_path, None, device="cpu") == []


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_the_quick_version_of_a_paper(name, tmp_path, capsys):
    assert main(["reproduce", name, "--quick", "--out", str(tmp_path), "--device", "cpu"]) == 0
    page = (tmp_path / "quick" / f"{name}.html").read_text()
    Checker().feed(page)
    assert "not run yet" not in page
    records = [json.loads(path.read_text()) for path in (tmp_path / "quick" / "records").glob("*.json")]
    assert records
    assert all(record["accuracy"] for record in records)
    assert Path(tmp_path / "quick" / f"{name}.md").exists()


class Checker(HTMLParser):
    """Fails where a tag that was not opened is closed."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "link", "path", "use", "rect", "line"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag in ("path", "use", "rect", "line"):
            return
        assert self.open
        assert self.open.pop() == tag
