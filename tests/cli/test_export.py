"""`hatrack export`: files that compute what the model does, read without this package."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from hatrack import HAT, Network, load, save
from hatrack.__main__ import main
from hatrack.networks import NETWORKS
from tests.helpers.learning import learn
from tests.helpers.records import make
from tests.helpers.toys import toy_tasks

pytestmark = pytest.mark.filterwarnings("ignore:task .* finds under 5% free")


def trunk():
    """Return the trunk of the model."""
    return NETWORKS["mlp"]((1, 4, 4), widths=(60, 60))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return the file of a model that has learned a task."""
    tasks = toy_tasks(2)
    method = HAT(Network(trunk(), tasks=tasks))
    learn(method, tasks)
    path = tmp_path_factory.mktemp("models") / "model.safetensors"
    save(method, path)
    return path


def exported(model, path, kind, *options):
    """Run the command, and return raw images and the logits of the model."""
    words = ("export", str(model), "--task", "toy 1", "--format", kind, "--out", str(path), *options)
    assert main((*words, "--trunk", "tests.cli.test_export:trunk")) == 0
    images = torch.randint(0, 256, (5, 1, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    images = images.float() / 64 - 2 if "--floats" in options else images
    method = load(model, trunk())
    with torch.no_grad():
        return images, method(method.net.preprocess(images, 1), 1)


@pytest.mark.parametrize("options", [(), ("--floats",)])
def test_the_type_of_the_images_is_told_and_how_to_have_floats(model, tmp_path, capsys, options):
    exported(model, tmp_path / "one.safetensors", "safetensors", *options)
    last = capsys.readouterr().out.splitlines()[-1]
    assert ("float32" in last) == bool(options)
    assert ("export it with --floats" in last) == (not options)


def test_a_record_is_told_from_a_model(tmp_path, capsys):
    record = make().save(tmp_path)
    assert main(("export", str(record), "--task", "0")) == 2
    assert f"{record} is a record, not a model: hatrack run ... --keep-model" in capsys.readouterr().err
    kept = record.with_suffix(".safetensors")
    kept.touch()
    assert main(("export", str(record), "--task", "0")) == 2
    assert f"its model is {kept}" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--floats",)])
def test_torch(model, tmp_path, capsys, options):
    images, logits = exported(model, tmp_path / "one.pt2", "torch", *options)
    torch.save((images, logits), tmp_path / "wanted.pt")
    code = (
        "import sys; sys.modules['hatrack'] = None\n"
        "import torch\n"
        "images, logits = torch.load('wanted.pt')\n"
        "found = torch.export.load('one.pt2').module()(images)\n"
        "assert (found - logits).abs().max() <= 1e-5 * logits.abs().max()\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120)
    said = capsys.readouterr().out
    whole = sum(p.numel() for p in trunk().parameters()) + 61 * 3
    assert f"of {whole:,}" in said
    assert "64 images" in said


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's exporter
def test_onnx(model, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    images, logits = exported(model, tmp_path / "one.onnx", "onnx")
    session = runtime.InferenceSession(str(tmp_path / "one.onnx"), providers=["CPUExecutionProvider"])
    assert [(put.name, put.type, put.shape[1:]) for put in session.get_inputs()] == [("images", "tensor(uint8)", [1, 4, 4])]
    for count in (1, 5):
        (found,) = session.run(None, {"images": images[:count].numpy()})
        assert (torch.from_numpy(found) - logits[:count]).abs().max() <= 1e-5 * logits.abs().max()


def test_safetensors(model, tmp_path):
    exported(model, tmp_path / "one.safetensors", "safetensors")
    with safe_open(tmp_path / "one.safetensors", "pt") as file:
        about = file.metadata()
        shapes = [tuple(file.get_tensor(name).shape) for name in file.keys()]  # noqa: SIM118
        names = list(file.keys())
    assert json.loads(about["shape"]) == [1, 4, 4]
    assert about["type"] == "torch.uint8"
    assert all(f"self.{name}" in about["code"] for name in names)
    used = [int(mask.sum()) for mask in load(model, trunk()).masks(1).values()]
    assert (used[0], 16) in shapes
    assert (used[1], used[0]) in shapes


def test_the_file_has_the_name_of_the_task_by_default(model, capsys):
    assert main(("export", str(model), "--task", "0", "--trunk", "tests.cli.test_export:trunk")) == 0
    assert model.with_name("model-toy_0.pt2").exists()


def test_wrong_tasks_name_the_nearest(model, capsys):
    assert main(("export", str(model), "--task", "toi 1", "--trunk", "tests.cli.test_export:trunk")) == 2
    said = capsys.readouterr().err
    assert "toi 1" in said
    assert "did you mean 'toy 1'" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("task", ["1", "toy 1"])
def test_a_task_that_was_not_learned_is_refused_with_those_that_were(task, tmp_path, capsys):
    tasks = toy_tasks(2)
    method = HAT(Network(trunk(), tasks=tasks))
    learn(method, tasks[:1])
    save(method, tmp_path / "one.safetensors")
    words = ("--task", task, "--trunk", "tests.cli.test_export:trunk")
    assert main(("export", str(tmp_path / "one.safetensors"), *words)) == 2
    said = capsys.readouterr().err
    assert f"--task {task}: no such task was learned" in said
    assert said.endswith("here are: toy 0\n")
    assert said.count("\n") == 1


def test_a_name_that_two_tasks_have_is_refused_and_their_files_have_numbers(tmp_path, capsys):
    tasks = [replace(task, name="same") for task in toy_tasks(2)]
    method = HAT(Network(trunk(), tasks=tasks))
    learn(method, tasks)
    save(method, tmp_path / "two.safetensors")
    words = ("--trunk", "tests.cli.test_export:trunk", "--format", "safetensors")
    assert main(("export", str(tmp_path / "two.safetensors"), "--task", "same", *words)) == 2
    assert "0, 1" in capsys.readouterr().err
    for number in "01":
        assert main(("export", str(tmp_path / "two.safetensors"), "--task", number, *words)) == 0
        assert (tmp_path / f"two-same-{number}.safetensors").exists()


class Own(HAT):
    """A method of the user's."""


def test_a_trunk_and_a_method_of_the_users_are_named_by_options(tmp_path, capsys):
    tasks, path = toy_tasks(1), tmp_path / "own.safetensors"
    method = Own(Network(trunk(), tasks=tasks))
    learn(method, tasks)
    save(method, path)
    words = ("export", str(path), "--task", "0", "--format", "safetensors")
    assert main(words) == 2
    assert "--trunk MODULE:FUNCTION" in capsys.readouterr().err
    assert main((*words, "--trunk", "tests.cli.test_export:trunk")) == 2
    assert "--method MODULE:CLASS" in capsys.readouterr().err
    assert main((*words, "--trunk", "tests.cli.test_export:trunk", "--method", "tests.cli.test_export:Own")) == 0


class Distances(torch.nn.Module):
    """A trunk with an operation that has no form for any number of images in ONNX."""

    def __init__(self):
        super().__init__()
        self.layer, self.centres = torch.nn.Linear(16, 8), torch.nn.Buffer(torch.ones(4, 8))

    def forward(self, x):
        return torch.cdist(self.layer(x.flatten(1)), self.centres)


@pytest.mark.slow
def test_an_operation_that_onnx_does_not_have_is_one_line(tmp_path, capsys):
    pytest.importorskip("onnxscript")
    tasks, path = toy_tasks(1), tmp_path / "model.safetensors"
    method = HAT(Network(Distances(), tasks=tasks))
    learn(method, tasks)
    save(method, path)
    capsys.readouterr()
    words = ("export", str(path), "--task", "0", "--format", "onnx", "--out", str(tmp_path / "x.onnx"))
    assert main((*words, "--trunk", "tests.cli.test_export:Distances")) == 2
    said = capsys.readouterr().err
    assert "for ONNX" in said
    assert "--format torch" in said
    assert said.count("\n") == 1
    assert not (tmp_path / "x.onnx").exists()


def test_without_the_extra_the_command_says_what_to_install(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    words = ("export", str(model), "--task", "0", "--format", "onnx", "--out", str(tmp_path / "x.onnx"))
    assert main((*words, "--trunk", "tests.cli.test_export:trunk")) == 2
    assert "hatrack[onnx]" in capsys.readouterr().err
    assert not (tmp_path / "x.onnx").exists()
