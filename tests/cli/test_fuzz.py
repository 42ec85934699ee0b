"""Every file that the program reads, damaged in many ways: it says so in one line and stops, or nothing was lost.

A case is made from its place and number alone. After each: exit code 0 or 2; with 2 exactly one line on standard error,
which names the file; no traceback, no pickle read, no memory taken because a header says so, no hang; nothing else changed.
"""

import io
import json
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import hatrack
from hatrack import Record
from hatrack.datasets import cache
from hatrack.datasets.archives import read_published
from hatrack.datasets.catalog import SETS
from hatrack.experiments.record import name_of, sign
from hatrack.networks.mlp import mlp
from tests.helpers import archives, mutations
from tests.helpers.fuzzing import (
    OWN,
    RUN,
    Build,
    Hang,
    Outcome,
    contents,
    files,
    finished,
    killed,
    limits,
    model,
    own,
    program,
    results,
    stopped,
)
from tests.helpers.learning import logits
from tests.helpers.records import foreign_scripts
from tests.helpers.records import make as make_record
from tests.helpers.tiers import cases, quick_and_slow
from tests.helpers.toys import toy_tasks

SOME, MANY, ALL = 2, 10, 210  # cases per place: in `make test-slow` some and many, in `make test-long` all


# Places: a tree of files, which of them are damaged and how, what reads them, and what a success must have come to

Damage = Callable[[random.Random, Path], str]  # changes a file and says how
Check = Callable[[Path, Outcome], None]


def raw(draw: random.Random, path: Path) -> str:
    how, data = mutations.damage(draw, path.read_bytes())
    path.write_bytes(data)
    return how


def by(change: Callable[[random.Random, bytes], tuple[str, bytes]]) -> Damage:
    def damage(draw: random.Random, path: Path) -> str:
        how, data = change(draw, path.read_bytes())
        path.write_bytes(data)
        return how

    return damage


@dataclass(frozen=True)
class Place:
    build: Build
    files: str  # a pattern; one of them is damaged
    words: list[list[str]]  # commands, one of which is run
    damages: tuple[Damage, ...]
    check: Check = lambda root, outcome: None
    exact: bool = True  # the error names the file itself, not only its folder


PLACES: dict[str, Place] = {}


# Records


def records(root: Path) -> None:
    (root / "runs").mkdir()
    for record in (make_record("sgd", 0), make_record("joint", 0)):
        record.save(root / "runs")


def signed(draw: random.Random, path: Path) -> str:
    """By someone who writes a right digest, and mostly the right name."""
    how, value = mutations.change(draw, json.loads(path.read_text()))
    spec = value.get("spec")
    if isinstance(spec, dict) and draw.random() < 0.7 and {"benchmark", "method", "seed"} <= spec.keys():
        value["name"] = name_of(spec)
        if re.fullmatch(r"[\w.-]{1,200}", value["name"]):
            path = path.rename(path.with_name(f"{value['name']}.json"))
    path.write_text(json.dumps(sign(value)))
    return how


def read_the_same(root: Path, outcome: Outcome) -> None:
    """A record that was damaged and still is read holds what was written."""
    pristine = {r.name: r for r in (make_record("sgd", 0), make_record("joint", 0))}
    for path in (root / "runs").glob("*.json"):
        assert Record.load(path) == pristine[path.stem]
    whole_page(root, outcome)


def whole_page(root: Path, outcome: Outcome) -> None:
    page = (root / "out" / "report.html").read_text()
    assert page.endswith("</html>\n")
    assert foreign_scripts(page) == []


REPORT = [["report", "runs", "--out", "out"]]
JSON = (raw, raw, by(mutations.change_json), by(mutations.change_json))
PLACES["record in a report"] = Place(records, "runs/*.json", REPORT, JSON, read_the_same)
PLACES["record with a right digest"] = Place(records, "runs/*.json", REPORT, (signed,), whole_page, exact=False)


# Runs of one's own tasks


def has_a_record(root: Path, outcome: Outcome) -> None:
    (path,) = (root / "runs").glob("*.json")
    Record.load(path)


PLACES["record that is there"] = Place(finished, "runs/*.json", [["run", "own", "sgd", *RUN]], JSON, has_a_record)
TOML = (raw, lambda draw, path: by(lambda d, _: mutations.change_toml(d, OWN))(draw, path))
PLACES["tasks.toml"] = Place(own, "tasks.toml", [["run", "own", "sgd", *RUN]], (TOML[0], TOML[1], TOML[1]), has_a_record)
PLACES["one's own .npz"] = Place(
    own, "*.npz", [["run", "own", "sgd", *RUN]], (raw, by(mutations.claim_npz), by(mutations.claim_npz)), has_a_record
)


def own_images(root: Path) -> None:
    for label in ("cat", "dog"):
        for number, kind in enumerate(("png", "jpg", "gif", "bmp", "tiff", "ppm", "webp")):
            path = root / "pets" / label / f"{number}.{kind}"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(archives.images(1, (9, 9, 3), number)[0]).save(path)
    (root / "tasks.toml").write_text('[[task]]\nname = "pets"\ndata = "pets"\n')


PLACES["one's own images"] = Place(own_images, "pets/*/*", [["run", "own", "sgd", *RUN]], (raw,), has_a_record)


# Saved states


def goes_on_to_the_same(root: Path, outcome: Outcome) -> None:
    whole, found = (results(next((root / name).glob("*.json"))) for name in ("whole", "runs"))
    assert whole == found
    assert [path.suffix for path in (root / "runs").iterdir()] == [".json"]


def all_states(draw: random.Random, path: Path) -> str:
    """Every one of them, by accidents of the same kind."""
    for file in path.parent.iterdir():
        file.write_bytes(mutations.BYTES["zero"](draw, file.read_bytes()) if draw.random() < 0.5 else b"")
    return "all"


def words_of(draw: random.Random, path: Path) -> str:
    return mutations.change_contents(draw, path)


def stopped_again(root: Path) -> None:
    """Killed while it was run a second time: the record of the first is still there."""
    own(root)
    assert program("run", "own", "hat", *RUN).code == 0
    shutil.copytree(root / "runs", root / "whole")
    killed("run", "own", "hat", *RUN, "--again", after=1)


ON = [["run", "own", "hat", *RUN], ["resume", "runs", "--device", "cpu"]]
STATES = "runs/*.part/*.safetensors"
PLACES["state"] = Place(stopped, STATES, ON, (raw, raw, by(mutations.claim_tensors)), goes_on_to_the_same)
PLACES["mark of a second run"] = Place(stopped_again, "runs/*.part/again", ON, JSON, goes_on_to_the_same, exact=False)
PLACES["all states"] = Place(stopped, STATES, ON, (all_states,), goes_on_to_the_same, exact=False)
PLACES["state with a right digest"] = Place(stopped, STATES, ON, (words_of,), has_a_record, exact=False)


# A method in a file


def load_model(root: Path) -> Outcome:
    with limits():
        try:
            method = hatrack.load(
                root / "model.safetensors", mlp((1, 4, 4), widths=(24, 24), dropout=0.2, input_dropout=0.1)
            )
        except ValueError as error:
            return Outcome(2, "", f"hatrack: {error}\n")
    return Outcome(0, str([logits(method, task).sum().item() for task in toy_tasks(2)]), "")


def answers_the_same(root: Path, outcome: Outcome) -> None:
    (root / "again").mkdir()
    model(root / "again")
    assert load_model(root / "again").said == outcome.said


PLACES["method"] = Place(model, "*.safetensors", [["load"]], (raw, by(mutations.claim_tensors)), answers_the_same)
PLACES["method with a right digest"] = Place(model, "*.safetensors", [["load"]], (words_of,))


# The data folder


def data_folder(root: Path) -> None:
    (root / "data").mkdir()
    cache.keep("mnist", archives.arrays("mnist"), "downloaded")


def same_arrays(root: Path, outcome: Outcome) -> None:
    if "here" not in outcome.said:  # data list reads no images
        assert cache.digest(cache.read(root / "data" / "mnist.npz", "mnist")) == cache.digest(archives.arrays("mnist"))


LOOK = [["data", "verify", "mnist"], ["list", "smnist", "--data", "full"], ["data", "list"]]
PLACES["set in the data folder"] = Place(data_folder, "data/*.npz", LOOK, (raw, by(mutations.claim_npz)), same_arrays)
PLACES["note in the data folder"] = Place(data_folder, "data/*.json", LOOK, JSON, same_arrays)


# Imports


def imported(name: str, build: Callable[[], dict[str, bytes]], checked: bool) -> Check:
    def check(root: Path, outcome: Outcome) -> None:
        """What came in is a set; where the format has checksums, the very one."""
        assert re.search(rf"^{name}: [\d,]+ \+ [\d,]+ images", outcome.said, re.MULTILINE)
        assert program("data", "verify", name).code == 0
        if checked:
            whole = root / "whole"
            whole.mkdir()
            for file, data in build().items():
                (whole / file).write_bytes(data)
            assert cache.digest(cache.read(root / "data" / f"{name}.npz", name)) == cache.digest(read_published(name, whole))

    return check


def images_for(name: str) -> Callable[[], dict[str, bytes]]:
    """Two images of every class."""
    spec = SETS[name]

    def build() -> dict[str, bytes]:
        count = 2 * spec.classes
        if name == "notmnist":
            return archives.notmnist(archives.images(count, spec.shape), np.arange(count) % spec.classes)
        photo = archives.encode_image(archives.images(1, (12, 10, 3))[0], "JPEG")
        return archives.caltech({(f"class {k % spec.classes:03}", f"{k}.jpg"): photo for k in range(count)})

    return build


def plain_idx() -> dict[str, bytes]:
    import gzip

    packed = archives.mnist(archives.arrays("mnist")).items()
    return {name.removesuffix(".gz"): gzip.decompress(data) for name, data in packed}


def npz() -> dict[str, bytes]:
    out = io.BytesIO()
    np.savez(out, **archives.arrays("mnist"))
    return {"mnist.npz": out.getvalue()}


FORMATS: dict[str, tuple[str, bool, Callable[[], dict[str, bytes]]]] = {  # the set, and whether the files have checksums
    "idx": ("mnist", False, plain_idx),
    "idx.gz": ("fashion-mnist", True, lambda: archives.mnist(archives.arrays("mnist"))),
    "letters": ("emnist-letters", True, lambda: archives.emnist(archives.arrays("emnist-letters"))),
    "cifar10": ("cifar10", True, lambda: archives.cifar(archives.arrays("cifar10"), coarse=False)),
    "cifar100": ("cifar100", True, lambda: archives.cifar(archives.arrays("cifar100"), coarse=True)),
    "mat": ("svhn", False, lambda: archives.svhn(archives.arrays("svhn"))),
    "gtsrb": ("gtsrb", True, lambda: archives.gtsrb(archives.arrays("gtsrb"))),
    "notmnist": ("notmnist", True, images_for("notmnist")),
    "caltech": ("caltech101", True, images_for("caltech101")),
    "npz": ("mnist", True, npz),
}
for kind, (name, checked, builder) in FORMATS.items():
    command = [["data", "import", "copies", "--name", name]]
    ways = (raw, by(mutations.claim_npz)) if kind == "npz" else (raw,)
    check = imported(name, builder, checked and kind != "npz")
    PLACES[f"import {kind}"] = Place(files(builder), "copies/*", command, ways, check, exact=kind == "npz")


# The cases


def case(place: Place, number: str, pristine: Path, root: Path, patch: pytest.MonkeyPatch) -> str:
    """Carry out one case; what was wrong with it, or nothing."""
    draw = random.Random(number)
    shutil.copytree(pristine, root)
    patch.setenv("HATRACK_DATA", str(root / "data"))
    patch.chdir(root)
    target = draw.choice(sorted(root.glob(place.files)))
    how = draw.choice(place.damages)(draw, target)
    before = contents(root)
    words = draw.choice(place.words)
    try:
        outcome = load_model(root) if words == ["load"] else program(*words)
        judge(place, root, target, before, outcome)
    except (Exception, Hang, mutations.Unpickled) as error:
        return f"{number}, {target.name}, {how}, {words[0]}: {type(error).__name__} {str(error)[:600]}"
    return ""


def judge(place: Place, root: Path, target: Path, before: dict[str, str], outcome: Outcome) -> None:
    after = contents(root)
    if outcome.code == 0:
        assert outcome.error == "" or not place.exact, f"a success is quiet: {outcome.error}"
        place.check(root, outcome)
        return
    assert outcome.code == 2, f"exit code {outcome.code}"
    assert outcome.error.count("\n") == 1, f"not one line: {outcome.error!r}"
    assert re.fullmatch(r"hatrack: [^\x00-\x1f\x7f]+\n", outcome.error), f"{outcome.error!r}"
    assert len(outcome.error) < 2000, f"a line of {len(outcome.error)} letters"
    named = target.name if place.exact else target.parent.name
    assert named in outcome.error, f"{named} is not named: {outcome.error}"
    new = {name for name in after if name not in before and not name.endswith(".lock")}
    assert not new, f"left behind: {new}"
    log = {name for name in before if name.endswith("epochs.jsonl")}  # a run that is begun again adds lines to it
    changed = {name for name in before if name not in log and after.get(name) != before[name]}
    assert not changed, f"damaged as well: {changed}"


def fuzz(place: str, numbers: range, tree: Path, folder: Path, patch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    wrong = []
    for number in numbers:
        root = folder / str(number)
        wrong.append(case(PLACES[place], f"{place} {number}", tree, root, patch))
        shutil.rmtree(root)
    found = [line for line in wrong if line]
    assert not found, f"{len(found)} of {len(numbers)}:\n" + "\n".join(found)


@pytest.mark.parametrize("place", quick_and_slow(PLACES, list(PLACES)[::4]))
def test_some_damage(place, pristine, tmp_path, monkeypatch):
    fuzz(place, range(SOME), pristine(PLACES[place].build), tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_much_damage(place, pristine, tmp_path, monkeypatch):
    fuzz(place, range(SOME, SOME + cases(MANY, ALL)), pristine(PLACES[place].build), tmp_path, monkeypatch)


def test_there_are_enough_cases():
    assert len(PLACES) * SOME >= 40
    assert len(PLACES) * MANY >= 200
    assert len(PLACES) * ALL >= 5000


def with_a_pickle(kind: str) -> Damage:
    def damage(draw: random.Random, path: Path) -> str:
        path.write_bytes(mutations.pickles()[kind])
        return kind

    return damage


@pytest.mark.slow
@pytest.mark.parametrize("place", [name for name in PLACES if "right digest" not in name and name != "all states"])
def test_a_pickle_in_any_place_is_never_read(place, pristine, tmp_path, monkeypatch):
    for kind in mutations.pickles():
        bad = replace(PLACES[place], damages=(with_a_pickle(kind),))
        assert not case(bad, f"{place} {kind}", pristine(bad.build), tmp_path / kind, monkeypatch)
