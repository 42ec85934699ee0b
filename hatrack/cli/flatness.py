"""`hatrack flatness`: how curved the losses of tasks are, how far later tasks move the weights, and what is forgotten."""

from pathlib import Path

import click

from hatrack.cli.group import imported_when_called
from hatrack.cli.options import FOLDER, device_option, own_methods

_flatness = imported_when_called("hatrack.cli.flatness_tables:flatness")


def _at_least(least: int) -> click.IntRange:
    return click.IntRange(min=least)


@click.command(
    params=[
        click.Argument(["records"], metavar="RECORD.json...", nargs=-1, required=True, type=FOLDER),
        click.Option(
            ["--images"], type=_at_least(0), default=1000, metavar="N", help="training images per task, 0: all [1000]"
        ),
        click.Option(
            ["--eigenvalues"], type=_at_least(1), default=3, metavar="N", help="the largest N of every Hessian [3]"
        ),
        click.Option(["--points"], type=_at_least(2), default=11, metavar="N", help="places on a line between tasks [11]"),
        click.Option(
            ["--names"],
            default="",
            metavar="NAME,...",
            help="names of the runs in the table and the figure, seeds of a run counted as one (default: their methods)",
        ),
        click.Option(["--figure"], type=FOLDER, metavar="FILE.png", help="where the figure goes"),
        own_methods(),
        device_option(),
    ]
)
def command(
    records: tuple[Path, ...],
    images: int,
    eigenvalues: int,
    points: int,
    names: str,
    figure: Path | None,
    methods: tuple[str, ...],
    device: str,
) -> None:
    """Measure the curvature of tasks' losses, the distance moved since and the forgetting, beside its bound.

    The runs must have kept the model after each task: hatrack run ... --keep-each. Results go to NAME.flatness beside each
    record.
    """
    _flatness(records, images=images, eigenvalues=eigenvalues, points=points, names=names, figure=figure,
              own=methods, device=device)  # fmt: skip
