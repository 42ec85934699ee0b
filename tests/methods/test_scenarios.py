"""Every method in the scenarios domain and class: where it is defined, what it answers, and its loss by plain loops."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hatrack
from hatrack import METHODS, Method, Network, Regime, Run, Task, Trainer, evaluate, in_scenario
from hatrack.methods.evaluate import without_task_id
from hatrack.methods.parts.fisher import fisher_diagonal
from hatrack.networks.mlp import mlp
from hatrack.seeds import seeded
from hatrack.tasks.split import Batch
from tests.helpers.learning import OPTIMIZERS, UNTRAINED, every_method, learn, logits, make
from tests.helpers.tiers import every_value
from tests.helpers.toys import toy_tasks

CLASS = [name for name in METHODS if "class" in METHODS.about(name).scenarios]
DOMAIN = [name for name in METHODS if "domain" in METHODS.about(name).scenarios]
in_class = pytest.mark.parametrize("name", CLASS)
in_domain = pytest.mark.parametrize("name", DOMAIN)


def class_tasks(count: int = 3) -> list[Task]:
    return in_scenario(toy_tasks(count), "class")


def small_net(tasks: list[Task], heads: str = "class") -> Network:
    with seeded(0, "weights"):
        trunk = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.ReLU())
    return Network(trunk, [t.classes for t in tasks], tasks[0].train.inputs(torch.arange(2)), heads=heads)


def batch_of(task: Task, count: int) -> Batch:
    return task.train.take(torch.arange(count), torch.tensor(0), torch.tensor(1), count)


def answer(net: Network, image: Tensor, classes: int) -> list[float]:
    """The first logits of one image, number by number in float64; nothing of the network is called."""
    layer = net.trunk[1]
    weight = torch.cat([head.weight for head in net.heads]).double().tolist()
    bias = torch.cat([head.bias for head in net.heads]).double().tolist()
    pixels = image.flatten().double().tolist()
    hidden = [
        max(0.0, sum(w * v for w, v in zip(row, pixels, strict=True)) + b)
        for row, b in zip(layer.weight.double().tolist(), layer.bias.double().tolist(), strict=True)
    ]
    return [sum(w * h for w, h in zip(weight[c], hidden, strict=True)) + bias[c] for c in range(classes)]


def cross_entropy(scores: list[float], label: int) -> float:
    return math.log(sum(math.exp(s) for s in scores)) - scores[label]


# Where a method is defined


@every_method
def test_the_table_says_where_a_method_is_defined(name):
    assert METHODS[name].scenarios == METHODS.about(name).scenarios
    assert set(METHODS[name].scenarios) <= {"task", "domain", "class"}
    assert "task" in METHODS[name].scenarios


@every_method
@pytest.mark.parametrize("scenario", ["domain", "class"])
def test_a_run_is_refused_where_the_method_is_not_defined(name, scenario):
    if scenario in METHODS[name].scenarios:
        assert Run("smnist", name, scenario=scenario).heads == "shared"
        return
    with pytest.raises(ValueError, match=f"{name} is not defined in the scenario '{scenario}'.*--scenario task") as error:
        Run("smnist", name, scenario=scenario)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", [name for name in METHODS if name not in CLASS])
def test_a_method_is_refused_on_a_network_of_all_classes(name):
    with pytest.raises(ValueError, match="not defined in the scenario 'class'"):
        make(name, class_tasks(), heads="class")


def test_gates_are_for_the_scenario_task():
    alone = {"hat", "pmask", "packnet", "pnn", "pathnet", "den", "independent", "frozen", "lora"}
    assert {name for name in METHODS if METHODS[name].scenarios == ("task",)} == alone


# What every method must do with one head of all classes


@in_class
def test_logits_are_those_of_all_classes_seen(name):
    tasks = class_tasks()
    method = make(name, tasks, heads="class")
    widths = []
    for task in tasks:
        learn(method, [task])
        widths.append([logits(method, other).shape[1] for other in tasks])
    assert widths == [[3, 6, 9], [6, 6, 9], [9, 9, 9]], "an unseen task is asked among the classes up to its own"


@in_class
def test_the_task_does_not_decide_the_answer(name):
    tasks = class_tasks()
    method = make(name, tasks, heads="class")
    learn(method, tasks)
    method.eval()
    x = tasks[0].test.inputs(torch.arange(10))
    raw = tasks[0].test.raw(torch.arange(10))
    with torch.no_grad():
        answers = [method(x, k) for k in (*range(3), torch.arange(10) % 3)]
    assert all(torch.equal(answers[0], other) for other in answers)
    assert torch.equal(method.predict(raw), answers[0].argmax(1))
    assert torch.equal(method.predict(raw, 1), answers[0].argmax(1))
    model = method.for_task(0)
    torch.testing.assert_close(model(x), answers[0])


@pytest.mark.parametrize(("optimizer", "name"), every_value(OPTIMIZERS, CLASS))
def test_every_step_obeys_the_rule(name, optimizer):
    tasks = class_tasks()
    fit = Trainer(Regime(epochs=2, batch=16, **OPTIMIZERS[optimizer]), watch=True)
    learn(make(name, tasks, heads="class"), tasks, fit)
    assert bool(fit.fits) == (name not in UNTRAINED)


@pytest.mark.parametrize(("optimizer", "name"), every_value(["sgd", "kept adamw with decay"], CLASS))
def test_classes_may_come_later(name, optimizer):
    tasks = class_tasks()
    method, twin = make(name, tasks, known=1, heads="class"), make(name, tasks, heads="class")
    fits = [Trainer(Regime(epochs=3, batch=16, **OPTIMIZERS[optimizer])) for _ in range(2)]
    for task in tasks:
        if task.index:
            method.net.add_task(task.classes)
        method.learn(task, fits[0])
        twin.learn(task, fits[1])
    for task in tasks:
        assert torch.equal(logits(method, task), logits(twin, task))


@in_class
def test_the_state_is_all_there_is(name):
    tasks = class_tasks()
    method, twin = make(name, tasks, heads="class"), make(name, tasks, seed=1, heads="class")
    learn(method, tasks[:2])
    twin.net.seed = method.net.seed
    twin.load_state_dict(copy.deepcopy(method.state_dict()))
    assert logits(twin, tasks[0]).shape[1] == 6
    for task in tasks:
        assert torch.equal(logits(method, task), logits(twin, task))


@in_class
def test_a_saved_method_answers_and_learns_as_before(name, tmp_path):
    tasks = class_tasks()
    method = make(name, tasks, known=1, heads="class")
    learn(method, tasks[:1])
    method.net.add_task(3)
    learn(method, tasks[1:2])
    hatrack.save(method, tmp_path / "model.safetensors")
    with seeded(9, "weights"):
        trunk = mlp(tasks[0].shape, widths=(24, 24), dropout=0.2, input_dropout=0.1)
    twin = hatrack.load(tmp_path / "model.safetensors", trunk)
    assert twin.net.incremental
    if name == "joint":
        twin.restore_data(tasks[0])
        twin.restore_data(tasks[1])
        twin.initial = method.initial
    for one in (method, twin):
        assert one.net.add_task(3) == 2
        learn(one, tasks[2:])
    assert logits(twin, tasks[0]).shape[1] == 9
    for task in tasks:
        assert torch.equal(logits(method, task), logits(twin, task))


@in_class
def test_a_task_that_fails_leaves_the_classes_seen(name):
    tasks = class_tasks()
    method = make(name, tasks, heads="class")
    learn(method, tasks[:1])

    class Broken(Trainer):
        def __call__(self, *args, **options):
            raise ZeroDivisionError

    if name not in UNTRAINED:
        with pytest.raises(ZeroDivisionError):
            method.learn(tasks[1], Broken())
        assert logits(method, tasks[0]).shape[1] == 3


@in_domain
def test_every_method_of_domain_needs_no_task(name):
    tasks = in_scenario(toy_tasks(3), "domain")
    method = make(name, tasks, heads="shared")
    learn(method, tasks)
    raw = tasks[1].test.raw(torch.arange(20))
    assert torch.equal(method.predict(raw), method.predict(raw, 0)) or name == "random"


def test_predict_says_when_it_needs_the_task():
    tasks = toy_tasks(2)
    raw = tasks[0].test.raw(torch.arange(2))
    method = make("sgd", tasks)
    with pytest.raises(ValueError, match="no task has been learned"):
        method.predict(raw)
    learn(method, tasks)
    with pytest.raises(ValueError, match="the router was not fitted on task 0"):
        method.predict(raw)
    gated = make("hat", tasks, heads="shared")
    learn(gated, tasks)
    with pytest.raises(ValueError, match="the router was not fitted on task 0"):  # one head, but gates of each task
        gated.predict(raw)
    shared = make("sgd", tasks, heads="shared")
    learn(shared, tasks)
    assert len(shared.predict(raw)) == 2
    shared.net.preprocessing.mean[1] += 1
    with pytest.raises(ValueError, match="transform images in different ways"):
        shared.predict(raw)


# The head


def test_initial_rows_depend_on_the_seed_and_the_task_only():
    tasks = class_tasks()
    few, all_known = make("sgd", tasks, known=1, heads="class").net, make("sgd", tasks, heads="class").net
    multi = make("sgd", tasks).net
    few.add_task(3)
    for k, head in enumerate(few.heads):
        assert torch.equal(head.weight, all_known.heads[k].weight)
        assert torch.equal(head.weight, multi.heads[k].weight)
    assert not torch.equal(few.heads[0].weight, few.heads[1].weight)
    assert repr(few).count("heads='class'") == 1


def test_training_is_that_of_one_linear_layer():
    """A plain loop over the same batches, with one layer of all classes whose first outputs are used."""
    tasks, seen = class_tasks(2), []

    class Witness(Method):
        def loss(self, batch):
            seen.append((batch.task, batch.x.clone(), batch.y.clone()))
            return super().loss(batch)

    net = small_net(tasks)
    trunk, layer = copy.deepcopy(net.trunk), nn.Linear(12, 6)
    layer.load_state_dict({name: torch.cat([head.get_parameter(name) for head in net.heads]) for name in ("weight", "bias")})
    learn(Witness(net), tasks, Trainer(Regime(epochs=4, batch=16, lr=0.05, clip=0.0, restore=False, schedule="constant")))
    optimizer = torch.optim.SGD([*trunk.parameters(), *layer.parameters()], lr=0.05)
    for task, x, y in seen:
        optimizer.zero_grad()
        F.cross_entropy(layer(trunk(x))[:, : 3 * (task + 1)], y).backward()
        optimizer.step()
    torch.testing.assert_close(torch.cat([head.weight for head in net.heads]), layer.weight)
    torch.testing.assert_close(net.trunk[1].weight, trunk[1].weight)
    assert {task for task, *_ in seen} == {0, 1}
    assert max(int(y.max()) for _, _, y in seen) == 5


def test_old_tasks_are_tested_among_all_classes():
    tasks = class_tasks(2)
    method = Method(small_net(tasks))
    learn(method, tasks)
    split = tasks[0].test
    right = 0
    for i in range(len(split)):
        scores = answer(method.net, split.inputs(torch.tensor([i]))[0], 6)
        right += scores.index(max(scores)) == int(split.y[i])
    assert evaluate(method, split).accuracy == pytest.approx(right / len(split))
    assert without_task_id(method, split, [0, 1]) == evaluate(method, split).accuracy


# The losses


def test_plain_training_by_hand():
    tasks = class_tasks()
    method = Method(small_net(tasks))
    method.history = {0: "toy 0"}
    batch = batch_of(tasks[1], 5)
    wanted = [cross_entropy(answer(method.net, x, 6), int(y)) for x, y in zip(batch.x, batch.y, strict=True)]
    assert method.loss(batch).item() == pytest.approx(sum(wanted) / 5, rel=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_lwf_distills_the_old_classes_by_hand(temperature):
    tasks = class_tasks()
    method = METHODS["lwf"](small_net(tasks), strength=3.0, temperature=temperature)
    learn(method, tasks[:2])
    old, found = copy.deepcopy(method.net), []

    def check(fitted, task, **changes):
        with torch.no_grad():
            for p in fitted.net.parameters():
                p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
        batch = batch_of(task, 4)
        wanted = 0.0
        for x, y in zip(batch.x, batch.y, strict=True):
            new, then = answer(fitted.net, x, 9), answer(old, x, 6)
            powers = [math.exp(s / temperature) for s in then]
            rest = [cross_entropy([s / temperature for s in new], c) * p / sum(powers) for c, p in enumerate(powers)]
            wanted += cross_entropy(new, int(y)) + 3.0 * sum(rest)
        found.append((fitted.loss(batch).item(), wanted / 4))

    check.regime = Regime()
    method.learn(tasks[2], check)
    assert found[0][0] == pytest.approx(found[0][1], rel=1e-4)


def test_lwf_counts_a_shared_head_once_or_per_task():
    tasks, terms = toy_tasks(3), {}
    for term in ("once", "per-task"):
        method = METHODS["lwf"](small_net(tasks, "shared"), strength=1.0, term=term)
        learn(method, tasks[:2])

        def check(fitted, task, **changes):
            batch = batch_of(task, 6)
            plain = F.cross_entropy(fitted(batch.x, 2), batch.y)
            terms[term] = (fitted.loss(batch) - plain).item()  # noqa: B023

        check.regime = Regime()
        method.learn(tasks[2], check)
    assert terms["per-task"] == pytest.approx(2 * terms["once"], rel=1e-4)
    assert terms["once"] > 0


def test_the_fisher_covers_all_classes_seen():
    """The Fisher with expected labels, example after example: van de Ven's, over the classes up to the task."""
    tasks = class_tasks()
    method = METHODS["ewc"](small_net(tasks), estimator="expected")
    learn(method, tasks[:1])
    method.history[1] = "toy 1"
    part = tasks[1].train.part(torch.arange(4))
    weights = method.net.shared_parameters()
    found = fisher_diagonal(method, part, 1, weights, estimator="expected")
    wanted = torch.zeros_like(found)
    for i in range(4):
        scores = method(part.inputs(torch.tensor([i])), 1)
        assert scores.shape == (1, 6)
        probabilities = scores.softmax(1)[0].tolist()
        for label, probability in enumerate(probabilities):
            one = F.cross_entropy(method(part.inputs(torch.tensor([i])), 1), torch.tensor([label]))
            gradients = torch.autograd.grad(one, weights, allow_unused=True, materialize_grads=True)
            wanted += probability * torch.cat([g.reshape(-1) for g in gradients]).square() / 4
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-7)
    assert found[-39:].eq(0).all(), "the rows of the third task, 3 x 12 weights and 3 biases, are not used yet"
    assert found[-78:-39].gt(0).any()


@pytest.mark.parametrize(("name", "sizes"), [("ewc", 2), ("si", 5), ("mas", 2), ("imm-mode", 2), ("imm-mean", 1)])
def test_penalties_act_on_the_head_of_all_classes(name, sizes):
    tasks = class_tasks()
    method = METHODS[name](small_net(tasks))
    count = 16 * 12 + 12 + 9 * 13
    assert [b.shape for b in method._buffers.values() if b.dim()] == [(count,)] * sizes


def test_imm_mean_keeps_rows_that_no_earlier_task_trained():
    tasks = class_tasks(2)
    method = METHODS["imm-mean"](small_net(tasks))
    learn(method, tasks[:1])
    before, fitted = copy.deepcopy(method.net), []

    def check(trained, task, **changes):
        with torch.no_grad():
            for p in trained.net.parameters():
                p.add_(1.0)
        fitted.append(copy.deepcopy(trained.net))

    check.regime = Regime()
    method.learn(tasks[1], check)
    torch.testing.assert_close(method.net.heads[1].weight, fitted[0].heads[1].weight)
    torch.testing.assert_close(method.net.heads[0].weight, before.heads[0].weight + 0.5)
    torch.testing.assert_close(method.net.trunk[1].weight, before.trunk[1].weight + 0.5)


def test_er_by_hand():
    tasks = class_tasks()
    method = METHODS["er"](small_net(tasks), memory=10, replay=6)
    learn(method, tasks[:2], Trainer(Regime(epochs=1, batch=16)))
    method.current_task = 2
    batch = batch_of(tasks[2], 4)
    torch.manual_seed(5)
    drawn = method.memory.sample(6)
    pairs = [*zip(batch.x, batch.y, strict=True), *zip(drawn.x, drawn.y, strict=True)]
    wanted = [cross_entropy(answer(method.net, x, 9), int(y)) for x, y in pairs]
    torch.manual_seed(5)
    assert method.loss(batch).item() == pytest.approx(sum(wanted) / 10, rel=1e-5)
    assert set(method.memory.y[method.memory.used].tolist()) <= set(range(6))
    assert method.memory.y.max() > 2


def test_derpp_compares_the_classes_seen_when_an_example_was_stored():
    tasks = class_tasks()
    method = METHODS["derpp"](small_net(tasks), memory=30, replay=5, alpha=0.7, beta=0.2)
    learn(method, tasks[:2], Trainer(Regime(epochs=1, batch=16)))
    method.current_task = 2
    batch = batch_of(tasks[2], 4)
    torch.manual_seed(5)
    dark, labelled = method.memory.sample(5), method.memory.sample(5)
    assert len(set(dark.task.tolist())) == 2
    drift = 0.0
    for x, task, kept in zip(dark.x, dark.task.tolist(), dark.more["logits"].tolist(), strict=True):
        width = 3 * (task + 1)
        drift += sum((a - b) ** 2 for a, b in zip(answer(method.net, x, width), kept[:width], strict=True)) / width
        assert kept[width:] == [0.0] * (9 - width)
    wanted = sum(cross_entropy(answer(method.net, x, 9), int(y)) for x, y in zip(batch.x, batch.y, strict=True)) / 4
    wanted += 0.7 * drift / 5
    again = [cross_entropy(answer(method.net, x, 9), int(y)) for x, y in zip(labelled.x, labelled.y, strict=True)]
    wanted += 0.2 * sum(again) / 5
    torch.manual_seed(5)
    assert method.loss(batch)[0].item() == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("name", ["agem", "er"])
def test_a_ring_has_so_many_images_of_every_class(name):
    tasks = class_tasks()
    options = {"per_class": 2} if name == "agem" else {"per_class": 2, "kind": "ring"}
    method = METHODS[name](small_net(tasks), **options)
    learn(method, tasks)
    assert len(method.memory.y) == 1 + 9 * 2
    assert sorted(method.memory.y[method.memory.used].tolist()) == sorted([*range(9)] * 2)
    for y, task in zip(method.memory.y[1:].tolist(), method.memory.task[1:].tolist(), strict=True):
        assert y // 3 == task


def test_joint_trains_all_classes():
    tasks = class_tasks()
    method = METHODS["joint"](small_net(tasks))
    learn(method, tasks, Trainer(Regime(epochs=30, batch=16, lr=0.2)))
    assert min(evaluate(method, task.test).accuracy for task in tasks) > 0.7
    plain = Method(small_net(tasks))
    learn(plain, tasks, Trainer(Regime(epochs=30, batch=16, lr=0.2)))
    assert evaluate(plain, tasks[0].test).accuracy < 0.1, "without a memory all answers are classes of the last task"


def test_random_guesses_among_the_classes_seen():
    tasks = class_tasks()
    method = METHODS["random"](small_net(tasks))
    learn(method, tasks[:2])
    guesses = method(torch.zeros(600, 1, 4, 4), 0).argmax(1)
    counts = guesses.bincount(minlength=6)
    assert len(counts) == 6
    assert counts.min() > 60
