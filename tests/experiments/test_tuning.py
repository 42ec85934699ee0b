"""Searches: values by hand on stub runs, no test number in the objective, kills at every place, and two processes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from hatrack.experiments import tuning
from hatrack.experiments.record import Record
from hatrack.experiments.run import folder_of
from hatrack.experiments.tuned import Tuned
from hatrack.experiments.tuning import tune
from hatrack.experiments.tuning_journal import Journal, propose
from hatrack.experiments.tuning_protocols import Search, objective, progress_value
from hatrack.experiments.tuning_space import Choices, Range, grid_size, to_parameters, to_values
from hatrack.methods.divergence import Diverged
from hatrack.regime import Regime
from tests.helpers.killing import Killed, killed_at
from tests.helpers.records import make
from tests.helpers.tiers import every_value

SPACE = {"strength": Range(1.0, 10000.0, log=True), "lr": Range(0.01, 0.1, log=True)}
SMALL = {
    "benchmark_options": {"data": "sample", "tasks": 5},
    "network_options": {"widths": (12,), "input_dropout": 0.0},
    "regime": {"epochs": 1, "batch": 100},
    "run": {"train_examples": 50},
}


FATAL = (2, 7, 12, 13, 24)  # numbers of calls at which a process is killed


def search(**changes) -> Search:
    return Search(**{"benchmark": "smnist", "method": "ewc", "space": SPACE, "tasks_used": 3, "given": SMALL, **changes})


class Stub:
    """Stands for `run`: three tasks with the validation accuracies that a function of the spec returns."""

    def __init__(self, matrix, test=0.5):
        self.matrix, self.test, self.specs = matrix, test, []

    def __call__(self, spec, out, *, after_task, progress=None, **how):
        self.specs.append(spec)
        rows = self.matrix(spec)
        record = make("sgd", 0, accuracy=[[self.test] * 3] * 3, names="abc")
        for count in range(1, 4):
            after_task([[x if k <= t else float("nan") for k, x in enumerate(row)] for t, row in enumerate(rows[:count])])
        return replace(record, valid_accuracy=[[x if k <= t else None for k, x in enumerate(r)] for t, r in enumerate(rows)])


def by_strength(spec):
    """The better, the nearer the strength is to 100."""
    good = min(spec.method_options["strength"], 100) / max(spec.method_options["strength"], 100)
    return [[0.9] * 3, [0.5 + good / 4] * 3, [0.3 + good / 2] * 3]


def trials_of(folder, one) -> list[tuple]:
    return [(t.number, t.state.name, t.value, t.params, t.intermediate_values) for t in Journal(folder, one).trials]


# Spaces


def test_points_of_ranges_and_choices():
    assert Range(1.0, 10000.0, log=True).points(5) == [1, 10, 100, 1000, 10000]
    assert Range(0.0, 1.0).points(3) == [0, 0.5, 1]
    assert Range(1, 3, whole=True).points(5) == [1, 2, 3], "each once"
    assert Choices((True, 0.5, (3, 4))).points(9) == ["true", "0.5", "3,4"]
    assert grid_size({"a": Range(1.0, 10.0), "b": Choices(("x", "y", "z"))}, 4) == 12


def test_values_have_few_digits_and_stay_in_their_range():
    space = {"a": Range(0.12344, 2.0), "b": Choices(("x", 3))}
    assert to_parameters(space, {"a": 1.23456789, "b": 3}) == {"a": 1.235, "b": "3"}
    assert Range(0.12344, 2.0).rounded(0.12344) == 0.12344, "0.1234 is below it"
    assert to_values(space, {"a": 1.235, "b": "3"}) == {"a": 1.235, "b": 3}


# Protocols


def test_the_objective_by_hand():
    first = [[0.9, None, None], [0.8, 0.6, None], [0.6, 0.5, 0.4]]
    second = [[0.9, None], [0.8, 0.6]]
    assert progress_value(first[:1]) == 0.9
    assert progress_value(first[:2]) == pytest.approx(0.7)
    assert objective([first]) == pytest.approx(0.5)
    assert objective([first, second]) == pytest.approx(0.6)


def test_runs_of_every_protocol():
    values = {"strength": 7.0, "lr": 0.02}
    (one,) = search(seeds=(4,)).runs(values)
    assert (one.benchmark, one.seed, one.first_tasks, one.regime) == ("smnist", 4, 3, Regime(epochs=1, batch=100, lr=0.02))
    assert one.method_options["strength"] == 7
    (one,) = search(protocol="one-seed", tasks_used=0).runs(values)
    assert (one.benchmark, one.first_tasks) == ("smnist", 0)
    given = {**SMALL, "benchmark_options": {"data": "sample"}}
    (one,) = search(protocol="transfer", on="digits-and-clothes", tasks_used=0, given=given).runs(values)
    assert (one.benchmark, one.first_tasks) == ("digits-and-clothes", 0)
    several = search(protocol="whole-stream", seeds=(0, 3), tasks_used=0).runs(values)
    assert [(run.seed, run.first_tasks) for run in several] == [(0, 0), (3, 0)]


def test_the_first_tasks_alone_are_trained(tmp_path):
    tuned = tune(search(), tmp_path, 1)
    (path,) = (tmp_path / "smnist-ewc-first-tasks" / "records").glob("*.json")
    record = Record.load(path)
    assert [task.name for task in record.tasks] == ["digits 0-1", "digits 2-3", "digits 4-5"]
    assert tuned.value == record.valid_average
    assert record.valid_average != record.summary["accuracy"], "what it is not chosen by"


@pytest.mark.parametrize("protocol", ["first-tasks", "whole-stream"])
def test_no_number_of_the_test_data_decides(protocol, tmp_path, monkeypatch):
    """With other results on test data, every byte of the outcome and of the trials is the same."""
    one = search(protocol=protocol, seeds=(0, 1) if protocol == "whole-stream" else (0,))
    outcomes = []
    for test in (0.1, 0.99):
        monkeypatch.setattr(tuning, "run", Stub(by_strength, test))
        tune(one, tmp_path / str(test), 8)
        outcomes.append((tmp_path / str(test) / f"{one.name}.json").read_bytes())
    assert outcomes[0] == outcomes[1]


def test_whole_stream_is_the_mean_over_its_seeds(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "run", Stub(lambda spec: [[0.9] * 3, [0.8] * 3, [0.2 + 0.1 * spec.seed] * 3]))
    tuned = tune(search(protocol="whole-stream", seeds=(1, 4)), tmp_path, 2)
    assert tuned.value == pytest.approx((0.3 + 0.6) / 2)


def test_no_validation_data(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "run", Stub(lambda spec: [[float("nan")] * 3] * 3))
    with pytest.raises(ValueError, match="task 1 of smnist has no validation data"):
        tune(search(), tmp_path, 2)


# Samplers and pruning


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_the_first_trial_has_the_defaults_and_the_best_is_found(sampler, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "run", stub := Stub(by_strength))
    tuned = tune(search(sampler=sampler), tmp_path, 12)
    assert stub.specs[0].method_options["strength"] == 200
    assert stub.specs[0].regime.lr == 0.05
    values = [trial["value"] for trial in tuned.trials]
    assert values[0] == pytest.approx(0.3 + 0.5 / 2)
    assert tuned.value == max(values)
    assert tuned.method_options["strength"] == tuned.trials[values.index(max(values))]["options"]["strength"]
    assert (tuned.budget, len(tuned.trials), len(set(values))) == (12, 12, 12)


def test_defaults_outside_the_space_are_not_tried(tmp_path):
    one = search(space={"strength": Range(1.0, 10.0)})
    assert one.defaults is None
    assert 1 <= propose(one, []).params["strength"] <= 10


def test_a_grid_has_each_point_once_and_then_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "run", Stub(by_strength))
    space = {"strength": Range(1.0, 10000.0, log=True), "anchors": Choices(("all", "online"))}
    tuned = tune(search(space=space, sampler="grid", points=3), tmp_path, 50)
    tried = sorted((t["options"]["anchors"], t["options"]["strength"]) for t in tuned.trials)
    assert tried == [(anchors, strength) for anchors in ("all", "online") for strength in (1, 100, 10000)]
    assert tuned.method_options["strength"] == 100


def test_trials_below_the_median_are_ended(tmp_path, monkeypatch):
    """After the second task five trials have 0.1, 0.2, ..., 0.5, so that the sixth needs more than 0.3."""
    seen = []

    def falling(spec):
        seen.append(spec)
        after_two = [0.1, 0.2, 0.3, 0.4, 0.5, 0.29, 0.31][len(seen) - 1]
        return [[0.9] * 3, [after_two] * 3, [0.05] * 3]

    monkeypatch.setattr(tuning, "run", Stub(falling))
    tuned = tune(search(pruner="median"), tmp_path, 7)
    assert [trial["state"] for trial in tuned.trials] == ["complete"] * 5 + ["pruned", "complete"]
    assert tuned.trials[5]["value"] == pytest.approx(0.29)
    assert tuned.value == pytest.approx(0.05), "an ended trial is never chosen"


def test_diverged_trials_count_and_are_not_chosen(tmp_path, monkeypatch):
    stub = Stub(by_strength)

    def run(spec, out, **how):
        if len(stub.specs) % 2:
            stub.specs.append(spec)
            raise Diverged("too large")
        return stub(spec, out, **how)

    monkeypatch.setattr(tuning, "run", run)
    tuned = tune(search(), tmp_path, 4)
    assert [trial["state"] for trial in tuned.trials] == ["complete", "diverged"] * 2
    assert tuned.trials[1]["value"] == 0
    monkeypatch.setattr(tuning, "run", lambda *_, **__: (_ for _ in ()).throw(Diverged("too large")))
    with pytest.raises(Diverged, match="all 3 trials of ewc"):
        tune(search(), tmp_path / "all", 3)


# Stopping and going on


def test_another_search_in_the_same_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "run", Stub(by_strength))
    tune(search(), tmp_path, 2)
    for changed, place in (({"seeds": (1,)}, "seeds"), ({"space": {"lr": Range(0.01, 0.1)}}, "space")):
        with pytest.raises(ValueError, match=f"holds another search: its {place} is"):
            tune(search(**changed), tmp_path, 2)


def test_more_trials_continue_a_search(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "run", stub := Stub(by_strength))
    tune(search(), tmp_path / "two", 4)
    assert len(tune(search(), tmp_path / "two", 9).trials) == 9
    assert len(stub.specs) == 9
    tune(search(), tmp_path / "one", 9)
    assert trials_of(tmp_path / "one" / search().name, search()) == trials_of(tmp_path / "two" / search().name, search())
    assert len(tune(search(), tmp_path / "two", 4).trials) == 4, "the first four alone"


@pytest.mark.parametrize(
    ("late", "place"), every_value([False, True], ["report", "below_median", "finish", "_lock_of", "next_trial"])
)
def test_kills_between_any_two_writes_change_nothing(place, late, tmp_path, monkeypatch):
    """Some calls of a method of the journal are the last of their process, before or after they did their work."""
    one = search(pruner="median")
    monkeypatch.setattr(tuning, "run", Stub(by_strength))
    tune(one, tmp_path / "whole", 8)
    whole = getattr(Journal, place)
    calls = []

    def deadly(self, *args, **options):
        calls.append(place)
        if not late and len(calls) in FATAL:
            raise Killed
        result = whole(self, *args, **options)
        if late and len(calls) in FATAL:
            if place == "_lock_of" and result is not None:
                result.release()  # as the system does
            raise Killed
        return result

    monkeypatch.setattr(Journal, place, deadly)
    for kills in range(len(FATAL) + 1):  # noqa: B007
        try:
            tune(one, tmp_path / "killed", 8)
            break
        except Killed:
            continue
    assert kills > 1
    monkeypatch.setattr(Journal, place, whole)
    assert trials_of(tmp_path / "whole" / one.name, one) == trials_of(tmp_path / "killed" / one.name, one)
    names = (tmp_path / folder / f"{one.name}.json" for folder in ("whole", "killed"))
    assert len({path.read_bytes() for path in names}) == 1


def test_a_trial_that_was_to_be_ended_is_ended_when_it_is_taken_up(tmp_path, monkeypatch):
    """Killed between its report and the pruner: its run, which would go on with the next task, does not."""
    after_two = iter([0.1, 0.2, 0.3, 0.4, 0.5, 0.29])
    monkeypatch.setattr(tuning, "run", Stub(lambda spec: [[0.9] * 3, [next(after_two)] * 3, [0.05] * 3]))
    report = Journal.report

    def deadly(self, number, step, value):
        report(self, number, step, value)
        if (number, step) == (5, 2):
            raise Killed

    monkeypatch.setattr(Journal, "report", deadly)
    with pytest.raises(Killed):
        tune(search(pruner="median"), tmp_path, 6)
    monkeypatch.setattr(tuning, "run", lambda *_, **__: pytest.fail("it was run"))
    assert tune(search(pruner="median"), tmp_path, 6).trials[5]["state"] == "pruned"


@pytest.mark.slow
def test_a_search_killed_twice_within_runs_ends_with_the_same_trials(tmp_path, monkeypatch):
    """Real runs, killed in a step; the run that was interrupted goes on from its state."""
    one = search(given={**SMALL, "regime": {"epochs": 1, "batch": 200}})
    whole = tune(one, tmp_path / "whole", 3, save_every=0.0)
    kills = killed_at(monkeypatch, 0.15, seed=3, most=2)
    left = []
    while True:
        try:
            killed = tune(one, tmp_path / "killed", 3, save_every=0.0)
            break
        except Killed:
            left.append(len(list((tmp_path / "killed" / one.name / "records").glob("*.part"))))
    assert len(kills) == 2
    assert left == [1, 1], "a run was under way each time"
    assert killed == whole
    assert trials_of(tmp_path / "whole" / one.name, one) == trials_of(tmp_path / "killed" / one.name, one)
    one_folder, two_folder = (tmp_path / name / one.name / "records" for name in ("whole", "killed"))
    assert [p.name for p in sorted(one_folder.iterdir())] == [p.name for p in sorted(two_folder.iterdir())]


def test_a_journal_that_was_half_written(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "run", Stub(by_strength))
    whole = tune(search(), tmp_path, 5)
    journal = tmp_path / search().name / "journal.log"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])
    assert tune(search(), tmp_path, 5) == whole
    assert all(json.loads(line) for line in journal.read_bytes().splitlines())


def test_an_ended_trial_leaves_no_states(tmp_path, monkeypatch):
    monkeypatch.setattr(Journal, "below_median", lambda self, number: bool(self.trials[number].intermediate_values))
    tune_all = search(pruner="median")
    tuned = tune(tune_all, tmp_path, 1)
    assert tuned.trials[0]["state"] == "pruned"
    assert list((tmp_path / tune_all.name / "records").iterdir()) == []


def command(out, *more: str) -> list[str]:
    words = ["tune", "smnist", "ewc", "--data", "sample", "--tasks", "5", "--widths", "12", "--epochs", "4", "--batch", "50"]
    return [sys.executable, "-m", "hatrack", *words, "--device", "cpu", "--out", str(out), "--save-every", "0.001", *more]


def start(out, *more: str, stdout: int = subprocess.DEVNULL) -> subprocess.Popen:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command(out, *more), stdout=stdout, stderr=subprocess.STDOUT, text=True, env=env)


@pytest.mark.slow
def test_two_processes_share_one_search(tmp_path):
    both = [start(tmp_path, "--trials", "10", stdout=subprocess.PIPE) for _ in range(2)]
    said = [process.communicate(timeout=300)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    numbers = [sorted(map(int, re.findall(r"trial (\d+) of 10:", text))) for text in said]
    assert sorted(numbers[0] + numbers[1]) == list(range(1, 11)), "each trial once"
    assert all(numbers), "both had some"
    tuned = Tuned.load(tmp_path / "smnist-ewc-first-tasks.json")
    assert [trial["number"] for trial in tuned.trials] == list(range(10))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGINT])
def test_a_process_that_is_killed_twice(kind, tmp_path):
    whole = start(tmp_path / "whole", "--trials", "4")
    assert whole.wait(300) == 0
    for trials in (1, 2):
        process = start(tmp_path / "killed", "--trials", "4")
        until = time.monotonic() + 120
        records = tmp_path / "killed" / "smnist-ewc-first-tasks" / "records"
        while len(list(records.glob("*.json"))) < trials or not list(records.glob("*.part/fit-*")):
            assert time.monotonic() < until
            time.sleep(0.01)
        process.send_signal(kind)
        process.wait(60)
        assert process.returncode == (130 if kind == signal.SIGINT else -signal.SIGKILL)
    assert start(tmp_path / "killed", "--trials", "4").wait(300) == 0
    names = (tmp_path / folder / "smnist-ewc-first-tasks.json" for folder in ("whole", "killed"))
    assert len({path.read_bytes() for path in names}) == 1


def test_equal_options_in_two_trials_run_once(tmp_path):
    """A run that has its record is not run again; its trial has the same value."""
    one = search(space={"anchors": Choices(("all", "online"))}, sampler="random")
    tuned = tune(one, tmp_path, 4)
    values = {trial["options"]["anchors"]: trial["value"] for trial in tuned.trials}
    assert [trial["value"] for trial in tuned.trials] == [values[trial["options"]["anchors"]] for trial in tuned.trials]
    specs = [one.runs({"anchors": name})[0] for name in values]
    records = tmp_path / one.name / "records"
    assert sorted(path.stem for path in records.iterdir()) == sorted(spec.name for spec in specs)
    assert all(folder_of(spec, records).done for spec in specs)
