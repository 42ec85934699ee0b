"""Tables of methods, benchmarks and networks: names, what each is, and where it is defined; imported when it is used."""

import importlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hatrack.options import nearest

T = TypeVar("T")


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
    """

    place: str
    summary: str
    paper: str = ""
    needs: str = ""
    costs: str = ""
    network: str = ""


class Registry(Mapping[str, T], Generic[T]):
    """A table written out by hand. `table[name]` imports the entry; everything else needs no import.

    Args:
        kind: what the entries are, for error messages.
        entries: the rows by name.
    """

    def __init__(self, kind: str, entries: Mapping[str, Entry]) -> None:
        self.kind, self.entries = kind, entries

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
        if name not in self.entries:
            raise ValueError(f"no {self.kind} {name!r}; {nearest(name, self)}")
        return self.entries[name]

    def find(self, name: str) -> T:
        """An entry by its name, or a user's own by its place, "module:name"; or an error in one line."""
        if ":" not in name:
            return load(self.about(name).place)  # type: ignore[no-any-return]
        if "" not in sys.path and "." not in sys.path:
            sys.path.insert(0, "")  # modules in the present folder, as for `python -m`
        try:
            return load(name)  # type: ignore[no-any-return]
        except (ImportError, AttributeError, SyntaxError) as error:
            raise ValueError(f"no {self.kind} {name!r}: {' '.join(str(error).split())}") from None

    def name_of(self, item: Any) -> str:
        """The name of an entry; of anything else its place, "module:name"."""
        place = f"{item.__module__}:{item.__qualname__}"
        return next((name for name, entry in self.entries.items() if entry.place == place), place)


def load(place: str) -> Any:
    """Import what is defined at "module:name"."""
    module, _, name = place.partition(":")
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found
