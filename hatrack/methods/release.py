"""Release a task: what may be released, and what HAT and PMASK do around giving up the masks of the task."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hatrack.methods.growth.growth import to_present
from hatrack.methods.parts.releasing import note_renewed, warn_of_example, warn_of_traces
from hatrack.options import expect

if TYPE_CHECKING:
    from hatrack.methods.hat import HAT
    from hatrack.methods.method import Method
    from hatrack.methods.pmask import PMASK


def check_release(method: "Method", task: Any, learned: Tensor, erase: Any) -> None:
    """Raise an error in one line if a task can't be released; `learned` says of every task whether it is learned."""
    method.net.check_task_id(task)
    expect("erase", erase, bool, "True or False")  # any text would be true, "no" as well
    done = learned.nonzero().flatten().tolist()
    if int(task) not in done:
        there = f"learned are {', '.join(map(str, done))}" if done else "none is"
        raise ValueError(f"task {task} is not learned, so it has nothing to release; {there}")


@contextmanager
def releasing(method: "HAT | PMASK", task: int, held: Sequence[str], *, erase: bool) -> Iterator[None]:
    """Forget a task, whose masks the block resets, and free what only it uses.

    Args:
        method: the method.
        task: the number of the task.
        held: the parameters that the first task trains and that no other task can change.
        erase: also give new values to all weights that no remaining task uses, and warn of what may hold traces.
    """
    check_release(method, task, method.done, erase)
    method.make_room()
    if erase and method.candidates is None:
        drift = "gates are soft" if method.kind == "soft" else "tasks share their norms"
        warn_of_traces(method, task, held, "" if method.used_by(task) else drift)
    elif erase:
        warn_of_example(method, task)
    method.forget_task(task)
    to_present(method, task)
    method.done[task] = False
    yield
    method.norms.reset(method.net, task)
    method.net.reset_head(task)
    if erase:
        method.net.preprocessing.reset(task)
    method.renew_free_weights(erase=erase)
    if erase or method.initial is not None:
        note_renewed(method, task if erase else None)
