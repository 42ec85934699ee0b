"""`hatrack inspect`, `certify` and `verify` on a run whose model was kept, and on a model of the user's own."""

import importlib
import json
import re
from dataclasses import replace

import pytest
import torch

from hatrack import HAT, Network, Record, Regime, Trainer, capacity, load, run, save
from hatrack.__main__ import main
from hatrack.cli.inspection import sentences, show
from hatrack.files import tensors as tensor_files
from hatrack.inspection.capacity import Capacity, LayerCapacity
from tests.helpers.runs import small
from tests.helpers.toys import toy_tasks

pytestmark = pytest.mark.filterwarnings("ignore:task .* finds under 5% free")


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    run(small("hat", regime=Regime(epochs=1)), folder, keep_model=True)
    run(small("sgd", regime=Regime(epochs=1)), folder, keep_model=True)
    return folder


def files(kept, method):
    (record,) = kept.glob(f"*-{method}-*.json")
    return record, record.with_suffix(".safetensors")


def test_a_kept_model_is_loaded_without_a_trunk_and_is_that_of_the_record(kept):
    record, model = files(kept, "hat")
    method = load(model)
    assert capacity(method).to_dict() == Record.load(record).weights_used
    assert list(method.history.values()) == [task.name for task in Record.load(record).tasks]


@pytest.mark.parametrize("widths", [[10**7, 10**7], [2**40, 2], ["wide"], None])
def test_a_file_can_t_make_us_build_a_network_larger_than_itself(kept, widths, tmp_path):
    tensors, metadata = tensor_files.load(files(kept, "hat")[1])
    metadata["network"]["options"]["widths"] = widths
    path = tmp_path / "wrong.safetensors"
    tensor_files.save(path, tensors, metadata)
    with pytest.raises(ValueError, match=r"wrong\.safetensors: "):
        load(path)


def test_a_run_whose_model_was_not_kept_is_run_again_for_it(tmp_path):
    one = small(regime=Regime(epochs=1))
    before = run(one, tmp_path)
    after = run(one, tmp_path, keep_model=True)
    assert after.accuracy == before.accuracy
    (model,) = tmp_path.glob("*.safetensors")
    written = model.stat().st_mtime_ns
    run(one, tmp_path, keep_model=True)
    assert model.stat().st_mtime_ns == written
    run(one, tmp_path, again=True)
    assert not model.exists(), "it belonged to the record that was replaced"


def test_tasks_have_the_numbers_that_other_commands_take(kept, tmp_path, capsys):
    method = load(files(kept, "hat")[1])
    names = list(method.history.values())
    method.release(0)
    save(method, tmp_path / "less.safetensors")
    assert main(("inspect", str(tmp_path / "less.safetensors"))) == 0
    said = capsys.readouterr().out
    assert f" 1 {names[1]}" in said
    assert names[0] not in said
    assert main(("inspect", str(files(kept, "hat")[1]))) == 0
    said = capsys.readouterr().out
    assert all(f" {number} {name}" in said for number, name in enumerate(names))


@pytest.mark.parametrize("place", [0, 1])
def test_the_tables(kept, capsys, place):
    path = files(kept, "hat")[place]
    found = Record.load(files(kept, "hat")[0]).weights_used
    assert main(("inspect", str(path))) == 0
    said = capsys.readouterr().out
    assert all(layer["title"] in said for layer in found["layers"])
    assert f"{100 * found['used'][-1]:.1f}" in said
    assert f"{1 - found['frozen'][-1]:.1%} of the weights are free" in said
    count = len(found["tasks"])
    reused = [j for j in range(count) if any(found["reuse"][i][j] for i in range(j + 1, count))]
    assert f"later tasks reuse weights of {', '.join(map(str, reused))}\n" in said


def test_weights_that_are_frozen_between_units_of_different_tasks(capsys):
    sizes = {"used": [0.2, 0.4], "own": [0.2, 0.2], "reuse": [[1.0, 0.0], [0.0, 1.0]], "shared_by": [6, 4, 0]}
    layer = LayerCapacity("1", "linear 1", 10, [0.2, 0.4], [0.2, 0.2], [6, 4, 0])
    found = Capacity(["a", "b"], [layer], **sizes, frozen=[0.2, 0.5])
    show(found)
    said = capsys.readouterr().out
    assert "50.0% of the weights are free" in said
    assert "10.0% are frozen between units of different tasks" in said
    assert re.search(r"all that are frozen +20.0 +50.0", said)
    show(replace(found, frozen=found.used))
    said = capsys.readouterr().out
    assert "60.0% of the weights are free" in said
    assert "frozen" not in said


def test_tasks_that_share_nothing():
    found = Capacity(["a", "b"], used=[0.2, 0.4], own=[0.2, 0.2], reuse=[[1.0, 0.0], [0.0, 1.0]], shared_by=[6, 4, 0])
    assert "no task reuses weights of an earlier one" in sentences(found)
    alone = Capacity(["a"], used=[0.2], own=[0.2], reuse=[[1.0]], shared_by=[8, 2])
    assert not any("reuse" in line for line in sentences(alone))


def test_pictures(kept, tmp_path, capsys):
    assert main(("inspect", str(files(kept, "hat")[0]), "--pictures", str(tmp_path / "pictures"))) == 0
    found = sorted((tmp_path / "pictures").iterdir())
    assert len(found) == len(load(files(kept, "hat")[1]).masks(0))
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in found)


def test_mistakes(kept, tmp_path, capsys):
    record, model = files(kept, "sgd")
    alone = tmp_path / files(kept, "hat")[0].name
    alone.write_bytes(files(kept, "hat")[0].read_bytes())
    for words, text in (
        (("inspect", str(record)), "no masks"),
        (("inspect", str(model)), "no masks"),
        (("inspect", str(alone), "--pictures", str(tmp_path / "p")), "--keep-model"),
        (("inspect", str(tmp_path / "none.json")), "none.json"),
        (("certify", str(model)), "sgd does not guarantee"),
        (("verify", str(model)), "--against"),
        (("certify", str(files(kept, "hat")[1]), "--trunk", "nowhere:f"), "--trunk nowhere:f"),
        (("certify", str(files(kept, "hat")[1]), "--trunk", "nowhere"), "MODULE:FUNCTION"),
        (("certify", str(files(kept, "hat")[1]), "--out", str(files(kept, "sgd")[1])), "is not a certificate"),
    ):
        assert main(words) == 2
        assert text in capsys.readouterr().err


def test_certify_and_verify_a_model_of_a_users_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ourtrunk.py").write_text(
        "from torch import nn\n"
        "def make(): return nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU())\n"
        "def none(): return 3\n"
        "def broken(): raise RuntimeError('no disk')\n"
    )
    tasks = toy_tasks(2)
    trunk = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(16, 12), torch.nn.ReLU(), torch.nn.Linear(12, 8), torch.nn.ReLU()
    )
    method = HAT(Network(trunk, tasks=tasks))
    method.learn(tasks[0], Trainer(Regime(epochs=1, batch=16)))
    save(method, "v1.safetensors")
    method.learn(tasks[1], Trainer(Regime(epochs=1, batch=16)))
    save(method, "v2.safetensors")
    own = ("--trunk", "ourtrunk:make")
    assert main(("certify", "v1.safetensors", *own)) == 0
    assert json.loads((tmp_path / "v1.certificate").read_text())["tasks"][0]["name"] == tasks[0].name
    capsys.readouterr()
    assert main(("verify", "v2.safetensors", "--against", "v1.certificate", *own)) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"unchanged: task {tasks[0].name!r}",
        f"added since: task {tasks[1].name!r}",
    ]
    assert main(("verify", "v1.safetensors", "--against", "v2.safetensors", *own)) == 1
    assert f"missing: task {tasks[1].name!r}" in capsys.readouterr().out.splitlines()
    assert main(("verify", "v2.safetensors", "--against", "v1.certificate")) == 2
    assert "does not say how its trunk is built" in capsys.readouterr().err
    assert main(("verify", "v2.safetensors", "--against", "v1.certificate", "--trunk", "ourtrunk:none")) == 2
    assert "makes a int, not an nn.Module" in capsys.readouterr().err
    assert main(("verify", "v2.safetensors", "--against", "v1.certificate", "--trunk", "ourtrunk:broken")) == 2
    assert "RuntimeError: no disk" in capsys.readouterr().err


def test_a_trunk_that_computes_something_else_is_a_change(tmp_path, monkeypatch, capsys):
    """Its tensors are the same bits, so that only the answers tell."""
    monkeypatch.chdir(tmp_path)
    layers = "nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.{0}(), nn.Linear(12, 8), nn.{0}())"
    (tmp_path / "twotrunks.py").write_text(
        f"from torch import nn\ndef relu(): return {layers.format('ReLU')}\ndef tanh(): return {layers.format('Tanh')}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    twotrunks = importlib.import_module("twotrunks")
    tasks = toy_tasks(1)
    old, new = HAT(Network(twotrunks.relu(), tasks=tasks)), HAT(Network(twotrunks.tanh(), tasks=tasks))
    old.learn(tasks[0], Trainer(Regime(epochs=1, batch=16)))
    new.load_state_dict(old.state_dict())
    new.digests = {}
    save(old, "old.safetensors")
    save(new, "new.safetensors")
    assert main(("certify", "old.safetensors", "--trunk", "twotrunks:relu")) == 0
    capsys.readouterr()
    assert main(("verify", "new.safetensors", "--against", "old.certificate", "--trunk", "twotrunks:tanh")) == 1
    assert capsys.readouterr().out.splitlines() == [f"changed: task {tasks[0].name!r}"]


def test_the_table_fits_the_terminal_and_cuts_no_number(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shares = [1 - 0.9**t for t in range(1, 31)]
    layer = LayerCapacity("a", "a layer with a very long name indeed", 1_234_567, shares, shares, [1] * 31)
    rows = [[1.0] * 30 for _ in range(30)]
    show(Capacity([f"task {t}" for t in range(30)], [layer], shares, shares, rows, [1] * 31))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert "the last 6 of 30 tasks are shown; a wider terminal shows more" in lines
    assert any("1,234,567" in line and f"{100 * shares[-1]:.1f}" in line for line in lines)


def test_a_model_is_known_by_its_content_whatever_its_name_is(kept, tmp_path, capsys):
    _, model = files(kept, "hat")
    copied, other = tmp_path / "copy.model", tmp_path / "picture.png"
    copied.write_bytes(model.read_bytes())
    other.write_bytes(b"\x89PNG\r\n\x1a\n\x00")
    assert main(("verify", str(copied), "--against", str(model))) == 0
    assert "unchanged" in capsys.readouterr().out
    assert main(("verify", str(other), "--against", str(model))) == 2
    assert "is not a certificate: it is not text" in capsys.readouterr().err
