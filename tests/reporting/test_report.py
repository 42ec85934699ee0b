"""The report: its numbers against values worked out here, and the page as a browser would read it."""

import csv
import io
import json
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from rich.console import Console

from hatrack.__main__ import main
from hatrack.experiments.record import Record, name_of
from hatrack.experiments.run import Run
from hatrack.regime import Regime
from hatrack.reporting.drawing import inline, looks, shade, slugs
from hatrack.reporting.figures import apart
from hatrack.reporting.report import read, report
from hatrack.reporting.tables import csv_text, label, ranking, settings, terminal
from hatrack.reporting.words import caution, command, story
from tests.helpers.records import ACCURACY, Reader, make, save

EVERYTHING = [make(method, seed) for method, seed in ACCURACY]


def written(folder: Path, records: list[Record]) -> str:
    """The page of these records."""
    return report(save(folder, records)).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with records of two methods and both references, and their report."""
    folder = tmp_path_factory.mktemp("whole")
    report(save(folder, EVERYTHING))
    return folder


def read_page(folder: Path) -> tuple[str, Reader]:
    text = (folder / "report.html").read_text(encoding="utf-8")
    return text, Reader(text)


def test_the_numbers_are_means_and_deviations_over_seeds() -> None:
    row = next(r for r in ranking(settings(EVERYTHING)[0]) if r.label == "sgd")
    expected = {
        "accuracy": [(0.50 + 0.80) / 2, (0.70 + 0.75) / 2],
        "learning": [(0.90 + 0.80) / 2, (0.80 + 0.75) / 2],
        "forgetting": [0.90 - 0.50, 0.80 - 0.70],
        "backward": [0.50 - 0.90, 0.70 - 0.80],
        "forward": [0.20 - 0.25, 0.30 - 0.25],
        "without_task_id": [0.1, 0.2],
        "forgetting_ratio": [
            ((0.50 - 0.30) / (0.95 - 0.30) + (0.80 - 0.40) / (0.85 - 0.40)) / 2 - 1,
            ((0.70 - 0.35) / (0.90 - 0.35) + (0.75 - 0.30) / (0.80 - 0.30)) / 2 - 1,
        ],
        "parameters": [1234, 1234],
        "seconds": [10, 12],
    }
    assert row.measures.keys() == expected.keys()
    for key, values in expected.items():
        found = row.measures[key]
        assert found is not None
        assert found.mean == pytest.approx(statistics.mean(values)), key
        assert found.std == pytest.approx(statistics.stdev(values)), key


def test_the_page_shows_these_numbers_and_ranks_by_accuracy(whole: Path) -> None:
    _, page = read_page(whole)
    # 68.75 is written as 68.8 and the deviation of (65, 72.5) is 5.3
    assert page.row("sgd")[:5] == ["sgd", "2", "68.8 ± 5.3", "81.2 ± 5.3", "0.250 ± 0.212"]
    assert page.row("hat")[2] == "79.0 ± 1.4"
    assert page.row("hat")[4:6] == ["0.000 ± 0.000", "0.000 ± 0.000"]
    assert page.row("sgd")[5] == "−0.250 ± 0.212"  # noqa: RUF001
    assert page.row("sgd")[9:] == ["1,234", "11.0 ± 1.4"]
    first = [row[0].strip() for row in page.rows if row]
    order = [first.index(name) for name in ("hat", "sgd", "References, not ranked", "joint", "random")]
    assert order == sorted(order)


def test_the_paragraph_says_what_was_lost() -> None:
    setting = settings(EVERYTHING)[0]
    assert "After two tasks, sgd had lost 25.0 points on average of what it once knew; hat 0.0." in story(setting)
    assert "At the end hat was right on 79.0 % of the test examples, averaged over all tasks, more than any" in story(
        setting
    )
    assert "joint training, which may keep all data, on 87.5 %; guessing on 33.8 %." in story(setting)


def test_rho_needs_both_references(tmp_path: Path) -> None:
    text = written(tmp_path, [r for r in EVERYTHING if r.spec["method"] in ("hat", "joint")])
    assert Reader(text).row("hat")[8] == "—"
    assert "hatrack run digits-and-clothes random --seeds 0-1" in text
    assert "hatrack run digits-and-clothes joint" not in text
    assert not list(tmp_path.glob("figures/*ratio*"))


def test_rho_says_how_many_seeds_it_has(tmp_path: Path) -> None:
    records = [r for r in EVERYTHING if r.spec["method"] == "hat" or r.spec["seed"] == 1]
    text = written(tmp_path, records)
    by_hand = ((0.80 - 0.35) / (0.90 - 0.35) + (0.76 - 0.30) / (0.80 - 0.30)) / 2 - 1
    assert Reader(text).row("hat")[8] == f"{by_hand:.3f} of one seed".replace("-", "−")  # noqa: RUF001
    assert "hatrack run digits-and-clothes joint --seed 0" in text
    rows = list(csv.DictReader(io.StringIO((tmp_path / "table.csv").read_text())))
    assert [row["forgetting_ratio_seeds"] for row in rows if row["method"] == "hat"] == ["1"]


def test_the_command_repeats_the_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the page tells a user to type gives records of the same setting."""
    run = {"network_options": {"widths": (300, 300)}, "benchmark_options": {"data": "sample"}, "heads": "shared"}
    record = make(regime=Regime(epochs=7, lr=0.01, restore=False), **run)
    line = command(settings([record])[0], "joint", [0, 1, 2, 5])
    options = "--heads shared --epochs 7 --lr 0.01 --no-restore --data sample --widths 300,300"
    assert line == f"hatrack run digits-and-clothes joint {options} --seeds 0,1,2,5"
    carried: list[Run] = []
    monkeypatch.setattr(
        "hatrack.experiments.parallel.run", lambda spec, *_, **__: carried.append(spec) or replace(record, spec=spec.spec)
    )
    assert main([*line.split()[1:], "--out", str(tmp_path)]) == 0
    assert [spec.seed for spec in carried] == [0, 1, 2, 5]
    assert carried[0].spec == {**record.spec, "method": "joint"}


def test_same_records_same_bytes(whole: Path, tmp_path: Path) -> None:
    report(save(tmp_path / "records", EVERYTHING[::-1]), tmp_path / "elsewhere" / "deep")
    files = sorted(p.relative_to(whole) for p in whole.rglob("*") if p.is_file() and p.suffix != ".json")
    others = sorted(p.relative_to(tmp_path / "elsewhere/deep") for p in (tmp_path / "elsewhere").rglob("*") if p.is_file())
    assert files == others
    assert all((whole / f).read_bytes() == (tmp_path / "elsewhere" / "deep" / f).read_bytes() for f in files)
    assert not list((tmp_path / "records").glob("*.html"))


def test_the_page_needs_nothing_else(whole: Path) -> None:
    text, page = read_page(whole)
    assert not re.search(r"https?://|//[a-z]|@import|javascript:", text)
    assert not page.tags & {"script", "img", "iframe", "object", "embed", "image"}
    assert not [name for name, _ in page.attributes if name.startswith("on") or name == "src"]
    assert {value for name, value in page.attributes if name.endswith("href") and not value.startswith("#")} == {"data:,"}
    assert all(url.startswith("#") for url in re.findall(r"url\(([^)]*)\)", text))
    assert 'name="viewport"' in text
    assert "@media print" in text


def test_a_panel_of_another_seed_says_so(tmp_path: Path) -> None:
    text = written(tmp_path, [make("sgd", 0), make("sgd", 1), make("hat", 1)])
    assert "at seed 0 where no other is named" in text
    panels = [part for part in text.split("<svg")[1:] if "validation accuracy in every epoch" in part]
    assert {name: "row, seed 1" in part for part in panels for name in ("hat", "sgd") if f'aria-label="{name}' in part} == {
        "hat": True,
        "sgd": False,
    }


def test_ids_are_unique_and_references_lead_somewhere(whole: Path) -> None:
    text, page = read_page(whole)
    assert text.count("<svg") == 8  # accuracy, ratio, and of three methods the tasks and the training
    assert len(page.ids) == len(set(page.ids))
    assert len(page.refers) > 20
    assert set(page.refers) <= set(page.ids)
    heads = re.findall(r"<svg [^>]*>", text)
    assert all("viewBox=" in head and "width=" not in head and "aria-label=" in head for head in heads)


def test_names_are_harmless(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    record = make(names=(evil, 'a "b" & $c$ id="x"\n--> \ud800 url(#y) 数'))
    record.spec |= {"benchmark": "<style><b>", "freeze": evil, "method": "..<i>", "network": evil}
    record.spec["method_options"] = {evil: f'"{evil}', "c": [evil, 1]}
    record.name = name_of(record.spec)
    record.versions = {evil: evil}
    text = written(tmp_path, [record])
    page = Reader(text)
    assert not page.tags & {"script", "b", "i"}
    assert evil not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert page.row(f'..<i> ({evil}="{evil}, c={evil},1)')[1] == "1"
    assert 'a "b" & $c$ id="x" --> url(#y) 数' in [cell for row in page.rows for cell in row]
    assert all(p.parent == tmp_path / "figures" for p in tmp_path.rglob("*.png"))
    assert not list(tmp_path.parent.glob("*.png"))


def test_text_in_a_figure_that_looks_like_an_id_stays_as_it_is() -> None:
    text = inline('<svg viewBox="0 0 1 1"><text id="a" x="1">id="a" url(#a)</text></svg>', "name", "what")
    assert text == '<svg role="img" aria-label="what" viewBox="0 0 1 1"><text id="name-a" x="1">id="a" url(#a)</text></svg>'


def test_csv_holds_the_ranking_in_full(whole: Path) -> None:
    text = (whole / "table.csv").read_text(encoding="utf-8")
    setting = settings(read(whole))[0]
    assert text == csv_text([setting])
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [(row["method"], row["reference"]) for row in rows] == [
        ("hat", "no"),
        ("sgd", "no"),
        ("joint", "yes"),
        ("random", "yes"),
    ]
    for row, expected in zip(rows, ranking(setting), strict=True):
        assert int(row["seeds"]) == 2
        for key, value in expected.measures.items():
            assert value is not None
            assert (float(row[key]), float(row[f"{key}_std"])) == (value.mean, value.std)


def test_figures_are_drawn(whole: Path) -> None:
    names = {path.stem for path in whole.glob("figures/*.png")}
    kinds = {"accuracy", "forgetting-ratio"}
    kinds |= {f"{kind}-{m}" for kind in ("tasks", "training") for m in ("sgd", "hat", "joint")}
    kinds |= {f"matrix-{m}" for m in ("sgd", "hat", "joint", "random")}
    assert names == {f"digits-and-clothes-{kind}" for kind in kinds}
    for path in whole.glob("figures/*.png"):
        image = matplotlib.image.imread(path)
        assert min(image.shape[:2]) > 200
        assert len(np.unique(image[..., :3] @ [1.0, 10.0, 100.0])) > 20  # colours


def test_a_method_has_one_colour_everywhere() -> None:
    soft = make(method="hat", method_options={"masks": "soft"})
    found = settings([*EVERYTHING, soft, make(regime=Regime(epochs=3))])
    seen = looks(found)
    assert set(seen) == {"sgd", "hat", "hat (masks=soft)", "joint", "random"}
    assert len({look.colour for look in seen.values()}) == 5


def test_matrices_are_means_over_seeds(whole: Path) -> None:
    _, page = read_page(whole)
    rows = [row for row in page.rows if row and row[0] in ("ones", "twos")]
    assert ["ones", "85.0", "25.0"] in rows
    assert ["twos", "60.0", "77.5"] in rows  # sgd: (50 + 70) / 2 and (80 + 75) / 2
    assert ["twos", "85.0", "73.0"] in rows  # hat


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "not JSON"),
        ("[]", "no schema"),
        ('{"schema": 1}', "missing"),
        ({"spec": {}}, "spec.benchmark is missing"),
        ({"accuracy": [[1.0]]}, "2 x 2"),
        ({"curves": [{"task": 0}]}, "curves"),
        ({"curves": [{"task": 0, "best": 5, "epochs": []}]}, "curves"),
        ({"seconds": None}, "seconds"),
        ({"seconds": {"total": None}}, "seconds"),
        ({"tasks": [1, 2]}, "tasks"),
    ],
)
def test_a_broken_record_is_named(content: Any, said: str, tmp_path: Path) -> None:
    folder = save(tmp_path, [make()])
    whole = json.loads(next(folder.glob("*.json")).read_text())
    text = content if isinstance(content, str) else json.dumps({**whole, **content})
    (folder / "broken.json").write_text(text)
    with pytest.raises(ValueError, match=r"broken\.json") as caught:
        report(folder)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (folder / "report.html").exists()


def test_a_folder_without_records_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hatrack run"):
        report(tmp_path)
    with pytest.raises(ValueError, match="no folder"):
        report(tmp_path / "nowhere")
    (tmp_path / "x.json").mkdir()
    with pytest.raises(ValueError, match=r"x\.json can't be read"):
        report(tmp_path)


def test_several_settings_are_kept_apart(tmp_path: Path) -> None:
    others = [make(seed=s, accuracy=[[0.5, 0.1], [0.4, 0.3]], regime=Regime(epochs=3)) for s in (0, 1)]
    records = [*others, *(r for r in EVERYTHING if r.spec["method"] == "sgd")]
    text = written(tmp_path, records)
    page = Reader(text)
    rows = [" ".join(row[2].split()) for row in page.rows if row and row[0].strip() == "sgd"]
    assert rows == ["68.8 ± 5.3", "35.0 ± 0.0"]
    assert {"setting-1", "setting-2", "setting-2-ranking"} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert [setting.title for setting in settings(records)] == [f"digits-and-clothes (epochs={n})" for n in (200, 3)]
    assert text.count("A short regime: every task was trained for at most three epochs") == 1
    assert len(list(tmp_path.glob("figures/*-accuracy.png"))) == 2


def test_titles_name_as_few_options_as_tell_settings_apart() -> None:
    def titles(*regimes: Regime) -> list[str]:
        records = [make(regime=regime) for regime in regimes]
        return [setting.title.removeprefix("digits-and-clothes") for setting in settings(records)]

    assert titles(Regime()) == [""]
    assert set(titles(Regime(epochs=3, lr=0.1), Regime(epochs=4, lr=0.2))) == {" (epochs=3)", " (epochs=4)"}
    three = titles(Regime(epochs=3, lr=0.1), Regime(epochs=3, lr=0.2), Regime(epochs=4, lr=0.2))
    assert set(three) == {" (epochs=3, lr=0.1)", " (epochs=3, lr=0.2)", " (epochs=4, lr=0.2)"}, "one does not suffice"


def test_variants_of_a_method_are_not_called_methods() -> None:
    one, two = make("hat"), make("hat", method_options={"c": 1.5})
    assert "by one method," in story(settings([one])[0])
    assert "by one method in two variants," in story(settings([one, two])[0])
    assert "by two methods in three variants," in story(settings([one, two, make("sgd")])[0])
    assert "by two methods," in story(settings([one, make("sgd")])[0])


def test_a_command_names_a_network_that_is_not_the_benchmark_s_own() -> None:
    assert "--network" not in command(settings([make()])[0], "joint", [0])
    assert "--network cnn" in command(settings([make(network="cnn")])[0], "joint", [0])


def test_a_short_regime_is_said_to_be_short() -> None:
    assert caution(settings([make()])[0]) == ""
    assert "not the paper's" in caution(settings([make(regime=Regime(epochs=199))])[0])
    assert caution(settings([make(regime=Regime(epochs=5, schedule="constant"))])[0]) == ""
    assert "sample of the data" in caution(settings([make(benchmark_options={"data": "sample"})])[0])


def test_one_seed_and_one_task(tmp_path: Path) -> None:
    text = written(tmp_path, [make(method, accuracy=[[a]]) for method, a in (("hat", 0.9), ("joint", 1.0), ("random", 0.5))])
    row = Reader(text).row("hat")
    assert row[1:5] == ["1", "90.0", "90.0", "0.000"]  # one seed: no deviation
    assert row[8] == "−0.200"  # noqa: RUF001  (0.9 - 0.5) / (1 - 0.5) - 1
    assert "With a single task there is nothing to forget yet." in text


def test_values_that_are_missing_are_dashes(tmp_path: Path) -> None:
    """A task that could not be measured before it was learned, and references that are the same."""
    record = make("hat", accuracy=[[0.9, 0.1], [0.8, 0.7]])
    record.accuracy[0][1] = None  # type: ignore[call-overload]
    record.without_task_id = [None, 0.5]  # type: ignore[list-item]
    same = [[0.5, 0.5], [0.5, 0.5]]
    row = Reader(written(tmp_path, [record, make("joint", accuracy=same), make("random", accuracy=same)])).row("hat")
    assert row[2] == "75.0"
    assert row[6:9] == ["—", "—", "—"]  # forward transfer, accuracy without task id, forgetting ratio


def test_labels_name_the_options_that_differ() -> None:
    assert label(make("hat")) == "hat"
    assert label(make("hat", method_options={"c": 1.5, "masks": "soft", "smax": 400.0})) == "hat (c=1.5, masks=soft)"
    unknown = replace(make(), spec={**make().spec, "method": "new", "method_options": {"a": [1, 2.0], "b": True}})
    assert label(unknown) == "new (a=1,2, b=true)"


def test_a_run_counts_once() -> None:
    again = replace(make(), seconds={"total": 99.0})
    assert ranking(settings([make(), again])[0])[0].seeds == (0,)
    with pytest.raises(ValueError, match="same run with different results"):
        settings([make(), make(accuracy=[[0.1, 0.1], [0.1, 0.1]])])


def test_tasks_that_depend_on_the_seed_are_numbered() -> None:
    assert settings([make(), make(seed=1)])[0].tasks == ["ones", "twos"]
    assert settings([make(), make(seed=1, names=("threes", "fours"))])[0].tasks == ["task 1", "task 2"]


def test_the_terminal_shows_the_same_numbers_in_100_columns() -> None:
    long = {"c": 1.25, "masks": "soft", "protect": "exact", "anneal": "authors", "gate_lr": 0.125}
    console = Console(width=100, file=io.StringIO(), color_system=None)
    console.print(terminal(settings([*EVERYTHING, make("hat", method_options=long)])[0]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text
    line = next(line for line in text.splitlines() if "sgd" in line)
    assert re.split(r"\s{2,}", line.strip()) == [
        "sgd", "2", "68.8 ± 5.3", "81.2 ± 5.3", "0.250 ± 0.212", "−0.317 ± 0.120", "11.0"]  # noqa: RUF001  # fmt: skip


def test_numbers_can_be_read_on_every_colour() -> None:
    def light(colour: str) -> float:
        parts = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in to_rgb(colour)]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    for value in np.linspace(0, 1, 101):
        for faded in (False, True):
            dark, bright = sorted(map(light, shade(float(value), 0.2, faded)))
            assert (bright + 0.05) / (dark + 0.05) >= 4.5  # WCAG AA


def test_names_beside_lines_do_not_touch() -> None:
    assert apart([1.0, 5.0], 1.0, 9.0) == [1.0, 5.0]
    assert apart([2.0, 2.0, 2.0], 1.0, 9.0) == [1.0, 2.0, 3.0]
    assert apart([2.0, 2.0, 2.0], 1.0, 2.5) == [0.5, 1.5, 2.5]
    assert apart([], 1.0, 0.0) == []


def test_file_names_are_plain_and_different() -> None:
    assert slugs(["hat (c=1.5)", "../x", "é", "ü", "hat c 1.5"]) == ["hat-c-1.5", "x", "unnamed", "unnamed-2", "hat-c-1.5-2"]
