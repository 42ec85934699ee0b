"""Compile the steps of a run's tasks ahead, in helper processes (`engine/helpers.py`).

A helper gets no data. It builds the method of the run on random images of the same shapes, takes one step, whose operations
are then those of the run, and compiles it. Of runs that are stacked it compiles the step of the stack.
"""

import gc
import json
import multiprocessing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from hatrack._version import __version__
from hatrack.engine import helpers
from hatrack.engine.choice import Precision
from hatrack.engine.compiled import import_compiler
from hatrack.engine.interleaving import is_interleaved, lane_count, run_interleaved, stacking
from hatrack.engine.precision import precision_scope
from hatrack.engine.recorded import own_stream
from hatrack.experiments.build import build_method, build_trunk
from hatrack.experiments.spec import Run, step_spec
from hatrack.methods.fit import EpochResult, FitResult
from hatrack.methods.method import Method
from hatrack.regime import Regime
from hatrack.tasks.batches import count_batches
from hatrack.tasks.device import all_to_device
from hatrack.tasks.split import Split
from hatrack.tasks.targets import CLASSES
from hatrack.tasks.task import Task
from hatrack.tasks.transform import Transform
from hatrack.training.checkpoint import stopping
from hatrack.training.epoch_sizes import max_steps, room_for_losses
from hatrack.training.paddings import fades, is_ours
from hatrack.training.trainer import Trainer

PACE = {  # options of a regime that change no operation of a step
    "epochs", "lr", "schedule", "patience", "factor", "floor", "gamma", "every", "restore", "task_lr_decay", "task_lr_floor",
    "on_divergence", "steps", "warmup", "best_by", "stop_after",
}  # fmt: skip


def form_of(task: Task, spec: Run, method: type[Method]) -> dict[str, Any]:
    """Return everything about a task that the operations and shapes of its step depend on, for JSON, and whether its head
    has room for the classes of all tasks (`FitLoop._paddings`)."""
    split, regime = task.train, spec.regime.at(task.index)
    pixels = split.transform.pixels
    own_head = spec.heads == "multi" and spec.scenario != "class" and is_ours(method)
    plain = split.target.smoothed(regime.smoothing) is CLASSES and not fades(regime, max_steps(task, regime))
    return {
        "classes": task.classes,
        "first": task.first,
        "examples": min(len(split), 2 * regime.batch),  # enough for one whole batch
        "room": room_for_losses(count_batches(len(split), regime.batch)),
        "raw": list(split.x.shape[1:]),
        "type": str(split.x.dtype).removeprefix("torch."),
        "shape": list(split.transform.shape),
        "channels": split.transform.mean.shape[1],
        "pixels": None if pixels is None else pixels.shape[1],
        "augment": split.augment,
        "padded": own_head and plain,
    }


def stacked_form_of(task: Task, spec: Run, method: type[Method]) -> dict[str, Any]:
    """Return the same of a step in a stack, where the pixels of images are moved already (`Split.laid_out`)."""
    form = form_of(task, spec, method)
    moved = {"raw": form["shape"], "pixels": None} if form["pixels"] is not None else {}
    return {**form, **moved}


def imitate(index: int, form: dict[str, Any]) -> Task:
    """Return a task of random images that has this form."""
    count, kind, source = form["examples"], getattr(torch, form["type"]), torch.Generator().manual_seed(index)
    raw, channels = (count, *form["raw"]), form["channels"]
    images = torch.rand(raw, generator=source).to(kind) if kind.is_floating_point else torch.randint(
        0, 256 if kind == torch.uint8 else 1, raw, dtype=kind, generator=source  # any network knows the token 0
    )  # fmt: skip
    values = max(1, images[0].numel())
    pixels = None if form["pixels"] is None else (torch.arange(form["pixels"]) % values)[None]
    transform = Transform(tuple(form["shape"]), torch.zeros(1, channels), torch.ones(1, channels), pixels)
    split = Split(
        images, form["first"] + torch.arange(count) % form["classes"], index, transform, torch.arange(count), form["augment"]
    )
    return Task(index, f"random images {index}", form["classes"], split, split, split, form["first"])


@dataclass
class Ahead:
    """The steps of a run that are compiled ahead.

    Attributes:
        names: the name of the job of every task, by the number of the task, but for the number of lanes.
        jobs: what a helper needs for it.
        lanes: how many lanes the run's stacks have at first; 0 if it is not stacked.
        taken: the names of the jobs of steps that the run has taken, with the number of lanes.
    """

    names: list[str]
    jobs: list[dict[str, Any]]
    lanes: int
    taken: set[str] = field(default_factory=set)

    def start(self, task: int, lanes: int) -> None:
        """Let a helper compile the step of a task, unless that was done before."""
        name = f"{self.names[task]} {lanes}"
        if not helpers.is_known(name):
            helpers.start(name, compile_step, {**self.jobs[task], "lanes": lanes})

    def wait(self, task: Task, lanes: int) -> None:
        """Wait until the step of a task is compiled, if a helper does that, or until the run is asked to stop."""
        if lanes != self.lanes:  # runs of its kind have ended
            self.start(task.index, lanes)
        name = f"{self.names[task.index]} {lanes}"
        self.taken.add(name)
        helpers.wait(name, stopping.is_set)

    def remember(self) -> None:
        """Note that the steps that the run has taken, all of them compiled, are in the compiler's cache."""
        for name in self.taken:
            helpers.remember(name)


def compile_ahead(
    spec: Run, tasks: list[Task], method: type[Method], device: torch.device, precision: Precision
) -> Ahead | None:
    """Let helpers compile the steps of a run's tasks; they begin before the run has built its own method.

    Each form is compiled by one helper. A run that is alone compiles the step of its first task itself at the same time.

    Returns:
        None if there are no helpers: with few processors, within one, and for methods whose every task has its own form.
    """
    if helpers.COUNT < 1 or method.step_forms == "many" or multiprocessing.parent_process() is not None:
        return None
    lanes = 0 if stacking() is None else lane_count()
    plain = step_spec(spec)
    plain["regime"] = {key: value for key, value in plain["regime"].items() if key not in PACE}
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    setting = [plain, where, precision, torch.get_num_threads(), torch.__version__, __version__]
    forms = [(stacked_form_of if lanes else form_of)(task, spec, method) for task in tasks]
    most, two = max(task.classes for task in tasks), method.step_forms == "two"
    heads = [{**form, "classes": most} if form["padded"] else form for form in forms]
    names = [json.dumps([*setting, form, two and k == 0], sort_keys=True) for k, form in enumerate(heads)]
    job = {
        "spec": {**spec.spec, "network": spec.network, "weights": spec.weights}, "tasks": forms, "device": device.type,
        "precision": precision, "threads": torch.get_num_threads(),
    }  # fmt: skip
    ahead = Ahead(names, [{**job, "order": [0, k] if two and k else [k]} for k in range(len(tasks))], lanes)
    for k, name in enumerate(names):
        if is_interleaved() or name != names[0]:
            ahead.start(k, lanes)
    return ahead


# In a helper


class OneStep(Trainer):
    """Takes one step of every fit; the step of the last task is compiled.

    Args:
        regime: the regime of the run.
        forms: the forms of the tasks.
        last: the number of the task whose step is compiled.
        lanes: how many lanes the stack has whose step it is; 0 for a step alone.
    """

    def __init__(self, regime: Regime, forms: list[dict[str, Any]], last: int, lanes: int = 0) -> None:
        super().__init__(regime, progress=False, engine="eager")
        self.forms, self.last, self.lanes = forms, last, lanes

    def __call__(
        self, method: Method, task: Task, *, plain: dict[nn.Parameter, float] | None = None, **changes: Any
    ) -> FitResult:
        self.engine = "compiled" if task.index == self.last else "eager"
        device = method.net.example.device
        with own_stream(device):
            loop = self.start(method, task, plain=plain, **changes)
            loop.losses = torch.zeros(self.forms[task.index]["room"], device=device)
            whole = loop.compiled.size if loop.compiled else len(task.train)
            method.train()
            index, number = torch.arange(whole, device=device), torch.zeros((), dtype=torch.int64, device=device)
            if loop.compiled and not self.forms[task.index]["padded"]:
                loop.compiled.paddings = tuple  # as in the run, where a decay may be stronger than in so few steps
            if loop.compiled and loop.stacked:
                loop.stacked.make_form(index, number, self.lanes, padded_too=self.forms[task.index]["padded"])
            else:
                loop.step_on(*loop.prefetcher.split.fetch(index), number)
            if loop.compiled and loop.compiled.failed:
                raise RuntimeError("the step can't be compiled")
            loop.result.epochs.append(EpochResult(loop.regime.lr, 0.0, None, None))  # for methods that read the last one
            return loop.close()


def compile_step(job: dict[str, Any]) -> None:
    """Take one step of the given tasks of a run and compile that of the last one."""
    spec, device = Run.from_spec(job["spec"], own=[job["spec"]["method"]]), torch.device(job["device"])
    torch.set_num_threads(job["threads"])
    import_compiler()  # while the method is built
    if job["lanes"]:
        run_interleaved([partial(_learn, spec, device, job)], device, 1, stack=True)
    else:
        _learn(spec, device, job)
    gc.collect()  # the helper may have another job
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _learn(spec: Run, device: torch.device, job: dict[str, Any]) -> None:
    """Learn random images."""
    tasks = all_to_device([imitate(k, form) for k, form in enumerate(job["tasks"])], device)
    with precision_scope(job["precision"], device):
        method = build_method(spec, tasks, build_trunk(spec, tasks), device)
        fit = OneStep(spec.regime, job["tasks"], job["order"][-1], job["lanes"])
        for k in job["order"]:
            method.learn(tasks[k], fit)
