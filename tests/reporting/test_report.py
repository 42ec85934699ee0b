"""The report: its page as a browser without script would read it, and its tables."""

import base64
import csv
import hashlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from hatrack.experiments.record import Record
from hatrack.experiments.records import records as records_in
from hatrack.regime import Regime
from hatrack.reporting.assets import SCRIPTS, scripts
from hatrack.reporting.page import collect, render_page
from hatrack.reporting.report import report
from hatrack.reporting.tables import csv_text, settings
from tests.helpers.records import ACCURACY, Reader, foreign_scripts, in_order, make, save, with_spec

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


def test_the_page_shows_these_numbers_and_ranks_by_accuracy(whole: Path) -> None:
    _, page = read_page(whole)
    # 68.75 is written as 68.8 and the deviation of (65, 72.5) is 5.3
    assert page.row("sgd")[:5] == ["sgd", "2", "68.8 ± 5.3", "81.2 ± 5.3", "0.250 ± 0.212"]
    assert page.row("hat")[2] == "79.0 ± 1.4"
    assert page.row("hat")[4:6] == ["0.000 ± 0.000", "0.000 ± 0.000"]
    assert page.row("sgd")[5] == "−0.250 ± 0.212"  # noqa: RUF001
    assert page.row("sgd")[9:] == ["—", "0.250 ± 0.212", "0.250 ± 0.212", "1,234", "11.0 ± 1.4"]
    first = [row[0].strip() for row in page.rows if row]
    order = [first.index(name) for name in ("hat", "sgd", "References, not ranked", "joint", "random")]
    assert order == sorted(order)


def test_the_summary_and_the_table_stand_in_their_places(whole: Path) -> None:
    _, page = read_page(whole)
    (summary,) = page.texts("p", kind="summary")
    assert in_order(summary, "25.0", "sgd", "hat", "79.0 %")
    assert page.texts("p", kind="caution") == []
    assert page.texts("p", kind="note") == []
    assert (whole / "table.csv").read_text(encoding="utf-8") == csv_text(settings(records_in(whole)))


def test_rho_needs_both_references(tmp_path: Path) -> None:
    text = written(tmp_path, [r for r in EVERYTHING if r.spec.method in ("hat", "joint")])
    assert Reader(text).row("hat")[8] == "—"
    assert "hatrack run digits-and-clothes random --seeds 0-1" in Reader(text).texts("code")
    (setting,) = island(text)["settings"]
    assert not any(value is not None for method in setting["methods"] for value in method["ratio"])


def test_rho_says_how_many_seeds_it_has(tmp_path: Path) -> None:
    records = [r for r in EVERYTHING if r.spec.method == "hat" or r.spec.seed == 1]
    text = written(tmp_path, records)
    by_hand = ((0.80 - 0.35) / (0.90 - 0.35) + (0.76 - 0.30) / (0.80 - 0.30)) / 2 - 1
    assert Reader(text).row("hat")[8] == f"{by_hand:.3f} of one seed".replace("-", "−")  # noqa: RUF001
    needed = [f"hatrack run digits-and-clothes {name} --seed 0" for name in ("joint", "random")]
    assert set(needed) <= set(Reader(text).texts("code"))
    rows = list(csv.DictReader(io.StringIO((tmp_path / "table.csv").read_text())))
    assert [row["forgetting_ratio_seeds"] for row in rows if row["method"] == "hat"] == ["1"]


def test_same_records_same_bytes(whole: Path, tmp_path: Path) -> None:
    report(save(tmp_path / "records", EVERYTHING[::-1]))
    files = sorted(p.relative_to(whole) for p in whole.rglob("*") if p.is_file() and p.suffix != ".json")
    assert [file.name for file in files] == ["by_task.csv", "report.html", "table.csv"]
    assert all((whole / f).read_bytes() == (tmp_path / "records" / f).read_bytes() for f in files)


def test_links_lead_from_a_page_elsewhere_to_the_records(tmp_path: Path) -> None:
    page = report(save(tmp_path / "my records", EVERYTHING), tmp_path / "elsewhere" / "deep")
    assert not list((tmp_path / "my records").glob("*.html"))
    links = [value for name, value in Reader(page.read_text(encoding="utf-8")).attributes if name == "href"]
    targets = {(page.parent / unquote(link)).resolve() for link in links if link.endswith(".json")}
    assert targets == set((tmp_path / "my records").glob("*.json"))


def without_scripts(text: str) -> str:
    return re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)


def island(text: str) -> Any:
    """The data of the page's charts."""
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.DOTALL)
    return json.loads(found)


def test_the_page_needs_nothing_else(whole: Path) -> None:
    text, page = read_page(whole)
    own = without_scripts(text) + "".join(scripts(SCRIPTS))
    assert not re.search(r"https?://|@import|javascript:", own)
    assert not page.tags & {"img", "iframe", "object", "embed", "image"}
    assert not [name for name, _ in page.attributes if name.startswith("on") or name == "src"]
    links = {value for name, value in page.attributes if name.endswith("href") and not value.startswith("#")}
    assert links == {"data:,", *(f"{record.name}.json" for record in EVERYTHING)}
    assert all(url.startswith("#") for url in re.findall(r"url\(([^)]*)\)", own))
    assert 'name="viewport"' in text
    assert "@media print" in text


def test_only_the_scripts_of_the_page_may_run(whole: Path) -> None:
    text, _ = read_page(whole)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    allowed = set(re.findall(r"&#39;sha256-([^&]*)&#39;", policy))
    found = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    digests = {base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in found}
    assert digests == allowed
    assert len(found) > 3
    assert "unsafe-inline" not in policy.split("script-src")[1].split(";")[0]
    assert "connect-src" not in policy
    assert "connect-src &#39;self&#39;" in render_page(collect(EVERYTHING), live=True)


def test_ids_are_unique_and_references_lead_somewhere(whole: Path) -> None:
    text, page = read_page(whole)
    assert len(page.ids) == len(set(page.ids))
    assert len(page.refers) > 20
    assert set(page.refers) <= set(page.ids)
    (figure,) = re.findall(r'<svg role="img"[^>]*>', text)
    assert "viewBox=" in figure
    assert "aria-label=" in figure


def test_names_are_harmless(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    record = make(names=(evil, 'a "b" & $c$ id="x"\n--> \ud800 url(#y) 数'))
    changes = {"benchmark": "<style><b>", "freeze": evil, "method": "..<i>", "network": evil}
    record = with_spec(record, **changes, method_options={evil: f'"{evil}', "c": [evil, 1]})
    record.versions = {evil: evil}
    text = written(tmp_path, [record])
    page = Reader(text)
    assert not page.tags & {"b", "i"}
    assert evil not in text
    assert foreign_scripts(text) == []
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    (setting,) = island(text)["settings"]
    assert setting["tasks"][0] == evil, "in JSON it is whole again"
    assert page.row(f'..<i> ({evil}="{evil}, c={evil},1)')[1] == "1"
    assert 'a "b" & $c$ id="x" --> url(#y) 数' in [cell for row in page.rows for cell in row]
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".csv", ".csv", ".html", ".json"]


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
    records = [*others, *(r for r in EVERYTHING if r.spec.method == "sgd")]
    text = written(tmp_path, records)
    page = Reader(text)
    rows = [" ".join(row[2].split()) for row in page.rows if len(row) == 14 and row[0].strip() == "sgd"]
    assert rows == ["68.8 ± 5.3", "35.0 ± 0.0"]
    assert {"setting-1", "setting-2", "setting-2-ranking"} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert [setting.title for setting in settings(records)] == [f"digits-and-clothes (epochs={n})" for n in (200, 3)]
    beside, warning = page.texts("p", kind="caution")
    assert "epochs" in beside, "side by side, with a caution that names what differs"
    assert in_order(warning, "three epochs", "200")


def test_one_seed_and_one_task(tmp_path: Path) -> None:
    text = written(tmp_path, [make(method, accuracy=[[a]]) for method, a in (("hat", 0.9), ("joint", 1.0), ("random", 0.5))])
    row = Reader(text).row("hat")
    assert row[1:5] == ["1", "90.0", "90.0", "0.000"]  # one seed: no deviation
    assert row[8] == "−0.200"  # noqa: RUF001  (0.9 - 0.5) / (1 - 0.5) - 1


def test_values_that_are_missing_are_dashes(tmp_path: Path) -> None:
    """A task that could not be measured before it was learned, and references that are the same."""
    record = make("hat", accuracy=[[0.9, 0.1], [0.8, 0.7]])
    record.accuracy[0][1] = None  # type: ignore[call-overload]
    record.without_task_id = [None, 0.5]  # type: ignore[list-item]
    same = [[0.5, 0.5], [0.5, 0.5]]
    row = Reader(written(tmp_path, [record, make("joint", accuracy=same), make("random", accuracy=same)])).row("hat")
    assert row[2] == "75.0"
    assert row[6:9] == ["—", "—", "—"]  # forward transfer, accuracy without task id, forgetting ratio


def test_reporting_is_imported_without_torch() -> None:
    code = "import sys, hatrack.reporting.report; print({'torch', 'bokeh'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
