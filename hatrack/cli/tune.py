"""`hatrack tune BENCHMARK METHOD`: a search for good options. Its other options are those of `hatrack run`."""

from collections.abc import Sequence
from pathlib import Path

import click

from hatrack.benchmarks import BENCHMARKS
from hatrack.cli.group import imported_when_called
from hatrack.cli.options import FOLDER, beginning, how_to_run, named
from hatrack.cli.run import NAMES, NETWORK, SEEDS, RunCommand, names_in
from hatrack.clusters.request import ENGINES

TEXT = "Search for good options of a method, or of several with commas between them, by their accuracy on validation data."
SPACE = (
    'What is searched is said by --over "strength=1:10000:log,lr=0.01:0.1:log": ranges LOW:HIGH, on a log scale with :log, '
    "or choices X|Y|Z, of options of the method and of the regime. Every other option has one value in all trials. "
    "The test data decide nothing."
)
PROTOCOLS = {  # texts of the help; hatrack/experiments/tuning_protocols.py has what each does
    "first-tasks": "the first tasks of one seed",
    "one-seed": "the whole sequence of one seed",
    "transfer": "another benchmark",
    "whole-stream": "the sequences of all seeds that are reported, which is too kind",
}
SAMPLERS = {"tpe": "", "grid": "", "random": ""}


class TuneCommand(RunCommand):
    """A command with the options of `hatrack run`, those of the benchmark being of the one that the trials are run on."""

    execute = staticmethod(imported_when_called("hatrack.cli.tuning:tune"))
    texts = (TEXT, SPACE)

    def names(self, args: Sequence[str]) -> dict[str, str]:
        """Return the benchmark of the trials, the methods and the network whose options the command has."""
        names = names_in(args)
        given = _ONLY_ON.make_context("tune", list(args)).params["on"] if len(names) > 1 else ()
        benchmarks = [word for word in given if word.partition(":")[0] not in ENGINES]
        return names_in([benchmarks[0], *args[1:]]) if benchmarks else names


_ONLY_ON = click.Command(
    "tune",
    params=[click.Option(["--on"], multiple=True)],
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
FIXED = [
    click.Option(
        ["--over"], metavar="SPACE", help="what is searched (default: a space for every method, shown by --dry-run)"
    ),
    click.Option(["--trials"], type=int, default=20, metavar="N", help="trials per method, of all processes together [20]"),
    click.Option(
        ["--protocol"],
        default="first-tasks",
        metavar="NAME",
        help="what the choice is made on: " + "; ".join(f"{k}, {v}" for k, v in PROTOCOLS.items()) + " [first-tasks]",
        shell_complete=beginning(PROTOCOLS),
    ),
    click.Option(
        ["--tasks-used"], type=int, metavar="N", help="tasks that first-tasks trains [3, or all if there are fewer]"
    ),
    click.Option(
        ["--on"],
        multiple=True,
        metavar="BENCHMARK|ray",
        help="the benchmark that transfer runs on; or ray, ray:ADDRESS: carry the trials out on a cluster",
        shell_complete=named(BENCHMARKS),
    ),
    click.Option(["--ask"], default="", metavar="NAME=VALUE,...", help="what every run asks of --on ray: gpus=0.25,cpus=2"),
    click.Option(
        ["--sampler"],
        default="tpe",
        metavar="tpe|grid|random",
        help="how trials are chosen [tpe]",
        shell_complete=beginning(SAMPLERS),
    ),
    click.Option(["--points"], type=int, default=5, metavar="N", help="values per range of the sampler grid [5]"),
    click.Option(
        ["--pruner"],
        default="none",
        metavar="none|median",
        help="median: end a trial that is below the median of the others after the same task [none]",
        shell_complete=beginning(("none", "median")),
    ),
    NETWORK,
    *SEEDS,
    click.Option(
        ["--out"], type=FOLDER, default=Path("tuned"), metavar="FOLDER", help="where searches and outcomes go [tuned]"
    ),
    click.Option(["--dry-run"], is_flag=True, help="run nothing; list what would be searched and what it would cost"),
    *(option for option in how_to_run() if option.name not in ("parallel", "stack")),
]
command = TuneCommand("tune", params=[*NAMES, *FIXED], short_help=TEXT)
