"""Writing the network of one task into a file. Imported when `hatrack export` begins: it needs torch."""

import io
import json
import logging
import re
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import save
from torch import Tensor, fx

from hatrack.cli.export import FORMATS
from hatrack.cli.trunks import load_model
from hatrack.files.atomic import write
from hatrack.methods.extraction.extract import COARSE, TOLERANCE, difference
from hatrack.methods.extraction.raw import raw_example
from hatrack.methods.method import Method
from hatrack.options import nearest
from hatrack.text import say

REPEATS = 20  # measurements of time, of which the median is shown
IMAGES = 64  # in a batch that is timed


def export(model: Path, task: str, kind: str, out: Path | None, trunk: str, own: str, floats: bool) -> None:
    """Write the network of one task of a saved model, compare it with the model, and print its size and its time.

    Args:
        model: the file of the model.
        task: the name of a task, or its number.
        kind: the format, one of FORMATS.
        out: the file to write; by default beside the model.
        trunk: the place of a function that makes the model's trunk, "module:name"; "" if the file says it.
        own: the place of the class of its method, "module:name"; "" if it is one of the library's.
        floats: whether raw images are floats, not bytes.
    """
    method = load_model(model, trunk, own).eval()
    number = task_number(method, task)
    path = out or model.with_name(f"{model.stem}-{_file_name(method, number)}{FORMATS[kind]}")
    example = raw_example(method.net.preprocessing, number, floats=floats)
    network = method.extract(number, raw=example)
    run = WRITERS[kind](network, example, path)
    _check(method, number, example, run)
    _tell(method, number, network, example, path, run)


def task_number(method: Method, task: str) -> int:
    """Return the number of a learned task by its name, or by its number."""
    found = [number for number, name in method.history.items() if name == task]
    if len(found) > 1:
        raise ValueError(f"--task {task}: several tasks have this name; their numbers are {', '.join(map(str, found))}")
    if found:
        return found[0]
    if task.isdecimal() and int(task) in method.history:
        return int(task)
    raise ValueError(f"--task {task}: no such task was learned; {nearest(task, method.history.values())}")


def _file_name(method: Method, task: int) -> str:
    """Return what the file of a task is called: its name, and its number too if files of two tasks would be called so."""
    names = {number: re.sub(r"[^\w.-]+", "_", name) for number, name in method.history.items()}
    return names[task] if list(names.values()).count(names[task]) == 1 else f"{names[task]}-{task}"


Run = Callable[[Tensor], Tensor]  # what a file computes


def save_torch(network: fx.GraphModule, example: Tensor, path: Path) -> Run:
    """Write a program for `torch.export.load`, and return what it computes when it is read again."""
    program = torch.export.export(network, (example,), dynamic_shapes=({0: torch.export.Dim("images")},))
    content = io.BytesIO()
    torch.export.save(program, content)
    write(path, content.getvalue())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.11 says here that it reads from a buffer that can't be written
        return cast(Run, torch.export.load(io.BytesIO(content.getvalue())).module())


def save_onnx(network: fx.GraphModule, example: Tensor, path: Path) -> Run:
    """Write a model for ONNX, and return what it computes with onnxruntime."""
    try:
        import onnxruntime as runtime  # type: ignore[import-untyped, import-not-found, unused-ignore]
        import onnxscript  # type: ignore[import-untyped, import-not-found, unused-ignore]  # noqa: F401
    except ImportError as error:
        raise ValueError(f'--format onnx needs {error.name}: pip install "hatrack[onnx]"') from error
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), _quiet(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # of torch's own code
        file = Path(folder) / "network.onnx"
        try:
            torch.onnx.export(
                network,
                (example,),
                file,
                dynamo=True,
                external_data=False,
                input_names=["images"],
                output_names=["logits"],
                dynamic_shapes=({0: torch.export.Dim("images")},),
            )
        except torch.onnx.OnnxExporterError as error:
            reason = (str(error.__cause__ or error).strip() or type(error).__name__).partition("\n")[0]
            raise ValueError(f"torch can't write this network for ONNX ({reason}); --format torch may be able to") from error
        write(path, file.read_bytes())
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what torch's exporter logs below an error, such as which other libraries are not installed, to itself."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def save_tensors(network: fx.GraphModule, example: Tensor, path: Path) -> Run:
    """Write the tensors of a network, with the code of its graph as text, and return what the network computes."""
    about = {"format": "pt", "code": network.code, "shape": json.dumps(list(example.shape[1:])), "type": str(example.dtype)}
    write(path, save({name: tensor.contiguous() for name, tensor in network.state_dict().items()}, about))
    return network


WRITERS = {"torch": save_torch, "onnx": save_onnx, "safetensors": save_tensors}


@torch.no_grad()
def _check(method: Method, task: int, images: Tensor, run: Run) -> None:
    """Raise an error if the file computes other logits than the model."""
    images = torch.cat([images, images.flip(0), images[:1]])  # another number than the example has
    wanted = method(method.net.preprocess(images, task), task)
    found = difference(run(images), wanted)
    if not found <= TOLERANCE.get(wanted.dtype, COARSE):
        raise ValueError(f"the file computes other logits than the model: they differ by {found:.1e} of the largest")
    say(f"logits equal those of the model to rounding: the largest difference is {found:.1e} of the largest logit")


@torch.no_grad()
def _tell(method: Method, task: int, network: fx.GraphModule, example: Tensor, path: Path, run: Run) -> None:
    """Print the size and the time of a network, and those of the whole one."""
    numbers = cast(dict[str, int], network.extraction)
    whole, served = numbers["weights_before"], method.for_task(task)
    size = next(p for p in served.parameters()).element_size()
    say(f"weights: {numbers['weights']:,} of {whole:,}")
    say(f"file: {path.stat().st_size:,} bytes; the weights of the whole network: {whole * size:,} bytes")
    if numbers["zeros_left"]:
        say(f"{numbers['zeros_left']:,} channels are always 0 and could not be cut")

    def full(images: Tensor) -> Tensor:
        return cast(Tensor, served(method.net.preprocess(images, task)))

    for count in (1, IMAGES):
        images = example[:1].expand(count, *example.shape[1:]).contiguous()
        own, before = milliseconds(run, images), milliseconds(full, images)
        noun = "image" if count == 1 else "images"
        say(f"{count} {noun}: {own:.2f} ms, the whole network {before:.2f} ms ({before / own:.1f} times)")
    kind = str(example.dtype).removeprefix("torch.")
    hint = "; if the task was learned from floats, export it with --floats" if kind == "uint8" else ""
    say(f"{path} takes images of shape {tuple(example.shape[1:])} and type {kind}{hint}")


def milliseconds(run: Run, images: Tensor) -> float:
    """Return the median time of a call, in milliseconds."""
    run(images)
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run(images)
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)
