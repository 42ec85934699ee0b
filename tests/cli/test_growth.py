"""A run whose network grows: what the commands say of its models, and that it is extended to the longer run."""

import pytest
import torch

from hatrack import Record, Regime, Run, load, run
from hatrack.__main__ import main
from hatrack.files import tensors as tensor_files
from tests.helpers.tiers import quick_and_slow

pytestmark = pytest.mark.filterwarnings("ignore:task .* finds under")


def spec(method, tasks):
    return Run(
        "pmnist",
        method,
        benchmark_options={"data": "sample", "tasks": tasks, "permutations": "prefix"},
        network_options={"widths": (12, 8)},
        method_options={"grow": "auto", "grow_below": 1.0},
        train_examples=100,
        regime=Regime(epochs=1, batch=200),
    )


@pytest.fixture(scope="module", params=quick_and_slow(["hat", "pmask"], ["hat"]))
def grown(request, tmp_path_factory):
    """The method's name and the record, without its suffix, of a run of three tasks whose models were all kept."""
    folder = tmp_path_factory.mktemp("runs")
    run(spec(request.param, 3), folder, keep_model=True, keep_each=True)
    return request.param, folder / spec(request.param, 3).name


def test_inspect_shows_the_present_widths(grown, capsys):
    assert main(("inspect", f"{grown[1]}.safetensors")) == 0
    out = capsys.readouterr().out
    width = load(f"{grown[1]}.safetensors").net.trunk[2].out_features
    assert width > 12
    assert f"{width} units" in out


def test_models_from_before_growth_certify_the_old_tasks(grown, capsys):
    for task in (1, 2):
        assert main(("verify", f"{grown[1]}.safetensors", "--against", f"{grown[1]}.task-{task}.safetensors")) == 0
        assert capsys.readouterr().out.count("unchanged: task") == task
    tensors, metadata = tensor_files.load(grown[1].with_suffix(".safetensors"))
    tensors["state.net.heads.0.weight"].view(torch.int32)[0, 0] ^= 1
    metadata["tasks"][0]["digest"] = ""  # as of a method that was changed and saved anew
    tampered = grown[1].with_suffix(".tampered.safetensors")
    tensor_files.save(tampered, tensors, metadata)
    assert main(("verify", str(tampered), "--against", f"{grown[1]}.task-1.safetensors")) == 1
    assert "permuted 0" in capsys.readouterr().out


def test_an_exported_task_answers_as_the_grown_model(grown, tmp_path):
    model = load(f"{grown[1]}.safetensors")
    images = torch.randint(0, 256, (5, 1, 28, 28), dtype=torch.uint8)
    for task in range(3):
        assert (
            main(
                ("export", f"{grown[1]}.safetensors", "--task", str(task), "--format", "torch", "--out", str(tmp_path / "x"))
            )
            == 0
        )
        exported = torch.export.load(tmp_path / "x").module()
        with torch.no_grad():
            expected = model(model.net.preprocess(images, task), task)
        torch.testing.assert_close(exported(images), expected, rtol=1e-4, atol=1e-4)


def test_flatness_refuses_widths_that_differ(grown, capsys):
    assert main(("flatness", f"{grown[1]}.json")) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "grows" in line


@pytest.mark.slow
def test_an_extension_is_the_longer_run(grown, tmp_path):
    method, record = grown
    whole = spec(method, 5)
    expected = run(whole, tmp_path, keep_model=True)
    assert main(("extend", f"{record}.json", "--tasks", "5", "--device", "cpu")) == 0
    found = Record.load(record.parent / f"{whole.name}.json")
    assert (found.accuracy, found.parameters, found.usage) == (expected.accuracy, expected.parameters, expected.usage)
    one, two = (load(folder / f"{whole.name}.safetensors").state_dict() for folder in (record.parent, tmp_path))
    assert one.keys() == two.keys()
    assert all(torch.equal(value, two[key]) for key, value in one.items())
    assert len(one["growth.steps"]) > len(load(f"{record}.safetensors").growth.steps) > 0
