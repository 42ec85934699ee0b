"""The driver of a fleet on an engine with virtual time: every run ends once, in its record or with a reason."""

import random
from collections import Counter

import pytest

from hatrack import Record, run
from hatrack.clusters.engine import Failed
from hatrack.clusters.fleet import Fleet
from hatrack.clusters.jobs import Result, read_files, write_files
from hatrack.clusters.plan import Plan
from hatrack.clusters.status import status, summary, write_page
from hatrack.experiments.run import folder_of
from hatrack.methods.divergence import Diverged
from hatrack.training.checkpoint import Stopped, stopping
from tests.helpers.fleets import DriverKilled, SimulatedEngine, names_in
from tests.helpers.runs import small


@pytest.fixture(scope="module")
def template():
    return run(small())


def sail(engine, runs, out, **how):
    todo = {one.name: one for one in runs}
    with Plan(out, "simulated", todo, write_page) as plan:
        return Fleet(todo, out, {}, engine, lambda *_: None, plan, **how).run()


def a_week(template, out, count, workers, kills):
    """Runs that take a week on these workers, failures of 1 % per worker and hour, and a driver that is killed."""
    runs = [small(seed=seed) for seed in range(count)]
    draw = random.Random(3)
    mean = 168 * workers / count
    hours = {one.name: draw.uniform(0.5, 1.5) * mean for one in runs}
    ends, worked, now, latest = Counter(), 0.0, 0.0, {}
    for dies in [*kills, float("inf")]:
        engine = SimulatedEngine(workers, hours, template, failures=0.01, seed=int(now), now=now, driver_dies_at=dies)
        try:
            found = sail(engine, runs, out)
        except DriverKilled:
            found = {}
        ends.update(engine.to_the_end)
        worked, now = worked + engine.worked, engine.now
        latest.update(engine.lost)
    return runs, hours, found, ends, worked, now, latest


def check_week(runs, hours, found, ends, worked, now, lost, out):
    assert all(isinstance(found[one.name], Record) for one in runs)
    assert names_in(out, ".json") == {one.name for one in runs}
    assert not names_in(out, ".part")
    assert not names_in(out, ".lock")
    assert max(ends.values()) == 1, "a run came to its end twice"
    assert sum(lost.values()) > 0, "nothing failed, so nothing was tested"
    assert worked < 1.1 * sum(hours.values()), "lost work is what was done since the last save"


def test_a_week_of_failures(tmp_path, template):
    found = a_week(template, tmp_path, 120, 8, [])
    check_week(*found, tmp_path)
    assert summary(status(tmp_path)) == "120 done"
    page = (tmp_path / "status.html").read_text()
    assert "120 done" in page
    assert page.count("<tr>") == 120


@pytest.mark.slow
def test_a_simulated_week_of_2000_runs_on_64_workers(tmp_path, template):
    """Control: without retries some runs have no record."""
    found = a_week(template, tmp_path, 2000, 64, [])
    check_week(*found, tmp_path)


def test_a_driver_that_is_killed_goes_on(tmp_path, template):
    """What was saved before is not done again; runs under way were killed with the driver and go on from their states."""
    found = a_week(template, tmp_path, 60, 4, [30.0, 77.7])
    check_week(*found, tmp_path)


def test_without_retries_a_lost_worker_is_the_reason(tmp_path, template):
    runs = [small(seed=seed) for seed in range(20)]
    engine = SimulatedEngine(4, {one.name: 50.0 for one in runs}, template, failures=0.02, retries=0)
    found = sail(engine, runs, tmp_path)
    failed = [name for name, outcome in found.items() if isinstance(outcome, Failed)]
    assert 0 < len(failed) < 20
    assert names_in(tmp_path, ".json") == found.keys() - set(failed)
    for one in status(tmp_path):
        assert (one.state, one.text) == (("failed", "its worker was lost too often") if one.name in failed else ("done", ""))
    again = SimulatedEngine(4, {one.name: 50.0 for one in runs}, template)
    assert all(isinstance(outcome, Record) for outcome in sail(again, runs, tmp_path).values())
    assert set(again.to_the_end) == set(failed), "only those without a record are run"
    assert not names_in(tmp_path, ".part"), "a reason outlives its run"


def test_a_node_with_a_full_disk_is_avoided(tmp_path, template):
    runs = [small(seed=seed) for seed in range(12)]
    engine = SimulatedEngine(3, {one.name: 1.0 for one in runs}, template, full=frozenset({"node-1"}))
    with pytest.warns(UserWarning, match="No space left on device, on node node-1"):
        found = sail(engine, runs, tmp_path)
    assert all(isinstance(outcome, Record) for outcome in found.values())


def test_where_all_disks_are_full_the_reason_is_told(tmp_path, template):
    runs = [small(seed=seed) for seed in range(3)]
    engine = SimulatedEngine(5, {one.name: 1.0 for one in runs}, template, full=frozenset(f"node-{k}" for k in range(5)))
    with pytest.warns(UserWarning, match="No space left on device"):
        found = sail(engine, runs, tmp_path)
    assert {type(outcome) for outcome in found.values()} == {Failed}
    assert all("No space left" in one.text for one in status(tmp_path))


def test_where_no_other_node_is_left_the_reason_is_told_at_once(tmp_path, template):
    """Fewer nodes than moves are allowed: an engine that avoids all of them would wait for ever."""
    runs = [small(seed=seed) for seed in range(3)]
    engine = SimulatedEngine(2, {one.name: 1.0 for one in runs}, template, full=frozenset({"node-0", "node-1"}))
    with pytest.warns(UserWarning, match="No space left on device"):
        found = sail(engine, runs, tmp_path)
    assert {type(outcome) for outcome in found.values()} == {Failed}
    assert all("No space left" in one.text for one in status(tmp_path))


def test_a_run_that_diverges_leaves_the_others(tmp_path, template, monkeypatch):
    runs = [small(seed=seed) for seed in range(4)]
    finish = SimulatedEngine._finish

    def diverge(self, handle, node, result):
        bad = self.jobs[handle][0].name == runs[2].name
        finish(self, handle, node, Result("diverged", "the loss is nan", node=node) if bad else result)

    monkeypatch.setattr(SimulatedEngine, "_finish", diverge)
    found = sail(SimulatedEngine(2, {one.name: 1.0 for one in runs}, template), runs, tmp_path)
    assert isinstance(found.pop(runs[2].name), Diverged)
    assert {type(outcome) for outcome in found.values()} == {Record}
    assert [one.text for one in status(tmp_path) if one.state == "failed"] == ["the loss is nan"]


def test_a_run_of_another_process_is_not_taken(tmp_path, template):
    runs = [small(seed=seed) for seed in range(3)]
    with folder_of(runs[1], tmp_path):
        found = sail(SimulatedEngine(2, {one.name: 1.0 for one in runs}, template), runs, tmp_path)
        assert {one.name: one.state for one in status(tmp_path)}[runs[1].name] == "running"
    assert "another process" in str(found[runs[1].name])
    assert "failed" not in [one.state for one in status(tmp_path)], "that it is run elsewhere is no failure of it"
    assert not (tmp_path / f"{runs[1].name}.json").exists()


def test_while_a_fleet_has_a_run_no_other_process_does(tmp_path, template):
    runs, seen = [small(seed=seed) for seed in range(3)], []

    class Looking(SimulatedEngine):
        def take(self):
            seen.extend(one.state for one in status(tmp_path))
            seen.append(folder_of(runs[0], tmp_path).blocked if self.now == 0 else "")
            return super().take()

    sail(Looking(1, {one.name: 1.0 for one in runs}, template), runs, tmp_path)
    assert any("is being run by another process" in said for said in seen)
    assert {"queued", "waiting"} & set(seen)


def test_a_stop_saves_all(tmp_path, template):
    runs = [small(seed=seed) for seed in range(6)]

    class Stopping(SimulatedEngine):
        def take(self):
            if self.now >= 1.0:
                stopping.set()
            return super().take()

        def stop(self):
            super().stop()
            for _, _, handle, _, node, *_ in self.busy:
                files = {f"{self.jobs[handle][0].name}.part/task-0.safetensors": b"0.5"}
                self._finish(handle, node, Result("stopped", files=files, node=node))
            self.busy.clear()

    try:
        with pytest.raises(Stopped):
            sail(Stopping(2, {one.name: 1.0 for one in runs}, template), runs, tmp_path)
    finally:
        stopping.clear()
    states = Counter(one.state for one in status(tmp_path))
    assert states["done"] >= 1
    assert states["stopped"] >= 1
    assert not states["running"]


def test_files_of_a_run_travel_whole(tmp_path):
    one = small()
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    with folder_of(one, tmp_path / "here") as here, folder_of(one, tmp_path / "there") as there:
        files = {f"{one.name}.part/task-1.safetensors": b"1", f"{one.name}.task-1.safetensors": b"model"}
        write_files(here, files)
        assert read_files(here) == files
        write_files(there, read_files(here))
        write_files(there, {f"{one.name}.part/task-2.safetensors": b"2"}, [f"{one.name}.part/task-2.safetensors"])
        assert read_files(there) == {f"{one.name}.part/task-2.safetensors": b"2", f"{one.name}.task-1.safetensors": b"model"}
        with pytest.raises(AssertionError):
            write_files(there, {f"{one.name}.part/../../x": b""})
        here.remove_states()
        there.remove_states()
