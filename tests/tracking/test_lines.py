"""The lines of a run: kills, fits that begin again, torn and hostile lines; a curve has neither gaps nor doubles."""

import json
import random

import pytest

from hatrack.experiments.metrics import forgetting as forgetting_of_matrix
from hatrack.tracking.lines import RunLines, parse, to_text
from hatrack.tracking.progress import seconds_left, share_done, status_text
from hatrack.tracking.reader import LinesReader
from hatrack.tracking.tracker import average, forgetting, scalars


def run_line(tasks=3, **more):
    about = {"kind": "run", "id": "ab", "tasks": [f"t{k}" for k in range(tasks)], "spec": {"method": "hat", "seed": 4}}
    return about | {"host": "h", "pid": 1, "time": 0.0} | more


def epoch(task=0, number=0, fit=0, halved=0, epochs=10, **values):
    place = {"kind": "epoch", "task": task, "fit": fit, "halved": halved, "epoch": number, "epochs": epochs}
    return place | {"lr": 0.1, "loss": 1.0, "valid_loss": 1.0, "valid_accuracy": 0.5, "seconds": 1.0, "time": 5.0} | values


def places(lines):
    return [(line["task"], line["fit"], line["epoch"]) for line in lines.curve()]


def whole_run(draw):
    """The lines of a run without any kill: some tasks, each with some fits, each with some epochs, then its results."""
    found = []
    for task in range(draw.randint(1, 4)):
        for fit in range(draw.randint(1, 3)):
            found += [epoch(task, number, fit) for number in range(draw.randint(1, 5))]
        found += [{"kind": "task", "task": task, "usage": {"a": 0.5}}, {"kind": "scores", "task": task, "accuracy": [1.0]}]
    return found


@pytest.mark.parametrize("seed", range(30))
def test_a_run_that_is_killed_often_has_the_lines_of_one_that_is_not(seed):
    """After every kill the run goes on from an earlier place; lines are torn, and what is no line lies between them."""
    draw = random.Random(seed)
    whole, text, done = whole_run(draw), b"", 0
    while done < len(whole):
        text += to_text(run_line()).encode() + b"\n"
        last = draw.randint(done, len(whole))
        for line in whole[done:last]:
            text += to_text(line).encode() + b"\n"
        if last < len(whole):
            text += to_text(whole[last]).encode()[: draw.randint(0, 30)] + draw.choice([b"", b"\x00\xff"]) + b"\n"
        done = last if last == len(whole) else draw.randint(0, last)
    lines = RunLines(line for part in text.split(b"\n") if (line := parse(part)))
    plain = RunLines(dict(line) for line in whole)
    assert [to_text(line) for line in lines.curve()] == [to_text(line) for line in whole if line["kind"] == "epoch"]
    assert [line["step"] for line in lines.curve()] == list(range(1, len(places(plain)) + 1))
    assert lines.tasks.keys() == lines.scores.keys() == plain.tasks.keys()
    assert [to_text(line) for line in lines.all() if line["kind"] != "run"] == [to_text(line) for line in whole]


def test_without_the_rule_there_are_doubles():
    """The control: a kill does write lines twice."""
    twice = [epoch(0, 0), epoch(0, 1), epoch(0, 2), run_line(), epoch(0, 1), epoch(0, 2)]
    assert [line["epoch"] for line in twice if line["kind"] == "epoch"] == [0, 1, 2, 1, 2]
    assert places(RunLines(twice)) == [(0, 0, 0), (0, 0, 1), (0, 0, 2)]


def test_a_fit_that_begins_again_replaces_its_lines_and_counts_on():
    lines = RunLines([epoch(0, 0), *(epoch(1, k) for k in range(4)), *(epoch(1, k, halved=1, loss=2.0) for k in range(2))])
    assert places(lines) == [(0, 0, 0), (1, 0, 0), (1, 0, 1)]
    assert [line["loss"] for line in lines.curve()] == [1.0, 2.0, 2.0]
    assert [line["step"] for line in lines.curve()] == [1, 2, 3]
    assert [line["number"] for line in lines.curve()] == [1, 6, 7]  # with the four epochs that were given up
    lines.add(epoch(2, 0))
    assert (lines.last["step"], lines.last["number"]) == (4, 8)
    lines.add(epoch(1, 2))  # killed before the state with half the rate was saved: the first attempt again
    assert places(lines)[-3:] == [(1, 0, 0), (1, 0, 1), (1, 0, 2)]
    assert lines.last["loss"] == 1.0


HOSTILE = [
    b"", b"{", b"null", b"[]", b"7", b'"x"', b"{}", b'{"kind":"epoch"}', b'{"kind":"run"}', b'{"kind":"run","tasks":[1]}',
    b'{"kind":"run","tasks":[],"layers":{"a":1}}', b'{"kind":"end"}', b'{"kind":"scores","task":"0"}',
    b"\xff\xfe", b"[" * 9000,
    b'{"kind":"scores","task":0,"accuracy":[NaN]}', b'{"kind":"scores","task":0,"accuracy":"x"}',
    b'{"kind":"task","task":0,"usage":{"a":"<b>"}}', b'{"kind":"task","task":-5}', b'{"kind":"other","task":0}',
    json.dumps({**epoch(), "loss": "x"}).encode(), json.dumps({**epoch(), "epoch": -1}).encode(),
    json.dumps({**epoch(), "task": True}).encode(), json.dumps({**epoch(), "fit": 1.0}).encode(),
    json.dumps({**epoch(), "loss": float("nan")}).encode(), b'{"kind":"end","why":"' + b"x" * 2**20 + b'"}',
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_what_is_no_line_is_passed_over(text):
    assert parse(text) is None


def test_numbers_that_are_not_finite_are_null():
    text = to_text(epoch(0, 0, loss=float("nan"), watched=[float("inf"), 0.5]))
    assert "NaN" not in text
    found = parse(text.encode())
    assert (found["loss"], found["watched"]) == (None, [None, 0.5])


# Reading


def append(path, *lines):
    with path.open("ab") as file:
        file.write(b"".join(to_text(line).encode() + b"\n" for line in lines))


def test_a_reader_takes_only_what_is_new(tmp_path, monkeypatch):
    path, reader = tmp_path / "lines", LinesReader(tmp_path / "lines")
    assert not reader.update()
    append(path, run_line(), epoch(0, 0))
    assert reader.update()
    assert not reader.update()
    text = to_text(epoch(0, 1)).encode()
    with path.open("ab") as file:
        file.write(text[:20])
    assert not reader.update()  # half a line
    with path.open("ab") as file:
        file.write(text[20:] + b"\n")
    read = []
    monkeypatch.setattr("hatrack.tracking.reader.parse", lambda text: read.append(text) or parse(text))
    assert reader.update()
    assert read == [text]
    assert places(reader.lines) == [(0, 0, 0), (0, 0, 1)]


@pytest.mark.parametrize("longer", [False, True])
def test_a_run_that_begins_anew_is_noticed(tmp_path, longer):
    path, reader = tmp_path / "lines", LinesReader(tmp_path / "lines")
    append(path, run_line(), epoch(0, 0), epoch(0, 1))
    reader.update()
    path.unlink()
    append(path, run_line(id="cd"), *(epoch(0, k, loss=3.0) for k in range(5 if longer else 1)))
    assert reader.update()
    assert reader.lines.about["id"] == "cd"
    assert {line["loss"] for line in reader.lines.curve()} == {3.0}


# What is read off them


def test_progress_counts_a_task_as_long_as_those_before():
    lines = RunLines([run_line(tasks=4)])
    assert share_done(lines) == 0
    lines.add(epoch(0, 0, epochs=10, seconds=2.0))
    assert share_done(lines) == pytest.approx(1 / 10 / 4)  # one line of ten epochs of four tasks
    for number in range(5):
        lines.add(epoch(0, number, epochs=10))
    lines.add({"kind": "task", "task": 0, "usage": {}})
    assert share_done(lines) == 1 / 4
    lines.add(epoch(1, 0, epochs=10, seconds=60.0))  # the first took 5 epochs
    assert share_done(lines) == pytest.approx((1 + 1 / 5) / 4)
    assert seconds_left(lines) == pytest.approx(60 * (4 - 1.2) / 1.2)


def test_the_pretraining_counts_nothing():
    lines = RunLines([run_line(tasks=2), epoch(-1, 0, seconds=100.0)])
    assert (share_done(lines), seconds_left(lines)) == (0, None)
    lines.add(epoch(0, 0, epochs=5, seconds=110.0))
    assert seconds_left(lines) == pytest.approx(10 * (2 - 1 / 5) / (1 / 5))


def test_the_status_begins_with_accuracy_and_forgetting():
    lines = RunLines([run_line(tasks=3), epoch(0, 0), {"kind": "task", "task": 0, "usage": {}}])
    assert status_text(RunLines([run_line()])) == "hat seed 4: starting"
    assert status_text(lines) == "hat seed 4: measuring"
    lines.add({"kind": "scores", "task": 0, "accuracy": [0.9, 0.1, 0.1]})
    lines.add(epoch(1, 0))
    lines.add({"kind": "scores", "task": 1, "accuracy": [0.8, 0.7, 0.1]})
    lines.add(epoch(2, 3, epochs=10, loss=0.25, valid_accuracy=0.625))
    assert status_text(lines) == "hat seed 4: 75.0%, forgot 10.0%; task 3/3, epoch 4/10, accuracy 62.5%, loss 0.25, t2"


def test_average_and_forgetting_are_those_of_records():
    draw = random.Random(1)
    rows = [[draw.random() for _ in range(5)] for _ in range(5)]
    lines = {task: {"kind": "scores", "task": task, "accuracy": rows[task]} for task in range(5)}
    for task in range(5):
        matrix = [row[: task + 1] for row in rows[: task + 1]]
        assert forgetting(lines[task], lines) == pytest.approx(forgetting_of_matrix(matrix))
        assert average(lines[task]) == pytest.approx(sum(rows[task][: task + 1]) / (task + 1))
    assert forgetting(lines[4], {4: lines[4]}) is None  # rows before are not known


def test_scalars_have_the_names_of_tasks_and_layers():
    lines = RunLines([run_line(tasks=2, layers={"2": "linear 1, 50 units"})])
    usage = {"2": 0.5, "trunk.2.weight": 0.25, "x (held whole: y)": 1.0}
    task = {"kind": "task", "task": 0, "usage": usage}
    assert scalars(task, lines) == {"capacity/linear 1, 50 units": 0.25}
    lines.about["tasks"] = ["same", "same"]
    scores = {"kind": "scores", "task": 1, "accuracy": [0.5, 0.25]}
    found = scalars(scores, lines)
    assert (found["test/same"], found["test/same (2)"], found["score/average"]) == (0.5, 0.25, 0.375)
    assert scalars(epoch(0, 0, valid_accuracy=None), lines).keys() == {"lr", "loss/training", "loss/validation", "task"}
