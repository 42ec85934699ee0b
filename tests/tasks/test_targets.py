"""Targets: losses, scores and answers against values worked out by hand or in float64, and what is refused."""

import math
import re

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from hatrack import EWC, HAT, PMASK, SI, Joint, Method, Network, PackNet, Record, Regime, Task, Trainer, evaluate, load, save
from hatrack.__main__ import main
from hatrack.methods.evaluate import Evaluations
from hatrack.tasks.targets import CLASSES, KINDS, MultiLabel, Ordinal, Own, Regression, Target, target_from_dict
from hatrack.text import SCORES
from hatrack.training.progress import describe_epoch

RNG = np.random.default_rng(0)
X = RNG.normal(size=(600, 6)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64) + (X[:, 1] > 0)  # 0, 1, 2: a quarter, a half, a quarter
NUMBER = (3 * X[:, 0] - X[:, 1] + 40).astype(np.float32)
NUMBERS = np.stack([NUMBER, 1e6 * X[:, 2]], 1)
LABELS = (X[:, :4] > 0).astype(np.int64)
LOSS = {"loss": lambda out, y: F.smooth_l1_loss(out[:, 0], y / 40), "classes": 1}


def task(index=0, y=Y, **options):
    return Task.from_arrays(index, f"task {index}", X[:500], y[:500], X[500:], y[500:], **options)


def trunk(width=60):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU())


# Values


def test_weighted_and_smoothed_classes():
    outputs, y = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0])
    logs = torch.log_softmax(outputs.double(), 1)
    assert CLASSES.loss(outputs, y).item() == pytest.approx(-(logs[0, 0] + logs[1, 0]).item() / 2)
    smoothed = -(0.9 * logs[:, 0] + 0.05 * logs.sum(1)).mean().item()
    assert CLASSES.smoothed(0.1).loss(outputs, y).item() == pytest.approx(smoothed)
    assert CLASSES.smoothed(0.1).total_loss(outputs, y).item() == pytest.approx(-logs[:, 0].sum().item()), "only in training"
    weighted = Target(weights=torch.tensor([0.5, 1.5]))
    mixed = torch.tensor([0, 1])
    by_hand = -(0.5 * logs[0, 0] + 1.5 * logs[1, 1]).item()
    assert weighted.total_loss(outputs, mixed).item() == pytest.approx(by_hand)
    assert weighted.loss(outputs, mixed).item() == pytest.approx(by_hand / 2)
    assert weighted.total_score(outputs, mixed) == 2


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_batch_whose_classes_count_nothing_has_no_loss(smoothing):
    outputs = torch.tensor([[2.0, 0.0], [0.0, 1.0]], requires_grad=True)
    target = Target(weights=torch.tensor([1.0, 0.0])).smoothed(smoothing)
    loss = target.loss(outputs, torch.tensor([1, 1]))
    loss.backward()
    assert loss.item() == 0
    assert outputs.grad.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    plain = F.cross_entropy(outputs, torch.tensor([0, 1]), weight=target.weights, label_smoothing=smoothing)
    assert target.loss(outputs, torch.tensor([0, 1])).item() == pytest.approx(plain.item())


def test_a_task_with_a_class_that_counts_nothing_is_learned():
    y = (np.arange(600) > 20).astype(int)  # batches of the second class alone
    one = task(y=y[RNG.permutation(600)], class_weights=[1.0, 0.0])
    result = Method(Network(trunk(), tasks=[one])).learn(one, Trainer(Regime(epochs=1, batch=4), watch=True))
    assert math.isfinite(result.fits[0].epochs[0].loss)


@pytest.mark.parametrize("kind", [Method, HAT])
def test_parts_of_a_batch_have_the_gradient_of_the_whole(kind):
    """Also if classes have weights: a part is divided by the weights of the batch, not by its own."""
    after = []
    for parts in (1, 4):
        one = task(class_weights=[1.0, 5.0, 40.0], valid=0)
        method = kind(Network(trunk(), tasks=[one]))
        method.learn(one, Trainer(Regime(epochs=1, batch=50, lr=0.05, accumulate=parts)))
        after.append(method.net.trunk[0].weight.detach())
    assert torch.allclose(*after, atol=1e-6, rtol=1e-4)


def test_the_loss_of_weighted_classes_is_that_of_torch():
    one = task(class_weights=[1.0, 5.0, 40.0])
    method = Method(Network(trunk(), tasks=[one]))
    with torch.no_grad():
        outputs = method.eval()(one.test.inputs(torch.arange(len(one.test))), 0)
    expected = F.cross_entropy(outputs, one.test.y, weight=one.target.weights).item()
    assert evaluate(method, one.test).loss == pytest.approx(expected, rel=1e-6)
    assert Evaluations(method, [one.test])()[0] == evaluate(method, one.test)


def test_balanced_weights_count_every_class_the_same():
    y = np.array([0] * 60 + [1] * 15 + [2] * 5 + [0, 1, 2] * 10)
    target = Task.from_arrays(0, "rare", X[:80], y[:80], X[80:110], y[80:], class_weights="balanced", valid=0).target
    shares = [(target.weights[k] * (y[:80] == k).sum()).item() for k in range(3)]
    assert shares == pytest.approx([80 / 3] * 3)
    given = Task.from_arrays(0, "rare", X[:80], y[:80], X[80:110], y[80:], class_weights=[1, 2, 4], valid=0).target
    assert given.weights[y[:80]].mean().item() == pytest.approx(1)
    assert (given.weights / given.weights[0]).tolist() == pytest.approx([1, 2, 4])


def test_several_labels():
    outputs, y = torch.tensor([[3.0, -1.0], [-2.0, 0.5]]), torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    losses = [math.log1p(math.exp(-v)) for v in (3.0, 1.0, -2.0, 0.5)]
    target = MultiLabel()
    assert target.loss(outputs, y).item() == pytest.approx(sum(losses) / 4)
    assert target.total_loss(outputs, y).item() == pytest.approx(sum(losses) / 2)
    assert target.total_score(outputs, y).item() == 1.5
    assert target.answer(outputs).tolist() == [[True, False], [False, True]]


@pytest.mark.parametrize("y", [NUMBER, NUMBERS, NUMBERS.astype(np.float64), NUMBER.astype(int)])
def test_numbers_are_learned_in_units_of_their_spread(y):
    made = task(y=y, target="regression", valid=0)
    rows = torch.as_tensor(y)[made.train.rows].double().reshape(500, -1)
    target = made.target
    assert target.mean.double() == pytest.approx(rows.mean(0), rel=1e-6)
    assert target.std.double() == pytest.approx(rows.std(0, correction=0), rel=1e-6)
    perfect = ((rows - rows.mean(0)) / rows.std(0, correction=0)).float()
    assert target.total_score(perfect, made.train.y).item() / 500 == pytest.approx(1, abs=1e-5)
    assert target.total_score(torch.zeros_like(perfect), made.train.y).item() / 500 == pytest.approx(0, abs=1e-5), "the mean"
    answer = target.answer(perfect)
    assert answer.shape == y[:500].shape
    assert answer.double() == pytest.approx(torch.as_tensor(y)[made.train.rows].double(), rel=1e-4, abs=1)


@pytest.mark.parametrize("kind", ["float64", "int64"])
def test_times_in_seconds_are_learned_as_well_as_without_the_offset(kind, tmp_path):
    """float32 keeps multiples of 128 of such numbers; the spread here is 95."""
    small = np.round(30 * NUMBER).astype(kind)
    scores, answers = [], []
    for y in (small, small + 1_700_000_000):
        one = task(y=y, target="regression")
        method = HAT(Network(trunk(), tasks=[one]))
        method.learn(one, Trainer(Regime(epochs=6, batch=16, lr=0.1)))
        scores.append(evaluate(method, one.test).accuracy)
        answers.append(method.predict(X, task=0))
    assert scores[0] > 0.5
    assert scores[1] == pytest.approx(scores[0], abs=1e-3)
    assert answers[1].dtype == torch.float64
    assert (answers[1] - 1_700_000_000).numpy() == pytest.approx(answers[0].numpy(), abs=1)
    save(method, tmp_path / "m.safetensors")
    assert torch.equal(load(tmp_path / "m.safetensors", trunk()).predict(X, task=0), answers[1])


@pytest.mark.parametrize("y", [NUMBER, NUMBERS, NUMBERS.astype(np.float64), NUMBER.astype(int), np.full(600, 0.1)])
def test_ordinary_numbers_stay_float32(y):
    rows = torch.as_tensor(y[:500]).float().reshape(500, -1)
    made = task(y=y, target="regression", valid=0)
    assert made.train.y.dtype == made.target.mean.dtype == torch.float32
    assert torch.equal(made.train.y[made.train.rows.argsort()], rows)
    assert torch.equal(made.target.mean, rows.double().mean(0).float())


@pytest.mark.parametrize("scale", [1e-60, 1e60])
def test_numbers_beyond_float32(scale):
    made = task(y=X[:, 0].astype(np.float64) * scale, target="regression", valid=0)
    perfect = torch.as_tensor((X[:500, 0] - X[:500, 0].mean()) / X[:500, 0].std())[made.train.rows][:, None]
    assert made.target.total_score(perfect, made.train.y).item() / 500 == pytest.approx(1, abs=1e-5)


def test_a_constant_number_does_not_divide_by_zero():
    made = task(y=np.full(600, 7.5, np.float32), target="regression")
    assert (made.target.mean.tolist(), made.target.std.tolist()) == ([7.5], [1.0])


def test_grades():
    outputs, y = torch.tensor([[2.0, -1.0], [1.0, 1.0], [-1.0, -3.0]]), torch.tensor([1, 2, 1])
    target = Ordinal()
    assert target.answer(outputs).tolist() == [1, 2, 0]
    assert target.total_score(outputs, y) == 2
    above = [[1, 0], [1, 1], [1, 0]]
    losses = [math.log1p(math.exp(-v if up else v)) for row, ups in zip(outputs.tolist(), above, strict=True)
              for v, up in zip(row, ups, strict=True)]  # fmt: skip
    assert target.loss(outputs, y).item() == pytest.approx(sum(losses) / 6)
    assert target.total_loss(outputs, y).item() == pytest.approx(sum(losses) / 2)
    assert task(target="ordinal").classes == 2, "one output less than grades"


@pytest.mark.parametrize("each", [True, False])
def test_a_loss_and_a_score_of_ones_own(each):
    def compare(out, y):
        errors = (out[:, 0] - y).abs()
        return errors if each else errors.mean()

    target = Own(own_loss=compare, own_score=lambda out, y: -compare(out, y))
    outputs, y = torch.tensor([[1.0], [4.0]]), torch.tensor([0.0, 1.0])
    found = target.loss(outputs, y), target.total_loss(outputs, y), target.total_score(outputs, y)
    assert [value.item() for value in found] == [2.0, 4.0, -4.0]
    assert Own(own_loss=compare).total_score(outputs, y).item() == -4.0


@pytest.mark.parametrize(
    "found", [lambda out, y: (out - y) ** 2, lambda out, y: out - y[:, None], lambda out, y: [1.0], lambda out, y: None]
)
@pytest.mark.parametrize("what", ["loss", "score"])
def test_a_function_of_ones_own_returns_a_number_or_one_per_example(what, found):
    outputs, y = torch.zeros(3, 1), torch.arange(3.0)
    target = Own(own_loss=found if what == "loss" else lambda out, y: out.mean(), own_score=found)
    with pytest.raises(ValueError, match=rf"own {what} .*\(3,\)") as error:
        target.loss(outputs, y) if what == "loss" else target.total_score(outputs, y)
    assert "\n" not in str(error.value)


def test_a_score_may_be_a_number_of_python_but_a_loss_may_not():
    outputs, y = torch.zeros(4, 1), torch.arange(4.0)
    for number in (0.5, np.float32(0.5)):
        target = Own(own_loss=lambda out, y, number=number: number, own_score=lambda out, y, number=number: number)
        assert target.total_score(outputs, y).item() == 2.0
        with pytest.raises(ValueError, match="must return a tensor"):
            target.loss(outputs, y)


def test_targets_that_are_no_numbers_need_a_loss_that_leaves_them_out():
    y = np.where(X[:, 0] > 1, np.nan, NUMBER).astype(np.float32)
    wrong = [lambda out, y: (out[:, 0] - y) ** 2, lambda out, y: ((out[:, 0] - y) ** 2).mean()]
    wrong.append(lambda out, y: torch.nanmean((out[:, 0] - y) ** 2))  # a number, but its gradient is none
    for each in wrong:
        with pytest.raises(ValueError, match=rf"NaN or infinite targets in {np.isnan(y[:500]).sum()} examples"):
            task(y=y, loss=each, classes=1)
    kept = task(y=y, loss=lambda out, y: F.mse_loss(out[:, 0][~y.isnan()], y[~y.isnan()] / 40), classes=1)
    assert kept.train.y.isnan().any()
    result = Method(Network(trunk(), tasks=[kept])).learn(kept, Trainer(Regime(epochs=2, lr=0.01)))
    assert math.isfinite(result.fits[0].epochs[-1].loss)


@pytest.mark.parametrize(
    "made",
    [
        *(Target(weights=torch.tensor([0.5, 1.5])), MultiLabel(), Ordinal(), Own()),
        Regression(mean=torch.tensor([0.1, 3.3]), std=torch.tensor([2.0, 1e-3]), flat=False),
        Regression(mean=torch.tensor([1.7e9]).double(), std=torch.tensor([64.0]).double(), flat=True),
    ],
)
def test_a_description_gives_the_same_target(made):
    again = target_from_dict(made.to_dict())
    assert type(again) is type(made)
    for name, value in vars(made).items():
        assert torch.equal(value, getattr(again, name)) if isinstance(value, torch.Tensor) else value == getattr(again, name)


@pytest.mark.parametrize("data", [{}, {"kind": "other"}, {"kind": "regression"}, {"kind": "classes", "weights": "x"},
                                  {"kind": "regression", "mean": [math.nan], "std": [1.0], "flat": False}])  # fmt: skip
def test_a_wrong_description_is_refused(data):
    with pytest.raises(ValueError, match="a target must be one of"):
        target_from_dict(data)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"target": "regresion"}, "regression"),
        ({"y": NUMBER}, "whole numbers"),
        ({"y": np.where(X[:, 0] > 0, np.nan, 1), "target": "regression"}, "NaN"),
        ({"y": LABELS + 1, "target": "multi-label"}, "0 or 1"),
        ({"y": Y, "target": "multi-label"}, "labels"),
        ({"y": LABELS}, "one label per image"),
        ({"y": np.zeros(600, int), "target": "ordinal"}, "two values"),
        ({"y": NUMBER, "target": "regression", "class_weights": [1]}, "class_weights"),
        ({"class_weights": [1, 2]}, "3 numbers"),
        ({"class_weights": [1, 2, -1]}, "3 numbers"),
        ({"class_weights": "equal"}, "balanced"),
        ({"loss": F.mse_loss}, "classes=N"),
        ({"loss": "mse", "classes": 1}, "function"),
        ({"score": F.mse_loss}, "a loss of your own"),
        ({"y": NUMBERS, "target": "regression", "classes": 3}, "2 numbers"),
    ],
)
def test_what_does_not_fit_is_refused(options, said):
    with pytest.raises(ValueError, match=said) as error:
        task(**options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "validation accuracy (100|[0-9]+).[0-9]%"),
        ({"y": LABELS, "target": "multi-label"}, "validation label accuracy [0-9]+.[0-9]%"),
        ({"y": NUMBER, "target": "regression"}, "validation R² -?[0-9.e-]+ "),
        ({"y": NUMBER, **LOSS}, "validation score -[0-9.e-]+ "),
    ],
)
def test_a_result_names_its_score(options, said):
    one, seen = task(**options), []
    trainer = Trainer(Regime(epochs=1, lr=1e-4), progress=seen.append)
    result = Method(Network(trunk(), tasks=[one])).learn(one, trainer)
    assert re.search(said, str(result))
    assert re.search(said.rstrip(), repr(result.fits[0]))
    name = (result.score or "accuracy") + " "
    assert name in describe_epoch(seen[0])
    assert name == f"{one.target.score} "


def test_scores_have_the_names_that_records_know():
    assert {kind.score for kind in KINDS.values()} == {*SCORES}


# Learning


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in (PMASK, PackNet, SI)]


@pytest.mark.parametrize("kind", [HAT, Method, *SLOW])
def test_tasks_of_five_kinds_in_one_network(kind, tmp_path):
    """Each is learned; what HAT, PMASK and PackNet guarantee holds for all kinds; a file keeps what answers mean."""
    kinds = [{}, {"y": LABELS, "target": "multi-label"}, {"y": NUMBER, "target": "regression"},
             {"target": "ordinal"}, {"y": NUMBER, **LOSS}]  # fmt: skip
    tasks = [task(k, **options) for k, options in enumerate(kinds)]
    method = kind(Network(trunk(), tasks=tasks))
    fit, after, scores = Trainer(Regime(epochs=6, batch=16, lr=0.1)), [], []
    for one in tasks:
        method.learn(one, fit)
        after.append(method.predict(X, task=one.index))
        scores.append(evaluate(method, one.test))
    least = [0.55, 0.6, 0.4, 0.4, -0.05]  # guessing has 0.5, 0.5, 0, about 0.3, -0.5
    assert all(score.accuracy > low for score, low in zip(scores, least, strict=True)), scores
    assert [str(a.dtype) for a in after] == ["torch.int64", "torch.bool", "torch.float32", "torch.int64", "torch.float32"]
    assert [tuple(a.shape) for a in after] == [(600,), (600, 4), (600,), (600,), (600, 1)]
    if kind is not SI and kind is not Method:
        assert all(torch.equal(method.predict(X, task=k), a) for k, a in enumerate(after))
    save(method, tmp_path / "m.safetensors")
    loaded = load(tmp_path / "m.safetensors", trunk())
    assert all(torch.equal(loaded.predict(X, task=k), method.predict(X, task=k)) for k in range(5))
    number = loaded.net.add_task(3)
    loaded.learn(task(number, **kinds[0]), fit)
    if kind is not SI and kind is not Method:
        assert all(torch.equal(loaded.predict(X, task=k), a) for k, a in enumerate(after))
    with pytest.raises(ValueError, match="a call per task"):
        loaded.predict(X[:2], task=torch.tensor([0, 2]))


def test_a_task_that_failed_leaves_the_meaning_of_answers():
    method = HAT(Network(trunk(), tasks=[task(y=NUMBER, target="regression")]))
    method.learn(task(y=NUMBER, target="regression"), Trainer(Regime(epochs=1)))
    before = method.predict(X, task=0)

    def fail(*_, **__):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        method.learn(task(y=NUMBER * 9, target="regression"), fail)
    assert torch.equal(method.predict(X, task=0), before)
    method.release(0)
    assert method.net.targets == {}


@pytest.mark.parametrize(
    ("outputs", "how"),
    [
        (1, {"y": NUMBER, "target": "regression"}),
        (4, {"y": LABELS, "target": "multi-label"}),
        (2, {"target": "ordinal"}),
        (3, {"class_weights": "balanced"}),
        (1, {"y": NUMBER, **LOSS}),
    ],
)
def test_a_head_has_as_many_outputs_as_the_target(outputs, how):
    """A wider one would be compared with the labels by a broadcast, and the saved file could not be loaded."""
    method = HAT(Network(trunk(), [5], X[:2]))
    with pytest.raises(ValueError, match=rf"has {outputs} outputs, but its head 5: net.add_task\({outputs}\)"):
        method.learn(task(**how), Trainer(Regime(epochs=1)))
    method.learn(task(method.net.add_task(outputs), **how), Trainer(Regime(epochs=1)))
    assert method.predict(X[:7], 1).shape[:1] == (7,)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (EWC, {"y": NUMBER, "target": "regression"}),
        (Joint, {"y": LABELS, "target": "multi-label"}),
        (Joint, {"class_weights": "balanced"}),
    ],
)
def test_methods_that_need_classes_say_so(kind, options):
    one = task(**options)
    with pytest.raises(ValueError, match=kind.__name__):
        kind(Network(trunk(), tasks=[one])).learn(one, Trainer(Regime(epochs=1)))


def test_what_the_regime_can_not_do_for_a_later_task_is_refused_before_the_first(tmp_path, capsys):
    for name, y in {"classes": Y, "number": NUMBER}.items():
        np.savez(tmp_path / f"{name}.npz", x_train=X[:500], y_train=y[:500], x_test=X[500:], y_test=y[500:])
    lines = [
        '[[task]]\nname = "c"\ndata = "classes.npz"',
        '[[task]]\nname = "r"\ndata = "number.npz"\ntarget = "regression"',
    ]
    (tmp_path / "tasks.toml").write_text("\n".join(lines))
    words = [
        "--tasks",
        str(tmp_path / "tasks.toml"),
        "--widths",
        "8",
        "--epochs",
        "1",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "runs"),
    ]
    for method, more, said in (
        ("sgd", ["--smoothing", "0.1"], "task 'r': smoothing"),
        ("ewc", [], "EWC learns tasks with classes"),
    ):
        assert main(["run", "own", method, *words, *more]) == 2
        assert said in capsys.readouterr().err
    assert not list(tmp_path.glob("runs/*")), "nothing was trained"


def test_one_head_of_all_tasks_needs_plain_classes():
    one = task(y=NUMBER, target="regression")
    with pytest.raises(ValueError, match="a head of its own"):
        Method(Network(trunk(), tasks=[one], heads="shared")).learn(one, Trainer(Regime(epochs=1)))


def test_a_file_of_tasks_of_several_kinds(tmp_path, capsys):
    """A run of them has a record that names the scores, and so does the page."""
    for name, y in {"number": NUMBER, "labels": LABELS}.items():
        np.savez(tmp_path / f"{name}.npz", x_train=X[:500], y_train=y[:500], x_test=X[500:], y_test=y[500:])
    lines = ['[[task]]\nname = "many"\ndata = "labels.npz"\ntarget = "multi-label"']
    lines += ['[[task]]\nname = "one"\ndata = "number.npz"\ntarget = "regression"']
    (tmp_path / "tasks.toml").write_text("\n".join(lines))
    words = [
        "run",
        "own",
        "hat",
        "--tasks",
        str(tmp_path / "tasks.toml"),
        "--widths",
        "40",
        "--dropout",
        "0",
        "--batch",
        "50",
    ]
    words += ["--epochs", "8", "--lr", "0.1", "--device", "cpu", "--out", str(tmp_path / "runs")]
    assert main(words) == 0
    (path,) = (tmp_path / "runs").glob("*.json")
    record = Record.load(path)
    assert [(task.score, task.classes) for task in record.tasks] == [("label accuracy", 4), ("R²", 1)]
    assert record.accuracy[1][0] == record.accuracy[0][0], "HAT keeps it"
    assert record.before[1] < record.accuracy[1][1] <= 1
    assert record.without_task_id == [None, None]
    assert record.score == "score"
    assert "score=" in repr(record)
    said = capsys.readouterr().out
    assert re.search(r"n +score +learning +forgetting", said), "the terminal's table"
    assert "%" not in said.split("forgetting")[0]
    assert main(["show", str(path)]) == 0
    assert "label accuracy in % or R²" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "runs")]) == 0
    page = (tmp_path / "runs" / "report.html").read_text()
    assert "R² of &#39;one&#39;" in page
    assert ">Average score<" in page
    assert "Average accuracy" not in page
    capsys.readouterr()
    (tmp_path / "tasks.toml").write_text(lines[0].replace("multi-label", "many"))
    assert main(words) == 2
    assert "multi-label" in capsys.readouterr().err
