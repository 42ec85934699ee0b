"""Jobs of Slurm: what a job does when its time is nearly over, what is queued, and submitit's local executor."""

import signal
import subprocess
import threading

import pytest

from hatrack import Record, Regime, run
from hatrack.clusters import slurm_queue
from hatrack.clusters.on_slurm import run_on_slurm
from hatrack.clusters.request import Submitted, parse_request
from hatrack.clusters.slurm_job import SlurmJob
from hatrack.clusters.slurm_queue import live_runs, write_array
from hatrack.clusters.status import status
from hatrack.experiments.run import folder_of
from hatrack.experiments.sameness import differences
from hatrack.training.checkpoint import stopping
from tests.helpers.killing import wait_for_epochs
from tests.helpers.runs import small

submitit = pytest.importorskip("submitit")
HOW = {"engine": "eager", "save_every": 5.0, "device": "cpu"}


@pytest.mark.slow
def test_a_job_saves_and_goes_on_when_it_is_requeued(tmp_path):
    """`checkpoint` is called from a signal handler, in the main thread, while a step is under way in another."""
    spec = small("hat", regime=Regime(epochs=20, batch=20))
    job, requeued = SlurmJob([spec], tmp_path, HOW, {}), []

    def when_time_is_over(*_):
        requeued.append(job.checkpoint())

    before = signal.signal(signal.SIGUSR2, when_time_is_over)
    main = threading.main_thread().ident
    timer = threading.Thread(target=lambda: (wait_for_epochs(tmp_path, 22), signal.pthread_kill(main, signal.SIGUSR2)))
    timer.start()
    try:
        assert job() == 0, "it came to its end before it was stopped"
    finally:
        signal.signal(signal.SIGUSR2, before)
        stopping.clear()
        timer.join()
    assert len(requeued) == 1
    assert list(tmp_path.glob("*.part/fit-*")), "nothing was saved"
    again = requeued[0].function
    assert again() == 1
    assert differences(run(spec), Record.load(tmp_path / f"{spec.name}.json")) == []


@pytest.mark.filterwarnings("ignore")
def test_a_run_that_fails_leaves_its_reason_and_the_others(tmp_path):
    bad = small(regime=Regime(lr=1e30, epochs=2, batch=100))
    good = small(seed=1)
    assert SlurmJob([bad, good], tmp_path, HOW, {})() == 1
    found = {one.name: one for one in status(tmp_path)}
    assert found[good.name].state == "done"
    assert found[bad.name].state == "failed"
    assert "loss" in found[bad.name].text


def test_what_slurm_has_is_not_submitted_again(tmp_path, monkeypatch):
    runs = [small(seed=seed) for seed in range(4)]
    write_array(tmp_path, "slurm", ["7_0", "7_1", "7_2"], [[one.name] for one in runs[:3]], [0, 0, 0])
    said = "7_0|RUNNING|None\n7_1|PENDING|Resources\n7_2|COMPLETED|None\n"
    asked = []

    def squeue(command, **_):
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, said, "")

    monkeypatch.setattr(slurm_queue.subprocess, "run", squeue)
    assert {name: (job.state, job.why) for name, job in live_runs(tmp_path).items()} == {
        runs[0].name: ("running", ""),
        runs[1].name: ("queued", "Resources"),
    }
    assert asked[0][-1] == "7"
    submitted = []
    monkeypatch.setattr("hatrack.clusters.on_slurm._submit", lambda left, *_: submitted.extend(left))
    with pytest.raises(Submitted, match="2 runs were handed to Slurm"):
        run_on_slurm(runs, tmp_path, parse_request("slurm"))
    assert [one.name for one in submitted] == [runs[2].name, runs[3].name]
    states = {one.name: one.state for one in status(tmp_path)}
    assert states == {runs[0].name: "running", runs[1].name: "queued"}


def test_a_queue_that_can_not_be_asked_is_an_error(tmp_path, monkeypatch):
    """Runs that may be queued must not be submitted twice."""
    write_array(tmp_path, "slurm", ["7_0"], [["x"]], [0])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="squeue can't be asked"):
        live_runs(tmp_path)


def test_when_all_records_are_there_slurm_is_not_asked(tmp_path, monkeypatch):
    runs = [small(seed=seed) for seed in range(2)]
    records = [run(one, tmp_path) for one in runs]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [record.name for record in run_on_slurm(runs, tmp_path, parse_request("slurm"))] == [r.name for r in records]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # submitit leaves its processes alone
@pytest.mark.slow
def test_the_local_executor_has_the_records_of_one_process(tmp_path):
    runs = [small(method, seed) for method in ("hat", "sgd") for seed in range(2)]
    request = parse_request("slurm", "cluster=local,group=2,time=5,wait=yes")
    found = run_on_slurm(runs, tmp_path / "jobs", request, engine="eager", precision="tf32", save_every=5.0)
    for record, spec in zip(found, runs, strict=True):
        assert differences(run(spec), record) == []
        assert folder_of(spec, tmp_path / "jobs").done
