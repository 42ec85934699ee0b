"""Writes the pages of the API reference from the docstrings and signatures of the public names.

python -m dev.api_reference FOLDER
"""

import inspect
import re
import sys
from pathlib import Path
from types import FunctionType
from typing import Annotated, Any, get_args, get_origin

import hatrack as hr
from hatrack.options import Parameter, parameters

PAGES = {  # file: title, what it is about, names
    "learning": (
        "Learning tasks",
        "What a program needs that trains one network on task after task.",
        [
            "Network",
            "lora",
            "Task",
            "Split",
            "Method",
            "Trainer",
            "TensorBoard",
            "WandB",
            "Regime",
            "LearnResult",
            "evaluate",
            "in_scenario",
            "save",
            "load",
            "protect",
            "Guard",
            "load_guard",
        ],
    ),
    "methods": (
        "Methods",
        "Every method is a class. They have the same methods as [`hr.Method`](learning.md#method); here are their options.",
        [hr.METHODS[name].__name__ for name in hr.METHODS if hr.METHODS[name] is not hr.Method],
    ),
    "experiments": (
        "Experiments",
        "Runs, their records, the report, and the tables of names.",
        ["Run", "run", "Record", "records", "report", "METHODS", "BENCHMARKS", "NETWORKS"],
    ),
    "inspection": (
        "Looking inside",
        "What each task uses of a network, and whether old tasks are unchanged: see [Looking inside](../looking_inside.md).",
        ["capacity", "Capacity", "flatness", "Flatness", "compare_certificates"],
    ),
    "extending": (
        "Writing a method",
        "What the file of a method needs: see [Adding a method](../adding_a_method.md).",
        ["Batch", "Fit", "FitResult", "Option", "check", "Diverged"],
    ),
}
SHOWN = {  # what users call of classes that have more for the library's own use
    "Network": ("from_classifier", "add_task", "preprocess"),
    "Task": ("from_arrays", "from_dataset", "shape"),
    "Split": ("inputs",),
    "Method": (
        *(
            "learn",
            "predict",
            "fit_router",
            "route",
            "__call__",
            "usage",
            "for_task",
            "extract",
            "masks",
            "dependencies",
            "grow",
            "certificate",
        ),  # to use one
        *("history", "num_parameters", "kept_bytes"),
        *("forward", "learn_task", "loss", "edit_grads", "constrain"),
        *("on_new_tasks", "end_learning", "used_by"),  # to write one
        *("restore_data", "explain_divergence"),
    ),
    "Trainer": (),
    "TensorBoard": (),
    "WandB": (),
    "Guard": ("learn", "use", "verify", "certificate", "usage", "release", "save", "add_optimizer", "remove"),
    "Capacity": ("free", "forecast"),
    "Regime": (),
}
SECTIONS = {"Args": "Arguments", "Attributes": "Attributes", "Returns": "Returns", "Raises": "Raises", "Example": "Example"}
HEADING = re.compile(rf"^({'|'.join(SECTIONS)})s?:$")
ENTRY = re.compile(r"^(\*{0,2}\w+)(?: \([^)]*\))?: (.*)$")


def markdown(docstring: str) -> str:
    """A docstring in Google style as Markdown."""
    docstring = re.sub(r"docs/([\w/.-]+\.md)", r"[\1](../\1)", docstring)
    lines, out, section = inspect.cleandoc(docstring).splitlines(), [], ""
    for line in lines:
        if found := HEADING.match(line):
            section = found[1]
            out += [] if out and not out[-1] else [""]
            out += [f"**{SECTIONS[section]}**", ""] + (["```python"] if section == "Example" else [])
        elif section and line and not line.startswith(" "):  # text after a section
            out += ["```", "", line] if section == "Example" else ["", line]
            section = ""
        elif section == "Example":
            out.append(line.removeprefix("    "))
        elif section in ("Args", "Attributes", "Raises") and (entry := ENTRY.match(line.removeprefix("    "))):
            out.append(f"- `{entry[1]}`: {entry[2]}")
        else:
            out.append(line.strip() if section == "Returns" else line.removeprefix("    ") if section else line)
    return "\n".join(out + (["```"] if section == "Example" else [])).replace("\n\n```\n", "\n```\n")


def kind(annotation: Any) -> str:
    """A type as it is written; of an option the type alone."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", text).replace("'", '"')


def signature(name: str, function: Any) -> str:
    """How a function or class is called, on one line, or with a line for each parameter."""
    if isinstance(function, type) and (issubclass(function, Exception) or getattr(function, "_is_protocol", False)):
        return name
    found = inspect.signature(function)
    parts = []
    for parameter in found.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not any(p.startswith("*") for p in parts):
            parts.append("*")
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        said = "" if parameter.annotation is parameter.empty else f": {kind(parameter.annotation)}"
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}".replace("<factory>", "...")
        parts.append(f"{stars}{parameter.name}{said}{default}")
    back = found.return_annotation
    end = "" if isinstance(function, type) or back in (found.empty, None) else f" -> {kind(back)}"
    line = f"{name}({', '.join(parts)}){end}"
    return line if len(line) <= 80 else f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){end}"


def allowed(parameter: Parameter) -> str:
    """The values of an option in a few words."""
    option = parameter.option
    if parameter.choices:
        return ", ".join(f"`{choice}`" for choice in parameter.choices)
    bounds = {"at least": option.low, "above": option.above, "at most": option.high}
    said = [f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None]
    return f"{kind(parameter.type)} {', '.join(said)}".strip().replace("|", "or")


def options(item: Any) -> list[str]:
    """A table of the options of a class or function, if it has any."""
    found = {} if isinstance(item, type) and issubclass(item, Exception) else parameters(item)
    rows = [f"| `{name}` | `{p.default!r}` | {allowed(p)} | {p.option.help} |" for name, p in found.items()]
    return ["", "| option | default | values | what it does |", "|---|---|---|---|", *rows] if rows else []


def members(item: type) -> list[tuple[str, Any]]:
    """The methods and properties of a class that users call, if they have a docstring."""
    own = {name: member for name, member in vars(item).items() if not name.startswith("_")}
    shown = SHOWN.get(item.__name__, ("release", "widths") if is_method(item) else (*own, "__call__"))
    classes = reversed(item.__mro__) if item.__name__ in SHOWN else [item]  # a class named there with what it inherits
    every = {name: member for one in classes if one.__module__.startswith("hatrack") for name, member in vars(one).items()}
    found = [(name, getattr(every[name], "__func__", every[name])) for name in shown if name in every]
    return [(name, member) for name, member in found if isinstance(member, property | FunctionType) and member.__doc__]


def entry(name: str) -> str:
    """The section about one public name."""
    item, lines = getattr(hr, name), [f"## {name}", ""]
    if isinstance(item, hr.METHODS.__class__):  # a table
        rows = [f"| `{key}` | {item.about(key).summary} |" for key in item]
        return "\n".join([*lines, f"`hr.{name}[name]` returns the entry.", "", "| name | what it is |", "|---|---|", *rows])
    shown = options(item)
    brief = f"hr.{name}({'net, ' if is_method(item) else ''}**options)" if shown else signature(f"hr.{name}", item)
    lines += ["```python", brief, "```", "", markdown(item.__doc__ or ""), *shown]
    for member, function in members(item) if inspect.isclass(item) else []:
        title, called = (f"Calling a {name}", name.lower()) if member == "__call__" else (f"{name}.{member}", member)
        call = [] if isinstance(function, property) else ["```python", signature(called, function), "```", ""]
        lines += ["", f"### {title}", "", *call, markdown(function.__doc__ or "")]
    return "\n".join(lines)


def is_method(item: Any) -> bool:
    """Whether it is the class of a method."""
    return inspect.isclass(item) and issubclass(item, hr.Method)


def write(folder: Path) -> None:
    """Write a page for each group of names."""
    folder.mkdir(parents=True, exist_ok=True)
    for stem, (title, about, names) in PAGES.items():
        text = "\n\n".join([f"# {title}", about, *(entry(name) for name in names)])
        (folder / f"{stem}.md").write_text(text + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
