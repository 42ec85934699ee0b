"""Made-up records, and a reader of the page that is made of them."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from hatrack.experiments.record import Record
from hatrack.experiments.run import Run

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
    """A small record of a run that never was."""
    table = np.array(ACCURACY[method, seed] if accuracy is None else accuracy)
    run = Run("digits-and-clothes", method, seed, **spec)
    epochs = [{"lr": 0.05, "loss": 1.0, "valid_loss": 1.0, "valid_accuracy": v} for v in (0.5, 0.7, 0.6)]
    return Record(
        name=run.name,
        spec=run.spec,
        tasks=[{"name": names[k], "classes": 3, "train": 100, "valid": 20, "test": 30} for k in range(len(table))],
        parameters=1234,
        before=[0.25] * len(table),
        accuracy=table.tolist(),
        loss=(1 - table).tolist(),
        train_loss=(1 - table).tolist(),
        without_task_id=[0.1 * (seed + 1)] * len(table),
        curves=[] if method == "random" else [{"task": k, "best": 1, "epochs": epochs} for k in range(len(table))],
        seconds={"total": 10.0 + 2 * seed, "learn": [5.0] * len(table)},
        versions={"hatrack": "0.1.0", "torch": "2.13.0"},
    )


def save(folder: Path, records: list[Record]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for record in records:
        record.save(folder)
    return folder


class Reader(HTMLParser):
    """A page's ids, references and tables, and whether its tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.refers: list[str] = re.findall(r"url\(#([^)]*)\)", text)
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.rows: list[list[str]] = []
        self.open: list[str] = []
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
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data

    def row(self, first: str) -> list[str]:
        return next(row for row in ([" ".join(c.split()) for c in r] for r in self.rows) if row and row[0] == first)
