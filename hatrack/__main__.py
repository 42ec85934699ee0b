"""The command line. Every option comes from a signature: the method's, the regime's, the benchmark's, the network's."""

import inspect
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hatrack._version import __version__
from hatrack.benchmarks import BENCHMARKS
from hatrack.cli import data as data_commands
from hatrack.cli import listing
from hatrack.cli.values import (
    DeviceOption,
    EngineOption,
    ParallelOption,
    PrecisionOption,
    SaveOption,
    convert,
    option,
    parse_device,
    parse_seeds,
)
from hatrack.engine.choice import ENGINES, PRECISIONS
from hatrack.experiments import demo
from hatrack.experiments.parallel import run_all
from hatrack.experiments.run import Run, folder_of, stopped_runs
from hatrack.methods import METHODS
from hatrack.methods.divergence import Diverged
from hatrack.networks import NETWORKS
from hatrack.options import Parameter, choose, nearest, parameters
from hatrack.regime import Regime
from hatrack.reporting.report import report as make_report
from hatrack.reporting.tables import settings, terminal
from hatrack.text import one_line, printable, shorten
from hatrack.training.checkpoint import Stopped

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
Values = dict[str, Any]


def application(words: Sequence[str]) -> typer.Typer:
    """The program. The options of `hatrack run BENCHMARK METHOD` depend on the two names, so they are looked up first."""
    app = typer.Typer(
        help="Train one network on task after task without losing the earlier ones.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_version)
    app.command("list")(_list)
    app.command("run", help=_run_help(words))(_run_command(words))
    app.command("resume")(_resume)
    app.command("report")(_report)
    app.command("demo")(_demo)
    app.add_typer(data_commands.app, name="data")
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


def _version(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and stop.")
    ] = False,
) -> None:
    """Train one network on task after task without losing the earlier ones."""


def _list(
    name: Annotated[str, typer.Argument(help="a method, benchmark or network, for its options")] = "",
    seed: Annotated[int | None, typer.Option(help="of a benchmark's tasks (default 0)", min=0, metavar="N")] = None,
    data: Annotated[str, typer.Option(help="of a benchmark's tasks: full or sample", metavar="NAME")] = "",
) -> None:
    """Methods, benchmarks and networks; or one of them with all its options, and the tasks of a benchmark."""
    if name not in BENCHMARKS and (seed is not None or data):
        raise ValueError(f"--seed and --data need the name of a benchmark, not {name!r}; {nearest(name, BENCHMARKS)}")
    Console().print(listing.entry(name) if name else listing.everything())
    if name in BENCHMARKS:
        try:
            Console().print(listing.tasks(name, seed or 0, data))
        except (OSError, ValueError) as error:
            if seed is not None or data:
                raise
            print(f"The tasks can't be shown: {printable(error)}")


def _report(
    folder: Annotated[Path, typer.Argument(help="the folder with the records")],
    out: Annotated[Path | None, typer.Option(help="where to write the page (default: the same folder)")] = None,
) -> None:
    """Make a page, figures and a table of the records in a folder."""
    if not folder.is_dir():
        raise ValueError(f"no folder {str(folder)!r}; hatrack run ... --out {folder} would make one")
    print(f"wrote {make_report(folder, out)}")


def _resume(
    folder: Annotated[
        Path, typer.Argument(help="the folder of the records, as `run --out` named it, or the folder NAME.part of one run")
    ] = Path("runs"),
    device: DeviceOption = "auto",
    engine: EngineOption = "auto",
    precision: PrecisionOption = "tf32",
    save_every: SaveOption = 5.0,
    parallel: ParallelOption = 1,
) -> None:
    """Go on with the runs in a folder that were stopped before their end."""
    if not folder.is_dir():
        raise ValueError(f"no folder {str(folder)!r}")
    runs, others = stopped_runs(folder)
    if not runs:
        raise ValueError("; ".join(others) or f"nothing in {folder} was stopped before its end")
    for why in others:
        warnings.warn(why, stacklevel=2)
    how = {"engine": choose("engine", engine, ENGINES), "precision": choose("precision", precision, PRECISIONS)}
    out = folder.parent if folder.suffix == ".part" else folder
    _carry_out(runs, out, again=False, device=parse_device(device), save_every=save_every, parallel=parallel, **how)


def _demo(out: Annotated[Path, typer.Option(help="where records and the page go")] = Path("demo")) -> None:
    """Forgetting and its cure, on real images, in about a minute; leaves a page to look at."""
    _carry_out(demo.runs(), out, again=False, device="cpu", engine="eager", parallel=min(2, os.cpu_count() or 1))
    print(f"The page to look at: {make_report(out)}")


# hatrack run


def _chosen(words: Sequence[str]) -> dict[str, tuple[str, Callable[..., Any]]]:
    """The benchmark, method and network that the command line names, so far as it does."""
    tables: dict[str, Mapping[str, Callable[..., Any]]]
    tables = {"benchmark": BENCHMARKS, "method": METHODS, "network": NETWORKS}
    if len(words) > 1 and words[1].startswith("-") and not {"-h", "--help"} & set(words):
        raise ValueError("the names come first, then the options: hatrack run BENCHMARK METHOD ...")
    names = dict(zip(("benchmark", "method"), [w for w in words[1:3] if not w.startswith("-")], strict=False))
    if len(names) == 2:
        names["network"] = BENCHMARKS.about(names["benchmark"]).network
        for place, word in enumerate(words):
            if word == "--network" and place + 1 < len(words):
                names["network"] = words[place + 1]
            elif word.startswith("--network="):
                names["network"] = word.split("=", 1)[1]
    return {kind: (name, choose(kind, name, tables[kind])) for kind, name in names.items()}


def _run_help(words: Sequence[str]) -> str:
    text = "Run a method on a benchmark and keep the record. The two names come first, then options."
    if words[:1] != ["run"] or len(_chosen(words)) < 2:
        text += (
            "\n\nhatrack run BENCHMARK METHOD --help shows the options of those two as well; hatrack list shows the names."
        )
    return text


def _run_command(words: Sequence[str]) -> Callable[..., None]:
    """A function whose signature holds the options of everything that is named."""
    groups: dict[str, tuple[str, dict[str, Parameter]]] = {
        "": ("Options", parameters(Run)),
        "regime": ("Regime", parameters(Regime)),
    }
    if words[:1] == ["run"]:
        for kind, (name, entry) in _chosen(words).items():
            groups[f"{kind}_options"] = (f"{kind.capitalize()} {name}", parameters(entry))

    def command(benchmark: str, method: str, **values: Any) -> None:
        chosen: dict[str, Values] = {}
        for group, (_, known) in groups.items():
            given = {name: values.pop(name) for name in known}
            chosen[group] = {n: convert(known[n], text) for n, text in given.items() if text is not None}
        _run(benchmark, method, chosen, **values)

    fixed = list(inspect.signature(_run).parameters.values())
    options = [option(p, panel) for panel, known in groups.values() for p in known.values()]
    command.__signature__ = inspect.Signature([*fixed[:2], *fixed[3:], *options])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in command.__signature__.parameters.values()}  # type: ignore[attr-defined]
    return command


def _run(
    benchmark: Annotated[str, typer.Argument(help="the task sequence")],
    method: Annotated[str, typer.Argument(help="the method")],
    chosen: dict[str, Any],
    network: Annotated[str, typer.Option(help="the trunk (default: the benchmark's own)", metavar="NAME")] = "",
    seed: Annotated[int | None, typer.Option(help="the seed (default 0)", metavar="N")] = None,
    seeds: Annotated[str | None, typer.Option(help="several seeds: 0-4, or 0,3,7", metavar="RANGE")] = None,
    out: Annotated[Path, typer.Option(help="where records go")] = Path("runs"),
    again: Annotated[bool, typer.Option("--again", help="run even if there is a record of this run")] = False,
    device: DeviceOption = "auto",
    engine: EngineOption = "auto",
    precision: PrecisionOption = "tf32",
    save_every: SaveOption = 5.0,
    parallel: ParallelOption = 1,
) -> None:
    if seed is not None and seeds is not None:
        raise ValueError("--seed and --seeds exclude each other")
    wanted = parse_seeds(seeds) if seeds is not None else [seed or 0]
    given = chosen.pop("regime")
    regime = Regime(**given)
    regime.check_effect(given, method, METHODS[method].replaces)
    own = chosen.pop("")
    runs = [Run(benchmark, method, s, network=network, regime=regime, **own, **chosen) for s in wanted]
    how = {"engine": choose("engine", engine, ENGINES), "precision": choose("precision", precision, PRECISIONS)}
    _carry_out(runs, out, again=again, device=parse_device(device), save_every=save_every, parallel=parallel, **how)


def _carry_out(runs: Sequence[Run], out: Path, *, again: bool, parallel: int, **how: Any) -> None:
    """Run them, then print the table."""
    if parallel < 1:
        raise ValueError(f"--parallel must be at least 1, not {parallel}")
    there = 0 if again else sum(folder_of(spec, out).done for spec in runs)
    records = run_all(runs, out, again=again, parallel=parallel, **how)
    for setting in settings(records):
        Console().print(terminal(setting))
    for record in records:
        for said in filter(None, (record.capacity, record.halvings)):
            print(f"{record.spec.method} seed {record.spec.seed}: {said}")
    print(f"{len(records)} {'record' if len(records) == 1 else 'records'} in {out}; a page of them: hatrack report {out}")
    if there:
        print(f"{there} of them {'was' if there == 1 else 'were'} there already and not run again; --again does")


def _whose(said: str, words: Sequence[str]) -> str:
    """For an option that this run does not have: who has it."""
    if words[:1] != ["run"]:
        return ""
    found = re.match(r"No such option: --([\w-]+)", said)
    name = found[1].replace("-", "_") if found else ""
    owners = [key for table in (METHODS, BENCHMARKS, NETWORKS) for key, entry in table.items() if name in parameters(entry)]
    return f"No such option: --{found[1]} in this run; these have it: {', '.join(owners)}" if found and owners else ""


def _said(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) if str(error) or not isinstance(error, MemoryError) else "there is not enough memory"


def main(words: Sequence[str] | None = None) -> int:
    """Run the program. What a user got wrong is one line on standard error and exit code 2."""
    words = list(sys.argv[1:] if words is None else words)
    warnings.formatwarning = one_line
    try:
        return int(application(words)(words or ["--help"], standalone_mode=False) or 0)
    except UsageError as error:
        said = " ".join(error.format_message().split())  # type: ignore[attr-defined]
        print(f"hatrack: {_whose(said, words) or said}", file=sys.stderr)
    except (ValueError, IndexError, OSError, MemoryError, Diverged) as error:
        if os.environ.get("HATRACK_TRACEBACK"):
            raise
        for line in _said(error).split("\n"):  # several runs diverged
            print(f"hatrack: {shorten(printable(line))}", file=sys.stderr)
    except RuntimeError as error:
        found = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", str(error))  # torch has no type of error for it on a CPU
        if not found or os.environ.get("HATRACK_TRACEBACK"):
            raise
        print(f"hatrack: there is not enough memory for another {found[1]}", file=sys.stderr)
    except Stopped as error:
        print(f"hatrack: {error}", file=sys.stderr)
        return 130
    except (KeyboardInterrupt, typer.Abort):
        print("hatrack: stopped", file=sys.stderr)
        return 130
    return 2


if __name__ == "__main__":
    sys.exit(main())
