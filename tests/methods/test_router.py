"""The router: its scores against loops in float64, what it finds, that it changes no weight, and that files hold it."""

import copy
import math
import threading

import numpy as np
import pytest
import torch
from torch import nn

import hatrack
from hatrack import HAT, METHODS, Method, Network, load, save
from hatrack.files import tensors
from hatrack.methods import router, router_scores
from hatrack.methods.parts.used_tensors import used_of_network
from hatrack.methods.router import KINDS, answers, features_and_logits
from hatrack.methods.router_scores import SHRINK, calibration, certainty, energy, fit_gaussians, relative_distance
from tests.helpers.learning import ISOLATED, learn, make
from tests.helpers.models import fresh
from tests.helpers.toys import toy_tasks

pytestmark = pytest.mark.filterwarnings("ignore:task .* finds under:UserWarning")  # networks so small are soon full
isolated = pytest.mark.parametrize("name", ISOLATED)


def with_router(name="hat", count=3, **options):
    """A method that has learned toy tasks and has a router for all of them, and the tasks."""
    tasks = toy_tasks(count)
    method = make(name, tasks, **options)
    learn(method, tasks)
    for task in tasks:
        method.fit_router(task)
    return method, tasks


def raw(task):
    return task.test.raw(torch.arange(len(task.test)))


# Scores


def clouds(images=300, features=6, classes=3):
    draw = np.random.RandomState(0)
    labels = draw.randint(classes, size=images)
    mixing = draw.normal(size=(features, features))
    values = 3 * draw.normal(size=(classes, features))[labels] + draw.normal(size=(images, features)) @ mixing
    return values, labels


def plain_distances(train, labels, values, directions):
    """Squared distances to the nearest class and to the single Gaussian, image by image, from covariances built in loops."""
    centre = train.mean(0)
    means = [train[labels == c].mean(0) for c in sorted(set(labels))]
    within, total = np.zeros((2, train.shape[1], train.shape[1]))
    for x, y in zip(train, labels, strict=True):
        within += np.outer(x - means[y], x - means[y]) / len(train)
        total += np.outer(x - centre, x - centre) / len(train)
    variances, axes = np.linalg.eigh(total)
    varied = int((variances > 1e-6 * variances.max()).sum())
    kept, rest = axes[:, ::-1][:, :directions], axes[:, ::-1][:, directions:]
    inverses = []
    for covariance in (within, total):
        mean = np.trace(covariance) / varied
        shrunk = (1 - SHRINK) * kept.T @ covariance @ kept + SHRINK * mean * np.eye(directions)
        left = (np.trace(covariance) - np.trace(kept.T @ covariance @ kept)) / max(1, varied - directions)
        variance = (1 - SHRINK) * left + SHRINK * mean
        inverses.append(kept @ np.linalg.inv(shrunk) @ kept.T + rest @ rest.T / variance)
    inside = [centre + kept @ kept.T @ (m - centre) for m in means]  # classes differ within the kept directions only
    near = [min((x - m) @ inverses[0] @ (x - m) for m in inside) for x in values]
    return np.array(near), np.array([(x - centre) @ inverses[1] @ (x - centre) for x in values])


@pytest.mark.parametrize("directions", [6, 3])
def test_the_relative_distance_is_that_of_a_loop(directions, monkeypatch):
    """With all directions, and with one variance in the directions that are left out."""
    monkeypatch.setattr(router_scores, "MOST", directions)
    train, labels = clouds()
    values = np.random.RandomState(1).normal(size=(40, 6)) * 5
    model = fit_gaussians(torch.tensor(train), torch.tensor(labels))
    near, single = plain_distances(train, labels, values, directions)
    np.testing.assert_allclose(relative_distance(torch.tensor(values), model).numpy(), single - near, rtol=2e-3, atol=2e-2)


def test_features_that_never_vary_and_classes_that_are_points_give_finite_scores():
    labels = torch.tensor([0, 1, 4, 4])
    points = torch.tensor([[1.0, 0], [0, 0], [3, 0], [3, 0]])  # no variance within classes, one feature always 0
    for features in (points, torch.zeros(4, 2)):
        model = fit_gaussians(features, labels)
        assert model.means.shape[0] == 3, "a class without images has no mean"
        assert torch.isfinite(relative_distance(torch.randn(5, 2), model)).all()


def test_energy_and_certainty_by_hand():
    logits = torch.tensor([[0.0, math.log(3.0)], [5.0, 5.0]])
    assert energy(logits).tolist() == pytest.approx([math.log(4), 5 + math.log(2)])
    assert certainty(logits).tolist() == pytest.approx([0.25 * math.log(0.25) + 0.75 * math.log(0.75), -math.log(2)])


def test_a_calibration_by_hand():
    """Of 0, 1, ..., 100 the median is 50 and the 5 % quantile 5; of equal scores the scale is not 0."""
    assert calibration(torch.arange(101.0)).tolist() == [50, 45]
    offset, scale = calibration(torch.full((9,), 2.0)).tolist()
    assert offset == 2
    assert scale > 0
    assert router_scores.calibrated(torch.tensor([5.0, 50.0, 95.0]), torch.tensor([50.0, 45.0])).tolist() == [-1, 0, 1]


def test_both_is_the_distance_and_the_energy_where_it_is_low():
    method, tasks = with_router()
    features, logits = features_and_logits(method.eval(), tasks[1].test.inputs(torch.arange(30)), 0)
    one = {kind: method.router.score(0, features, logits, kind) for kind in KINDS}
    assert torch.equal(one["both"], one["distance"] + one["energy"].clamp(max=0))


# What it finds


@isolated
def test_it_sees_what_the_head_of_the_task_reads(name):
    method, tasks = with_router(name)
    x = tasks[2].test.inputs(torch.arange(5))
    for task in range(3):
        features, logits = features_and_logits(method.eval(), x, task)
        heads = getattr(method, "heads", None) or method.net.heads
        assert torch.equal(logits, method(x, task))
        assert torch.allclose((heads if len(heads) > 1 else method.net.heads)[task](features), logits, atol=1e-6)
    assert not any(head._forward_pre_hooks for head in method.net.heads)


@isolated
def test_it_finds_the_tasks_of_images(name):
    """Three clouds per task: the tasks are far apart, and most images find their own."""
    method, tasks = with_router(name)
    for kind in ("both", "distance"):
        found = [(method.route(raw(task), kind=kind) == task.index).float().mean().item() for task in tasks]
        assert sum(found) / 3 > 0.6, (kind, found)


def test_a_prediction_without_a_task_is_that_of_the_task_that_was_found():
    method, tasks = with_router()
    images = torch.cat([raw(task) for task in tasks])
    task = method.route(images)
    assert len(task.unique()) == 3
    assert torch.equal(method.predict(images), method.predict(images, task))
    assert torch.equal(answers(method, images, "distance").label, method.predict(images))
    assert torch.equal(method.predict(images.numpy()), method.predict(images))
    assert method.route(images[:0]).shape == (0,)


def test_it_does_not_depend_on_the_other_images_of_the_batch(monkeypatch):
    method, tasks = with_router()
    images = torch.cat([raw(task) for task in tasks])
    whole = method.route(images)
    monkeypatch.setattr(router, "BATCH", 7)
    assert torch.equal(method.route(images), whole)


def test_every_task_is_asked_with_its_own_preprocessing(monkeypatch):
    method, tasks = with_router()
    method.net.preprocessing.mean[1] += 3  # as if task 1 had been learned from other images
    seen = []
    plain = features_and_logits
    monkeypatch.setattr(router, "features_and_logits", lambda m, x, task: seen.append((task, x)) or plain(m, x, task))
    images = raw(tasks[0])
    method.route(images)
    assert [task for task, _ in seen] == [0, 1, 2]
    assert all(torch.equal(x, method.net.preprocess(images, task)) for task, x in seen)


def test_tasks_that_take_images_of_another_size_are_not_asked():
    method, tasks = with_router()
    method.net.preprocessing.raw[1] = 99
    assert 1 not in method.route(raw(tasks[1]))
    method.net.preprocessing.raw[:] = 99
    with pytest.raises(ValueError, match=r"16 values.* 99"):
        method.route(raw(tasks[1]))


def test_a_shared_head_and_a_trunk_of_ones_own():
    tasks = toy_tasks(2)

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(16, 40), nn.Linear(40, 20)

        def forward(self, x):
            return torch.tanh(self.two(torch.relu(self.one(x.flatten(1)))))

    for heads in ("multi", "shared"):
        method = HAT(Network(Own(), tasks=tasks, heads=heads))
        learn(method, tasks)
        for task in tasks:
            method.fit_router(task)
        assert method.predict(raw(tasks[0])).shape == (30,)


def test_no_validation_data():
    tasks = toy_tasks(2, valid=0.0)
    method = make("hat", tasks)
    learn(method, tasks)
    for task in tasks:
        method.fit_router(task)
    assert method.route(raw(tasks[0])).shape == (30,)


# What it must not do


@isolated
def test_it_changes_no_weight_and_no_answer(name):
    tasks = toy_tasks(3)
    method = make(name, tasks)
    learn(method, tasks[:2])
    method.train()
    before, own = tensors.digest(method.state_dict()), {task: method.used_by(task) for task in (0, 1)}
    own = {task: tensors.digest(used) for task, used in own.items()}
    random = torch.random.get_rng_state()
    for task in tasks[:2]:
        method.fit_router(task)
    method.predict(raw(tasks[0]))
    assert method.training
    assert torch.equal(torch.random.get_rng_state(), random)
    weights = {key: value for key, value in method.state_dict().items() if not key.startswith("router.")}
    assert tensors.digest(weights) == before
    assert {task: tensors.digest(method.used_by(task)) for task in (0, 1)} == own


@isolated
def test_the_next_task_is_learned_to_the_same_bits_and_old_statistics_stay(name):
    tasks = toy_tasks(3)
    plain, method = make(name, tasks), make(name, tasks)
    learn(plain, tasks[:2])
    learn(method, tasks[:2])
    for task in tasks[:2]:
        method.fit_router(task)
    statistics = {key: value.clone() for key, value in method.router.state_dict().items()}
    for one in (plain, method):
        learn(one, tasks[2:])
    assert all(torch.equal(value, method.state_dict()[key]) for key, value in plain.state_dict().items())
    for task in tasks[:2]:
        method.fit_router(task)
    for key, value in statistics.items():  # the features have not changed but for rounding
        assert torch.allclose(value.abs(), method.router.state_dict()[key].abs(), rtol=1e-3, atol=1e-3), key


def test_it_counts_in_the_bytes_and_nowhere_before_it_is_fitted():
    tasks = toy_tasks(2)
    method = make("hat", tasks)
    learn(method, tasks)
    assert not [key for key in method.state_dict() if "router" in key]
    before, parameters = method.num_bytes(), method.num_parameters()
    method.fit_router(tasks[0])
    assert method.num_bytes() == before + sum(value.nbytes for value in method.router.state_dict().values()) > before
    assert method.num_parameters() == parameters


# Errors


def test_what_it_can_not_do_is_one_line():
    tasks = toy_tasks(2)
    method = make("hat", tasks)
    with pytest.raises(ValueError, match="no task has been learned") as error:
        method.predict(raw(tasks[0]))
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"task 0 \('toy 0'\) has not been learned"):
        method.fit_router(tasks[0])
    learn(method, tasks)
    method.fit_router(tasks[0])
    with pytest.raises(ValueError, match=r"not fitted on task 1 \('toy 1'\)"):
        method.route(raw(tasks[0]))
    method.fit_router(tasks[1])
    with pytest.raises(ValueError, match="did you mean 'distance'"):
        method.route(raw(tasks[0]), kind="distanc")
    with pytest.raises(ValueError, match="task must be a Task"):
        method.fit_router(0)


@pytest.mark.parametrize("name", sorted(set(METHODS) - set(ISOLATED)))
def test_methods_that_guarantee_nothing_are_refused(name):
    tasks = toy_tasks(1)
    method = make(name, tasks)
    learn(method, tasks)
    with pytest.raises(ValueError, match="does not guarantee that finished tasks stay"):
        method.fit_router(tasks[0])


def test_a_method_that_calls_no_head_is_refused():
    class Headless(Method):
        def forward(self, x, task):
            return nn.functional.linear(self.net.trunk(x), *self.net.heads[task].parameters())

        def used_by(self, task):
            return used_of_network(self.net, task, {})

    tasks = toy_tasks(1)
    method = Headless(make("sgd", tasks).net)
    learn(method, tasks)
    with pytest.raises(ValueError, match="Headless calls no head"):
        method.fit_router(tasks[0])


# Tasks that go away, files, copies and threads


@pytest.mark.parametrize("name", ["hat", "pmask", "packnet"])
def test_releasing_a_task_deletes_its_statistics(name):
    method, tasks = with_router(name)
    method.release(1)
    assert method.router.tasks() == [0, 2]
    assert not [key for key in method.state_dict() if key.startswith("router.task_1_")]
    assert set(method.route(raw(tasks[1])).tolist()) <= {0, 2}


def test_a_router_that_knows_all_finished_tasks_is_fitted_on_new_ones_as_well():
    """So that there is no moment at which the method can't answer."""
    method, tasks = with_router()
    learn(method, tasks[:1])  # once more
    assert sorted(method.router.tasks()) == [0, 1, 2]
    method.predict(raw(tasks[0]))
    few = make("hat", tasks)
    learn(few, tasks[:2])
    few.fit_router(tasks[0])
    learn(few, tasks[2:])
    assert few.router.tasks() == [0], "it did not know all before"


def test_it_looks_at_images_as_predict_does():
    method, tasks = with_router()
    assert len(method.predict(raw(tasks[0])[:0])) == 0
    assert len(method.predict(raw(tasks[0])[:0], 1)) == 0
    for wrong in (math.nan, math.inf):
        images = raw(tasks[0]).float()
        images[1] = wrong
        for call in (method.route, method.predict):
            with pytest.raises(ValueError, match="NaN or infinite"):
                call(images)


@isolated
def test_a_file_gives_the_same_answers(name, tmp_path):
    method, tasks = with_router(name)
    images = torch.cat([raw(task) for task in tasks])
    save(method, tmp_path / "m.safetensors")
    twin = load(tmp_path / "m.safetensors", make(name, tasks).net.trunk)
    assert twin.router.tasks() == [0, 1, 2]
    for kind in KINDS:
        assert torch.equal(twin.route(images, kind=kind), method.route(images, kind=kind))
    assert torch.equal(twin.predict(images), method.predict(images))


def test_a_file_without_a_router_is_as_before_and_loads(tmp_path):
    tasks = toy_tasks(2)
    method = make("hat", tasks)
    learn(method, tasks)
    save(method, tmp_path / "m.safetensors")
    assert not [name for name in tensors.load(tmp_path / "m.safetensors")[0] if "router" in name]
    twin = load(tmp_path / "m.safetensors", make("hat", tasks).net.trunk)
    assert twin.router.tasks() == []


@pytest.mark.parametrize("damage", ["missing", "unknown", "shape", "type"])
def test_a_file_with_a_wrong_router_is_refused(damage, tmp_path):
    method, tasks = with_router()
    path = tmp_path / "m.safetensors"
    save(method, path)
    found, metadata = tensors.load(path)
    key = "state.router.task_1_means"
    if damage == "missing":
        del found[key]
    elif damage == "unknown":
        found["state.router.task_1_others"] = found[key]
    elif damage == "shape":
        found[key] = found[key][:, 1:]
    else:
        found[key] = found[key].double()
    tensors.save(path, found, metadata)
    with pytest.raises(ValueError, match=r"does not fit HAT.*task_1"):
        load(path, make("hat", tasks).net.trunk)


def test_copies_and_states():
    method, tasks = with_router()
    images = torch.cat([raw(task) for task in tasks])
    twin = make("hat", tasks)
    twin.load_state_dict(method.state_dict())
    assert torch.equal(twin.predict(images), method.predict(images))
    assert torch.equal(copy.deepcopy(method).predict(images), method.predict(images))
    empty = make("hat", tasks)
    learn(empty, tasks)
    twin.load_state_dict(empty.state_dict())
    assert twin.router.tasks() == [], "a state without a router takes it away"


def test_threads_get_the_same_answers_while_the_router_is_fitted_again():
    method, tasks = with_router()
    images = torch.cat([raw(task) for task in tasks])
    expected, wrong = method.predict(images), []

    def ask():
        wrong.extend(1 for _ in range(5) if not torch.equal(method.predict(images), expected))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        for task in tasks:
            method.fit_router(task)
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_public_model_of_a_file_is_served_without_a_task(tmp_path):
    tasks = toy_tasks(2)
    method = HAT(Network(fresh(), tasks=tasks))
    learn(method, tasks)
    for task in tasks:
        method.fit_router(task)
    hatrack.save(method, tmp_path / "m.safetensors")
    assert hatrack.load(tmp_path / "m.safetensors", fresh()).predict(raw(tasks[1])).shape == (30,)
