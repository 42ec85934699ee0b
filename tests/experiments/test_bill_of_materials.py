"""The bill of materials of a model: valid by the schema of CycloneDX, and true."""

import hashlib
import json

import pytest

from hatrack import HAT, Network, Record, Regime, Run, Trainer, load, run, save
from hatrack.__main__ import main
from hatrack.benchmarks import BENCHMARKS
from hatrack.datasets.catalog import SETS
from hatrack.experiments.bill_of_materials import DATA, bill_of_materials
from hatrack.networks.mlp import mlp
from tests.helpers.missing_sets import missing
from tests.helpers.records import make, with_spec
from tests.helpers.runs import small
from tests.helpers.toys import toy_tasks

pytestmark = pytest.mark.filterwarnings("ignore:task .* finds under 5% free")


def errors(bill):
    """What the schema of CycloneDX 1.6 finds wrong, and a bill that it must find wrong, so that this can fail."""
    schema = pytest.importorskip("cyclonedx.schema")
    validator = pytest.importorskip("cyclonedx.validation.json").JsonStrictValidator(schema.SchemaVersion.V1_6)
    assert validator.validate_str(json.dumps({**bill, "metadata": {"component": {"type": "model"}}})) is not None
    return validator.validate_str(json.dumps(bill))


def properties(bill):
    return {item["name"]: item["value"] for item in bill["metadata"]["component"]["properties"]}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for method in ("hat", "sgd"):
        run(small(method, regime=Regime(epochs=1)), folder, keep_model=True)
    return folder


@pytest.mark.parametrize("method", ["hat", "sgd"])
def test_a_model_with_its_record(kept, method, tmp_path):
    (model,) = kept.glob(f"*-{method}-*.safetensors")
    out = tmp_path / "bill.json"
    assert main(("certify", str(model), "--format", "cyclonedx", "-o", str(out))) == 0
    bill, record, loaded = json.loads(out.read_text()), Record.load(model.with_suffix(".json")), load(model)
    assert errors(bill) is None
    found = bill["metadata"]["component"]
    assert (found["type"], found["name"]) == ("machine-learning-model", record.name)
    assert found["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(model.read_bytes()).hexdigest()}]
    told = properties(bill)
    assert told["hatrack:method"] == method
    for number, task in enumerate(record.tasks):
        assert told[f"hatrack:task:{number}:name"] == task.name
        digest = loaded.certificate()["tasks"][number]["digest"] if method == "hat" else None
        assert told.get(f"hatrack:task:{number}:sha256") == digest
    metrics = found["modelCard"]["quantitativeAnalysis"]["performanceMetrics"]
    assert [(item["slice"], float(item["value"])) for item in metrics] == [
        (task.name, pytest.approx(accuracy, abs=1e-6))
        for task, accuracy in zip(record.tasks, record.accuracy[-1], strict=True)
    ]
    assert [part["name"] for part in bill["components"]] == ["mnist", "hatrack", "torch", "python"]
    assert "hashes" not in bill["components"][0]  # of the sample no digest is published
    assert bill["dependencies"][0]["dependsOn"] == [part["bom-ref"] for part in bill["components"]]
    assert bill == bill_of_materials(loaded, model, record)


def test_a_model_of_a_users_own_without_a_record(tmp_path):
    tasks = toy_tasks(2)
    method = HAT(Network(mlp(tasks[0].shape, widths=(8,)), tasks=tasks))
    for task in tasks:
        method.learn(task, Trainer(Regime(epochs=1)))
    save(method, tmp_path / "own.safetensors", network=("mlp", {"widths": [8]}))
    assert main(("certify", str(tmp_path / "own.safetensors"), "--format", "cyclonedx")) == 0
    bill = json.loads((tmp_path / "own.cdx.json").read_text())
    assert errors(bill) is None
    assert bill["metadata"]["component"]["name"] == "own"
    assert "quantitativeAnalysis" not in bill["metadata"]["component"]["modelCard"]
    assert len(bill["metadata"]["component"]["modelCard"]["modelParameters"]["outputs"]) == 2


def test_data_sets_have_the_digests_of_the_catalog(kept):
    (model,) = kept.glob("*-hat-*.safetensors")
    loaded = load(model)
    full = with_spec(make("hat"), benchmark_options={"data": "full", "valid": 0.15})
    bill = bill_of_materials(loaded, model, full)
    assert errors(bill) is None
    hashes = {part["name"]: part["hashes"][0]["content"] for part in bill["components"] if part["type"] == "data"}
    assert hashes == {name: SETS[name].digest for name in ("mnist", "fashion-mnist")}
    own = with_spec(make("hat"), benchmark="own", data_digest="a" * 64)
    (data,) = [part for part in bill_of_materials(loaded, model, own)["components"] if part["type"] == "data"]
    assert data["hashes"][0]["content"] == "a" * 64
    mixed = with_spec(make("hat", names=("mnist", "cifar10")), benchmark="mixture", benchmark_options={"valid": 0.15})
    names = [part["name"] for part in bill_of_materials(loaded, model, mixed)["components"] if part["type"] == "data"]
    assert names == ["mnist", "cifar10"]


def test_the_data_sets_of_every_benchmark_are_known(tmp_path, monkeypatch):
    monkeypatch.setenv("HATRACK_DATA", str(tmp_path))
    assert set(DATA) == set(BENCHMARKS) - {"own", "mixture", "mixture-open"}
    assert {name: missing(BENCHMARKS[name]) for name in DATA} == {name: set(sets) for name, sets in DATA.items()}


def test_another_file_is_not_replaced(kept, capsys):
    (model,) = kept.glob("*-hat-*.safetensors")
    record = model.with_suffix(".json")
    before = record.read_bytes()
    assert main(("certify", str(model), "--format", "cyclonedx", "--out", str(record))) == 2
    assert "not replaced" in capsys.readouterr().err
    assert record.read_bytes() == before
    assert main(("certify", str(model), "--format", "spdx")) == 2
    assert Run.from_spec(Record.load(record).spec.written).method == "hat"


@pytest.mark.parametrize("noted", [True, False])
def test_a_record_of_another_model_is_left_out(kept, noted, tmp_path, capsys):
    (model,) = kept.glob("*-hat-*.safetensors")
    other = small("hat", regime=Regime(epochs=2))
    run(other, tmp_path / "other", keep_model=True)
    record, own = Record.load(model.with_suffix(".json")), tmp_path / model.name
    record.models = record.models if noted else {}
    record.save(tmp_path)
    for source, belongs in ((model, True), (tmp_path / "other" / f"{other.name}.safetensors", False)):
        own.write_bytes(source.read_bytes())
        assert main(("certify", str(own), "--format", "cyclonedx")) == 0
        assert ("another model" in capsys.readouterr().out) == (not belongs)
        bill = json.loads(own.with_suffix(".cdx.json").read_text())
        assert errors(bill) is None
        assert ("quantitativeAnalysis" in bill["metadata"]["component"]["modelCard"]) == belongs
        assert (bill["components"][0]["type"] == "data") == belongs
    if noted:
        bill = bill_of_materials(load(own), own, record)
        assert "quantitativeAnalysis" not in bill["metadata"]["component"]["modelCard"]
