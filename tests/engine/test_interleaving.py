"""Interleaved runs on a machine without a GPU: torch.cuda is replaced by stand-ins, the GPU's generator is the real one."""

import contextlib
import signal
import threading
import time

import pytest
import torch

from hatrack.engine import interleaving
from hatrack.experiments import parallel
from hatrack.training.checkpoint import Stopped, stopping

GPU = torch.device("cuda")


class Generator:
    def clone_state(self):
        return Generator()

    def graphsafe_set_state(self, state):
        pass

    def graphsafe_get_state(self):
        return self


class Stream:
    fails = False

    def synchronize(self):
        if self.fails:
            raise RuntimeError("CUDA error")


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "default_generators", [Generator()])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: Stream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(interleaving, "STEPS", 1)


def test_each_run_draws_what_it_would_draw_alone():
    """However many are under way, and whichever began late: five runs, three at a time."""

    def run(number):
        drawn = []
        for _ in range(3 + number):
            drawn.append(torch.rand(()).item())
            interleaving.step_done()
        interleaving.wait_for_gpu()
        return [*drawn, torch.rand(()).item()]

    torch.manual_seed(7)
    outside = torch.get_rng_state()
    together = interleaving.run_interleaved([lambda n=n: run(n) for n in range(5)], GPU, 3)
    assert torch.equal(torch.get_rng_state(), outside)
    for number, drawn in enumerate(together):
        torch.manual_seed(7)
        assert drawn == run(number)


def test_runs_side_by_side_are_not_stacked_when_one_of_them_has_ended():
    """A run that has its record already ends at once."""
    seen = []

    def run(number):
        for _ in range(20 * number):
            interleaving.step_done()
        seen.append(interleaving.stacking())

    interleaving.run_interleaved([lambda n=n: run(n) for n in range(3)], GPU, 3)
    assert seen == [None, None, None]
    interleaving.run_interleaved([lambda n=n: run(n) for n in range(3)], GPU, 3, stack=True)
    assert seen[3:] == [[], [], []]


def test_only_one_run_executes_python_at_a_time():
    at_once, most = 0, []

    def run():
        nonlocal at_once
        for _ in range(20):
            at_once += 1
            time.sleep(0.0005)
            most.append(at_once)
            at_once -= 1
            interleaving.step_done()

    interleaving.run_interleaved([run] * 4, GPU, 4)
    assert max(most) == 1


def test_the_first_error_is_raised_and_nothing_begins_after_it():
    begun = []

    def fails(number):
        begun.append(number)
        interleaving.step_done()
        raise ValueError(f"run {number} is broken")

    with pytest.raises(ValueError, match="run 0 is broken"):
        interleaving.run_interleaved([lambda n=n: fails(n) for n in range(6)], GPU, 2)
    assert begun in ([0], [0, 1])


def test_a_wait_that_fails_releases_the_scheduler_once(monkeypatch):
    busy, most = threading.Semaphore(1), []

    def fails():
        for _ in range(5):  # until the others wait for the scheduler
            time.sleep(0.002)
            interleaving.step_done()
        monkeypatch.setattr(Stream, "fails", True)
        interleaving.wait_for_gpu()

    def goes_on():
        for _ in range(30):
            most.append(busy.acquire(blocking=False))
            time.sleep(0.001)
            busy.release()
            interleaving.step_done()

    with pytest.raises(RuntimeError, match="CUDA error"):
        interleaving.run_interleaved([fails, goes_on, goes_on], GPU, 3)
    assert all(most)


def test_if_one_fails_the_others_save_and_stop():
    steps = []

    def fails():
        interleaving.step_done()
        raise ValueError("broken")

    def goes_on():
        for step in range(1000):
            if stopping.is_set():  # as a checkpointer does
                raise Stopped("saved")
            steps.append(step)
            interleaving.step_done()

    with pytest.raises(ValueError, match="broken"):
        parallel._in_threads([fails, goes_on, goes_on], GPU, 3)
    assert len(steps) < 10
    assert not stopping.is_set(), "later runs go on"


def test_if_somebody_asks_for_an_end_all_stop():
    def goes_on(number):
        for step in range(1000):
            if number == 0 and step == 3:
                stopping.set()
            if stopping.is_set():
                raise Stopped("saved")
            interleaving.step_done()

    try:
        with pytest.raises(Stopped, match="saved"):
            parallel._in_threads([lambda n=n: goes_on(n) for n in range(3)], GPU, 3)
        assert stopping.is_set()
    finally:
        stopping.clear()


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="no signals for threads")
def test_a_signal_that_another_thread_gets_is_handled_while_runs_go_on():
    """Only the main thread executes handlers, and it slept until all runs had ended: a request to stop was not seen."""
    seen = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: seen.set())

    def learn():
        time.sleep(0.5)  # until the main thread waits
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        with interleaving.others_run():
            return seen.wait(10)

    try:
        assert interleaving.run_interleaved([learn, learn], torch.device("cpu"), 2) == [True, True]
    finally:
        signal.signal(signal.SIGTERM, before)
