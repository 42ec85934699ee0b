"""A guard that was saved and loaded: the same bits, checked when it is loaded, and another task learned."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import hatrack as hr
from hatrack.files import tensors as tensor_files
from tests.helpers.guarded import BACKBONES, PROBE, WIDTH, Loop, differing, make_loop, state
from tests.helpers.tiers import every_value


def saved(tmp_path, backbone="cnn", method="hat", names="ab"):
    """A loop that has learned some tasks, and its file."""
    loop = make_loop(backbone, method=method, options={"smax": 200.0}, weight_decay=0.1)
    for number, name in enumerate(names):
        loop.learn(name, number)
    path = tmp_path / "guard.safetensors"
    loop.guard.save(path)
    return loop, path


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A loop that has learned two tasks, and its file; nobody may change them."""
    return saved(tmp_path_factory.mktemp("guard"))


@pytest.fixture
def own_file(kept, tmp_path):
    """The same loop, and a file of one's own."""
    loop, path = kept
    return loop, Path(shutil.copy(path, tmp_path))


def loaded(loop, path, backbone="cnn", own="ab"):
    """The same tasks in new modules, which have other values."""
    torch.manual_seed(1)
    module, heads = BACKBONES[backbone](), {name: nn.Linear(WIDTH, 3) for name in "abcde"}
    held = [*module.parameters(), *(p for head in heads.values() for p in head.parameters())]
    optimizer = torch.optim.AdamW(held, lr=0.01, weight_decay=0.1)
    guard = hr.load_guard(path, module, optimizer, own={name: [heads[name]] for name in own})
    return Loop(guard, optimizer, heads, dict(loop.answers))


@pytest.mark.parametrize(("method", "backbone"), every_value(["hat", "pmask"], BACKBONES))
def test_a_loaded_guard_is_the_one_that_was_saved(tmp_path, backbone, method):
    loop, path = saved(tmp_path, backbone, method)
    other = loaded(loop, path, backbone)
    assert repr(other.guard) == repr(loop.guard)
    assert other.guard.verify() == loop.guard.verify()
    assert other.guard.usage() == loop.guard.usage()
    assert other.guard.method.options == loop.guard.method.options
    assert other.changed() == []
    other.learn("c", 2)
    other.learn("d", 3)
    assert other.changed() == []
    other.guard.save(path)
    again = loaded(other, path, backbone, own="abcd")
    assert again.changed() == []
    assert list(again.guard.tasks) == list("abcd")


def test_four_tasks_of_different_kinds_and_a_fifth(tmp_path):
    """Classes, labels, values and classes again in one backbone, saved and loaded."""
    loop = make_loop("residual", weight_decay=0.1)
    for number, (name, kind) in enumerate(zip("abcd", ["classes", "labels", "values", "classes"], strict=True)):
        loop.learn(name, number, kind=kind)
    loop.guard.save(tmp_path / "four.safetensors")
    other = loaded(loop, tmp_path / "four.safetensors", "residual", own="abcd")
    other.learn("e", 4, kind="labels")
    assert other.changed() == []


def test_after_a_release_the_numbers_are_kept(tmp_path):
    loop, _ = saved(tmp_path, names="abc")
    loop.guard.release("b")
    del loop.answers["b"]
    loop.guard.save(tmp_path / "guard.safetensors")
    other = loaded(loop, tmp_path / "guard.safetensors", own="ac")
    other.learn("b", 5)
    assert [task.number for task in other.guard.tasks.values()] == [1, 3, 2]
    assert other.changed() == []


def test_modules_that_are_not_given_stay_in_the_file(own_file):
    loop, path = own_file
    with pytest.warns(UserWarning, match="modules of the task 'b'"):
        other = loaded(loop, path, own="a")
    other.guard.verify()
    other.guard.save(path)
    again = loaded(loop, path)
    assert again.changed() == []


def test_a_guard_that_has_learned_nothing(tmp_path):
    loop = make_loop("mlp")
    loop.guard.save(tmp_path / "empty.safetensors")
    other = loaded(loop, tmp_path / "empty.safetensors", "mlp", own="")
    other.learn("a")
    assert other.changed() == []


def test_nothing_is_written_if_a_task_has_changed(tmp_path):
    loop, path = saved(tmp_path)
    before = path.read_bytes()
    with torch.no_grad():
        loop.heads["a"].bias[0] += 1
    with pytest.raises(ValueError, match="task 'a' is not what it was"):
        loop.guard.save(path)
    assert path.read_bytes() == before


def changed_file(path, change):
    """Write the file again, with a change and a right digest of the whole."""
    tensors, metadata = tensor_files.load(path)
    change(tensors, metadata)
    tensor_files.save(path, tensors, metadata)


def flip(name):
    """Change one bit that the first task uses."""

    def change(tensors, metadata):
        place = int((tensors[name].reshape(-1) != 0).nonzero()[0])
        tensors[name].view(torch.int32).view(-1)[place] ^= 1

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (flip("own.1.0.weight"), "task 'a' is not what it was"),
        (flip("state.net.trunk.0.bias"), "is not what it was"),
        (flip("state.norms.sets.0.n0"), "task 'a' is not what it was"),
        (lambda t, m: t["state.gates"].logical_not_(), "task 'a' is not what it was"),
        (lambda t, m: t.pop("answers.1"), "holds no whole guard: tasks"),
        (lambda t, m: t.pop("example"), "holds no whole guard: example"),
        (lambda t, m: t.pop("state.done"), "holds no whole guard: tasks"),
        (lambda t, m: t.pop("state.gates"), "does not fit the backbone"),
        (lambda t, m: t["answers.1"].add_(1), "task 'a' answers differently"),
        (lambda t, m: m.update(kind="method"), "holds no guard"),
        (lambda t, m: m.update(format=2), "format 2, newer than 1"),
        (lambda t, m: m.update(options={"smaxx": 1.0}), "no option 'smaxx'; did you mean 'smax'"),
        (lambda t, m: m.update(method="ewc"), "no method of a guard 'ewc'"),
        (lambda t, m: m.update(numbers=10**9), "holds no whole guard: tasks"),
        (lambda t, m: m["tasks"][0].update(number=2), "holds no whole guard: tasks"),
        (lambda t, m: m["tasks"][0].update(digest=3), "holds no whole guard: tasks"),
        (lambda t, m: m.update(tasks=[3]), "holds no whole guard: tasks"),
        (lambda t, m: m.pop("seed"), "holds no whole guard: seed"),
    ],
)
def test_a_file_that_was_changed_is_refused(own_file, change, message):
    loop, path = own_file
    changed_file(path, change)
    with pytest.raises(ValueError, match=message) as error:
        loaded(loop, path)
    assert "\n" not in str(error.value)


def test_a_damaged_file_is_refused(own_file):
    loop, path = own_file
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="is damaged: its digest differs"):
        loaded(loop, path)


def test_what_does_not_fit_is_named(kept):
    loop, path = kept
    with pytest.raises(ValueError, match="the backbone is not like the one that was saved: it lacks"):
        loaded(loop, path, "mlp")
    with pytest.raises(ValueError, match=r"no task 'digits'; there are: a, b"):
        hr.load_guard(path, BACKBONES["cnn"](), torch.optim.SGD(nn.Linear(2, 2).parameters()), own={"digits": []})
    backbone = BACKBONES["cnn"]()
    optimizer = torch.optim.SGD(backbone.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="task 'a': the modules of the task are not like those that were saved"):
        hr.load_guard(path, backbone, optimizer, own={"a": [nn.Linear(WIDTH, 4)]})
    with pytest.raises(ValueError, match="holds no parameter of the backbone"):
        hr.load_guard(path, BACKBONES["cnn"](), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))


def test_the_file_has_no_pickle_and_plain_metadata(kept):
    _, path = kept
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata = json.loads(header["__metadata__"]["hatrack"])
    assert [(task["name"], task["number"]) for task in metadata["tasks"]] == [("a", 1), ("b", 2)]
    assert not any("hatrack_gates" in name for name in header)


def test_the_state_of_the_backbone_can_be_loaded_into_a_guarded_one(tmp_path):
    """A checkpoint of a user's own: weights, norms being learned and the embedding."""
    loop, _ = saved(tmp_path)
    state = {key: value.clone() for key, value in loop.backbone.state_dict().items()}
    assert "hatrack_gates.embedding" in state
    loop.backbone.load_state_dict(state)
    assert loop.changed() == []
    with loop.guard.use("a"):
        assert loop.backbone(PROBE).shape == (8, WIDTH)


def test_the_state_of_the_optimizer_goes_its_own_way(tmp_path):
    """It is saved and loaded as always, and learning goes on with it as if nothing had been: the same bits."""
    loop, path = saved(tmp_path, "mlp")
    state = copy.deepcopy(loop.optimizer.state_dict())
    other = loaded(loop, path, "mlp")
    other.optimizer.load_state_dict(state)
    loop.learn("c", 2)
    other.heads["c"].load_state_dict(make_loop("mlp").heads["c"].state_dict())
    other.learn("c", 2)
    for name, tensor in loop.backbone.state_dict().items():
        assert torch.equal(tensor, other.backbone.state_dict()[name]), name
    assert torch.equal(loop.answers["c"], other.answers["c"])


def kept_as_it_is(loop, call, message):
    """Check that a refused call changes neither the guard nor any tensor, and that the next task is learned as usual."""
    before = state(loop.backbone, *loop.heads.values())
    flags = [p.requires_grad for head in loop.heads.values() for p in head.parameters()]
    modes = [part.training for module in (loop.backbone, *loop.heads.values()) for part in module.modules()]
    with pytest.raises(ValueError, match=message):
        call()
    assert differing(before, state(loop.backbone, *loop.heads.values())) == []
    assert flags == [p.requires_grad for head in loop.heads.values() for p in head.parameters()]
    assert modes == [part.training for module in (loop.backbone, *loop.heads.values()) for part in module.modules()]
    with pytest.raises(ValueError, match="outside of a block of learning"):
        loop.optimizer.step()
    assert loop.changed() == []
    loop.learn("d", 3)
    assert loop.changed() == []


@pytest.mark.parametrize("wrong", ["file", "head", "optimizer", "LBFGS", "own", "damaged"])
def test_a_refused_load_leaves_the_guard_as_it_is(tmp_path, wrong):
    """The backbone has a guard that has learned one more task than the file."""
    loop, path = saved(tmp_path, "mlp")
    loop.learn("c", 2)
    other = tmp_path / "other.safetensors"
    make_loop("residual").guard.save(other)
    if wrong == "damaged":
        changed_file(path, flip("state.net.trunk.1.weight"))
    call, message = {
        "file": (lambda: hr.load_guard(other, loop.backbone, loop.optimizer), "not like the one that was saved"),
        "head": (
            lambda: load(own={"a": [loop.heads["a"]], "b": [nn.Linear(WIDTH, 4)]}),
            "task 'b': the modules of the task",
        ),
        "optimizer": (lambda: load(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)), "holds no parameter"),
        "LBFGS": (lambda: load(torch.optim.LBFGS(loop.backbone.parameters())), "LBFGS"),
        "own": (lambda: load(own=[loop.heads["a"]]), r"modules of tasks by name.*'digits': \[head\]"),
        "damaged": (lambda: load(), "task 'a' is not what it was"),
    }[wrong]

    def load(optimizer=loop.optimizer, own=None):
        return hr.load_guard(path, loop.backbone, optimizer, own=own)

    kept_as_it_is(loop, call, message)


def test_a_refused_load_writes_nothing_into_new_modules(tmp_path):
    """The head of the last task does not fit: the backbone and the heads of the tasks before it are as they were."""
    _, path = saved(tmp_path, "mlp")
    torch.manual_seed(5)
    backbone, heads = BACKBONES["mlp"](), [nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 4)]
    backbone[1].requires_grad_(False)
    before = state(backbone, *heads)
    with pytest.raises(ValueError, match="task 'b'"):
        hr.load_guard(path, backbone, torch.optim.SGD(backbone.parameters()), own={"a": heads[:1], "b": heads[1:]})
    assert differing(before, state(backbone, *heads)) == []
    assert [p.requires_grad for p in backbone.parameters()] == [False, False, True, True]
    assert all(p.requires_grad for head in heads for p in head.parameters())
    assert heads[0].training


def test_a_load_into_a_protected_backbone_seals_the_heads(tmp_path):
    """The guard that was there is removed, and its heads belong to the new one."""
    loop, path = saved(tmp_path, "mlp")
    loop.learn("c", 2)
    del loop.answers["c"]
    old, loop.guard = loop.guard, hr.load_guard(path, loop.backbone, loop.optimizer)
    assert loop.changed() == []
    assert not any(p.requires_grad for name in "ab" for p in loop.heads[name].parameters())
    assert loop.heads["c"].weight.requires_grad
    with pytest.raises(ValueError, match="the guard was removed"):
        old.verify()
    loop.learn("c", 4)
    assert loop.changed() == []
    loop.guard.release("a")
    assert loop.heads["a"].weight.requires_grad


def test_the_warning_about_modules_that_are_missing_shows_the_argument(tmp_path):
    loop, path = saved(tmp_path, "mlp", names="a")
    with pytest.warns(UserWarning, match=r"load_guard\(\.\.\., own=\{'a': \[head\]\}\) fills"):
        loaded(loop, path, "mlp", own="")
