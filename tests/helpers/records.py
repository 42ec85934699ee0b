"""Invented records, and a parser for the page that is made from them."""

import re
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from hatrack.experiments.record import Record, name_of
from hatrack.experiments.record_parts import Curve, CurvePoint, Seconds, Spec, TaskInfo
from hatrack.experiments.run import Run
from hatrack.reporting.assets import SCRIPTS, library, scripts

ACCURACY = {  # by method and seed
    ("sgd", 0): [[0.90, 0.20], [0.50, 0.80]],
    ("sgd", 1): [[0.80, 0.30], [0.70, 0.75]],
    ("hat", 0): [[0.90, 0.20], [0.90, 0.70]],
    ("hat", 1): [[0.80, 0.30], [0.80, 0.76]],
    ("joint", 0): [[0.90, 0.10], [0.95, 0.85]],
    ("joint", 1): [[0.85, 0.10], [0.90, 0.80]],
    ("random", 0): [[0.30, 0.40], [0.30, 0.40]],
    ("random", 1): [[0.35, 0.30], [0.35, 0.30]],
}


def make(method: str = "sgd", seed: int = 0, accuracy: Any = None, names: Any = ("ones", "twos"), **spec: Any) -> Record:
    """Return a small record without running anything."""
    table = np.array(ACCURACY[method, seed] if accuracy is None else accuracy)
    run = Run("digits-and-clothes", method, seed, **spec)
    epochs = [CurvePoint(0.05, 1.0, 1.0, valid_accuracy) for valid_accuracy in (0.5, 0.7, 0.6)]
    return Record(
        name=run.name,
        spec=Spec.from_dict(run.spec),
        tasks=[TaskInfo(names[k], 3, 100, 20, 30) for k in range(len(table))],
        parameters=1234,
        before=[0.25] * len(table),
        accuracy=table.tolist(),
        loss=(1 - table).tolist(),
        train_loss=(1 - table).tolist(),
        without_task_id=[0.1 * (seed + 1)] * len(table),
        curves=[] if method == "random" else [Curve(k, 1, epochs) for k in range(len(table))],
        seconds=Seconds(total=10.0 + 2 * seed, learn=[5.0] * len(table)),
        versions={"hatrack": "0.1.0", "torch": "2.13.0"},
    )


def with_spec(record: Record, **changes: Any) -> Record:
    """Return a record with other values in its spec, and the name that belongs to them."""
    spec = record.spec.replace(**changes)
    return replace(record, spec=spec, name=name_of(spec.written))


def in_order(text: str, *parts: str) -> bool:
    """Whether the parts occur in a text one after another."""
    return re.search(".*?".join(map(re.escape, parts)), text, re.DOTALL) is not None


def save(folder: Path, records: list[Record]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for record in records:
        record.save(folder)
    return folder


def foreign_scripts(text: str) -> list[str]:
    """Return the scripts of a page that are not files of the package or of its library, nor the data of the charts."""
    known = {*library(), *scripts(SCRIPTS)}
    found = re.findall(r"<script([^>]*)>(.*?)</script", text, flags=re.DOTALL | re.IGNORECASE)
    return [body for attributes, body in found if body not in known and 'id="data"' not in attributes]


@dataclass
class Element:
    """An element of a page, with all the text inside it."""

    tag: str
    attributes: dict[str, str]
    text: str = ""


class Reader(HTMLParser):
    """A page's elements, ids, references and tables; fails unless its tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.refers: list[str] = re.findall(r"url\(#([^)]*)\)", re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL))
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.rows: list[list[str]] = []
        self.elements: list[Element] = []  # in the order of their opening tags
        self.open: list[Element] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.refers += [value[1:] for name, value in attrs if name == "href" and value and value.startswith("#")]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in ("meta", "link", "br", "input"):
            self.open.append(Element(tag, {name: value or "" for name, value in attrs}))
            self.elements.append(self.open[-1])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element.text += data
        if {"td", "th"} & {element.tag for element in self.open}:
            self.rows[-1][-1] += data

    def row(self, first: str) -> list[str]:
        """Return the first row of a table that starts with this cell."""
        return next(row for row in ([" ".join(c.split()) for c in r] for r in self.rows) if row and row[0] == first)

    def texts(self, tag: str, **attributes: str) -> list[str]:
        """Return the texts of all elements with this tag and these attributes; `kind` is the class."""
        wanted = {"class" if name == "kind" else name: value for name, value in attributes.items()}
        return [e.text for e in self.elements if e.tag == tag and wanted.items() <= e.attributes.items()]

    def after(self, anchor: str) -> str:
        """Return the text of the element that follows the one with this id."""
        place = next(k for k, e in enumerate(self.elements) if e.attributes.get("id") == anchor)
        return self.elements[place + 1].text
