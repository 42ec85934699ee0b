"""Ray as the engine of a fleet: a task per run, with Ray's own places, queues and retries."""

import resource
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from hatrack._version import __version__
from hatrack.clusters.engine import Lost
from hatrack.clusters.jobs import Job, Result
from hatrack.clusters.mailbox import Mailbox, Message
from hatrack.clusters.request import Request
from hatrack.clusters.worker import carry_out
from hatrack.text import printable, shorten

GB = 2**30
AT_LEAST, PER_SLOT = 16, 2  # jobs that are handed over at a time: Ray always has one waiting for every place


class RayEngine:
    """An engine that carries out every job as a task of Ray.

    Args:
        ray: the module, connected to a cluster.
        request: what every run asks for.
    """

    def __init__(self, ray: Any, request: Request) -> None:
        self.ray, self.request = ray, request
        self.node = ray.get_runtime_context().get_node_id()  # that of the driver
        on_this_node = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(self.node, soft=False)
        # The mailbox is on the node of the driver, so that no other node takes it along when it is lost.
        self.mailbox = ray.remote(Mailbox).options(num_cpus=0, scheduling_strategy=on_this_node).remote()
        memory = {"memory": int(request.memory * GB)} if request.memory else {}
        self.task = ray.remote(_work)
        self.asks: dict[str, Any] = {
            "num_cpus": request.cpus,
            "num_gpus": request.gpus,
            "max_retries": request.retries,
            "scheduling_strategy": "SPREAD",
            "name": "hatrack run",
            **memory,
        }
        self.most = _open_files() // 2
        check_places([node["Resources"] for node in ray.nodes() if node["Alive"]], request)

    def submit(self, job: Job, avoid: Iterable[str]) -> Any:
        """Hand a job to Ray, to be carried out on another node than those to avoid."""
        asks, names = dict(self.asks), list(avoid)
        if names:
            asks |= {"label_selector": {"ray.io/node-id": f"!in({','.join(names)})"}, "scheduling_strategy": "DEFAULT"}
        return self.task.options(**asks).remote(job, self.mailbox, __version__)

    def has_others(self, avoid: Iterable[str]) -> bool:
        """Return whether a node besides those to avoid has what a run asks for: Ray would wait for one without a word."""
        names = set(avoid)
        others = [node["Resources"] for node in self.ray.nodes() if node["Alive"] and node["NodeID"] not in names]
        return bool(others) and missing(others, self.request) is None

    def wait(self, handles: list[Any], seconds: float) -> list[Any]:
        """Wait until a job has ended, at most so long."""
        done, _ = self.ray.wait(handles, num_returns=1, timeout=seconds)
        more, _ = self.ray.wait(handles, num_returns=len(handles), timeout=0)
        return list(dict.fromkeys([*done, *more]))

    def result(self, handle: Any) -> Result:
        """Return the result of a job; raise Lost if Ray has given it up."""
        try:
            found: Result = self.ray.get(handle)
        except self.ray.exceptions.RayTaskError as error:
            raise Lost(shorten(printable(error.cause if error.cause else error), 300)) from None
        except self.ray.exceptions.RayError as error:
            kind = type(error).__name__
            tries = self.request.retries + 1
            raise Lost(f"its worker was lost {tries} times, the last time by {kind}; too little memory?") from None
        return found

    def take(self) -> list[Message]:
        """Return new messages of workers."""
        found: list[Message] = self._get(self.mailbox.take.remote())
        return found

    def give(self, name: str, attempt: int, content: Any) -> None:
        """Answer the question of a worker."""
        self.mailbox.give.remote(name, attempt, content)

    def stop(self) -> None:
        """Ask all workers to save and stop."""
        self._get(self.mailbox.stop.remote())

    def _get(self, call: Any) -> Any:
        """Return what a call of the mailbox returns; raise a ValueError if the cluster is gone."""
        try:
            return self.ray.get(call)
        except self.ray.exceptions.RayError as error:
            raise ValueError(
                f"the node of the driver, or the whole cluster of Ray, was lost ({type(error).__name__}); "
                "the same command goes on from what was saved"
            ) from None

    def room(self) -> int:
        """Return how many jobs may be handed over at a time: twice as many as have a place now."""
        return min(self.most, max(AT_LEAST, PER_SLOT * self.places()))

    def places(self) -> int:
        """Return how many jobs the cluster carries out at a time."""
        found = self.ray.cluster_resources()
        places = [found.get("CPU", 0) / self.request.cpus]
        places += [found.get("GPU", 0) / self.request.gpus] if self.request.gpus else []
        return int(min(places))


def check_places(nodes: Iterable[Mapping[str, float]], request: Request) -> None:
    """Raise a ValueError if no node has what a run asks for: Ray would wait for one without a word.

    Args:
        nodes: what each node of the cluster has, in Ray's words.
        request: what every run asks for.
    """
    if found := missing(list(nodes), request):
        option, asked, unit, most = found
        text = f"a run asks for {asked:g} {unit}, but the largest node of the cluster has {most:.4g}"
        raise ValueError(f"{text}; --ask {option}= says how many")


def missing(nodes: Sequence[Mapping[str, float]], request: Request) -> tuple[str, float, str, float] | None:
    """Return what a run asks for and no node has: the option, how much is asked, its unit, and the most of any node."""
    for option, key, unit, size in (("cpus", "CPU", "CPUs", 1), ("gpus", "GPU", "GPUs", 1), ("memory", "memory", "GB", GB)):
        asked, most = getattr(request, option), max((node.get(key, 0.0) for node in nodes), default=0.0) / size
        if asked > most:
            return option, asked, unit, most
    return None


class _Line:
    """The mailbox as a worker on Ray sees it."""

    def __init__(self, ray: Any, mailbox: Any) -> None:
        self.ray, self.mailbox = ray, mailbox

    def begin(self, name: str, node: str) -> tuple[int, bool]:
        found: tuple[int, bool] = self.ray.get(self.mailbox.begin.remote(name, node))
        return found

    def post(self, name: str, attempt: int, kind: str, content: Any) -> bool:
        return bool(self.ray.get(self.mailbox.post.remote(name, attempt, kind, content)))

    def answer(self, name: str, attempt: int) -> tuple[bool, Any]:
        found: tuple[bool, Any] = self.ray.get(self.mailbox.answer.remote(name, attempt))
        return found


def _work(job: Job, mailbox: Any, version: str) -> Result:
    """The task of a run, on a worker of Ray."""
    import ray

    node = ray.get_runtime_context().get_node_id()
    if version != __version__:
        return Result("failed", f"node {node} has hatrack {__version__}, the driver {version}: install the same", node=node)
    return carry_out(job, _Line(ray, mailbox), node)


def _open_files() -> int:
    """Return how many files this process may have open, after asking for as many as are allowed: every lock is one."""
    with suppress(ValueError, OSError):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 2**17)
