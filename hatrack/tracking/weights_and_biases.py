"""W&B: the lines of a run as a run of Weights & Biases, online or offline (`WANDB_MODE=offline`).

A point that was logged there cannot be taken back, and the steps of a run only grow. So the steps count every epoch, also
those of a fit that begins again, and the curves are drawn over the number of epochs that hold. A run that goes on has the id
of before. Online, W&B says how many steps it has, and the others are logged; offline every process writes all lines, so that
the last folder has the whole run.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from hatrack.tracking.lines import Line, RunLines
from hatrack.tracking.tracker import scalars

MISSING = "--log wandb needs the package wandb: pip install 'hatrack[wandb]'"


class WandB:
    """Logs the curves of a run with Weights & Biases; W&B's own variables (WANDB_MODE, WANDB_PROJECT) hold.

    Args:
        project: the project, unless WANDB_PROJECT names one.
        folder: where W&B keeps its files; by default where it wants to.
        name: the name of the run, unless the lines have one.

    Raises:
        ValueError: the package wandb is not installed.

    Example:
        >>> fit = hr.Trainer(hr.Regime(epochs=2), log=hr.WandB("my-project"))
    """

    def __init__(self, project: str = "hatrack", *, folder: Path | str | None = None, name: str | None = None) -> None:
        self.project, self.folder, self.name = project, folder, name
        self._run: Any = None
        self._known = 0  # steps that W&B has already
        import_wandb()

    def __repr__(self) -> str:
        return f"WandB({self.project!r})"

    def begin(self, lines: RunLines) -> None:
        """Start or continue the run of W&B, and log what it does not have yet."""
        wandb, about = import_wandb(), lines.about
        if self.folder is not None:
            Path(self.folder).mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", self.project),
            id=lines.first.get("id"),
            name=about.get("name", self.name),
            config=about.get("spec"),
            dir=None if self.folder is None else str(self.folder),
            resume="allow",
            reinit="create_new",  # other runs of this process go on
            settings=wandb.Settings(silent=True, console="off"),  # the terminal is ours
        )
        self._run.define_metric("epoch")
        self._run.define_metric("*", step_metric="epoch")
        self._known = 0 if self._run.offline else int(self._run.step)
        for line in lines.all():
            self.add(line, lines)

    def add(self, line: Line, lines: RunLines) -> None:
        """Log the numbers of a line, unless W&B has them."""
        found = scalars(line, lines)
        if found and line["number"] >= self._known:  # what follows a task belongs to the step of its last epoch
            self._run.log({**found, "epoch": line["step"]}, step=line["number"])

    def end(self) -> None:
        """Finish the run of W&B."""
        if self._run is not None:
            self._run.finish()


def import_wandb() -> Any:
    """Return the package wandb; raise a ValueError in one line if it is missing."""
    with suppress(ImportError):
        import wandb

        if hasattr(wandb, "init"):  # a folder of that name is not the package
            return wandb
    raise ValueError(MISSING)
