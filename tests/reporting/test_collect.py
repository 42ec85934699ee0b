"""The data of a page: the finding and the cards follow from the records, sweeps are found, and all of it is JSON."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hatrack.regime import Regime
from hatrack.reporting import page
from hatrack.reporting.facts import cards, forgets_nothing, headline, setup
from hatrack.reporting.page import collect, island, page_json, render_page
from hatrack.reporting.report import report, unfinished
from hatrack.reporting.sweeps import responses, sweep_data
from hatrack.reporting.tables import Setting, settings
from hatrack.reporting.words import caution
from tests.helpers.many_records import many
from tests.helpers.records import Reader, make, save


def setting(**levels: tuple[float, ...]) -> Setting:
    """Records of two tasks in which a method keeps this accuracy, a level per seed."""
    (found,) = settings(
        make(name.replace("_", "-"), seed, [[level, 0.2], [level, level]])
        for name, some in levels.items()
        for seed, level in enumerate(some)
    )
    return found


def test_the_headline_follows_from_the_tests() -> None:
    ahead = setting(hat=(0.8, 0.81, 0.82), sgd=(0.5, 0.51, 0.53))
    assert headline(ahead).startswith("hat is ahead of all other methods: 81.0\u00a0%")
    tied = setting(hat=(0.8, 0.6, 0.7), sgd=(0.7, 0.8, 0.6))
    assert "tied" in headline(tied)
    assert "too few seeds" in headline(setting(hat=(0.8, 0.9), sgd=(0.5, 0.5)))
    assert "too few" not in headline(setting(hat=(0.8,)))


def test_nobody_is_ahead_of_a_method_that_was_not_compared() -> None:
    """A single run may have the highest mean: it is in no test, so that no sentence may say it is behind."""
    alone = setting(hat=(0.8, 0.81, 0.82), ewc=(0.99,))
    assert headline(alone).endswith("too few seeds to name a winner")
    assert "Too few seeds" in cards(alone)[0]["lines"][-1]
    assert not any(row["place"] for row in collect(alone.records)["sections"][0]["board"]["rows"])
    three = setting(hat=(0.8, 0.81, 0.82), sgd=(0.5, 0.51, 0.53), ewc=(0.99,))
    assert headline(three).startswith("hat is ahead of all other methods with three seeds or more: 81.0")
    assert cards(three)[0]["lines"][-1].startswith("Ahead of all other methods with three seeds or more")
    tied = setting(hat=(0.8, 0.6, 0.7), sgd=(0.7, 0.8, 0.6), ewc=(0.99,))
    assert headline(tied).endswith("; methods with fewer than three seeds are not compared")
    assert cards(tied)[0]["lines"][-1].endswith("Methods with fewer than three seeds are not compared.")


def test_a_zero_is_checked_only_if_the_method_guarantees_it() -> None:
    found = setting(hat=(0.8, 0.9, 0.7), sgd=(0.5, 0.6, 0.7))
    assert forgets_nothing(found.methods["hat"])
    assert not forgets_nothing(found.methods["sgd"]), "zero as well, but nobody checked the bits"
    soft = [make("hat", 0, method_options={"masks": "soft"})]
    assert not forgets_nothing(soft)
    lost = [make("hat", 0, [[0.9, 0.1], [0.8, 0.7]])]
    assert not forgets_nothing(lost)
    _, forgetting, trust = cards(found)
    assert forgetting["large"] == "1 of 2 forget nothing"
    assert "hat: exactly zero, checked bit for bit" in forgetting["lines"]
    assert trust["lines"][0] == "✓ three seeds per method"


def test_forgetting_of_a_score_without_percent_is_not_times_100() -> None:
    found = make("sgd", 0, [[0.9, 0.1], [0.65, 0.9]])
    (of_r2,) = settings([replace(found, tasks=[replace(task, score="R²") for task in found.tasks])])
    assert cards(of_r2)[1]["large"] == "0.250 at best"
    assert cards(settings([found])[0])[1]["large"] == "25.0 points at best"


def test_a_regime_that_counts_steps_is_not_taken_for_200_epochs() -> None:
    (few,) = settings([make(regime=Regime(steps=100))])
    assert cards(few)[2]["lines"][1] == "! shorter training than the HAT paper's"
    assert "at most 100 steps, while the HAT paper allows 200 epochs" in caution(few)
    (own,) = settings([make(regime=Regime(steps=100, schedule="constant"))])
    assert cards(own)[2]["lines"][1] == "✓ a regime of its own: 100 steps per task"
    (many_steps,) = settings([make(regime=Regime(steps=10**6))])
    assert cards(many_steps)[2]["lines"][1] == "✓ trained as long as the HAT paper allows"
    assert not caution(many_steps)


def test_what_was_run_names_differences_from_the_defaults_first() -> None:
    (found,) = settings([make(regime=Regime(epochs=3, lr=0.01))])
    changed = {row[1]: row[2:] for row in setup(found)["changed"]}
    assert changed == {"epochs": ["3", "200"], "lr": ["0.01", "0.05"]}
    assert "batch" in {row[1] for row in setup(found)["same"]}


def test_sweeps_are_found_among_records() -> None:
    records = [make("hat", s, regime=Regime(lr=lr), method_options={"c": c})
               for s in (0, 1) for lr in (0.1, 0.02) for c in (0.75, 1.5)]  # fmt: skip
    (response,) = responses([*records, make("sgd", 0)])
    assert response.axes == {"c": ["0.75", "1.5"], "regime.lr": ["0.02", "0.1"]}
    data = sweep_data(response)
    assert [row["point"] for row in data["rows"]] == [[c, lr] for c in ("0.75", "1.5") for lr in ("0.02", "0.1")]
    assert all(row["seeds"] == 2 for row in data["rows"])
    assert data["rows"][0]["values"][1][0] == pytest.approx((0.80 + 0.78) / 2)
    assert responses([make("hat", 0), make("hat", 1)]) == [], "seeds are no option"


def test_the_data_is_json_and_no_name_ends_its_element() -> None:
    data = collect(many(3, 3, 3))
    assert json.loads(json.dumps(data)) == json.loads(json.dumps(data))
    text = island({"</script><!--": "<a> & \u2028"})
    assert not set(text) & set("<>&\u2028")
    assert json.loads(text) == {"</script><!--": "<a> & \u2028"}


def test_a_page_of_runs_that_go_on_needs_no_record() -> None:
    data = collect([], running=[{"name": "x", "status": "running", "task": 1, "tasks": 2, "left": 90.0}])
    text = render_page(data, live=True)
    assert "window.HATRACK_LIVE = true" in text
    news = json.loads(page_json(data))
    assert "task 1 of 2" in news["running_html"]
    assert "90 s left" in news["running_html"]
    assert "window.HATRACK_LIVE = true" not in render_page(data)
    other = collect([make()])
    assert collect([make()])["digest"] == other["digest"] != data["digest"]
    assert collect([replace(make(), accuracy=[[0.9, 0.2], [0.5, 0.81]])])["digest"] != other["digest"]


def test_runs_that_were_stopped_are_named(tmp_path: Path) -> None:
    save(tmp_path, [make()])
    (tmp_path / "another-run.part").mkdir()
    (tmp_path / f"{make().name}.part").mkdir()
    assert [state["name"] for state in unfinished(tmp_path)] == ["another-run"], "the other has its record"
    assert "another-run" in report(tmp_path).read_text(encoding="utf-8")


def test_a_page_without_bokeh_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "library", lambda: ())
    text = render_page(collect([make()]))
    assert len(text) < 200_000
    assert any("pip install bokeh" in note for note in Reader(text).texts("p", kind="note js-only"))
    monkeypatch.undo()
    assert "pip install bokeh" not in render_page(collect([make()]))


def test_the_setting_with_most_methods_comes_first():
    few, more = (
        [make("sgd", seed) for seed in (0, 1)],
        [make(method, 0, heads="shared") for method in ("sgd", "hat", "joint")],
    )
    assert [len(setting.records) for setting in settings([*few, *more])] == [2, 3]
    found = collect([*few, *more])["sections"]
    assert [len(section["chart"]["methods"]) for section in found] == [3, 1]
