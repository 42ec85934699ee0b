"""The program: a group of commands, each imported when it is used, so that `--help` takes no time."""

import io
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import click
from click.shell_completion import CompletionItem

from hatrack._version import __version__
from hatrack.cli.errors import report
from hatrack.cli.interrupts import end_at_ctrl_c, ignore_ctrl_c
from hatrack.registry import Entry, Registry, load
from hatrack.text import one_line

PROGRAM = "hatrack"
COMMANDS: Registry[click.Command] = Registry("command", {
    "list": Entry(
        "hatrack.cli.list:command",
        "Show methods, benchmarks and networks; or one of them with its options, and the tasks of a benchmark.",
    ),
    "run": Entry("hatrack.cli.run:command", "Run a method on a benchmark and keep the record."),
    "sweep": Entry("hatrack.cli.sweep:command", "Run a method with every combination of several values of its options."),
    "tune": Entry("hatrack.cli.tune:command", "Search for good options of a method by their accuracy on validation data."),
    "compress": Entry("hatrack.cli.compress:command", "Train one task in as few weights as it needs, beside plain SGD."),
    "resume": Entry("hatrack.cli.resume:command", "Continue the runs in a folder that were stopped before their end."),
    "status": Entry("hatrack.cli.status:command", "Tell which runs of a folder are running, done or failed, and why."),
    "show": Entry("hatrack.cli.show:command", "Show what a record holds: its settings, its results, and how to go on."),
    "extend": Entry("hatrack.cli.extend:command", "Go on with more tasks from a run that kept its model."),
    "watch": Entry("hatrack.cli.watch:command", "Show the page of a folder in the browser while its runs go on."),
    "report": Entry("hatrack.cli.report:command", "Make a page and tables of the records in a folder."),
    "table": Entry("hatrack.cli.table:command", "Print the ranking of records as a table for a paper."),
    "figure": Entry("hatrack.cli.figure:command", "Draw figures of records for a paper, as PDF, SVG or PNG."),
    "inspect": Entry("hatrack.cli.inspect:command", "Show what each task uses of a network, and what is free."),
    "flatness": Entry("hatrack.cli.flatness:command", "Measure how curved the losses of tasks are, and what was forgotten."),
    "export": Entry("hatrack.cli.export:command", "Write the network of one task, cut to what it uses, for ONNX or torch."),
    "certify": Entry("hatrack.cli.certify:command", "Write the certificate of a saved model."),
    "verify": Entry("hatrack.cli.verify:command", "Tell whether a later model has every old task, bit for bit."),
    "reproduce": Entry("hatrack.cli.reproduce:command", "Reproduce a paper: its tables and figures beside the published."),
    "demo": Entry(
        "hatrack.cli.demo:command",
        "Show forgetting and its cure on real images, in about a minute; leaves a page to look at.",
    ),
    "data": Entry("hatrack.cli.data:command", "Image sets: show what is there, get more, check them."),
    "completion": Entry("hatrack.cli.completion:command", "Print the script that completes hatrack's words in a shell."),
})  # fmt: skip


class LazyGroup(click.Group):
    """A group whose commands are the entries of a Registry. Its help and completions come from the table alone.

    Args:
        name: of the group.
        help: what its commands are for, in a sentence.
        table: where the commands are defined, with a summary of each.
    """

    def __init__(self, name: str, help: str, table: Registry[click.Command]) -> None:
        super().__init__(
            name,
            cast(dict[str, click.Command], table),  # click only reads from it
            invoke_without_command=True,
            subcommand_metavar="COMMAND [ARGS]...",
            callback=click.pass_context(_show_help),
            help=help,
            context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
        )
        self.table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the table."""
        return list(self.table)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the names and summaries."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.table.about(name).summary) for name in self.table])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands and options that begin so."""
        names = [name for name in self.table if name.startswith(incomplete)]
        found = [CompletionItem(name, help=self.table.about(name).summary) for name in names]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]


def _show_help(ctx: click.Context) -> None:
    """Print the help of a group that was called without a command."""
    if ctx.invoked_subcommand is None:
        print(ctx.get_help().rstrip())


def imported_when_called(place: str) -> Callable[..., Any]:
    """Return a function that imports the one at "module:name" when it is called, and calls it."""

    def function(*args: Any, **options: Any) -> Any:
        return load(place)(*args, **options)

    return function


program = LazyGroup(PROGRAM, "Train one network on task after task without losing the earlier ones.", COMMANDS)
click.version_option(__version__, message="%(version)s", help="Print the version and stop.")(program)


def main(words: Sequence[str] | None = None) -> int:
    """Run the program. A user's mistake is one line on standard error and exit code 2.

    Args:
        words: the command line without the name of the program; by default that of the process.

    Returns:
        The exit code: 0; 1 for a defect of this program; 2 for a user's mistake or a run that diverged; 130 for a program
        that was stopped.
    """
    warnings.formatwarning = one_line
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal or a file that can't take a letter gets a question mark
            stream.reconfigure(errors="replace")
    given = list(sys.argv[1:] if words is None else words)
    own_process = words is None
    if own_process:
        end_at_ctrl_c()
    try:
        return int(program.main(given, prog_name=PROGRAM, standalone_mode=False) or 0)
    except (Exception, KeyboardInterrupt) as error:
        if own_process:
            ignore_ctrl_c()
        return report(error, given)
    finally:
        if own_process:
            ignore_ctrl_c()
