"""Tables of methods, benchmarks and networks: names, what each is, and where it is defined; imported when it is used."""

import gc
import hashlib
import importlib
import inspect
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, cast

from hatrack.options import nearest

T = TypeVar("T")
Scenario = Literal["task", "domain", "class"]
SCENARIOS: dict[str, str] = {  # see tasks/scenario.py
    "task": "the task is known at test",
    "domain": "the task is unknown, and all tasks have the same labels",
    "class": "the task is unknown, and every class has a label of its own",
}


@dataclass(frozen=True)
class Entry:
    """One row of a table.

    Attributes:
        place: where it is defined, "module:name".
        summary: what it is, in a sentence.
        paper: who wrote it and when, for methods.
        needs: what a method needs beyond the data of the task.
        costs: what a method adds to the network: parameters, bits per task, stored images.
        network: the network of a benchmark's runs that name none.
        scenarios: the scenarios in which a method is defined, as in its class.
    """

    place: str
    summary: str
    paper: str = ""
    needs: str = ""
    costs: str = ""
    network: str = ""
    scenarios: tuple[str, ...] = ()


class Registry(Mapping[str, T], Generic[T]):
    """A table written out by hand. `table[name]` imports the entry; everything else needs no import.

    Args:
        kind: what the entries are, for error messages.
        entries: the rows by name.
        base: the place of the class of which a user's own entry must be a subclass; "" if users have no entries.
        families: the places of functions that make an entry of what stands behind a colon, such as "timm:resnet18".
    """

    def __init__(
        self, kind: str, entries: Mapping[str, Entry], base: str = "", families: Mapping[str, str] | None = None
    ) -> None:
        self.kind, self.entries, self.base, self.families = kind, entries, base, families or {}

    def __getitem__(self, name: str) -> T:
        return load(self.entries[name].place)  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def about(self, name: str) -> Entry:
        """The row of an entry, or an error that names the nearest one."""
        if not isinstance(name, str) or name not in self.entries:
            raise ValueError(f"no {self.kind} {name!r}; {nearest(name, self)}")
        return self.entries[name]

    def find(self, name: str) -> T:
        """Return an entry by its name, or a user's own by its place.

        Args:
            name: a name in the table, or of one of the families; or "module:name", for a module in the present folder or
                on Python's path.

        Returns:
            The class or function.

        Raises:
            ValueError: there is none of this name, its module can't be imported, or it is of another kind.
        """
        if self.in_family(name):
            family, _, rest = name.partition(":")
            return load(self.families[family])(rest)  # type: ignore[no-any-return]
        if not isinstance(name, str) or ":" not in name or not self.base:
            return load(self.about(name).place)  # type: ignore[no-any-return]
        try:
            found = load_own(name)
        except ValueError as error:
            raise ValueError(f"no {self.kind} {name!r}: {error}") from error.__cause__
        if not inspect.isclass(found) or not issubclass(found, load(self.base)):
            raise ValueError(f"{name} is no {self.kind}: it must be a subclass of hatrack.{self.base.partition(':')[2]}")
        return cast(T, found)

    def in_family(self, name: Any) -> bool:
        """Return whether a name belongs to one of the families: "timm:resnet18" does."""
        return isinstance(name, str) and ":" in name and name.partition(":")[0] in self.families

    def name_of(self, item: Any) -> str:
        """The name of an entry; of anything else its place, "module:name"."""
        place = f"{item.__module__}:{item.__qualname__}"
        return next((name for name, entry in self.entries.items() if entry.place == place), place)


def undefined(method: str, scenario: str, scenarios: tuple[str, ...]) -> str:
    """Return the error message for a method in a scenario in which it is not defined."""
    where = " and ".join(f"--scenario {name}" for name in scenarios)
    why = "it has to know the task at test" if scenarios == ("task",) else "its formula has no meaning there"
    return f"{method} is not defined in the scenario {scenario!r}, because {why}; it is in {where}"


def load(place: str) -> Any:
    """Import what is defined at "module:name" and return it."""
    module, _, name = place.partition(":")
    with _no_garbage_collection():
        found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Within it Python does not look for garbage. To import torch and its compiler makes several 100,000 objects, most of
    which stay; to look through them again and again takes a quarter of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def load_own(place: str) -> Any:
    """Import what a user defined at "module:name", or raise a ValueError that says in one line what is wrong."""
    module, _, name = place.partition(":")
    if not all(part.isidentifier() for part in f"{module}.{name}".split(".")):
        raise ValueError("a class of your own is named MODULE:CLASS, such as mymethods:MyMethod")
    if "" not in sys.path and "." not in sys.path:
        sys.path.append("")  # modules in the present folder; last, so that none takes the place of a library's
    importlib.invalidate_caches()  # the file may be younger than the last look into its folder
    try:
        loaded = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        raise ValueError(_why_not_imported(module, error)) from error
    try:
        return load(place)
    except AttributeError:
        known = [key for key, value in vars(loaded).items() if callable(value) and value.__module__ == module]
        raise ValueError(f"{module} has no {name!r}; {nearest(name, known)}") from None


def source_digest(item: Any) -> str:
    """Return a SHA-256 of the file in which a user's class is defined; empty if there is none."""
    file = inspect.getsourcefile(item)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""


def _why_not_imported(module: str, error: BaseException) -> str:
    """Say in one line why a module can't be imported: what was raised, and in which line."""
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
        return f"there is no module {error.name!r} in this folder or on Python's path"
    said = " ".join(f"{type(error).__name__}: {error}".split())
    frames = [f for f in traceback.extract_tb(error.__traceback__)[1:] if "importlib" not in f.filename]
    if frames and not isinstance(error, SyntaxError):  # which names its place itself
        said += f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"
    return f"{module} can't be imported: {said}"
