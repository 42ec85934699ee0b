"""`hatrack inspect`, `certify` and `verify` on a run whose model was kept, and on a model of the user's own."""

import json

import pytest
import torch

from hatrack import HAT, Network, Record, Regime, Trainer, capacity, load, run, save
from hatrack.__main__ import main
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


def test_a_run_whose_model_was_not_kept_is_not_taken_for_one(tmp_path):
    one = small(regime=Regime(epochs=1))
    run(one, tmp_path)
    with pytest.raises(ValueError, match="its model was not kept; --again"):
        run(one, tmp_path, keep_model=True)
    run(one, tmp_path, keep_model=True, again=True)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1


@pytest.mark.parametrize("place", [0, 1])
def test_the_tables(kept, capsys, place):
    path = files(kept, "hat")[place]
    found = Record.load(files(kept, "hat")[0]).weights_used
    assert main(("inspect", str(path))) == 0
    said = capsys.readouterr().out
    assert all(layer["title"] in said for layer in found["layers"])
    assert f"{100 * found['used'][-1]:.1f}" in said
    assert f"{found['shared_by'][0] / sum(found['shared_by']):.1%} of the weights are free" in said


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
    ):
        assert main(words) == 2
        assert text in capsys.readouterr().err


def test_certify_and_verify_a_model_of_a_users_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ourtrunk.py").write_text(
        "from torch import nn\n"
        "def make(): return nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU())\n"
        "def none(): return 3\n"
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
