"""Certificates: what shows that finished tasks are, bit for bit, what they were, without trusting who trained since.

A certificate has, per finished task, the digest of all that the task uses (weights, gates, norms, head, preprocessing), its
target, which says what `predict` makes of its outputs, and its answers on the example images of the network.
`compare_certificates` compares the certificate of a method with that of an earlier one.
"""

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hatrack._version import __version__
from hatrack.files import schema, tensors
from hatrack.files.atomic import read_bytes, write
from hatrack.methods import METHODS
from hatrack.methods.guarantees import digest, logits
from hatrack.tasks.targets import CLASSES

if TYPE_CHECKING:
    from hatrack.methods.method import Method

KIND, FORMAT = "hatrack certificate", 1
# How far answers may differ, as a share of the largest of them. They are equal if they are computed in the same way; the
# last bits depend on the machine, the build of torch and the number of threads, and products in TF32 are a hundredth off.
TOLERANCE, SAME_CONDITIONS = 1e-2, 1e-5
CONDITIONS = ("torch", "system", "device", "processor", "threads", "tf32")  # in `versions`: what decides the last bits
TASK = schema.fields(
    {
        "number": schema.number(0, 2**40, whole=True),
        "name": schema.text,
        "digest": schema.text,
        "answers": schema.items(schema.items(schema.number(-1e39, 1e39, null=True))),
    },
    {"target": schema.table(lambda *_: None)},  # certificates of version 0.1 have none
)
TASKS = schema.fields({"tasks": schema.items(TASK)}, {"versions": schema.table(schema.text)})  # what a comparison reads
FIELDS = schema.fields({
    "kind": schema.text,
    "format": schema.number(1, 2**31, whole=True),
    "method": schema.text,
    "options": schema.table(schema.plain),
    "tasks": schema.items(TASK),
    "versions": schema.table(schema.text),
    "digest": schema.text,
})  # fmt: skip


@torch.no_grad()
def certificate(method: "Method") -> dict[str, Any]:
    """Return the certificate of a method: plain values, which JSON can hold.

    Args:
        method: a method that guarantees its finished tasks, such as HAT, PMASK or PackNet.

    Returns:
        The certificate. `digest` covers everything else in it, so that a change of the certificate itself is noticed.

    Raises:
        ValueError: if the method guarantees nothing, or has learned nothing.
    """
    digests = {task: digest(method, task) for task in method.history}
    if not digests:
        raise ValueError("nothing has been learned, so there is nothing to certify")
    if not all(digests.values()):
        kind = METHODS.name_of(type(method))
        raise ValueError(f"{kind} does not guarantee that finished tasks stay as they are, so it can't certify them")
    net = method.net
    targets = {task: {"outputs": net.classes[task], **net.targets.get(task, CLASSES).to_dict()} for task in digests}
    return certificate_of(
        method,
        [entry(task, name, digests[task], targets[task], logits(method, task)) for task, name in method.history.items()],
    )


def entry(number: int, name: str, digest: str, target: Mapping[str, Any], answers: torch.Tensor) -> dict[str, Any]:
    """Return what a certificate has of a finished task."""
    return {"number": number, "name": name, "digest": digest, "target": dict(target), "answers": _plain(answers)}


def certificate_of(method: "Method", tasks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the certificate of a method with these entries, see `entry`."""
    return signed({
        "kind": KIND,
        "format": FORMAT,
        "method": METHODS.name_of(type(method)),
        "options": json.loads(json.dumps(method.options)),
        "tasks": tasks,
        "versions": {
            "hatrack": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            **_conditions(method.net.example.device),
        },
    })  # fmt: skip


def _conditions(device: torch.device) -> dict[str, str]:
    """Return what decides, beside the version of torch, the last bits of answers on a device."""
    gpu = device.type == "cuda"
    torch_flags: Any = torch.backends
    products = (torch_flags.cuda.matmul, torch_flags.cudnn.conv) if gpu else ()
    flags = [part.fp32_precision == "tf32" for part in products]  # `allow_tf32` can't be read if a user has set this one
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name(device) if gpu else device.type,
        "processor": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "tf32": " ".join(map(str, flags)),
    }


def _plain(answers: torch.Tensor) -> list[list[float | None]]:
    """Return logits as nested lists; None in place of numbers that JSON has not."""
    rows: list[list[float]] = answers.double().tolist()
    return [[value if abs(value) < float("inf") else None for value in row] for row in rows]


def signed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a certificate with the digest of its content."""
    plain = {key: value for key, value in content.items() if key != "digest"}
    return {**plain, "digest": tensors.digest({}, json.dumps(plain, sort_keys=True))}


def save_certificate(found: Mapping[str, Any], path: Path | str) -> None:
    """Write a certificate to a JSON file, whole or not at all."""
    write(Path(path), json.dumps(found, indent=1) + "\n", follow=False)


def load_certificate(path: Path | str) -> dict[str, Any]:
    """Read a certificate from a JSON file; raise a ValueError in one line if it is none, or was changed."""
    path = Path(path)
    try:
        found = json.loads(read_bytes(path).decode())
        FIELDS("", found)
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a certificate: it is not text, and not a model of hatrack either") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a certificate: {' '.join(str(error).split())}") from None
    if found["kind"] != KIND or found["format"] > FORMAT:
        raise ValueError(f"{path} is not a certificate that this version can read")
    if found != signed(found):
        raise ValueError(f"{path}: the certificate was changed after it was written")
    numbers = [task["number"] for task in found["tasks"]]
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(f"{path} is not a certificate: it has no task, or one twice")
    return dict(found)


@dataclass(frozen=True)
class Comparison:
    """What became of the tasks of an old certificate in a new one, by the names of the tasks.

    Attributes:
        same: tasks that use the same bits.
        changed: tasks that use other bits, have another target, or give other answers on the example: then the code of the
            trunk differs.
        missing: tasks that are gone, or have another number.
        added: tasks that only the new one has.
    """

    same: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)

    @property
    def kept(self) -> bool:
        """Whether every old task is there and unchanged."""
        return not (self.changed or self.missing)


def compare_certificates(new: Mapping[str, Any], old: Mapping[str, Any]) -> Comparison:
    """Compare two certificates task by task: digests and targets exactly, answers on the example to a tolerance.

    Answers may differ by 1e-5 of the largest if both certificates were made with the same version of torch on the same
    kind of device and processor, with as many threads, and by 1e-2 otherwise.

    Args:
        new: what `certificate` returns for the later method.
        old: the certificate of the earlier one.

    Returns:
        The names of the tasks that are the same, changed, missing and added.

    Raises:
        ValueError: one of them is no certificate.

    Example:
        >>> method = hr.HAT(hr.Network(trunk, tasks=tasks))
        >>> result = method.learn(tasks[0], hr.Trainer(hr.Regime(epochs=2)))
        >>> before = method.certificate()
        >>> result = method.learn(tasks[1], hr.Trainer(hr.Regime(epochs=2)))
        >>> hr.compare_certificates(method.certificate(), before)
        Comparison(same=['digits'], changed=[], missing=[], added=['signs'])
    """
    _check_tasks("new", new)
    _check_tasks("old", old)
    now = {(task["number"], task["name"]): task for task in new["tasks"]}
    then = {(task["number"], task["name"]): task for task in old["tasks"]}
    result = Comparison(added=[key[1] for key in now if key not in then])
    one, two = new.get("versions", {}), old.get("versions", {})
    alike = all(name in one and one[name] == two.get(name) for name in CONDITIONS)
    share = SAME_CONDITIONS if alike else TOLERANCE
    for key, before in then.items():
        place = result.missing if key not in now else result.same if _same(now[key], before, share) else result.changed
        place.append(key[1])
    return result


def _check_tasks(which: str, found: Any) -> None:
    """Raise a ValueError in one line if this has no tasks as a certificate has them."""
    try:
        TASKS("", found)
    except ValueError as error:
        raise ValueError(f"the {which} certificate is none, method.certificate() returns one: {error}") from None


def _same(now: Mapping[str, Any], then: Mapping[str, Any], share: float) -> bool:
    """Return whether a task uses the same bits, has the same target and gives the same answers, but for a share of the
    largest of them."""
    if now.get("target", then.get("target")) != then.get("target", now.get("target")):  # where both certificates have it
        return False
    if now["digest"] != then["digest"] or list(map(len, now["answers"])) != list(map(len, then["answers"])):
        return False
    pairs = [pair for both in zip(now["answers"], then["answers"], strict=True) for pair in zip(*both, strict=True)]
    bound = share * max([1.0, *(abs(b) for _, b in pairs if b is not None)])
    return all(a is b is None or (a is not None and b is not None and abs(a - b) <= bound) for a, b in pairs)
