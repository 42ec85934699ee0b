"""Carrying out `hatrack tune`. Imported when it begins: it needs torch, and Optuna."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hatrack.benchmarks import BENCHMARKS
from hatrack.cli.errors import Interrupted
from hatrack.cli.execute import available, chosen_seeds, own_options
from hatrack.cli.search_space import space_of
from hatrack.cli.values import show
from hatrack.clusters.request import ENGINES, Request, parse_request
from hatrack.clusters.tune_on_ray import tune_on_ray
from hatrack.experiments.costs import expected_cost
from hatrack.experiments.progress import Display
from hatrack.experiments.record import Record
from hatrack.experiments.record_parts import Spec
from hatrack.experiments.signals import stop_by_signal
from hatrack.experiments.tuned import Tuned
from hatrack.experiments.tuning import Finished, finished, score_of
from hatrack.experiments.tuning import tune as carry_out
from hatrack.experiments.tuning_journal import Journal, load_optuna
from hatrack.experiments.tuning_protocols import FIRST_TASKS, PROTOCOLS, Search
from hatrack.experiments.tuning_space import Choices
from hatrack.methods import METHODS
from hatrack.options import choose
from hatrack.reporting.tables import option_text
from hatrack.reporting.words import run_command
from hatrack.text import duration, say, score_value
from hatrack.training.checkpoint import Stopped

SAMPLERS = {name: name for name in ("tpe", "grid", "random")}
PRUNERS = {name: name for name in ("none", "median")}


def tune(
    benchmark: str,
    method: str,
    *,
    given: Mapping[str, Mapping[str, Any]],
    over: str | None,
    trials: int,
    protocol: str,
    tasks_used: int | None,
    on: Sequence[str],
    ask: str,
    sampler: str,
    points: int,
    pruner: str,
    network: str,
    seed: int | None,
    seeds: str | None,
    out: Path,
    dry_run: bool,
    device: str,
    **how: Any,
) -> None:
    """Search for options of one or several methods on a benchmark, with the same number of trials for each.

    Args:
        benchmark: the name of the benchmark.
        method: the names of the methods with commas between them.
        given: the options that are the same in all trials, by what they belong to.
        over: what is searched, as a text; None for the default space of every method.
        trials: how many trials every method has.
        protocol: a name in `PROTOCOLS`.
        tasks_used: how many tasks the protocol "first-tasks" trains.
        on: the benchmark of the protocol "transfer", and "ray" or "ray:ADDRESS" for trials on a cluster.
        ask: what every run asks of the cluster.
        sampler: "tpe", "grid" or "random".
        points: the number of values per range of a grid.
        pruner: "none" or "median".
        network: the name of the network; "" for the benchmark's own.
        seed: the only seed.
        seeds: several seeds, as a text.
        out: the folder of the searches and of their outcomes.
        dry_run: run nothing, and print what would be searched.
        device: "auto", "cpu" or "cuda".
        how: engine, precision, save_every.
    """
    load_optuna()
    BENCHMARKS.about(benchmark)
    request, transfer = _sort_on(on, ask, device)
    names = method.split(",")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{twice[0]} is named twice")
    for name, number in {"--trials": trials, "--points": points}.items():
        if number < 1:
            raise ValueError(f"{name} must be at least 1, not {number}")
    choose("sampler", sampler, SAMPLERS)
    choose("pruner", pruner, PRUNERS)
    chosen = tuple(chosen_seeds(seed, seeds))
    check_protocol(protocol, benchmark, transfer, tasks_used, seeds, given)
    own = own_options(names, given["method_options"])
    searches = []
    for name in names:
        mine = {**given, "method_options": own[name]}
        search = Search(
            benchmark=benchmark, method=METHODS.name_of(METHODS.find(name)), space=space_of(name, over, mine),
            protocol=protocol, seeds=chosen, on=transfer or "", network=network, given=mine,
            sampler=sampler, pruner=pruner, points=points, tasks_used=tasks_used or 0,
        )  # fmt: skip
        searches.append(search)
    if protocol == "first-tasks":
        decided = first_tasks(searches[0], tasks_used)
        searches = [replace(search, **decided) for search in searches]
    counts = {search.method: search.limit(trials) for search in searches}
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{name} {count}" for name, count in counts.items())
        say(f"caution: the grids have different sizes, so that the methods do not have equal budgets: {shown} trials")
    if dry_run:
        show_searches(searches, out, trials)
        return
    for search in searches:
        where: dict[str, Any] = {"request": request} if request.engine else {"device": available(device)}
        if tuned := search_one(search, out, trials, **where, **how):
            show_outcome(search, tuned, out)
        else:
            say(f"{search.name}: another process has not finished its trials; it will write the outcome")


def _sort_on(on: Sequence[str], ask: str, device: str) -> tuple[Request, str | None]:
    """Return the cluster that trials are carried out on, and the benchmark of the protocol "transfer"; --on names both."""
    engines = [word for word in on if word.partition(":")[0] in ENGINES]
    benchmarks = [word for word in on if word not in engines]
    if len(engines) > 1 or len(benchmarks) > 1:
        raise ValueError(f"--on names one benchmark and one engine at most, not {', '.join(on)}")
    request = parse_request(engines[0] if engines else "", ask, device)
    if request.engine == "slurm":
        raise ValueError("--on slurm is not for a search: several jobs with the same hatrack tune command share its trials")
    if request.files != "store":
        raise ValueError("--ask files=folder is not for a search, whose journal and records stay on this machine")
    return request, benchmarks[0] if benchmarks else None


def check_protocol(
    protocol: str,
    benchmark: str,
    on: str | None,
    tasks_used: int | None,
    seeds: str | None,
    given: Mapping[str, Mapping[str, Any]],
) -> None:
    """Raise a ValueError if an option does not belong to the protocol, or one that it needs is missing."""
    choose("protocol", protocol, PROTOCOLS)
    if protocol == "transfer" and (on is None or on == benchmark):
        raise ValueError("--protocol transfer needs --on BENCHMARK, another benchmark than the one that is tuned for")
    if protocol == "whole-stream" and seeds is None:
        raise ValueError("--protocol whole-stream needs --seeds, such as 0-4: all seeds that will be reported")
    for word, value, owner in (("--on", on, "transfer"), ("--seeds", seeds, "whole-stream"),
                               ("--tasks-used", tasks_used, "first-tasks")):  # fmt: skip
        if value is not None and protocol != owner:
            raise ValueError(f"{word} does nothing with --protocol {protocol}; it is for --protocol {owner}")
    if protocol == "first-tasks" and given["run"].get("first_tasks"):
        raise ValueError("--first-tasks is decided by --protocol first-tasks; --tasks-used changes it")


def first_tasks(search: Search, wanted: int | None) -> dict[str, Any]:
    """Return the fields `protocol` and `tasks_used` of a search by the protocol "first-tasks".

    If it would use all tasks of the benchmark, it is a search by the protocol "one-seed" and is recorded as one.

    Args:
        search: the search.
        wanted: how many tasks are to be trained; None for the default.

    Raises:
        ValueError: the benchmark does not have so many tasks.
    """
    count = len(BENCHMARKS.find(search.benchmark)(search.seeds[0], **search.given["benchmark_options"]))
    if wanted is not None and not 1 <= wanted <= count:
        raise ValueError(f"--tasks-used must be from 1 to {count}, the tasks of {search.benchmark}, not {wanted}")
    used = wanted or min(FIRST_TASKS, count)
    if used < count:
        return {"tasks_used": used}
    say(f"{search.benchmark} has {count} tasks, and first-tasks uses all of them: the search is recorded as one-seed")
    return {"protocol": "one-seed", "tasks_used": 0}


def search_one(search: Search, out: Path, trials: int, **how: Any) -> Tuned | None:
    """Carry out one search with its progress in the terminal; Ctrl-C saves and stops."""
    count = search.limit(trials)
    with stop_by_signal(), Display(count) as display:

        def show_progress(number: int, done: float, text: str) -> None:
            display.show(min(number, count - 1), done, f"trial {number + 1} of {count}: {text}")

        def tell(trial: Finished, best: Finished) -> None:
            display.show(min(trial.number, count - 1), 1.0, "")
            options = ", ".join(f"{name}={option_text(value)}" for name, value in trial.options.items())
            state = {"complete": "", "pruned": "ended by the pruner at "}.get(trial.state, f"{trial.state}, ")
            score = score_of(out / search.name)
            value, most = (named(score, one.value) for one in (trial, best))
            line = f"{search.method}, trial {trial.number + 1} of {count}: {options}: {state}{value}"
            say(f"{line}; best so far {most} (trial {best.number + 1})")

        try:
            if "request" in how:
                return tune_on_ray(search, out, trials, show=show_progress, tell=tell, **how)
            return carry_out(search, out, trials, show=show_progress, tell=tell, **how)
        except Stopped:
            raise Interrupted(f"stopped, and saved; the same command goes on with {search.name}") from None
        except KeyboardInterrupt:
            raise Interrupted("stopped at once; the same command goes on from what was saved before") from None


def named(score: str, value: float) -> str:
    """Return the value of a trial: 98.21%, which is an accuracy, or with the name of its score: R² 0.9131."""
    return score_value(score, value) if score == "accuracy" else f"{score} {score_value(score, value)}"


def show_outcome(search: Search, tuned: Tuned, out: Path) -> None:
    """Print the options that were chosen, and the command that uses them."""
    chosen = {**tuned.method_options, **tuned.regime}
    words = ", ".join(f"{name}={option_text(value)}" for name, value in chosen.items())
    path = out / f"{search.name}.json"
    count = len(tuned.trials)
    how = f"protocol {search.protocol}, {count} trial{'s' * (count > 1)}"
    say(f"{search.method}: {words}, with {named(tuned.score, tuned.value)} on validation data ({how})")
    if caution := PROTOCOLS[search.protocol].caution:
        say(f"caution: {caution.text}")
    say(f"to use it: {use_command(search)} --tuned {shlex.quote(str(path))}")


def use_command(search: Search) -> str:
    """Return the command that runs the method as it was searched, but for the options that were chosen."""
    given = {key: table for key, table in search.given.items() if not (search.on and key == "benchmark_options")}
    run = replace(search, tasks_used=0, on="", given=given).runs({})[0]
    first = search.seeds[0]  # results at the seed of the search would have a caution
    seeds = [first + k for k in range(1, 6)] if PROTOCOLS[search.protocol].own_seed else [0]
    return run_command(Spec.from_dict(run.spec), seeds)


def show_searches(searches: Sequence[Search], out: Path, trials: int) -> None:
    """Print what would be searched, how many trials are there already, and what the others would cost."""
    table = Table("method", "over", "chosen on", "trials", "there", "time", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for search in searches:
        folder = out / search.name
        there = len(finished(Journal(folder, search))) if (folder / "journal.log").exists() else 0
        records = [Record.load(path) for path in sorted((folder / "records").glob("*.json"))]
        wanted = search.limit(trials)
        spec = search.runs({n: a.values[0] if isinstance(a, Choices) else a.rounded(a.low) for n, a in search.space.items()})
        each = expected_cost(spec[0], records).seconds
        left = max(0, wanted - there)
        time = "unknown" if each is None else duration(each * left * len(search.seeds))
        space = " ".join(f"{name}={axis}" for name, axis in search.space.items())
        used = f"{search.tasks_used} tasks, " if search.tasks_used else ""
        where = f"{search.trial_benchmark}: {used}seed{'s' * (len(search.seeds) > 1)} {show(search.seeds)}"
        table.add_row(Text(search.method), Text(space), Text(where), str(wanted), str(there), time)
    Console().print(table)
    say(f"{searches[0].protocol}: {PROTOCOLS[searches[0].protocol].summary}; nothing was run")
