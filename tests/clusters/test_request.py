"""What --on and --ask stand for, and what is refused."""

import pytest

from hatrack.__main__ import main
from hatrack.clusters.dispatch import run_anywhere
from hatrack.clusters.request import parse_request

WORDS = ["run", "smnist", "sgd", "--data", "sample"]


def test_what_is_asked_for():
    found = parse_request("ray:10.0.0.1:6379", "gpus=0.25, cpus=2,files=folder,data=send,retries=0")
    assert (found.engine, found.address, found.gpus, found.cpus) == ("ray", "10.0.0.1:6379", 0.25, 2.0)
    assert (found.files, found.data, found.retries, found.device) == ("folder", "send", 0, "cuda")
    slurm = parse_request("slurm", "partition=gpu,time=30,group=4")
    assert (slurm.partition, slurm.time, slurm.group, slurm.device) == ("gpu", 30.0, 4, "cpu")
    assert parse_request("ray", "", "cuda").gpus == 1
    assert parse_request("").engine == ""


@pytest.mark.parametrize(
    ("on", "ask", "device", "said"),
    [
        ("rey", "", "auto", "--on must be ray, ray:ADDRESS or slurm, not 'rey'"),
        ("slurm:x", "", "auto", "only ray has an address"),
        ("ray:", "", "auto", "the address is missing"),
        ("ray", "gpu=1", "auto", "did you mean"),
        ("ray", "gpus", "auto", "NAME=VALUE"),
        ("ray", "gpus=many", "auto", "must be a number from 0, not 'many'"),
        ("ray", "cpus=0", "auto", "must be a number from 0.01"),
        ("ray", "cpus=nan", "auto", "must be a number"),
        ("ray", "retries=-1", "auto", "must be a whole number"),
        ("ray", "partition=x", "auto", "is for --on slurm, not for --on ray"),
        ("slurm", "files=folder", "auto", "is for --on ray, not for --on slurm"),
        ("", "gpus=1", "auto", "does nothing without --on"),
        ("ray", "gpus=1", "cpu", "contradicts --device cpu"),
        ("ray", "files=disk", "auto", "must be store or folder"),
    ],
)
def test_a_mistake_is_one_line(on, ask, device, said):
    with pytest.raises(ValueError, match=said.replace("?", r"\?")) as error:
        parse_request(on, ask, device)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--on", "rey"], "--on must be"),
        (["--shard", "9/8"], "--shard must be"),
        (["--ranks", "0"], "--ranks must be at least 1"),
        (["--ranks", "2", "--parallel", "2"], "without --on and --parallel"),
        (["--on", "ray", "--parallel", "2"], "--parallel is for one machine"),
    ],
)
def test_the_command_line_refuses(words, said, tmp_path, capsys):
    assert main([*WORDS, "--out", str(tmp_path / "out"), *words]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_tune_takes_an_engine_and_a_benchmark(tmp_path, capsys):
    words = ["tune", "smnist", "sgd", "--data", "sample", "--out", str(tmp_path / "out"), "--on"]
    assert main([*words, "slurm"]) == 2
    assert "--on slurm is not for a search" in capsys.readouterr().err
    assert main([*words, "ray", "--on", "ray:x"]) == 2
    assert "one benchmark and one engine" in capsys.readouterr().err
    assert main([*words, "ray", "--dry-run"]) == 0
    assert main([*words, "rmnist"]) == 2
    assert "--on does nothing with --protocol first-tasks" in capsys.readouterr().err


@pytest.mark.parametrize("given", [{"log": ("tensorboard",)}, {"stack": True}])
@pytest.mark.parametrize("where", [{"on": "ray"}, {"on": "slurm"}, {"ranks": 2}])
def test_what_is_for_one_process_is_refused_elsewhere(tmp_path, given, where):
    (name,) = given
    with pytest.raises(ValueError, match=rf"--{name} is for runs of this process"):
        run_anywhere([], tmp_path, device="cpu", **given, **where)
