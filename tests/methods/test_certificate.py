"""Certificates: a later task changes none, and any bit that a task uses does."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from hatrack import HAT, METHODS, Network, Regime, Task, Trainer, compare_certificates, load, save
from hatrack.__main__ import main
from hatrack.files import tensors
from hatrack.methods.certificate import load_certificate, save_certificate, signed
from hatrack.networks.mlp import mlp
from tests.helpers.learning import ISOLATED, learn, make
from tests.helpers.tiers import cases
from tests.helpers.toys import toy_tasks

pytestmark = pytest.mark.filterwarnings("ignore:task .* finds under 5% free")
NAMES = [name for name in ISOLATED if name != "frozen"]


@pytest.mark.parametrize("name", ISOLATED)
def test_a_later_task_changes_no_certificate(name, tmp_path):
    tasks = toy_tasks(3)
    method = make(name, tasks)
    learn(method, tasks[:2])
    before = method.certificate()
    save_certificate(before, tmp_path / "old.certificate")
    assert load_certificate(tmp_path / "old.certificate") == before
    learn(method, tasks[2:])
    found = compare_certificates(method.certificate(), before)
    assert (found.same, found.added, found.kept) == ([tasks[0].name, tasks[1].name], [tasks[2].name], True)
    again = compare_certificates(before, method.certificate())
    assert (again.missing, again.kept) == ([tasks[2].name], False)


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ISOLATED])
def test_methods_that_guarantee_nothing_certify_nothing(name):
    tasks = toy_tasks(2)
    method = make(name, tasks)
    with pytest.raises(ValueError, match="nothing has been learned"):
        method.certificate()
    learn(method, tasks[:1])
    with pytest.raises(ValueError, match=f"{name} does not guarantee"):
        method.certificate()


def flip(tensor: torch.Tensor, place: int, bit: int) -> None:
    """Flip one bit of one element."""
    bytes_ = tensor.detach().view(-1)[place : place + 1].view(torch.uint8)
    bytes_[bit // 8] ^= 1 << bit % 8


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hat", "pmask"])
def test_every_tampered_model_is_found_and_named(name, tmp_path, monkeypatch, capsys):
    """100 of each: a bit of what a task uses is changed in memory, and the model saved anew with valid digests."""
    tasks = toy_tasks(3)
    method = make(name, tasks)
    learn(method, tasks)
    trunk = {"net.trunk." + key: value for key, value in method.net.trunk.named_parameters()}
    save_certificate(method.certificate(), tmp_path / "old.certificate")
    draw = torch.Generator().manual_seed(1)
    masks = [method.weight_masks(task) for task in range(3)]
    (tmp_path / "mytrunk.py").write_text(
        "from hatrack.networks.mlp import mlp\n"
        f"def trunk(): return mlp({tasks[0].shape}, widths=(24, 24), dropout=0.2, input_dropout=0.1)\n"
    )
    monkeypatch.chdir(tmp_path)
    words = ("verify", "new.safetensors", "--against", "old.certificate", "--trunk", "mytrunk:trunk")
    for case in range(cases(20, 100)):
        key = list(trunk)[int(torch.randint(len(trunk), (1,), generator=draw))]
        weight = trunk[key]
        place = int(torch.randint(weight.numel(), (1,), generator=draw))
        used = [mask[key.removeprefix("net.trunk.")].flatten()[place] for mask in masks]
        users = [t for t in range(3) if used[t]]
        bit = int(torch.randint(23, (1,), generator=draw))
        flip(weight, place, bit)
        method.digests = {}
        save(method, "new.safetensors")
        code = main(words)
        said = capsys.readouterr().out
        assert code == (1 if users else 0), f"case {case}: {key}[{place}], bit {bit}"
        assert [t for t in range(3) if f"changed: task {tasks[t].name!r}" in said.splitlines()] == users
        flip(weight, place, bit)


def test_a_file_that_says_the_old_digest_of_a_changed_tensor_is_refused(tmp_path):
    tasks = toy_tasks(2)
    method = make("hat", tasks)
    learn(method, tasks)
    save(method, tmp_path / "model.safetensors")
    content, metadata = tensors.load(tmp_path / "model.safetensors")
    gates = content["state.gates"]
    gates[1, 0] = ~gates[1, 0]
    tensors.save(tmp_path / "model.safetensors", content, metadata)
    with pytest.raises(ValueError, match=f"task 1 \\({tasks[1].name!r}\\) is not what it was"):
        load(tmp_path / "model.safetensors", mlp(tasks[0].shape, widths=(24, 24), dropout=0.2, input_dropout=0.1))


def test_a_changed_or_foreign_certificate_is_refused(tmp_path, capsys):
    tasks = toy_tasks(1)
    method = make("hat", tasks)
    learn(method, tasks, Trainer(Regime(epochs=1)))
    path = tmp_path / "a.certificate"
    good = method.certificate()
    for wrong, text in (
        ({**good, "method": "ewc"}, "was changed after it was written"),
        (signed({**good, "kind": "other"}), "not a certificate that this version can read"),
        (signed({**good, "format": 99}), "not a certificate that this version can read"),
        (signed({**good, "tasks": [{"name": 3}]}), "is not a certificate: tasks"),
        ({"a": 1}, "is not a certificate"),
        (signed({**good, "tasks": []}), "no task, or one twice"),
        (signed({**good, "tasks": good["tasks"] * 2}), "no task, or one twice"),
    ):
        path.write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=text):
            load_certificate(path)
    path.write_text("no json")
    assert main(("verify", str(path), "--against", str(path))) == 2
    assert "is not a certificate" in capsys.readouterr().err


def test_another_target_is_a_change(tmp_path):
    """Outputs of a regression are in units of its mean and spread: other ones make `predict` answer something else."""
    x = np.random.RandomState(0).randn(60, 1, 4, 4).astype("float32")
    y = x.reshape(60, -1)[:, :2] * 50 + 1000
    task = Task.from_arrays(0, "numbers", x, y, x, y, target="regression")
    make_trunk = lambda: mlp(task.shape, widths=(24,), dropout=0, input_dropout=0)  # noqa: E731
    method = HAT(Network(make_trunk(), tasks=[task]))
    learn(method, [task])
    old, target, path = method.certificate(), method.net.targets[0], tmp_path / "model.safetensors"
    before = {**old, "tasks": [{k: v for k, v in old["tasks"][0].items() if k != "target"}]}
    save_certificate(signed(before), tmp_path / "old.certificate")
    before = load_certificate(tmp_path / "old.certificate")
    for change in ({"mean": target.mean * 2}, {"std": target.std * 2}, {"flat": True}):
        method.net.targets[0] = replace(target, **change)
        save(method, path)
        for new in (method, load(path, make_trunk())):
            assert compare_certificates(new.certificate(), old).changed == ["numbers"]
            assert compare_certificates(new.certificate(), before).kept, "a certificate from before has no target"
            assert compare_certificates(before, new.certificate()).kept
    method.net.targets.clear()
    assert compare_certificates(method.certificate(), old).changed == ["numbers"]
    method.net.targets[0] = target
    save(method, path)
    assert compare_certificates(load(path, make_trunk()).certificate(), old).same == ["numbers"]


class Scaled(torch.nn.Module):
    """A trunk whose features are a little larger."""

    def __init__(self, trunk, factor):
        super().__init__()
        self.trunk, self.factor = trunk, factor

    def forward(self, x):
        return self.trunk(x) * self.factor


def test_a_small_change_of_the_code_is_found_under_the_same_conditions():
    tasks = toy_tasks(2)
    methods = [HAT(Network(Scaled(mlp(tasks[0].shape, widths=(24,)), factor), tasks=tasks)) for factor in (1.0, 1.0005)]
    learn(methods[0], tasks)
    methods[1].load_state_dict(methods[0].state_dict())
    old, new = (method.certificate() for method in methods)
    assert [task["digest"] for task in old["tasks"]] == [task["digest"] for task in new["tasks"]]
    assert compare_certificates(new, old).changed == [task.name for task in tasks]
    for name in ("torch", "device", "threads", "processor", "system", "tf32"):
        elsewhere = {**old, "versions": {**old["versions"], name: "another"}}
        assert compare_certificates(new, elsewhere).kept, f"another {name} may round otherwise"
    names = ("hatrack", "torch", "python")  # what a certificate of version 0.1 has
    assert compare_certificates(new, {**old, "versions": {k: old["versions"][k] for k in names}}).kept
