"""Extending a run. Imported when `hatrack extend` begins: it needs torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hatrack.cli.execute import available, carry_out
from hatrack.experiments.extending import extended_run, other_conditions, prepare
from hatrack.experiments.record import Record
from hatrack.experiments.run import folder_of
from hatrack.methods import METHODS
from hatrack.text import say


def extend(path: Path, tasks: int, keep_each: bool, methods: Sequence[str], *, device: str, **how: Any) -> None:
    """Go on with more tasks from a finished run, print the table of the longer run, and keep its model.

    Args:
        path: the file of the record of the finished run.
        tasks: the number of tasks of the longer run.
        keep_each: keep the model after each task as well.
        methods: methods of the user's own, "module:class", that may be imported.
        device: "auto", "cpu" or "cuda".
        how: engine, precision, save_every.
    """
    for name in methods:
        METHODS.find(name)  # an error now if there is none
    record, device = Record.load(path), available(device)
    spec = extended_run(record, tasks, methods)
    folder = folder_of(spec, path.parent, minutes=how["save_every"])
    computed = {"device": device, "engine": how["engine"], "precision": how["precision"]}
    if not folder.done:
        prepare(path, record, spec, folder, keep_each=keep_each, **computed)
        if changed := other_conditions(record, spec, **computed):
            say(f"not computed as the first tasks were, so that last bits may differ from a whole run: {', '.join(changed)}")
        if missing := folder.extended().get("missing"):
            say(
                f"{missing} numbers of the record will be missing, on new tasks after old ones: only a run with --keep-each "
                "has the models that they need"
            )
    notes = {spec.name: record.tuned} if record.tuned else None  # its options are those that were tuned
    carry_out([spec], path.parent, keep_model=True, keep_each=keep_each, notes=notes, device=device, **how)
