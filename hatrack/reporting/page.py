"""The page of a report: one HTML file that loads no other file and runs no script."""

import math
from collections.abc import Mapping
from html import escape
from pathlib import Path

from hatrack.reporting.capacity import capacity_part
from hatrack.reporting.drawing import Drawing, LineStyle, Scale, cell_colours
from hatrack.reporting.elements import cell, coloured_label, escaped, table, unbroken
from hatrack.reporting.figures import mean_matrix, scale_of, shown_tasks
from hatrack.reporting.measures import MISSING, Measure, heading, shown_measures
from hatrack.reporting.page_by_task import by_task_tables
from hatrack.reporting.page_costs import costs_part, left_out_note
from hatrack.reporting.page_differences import differences_part
from hatrack.reporting.tables import Row, Setting, option_text, ranking
from hatrack.reporting.words import caution, count_text, reference_commands, summary
from hatrack.text import is_percent

STYLE = Path(__file__).with_name("style.css")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"  # nothing may be loaded or run
PARTS = {  # of a setting, by the end of their anchors
    "ranking": "Ranking",
    "differences": "Differences between methods",
    "costs": "Costs",
    "progress": "Average accuracy",
    "by-task": "After every number of tasks",
    "tasks": "Accuracy on each task",
    "matrices": "Accuracy matrices",
    "capacity": "Capacity and reuse",
    "training": "Training curves",
    "run": "Setup",
}


def page(settings: list[Setting], drawings: list[list[Drawing]], styles: dict[str, LineStyle]) -> str:
    """Return the page for the settings and the figures of each."""
    sections = [_section(k + 1, *both, styles) for k, both in enumerate(zip(settings, drawings, strict=True))]
    title = settings[0].title if len(settings) == 1 else f"{settings[0].title} and more"
    return "\n".join([
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">',
        f"<title>hatrack report: {escaped(title)}</title>",
        f"<style>\n{STYLE.read_text(encoding='utf-8')}</style>\n</head>\n<body>",
        f"<header><p>hatrack report</p><h1>{_capital(_common_score(settings))} and forgetting</h1></header>\n<main>",
        _contents(settings) if len(settings) > 1 else "",
        *sections,
        _glossary(settings),
        "</main>\n<footer><p>This page was made from the records alone. In the same folder, table.csv and by_task.csv "
        "have all digits of every number, and figures/ has every figure as PNG.</p></footer>\n</body>\n</html>\n",
    ])  # fmt: skip


def _common_score(settings: list[Setting]) -> str:
    """Return the name of the score of all settings: that of the first, or the accuracy if they differ."""
    return settings[0].score if len({setting.score for setting in settings}) == 1 else "accuracy"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _named(title: str, score: str) -> str:
    """Return a title with the name of the score in place of the accuracy."""
    return title.replace("accuracy", score).replace("Accuracy", _capital(score))


def _unit(setting: Setting) -> str:
    return ", in percent" if is_percent(setting.score) else ""


def _contents(settings: list[Setting]) -> str:
    items = "".join(f'<li><a href="#setting-{k + 1}">{escaped(s.title)}</a></li>' for k, s in enumerate(settings))
    count = count_text(len(settings), "setting").capitalize()
    text = f"{count}. Compare methods only within a setting, because settings differ in more than the method."
    return f"<nav><p>{text}</p><ol>{items}</ol></nav>"


def _section(index: int, setting: Setting, drawings: list[Drawing], styles: dict[str, LineStyle]) -> str:
    """Return the section of one setting."""
    rows, anchor = ranking(setting), f"setting-{index}"
    bodies = {
        "ranking": _ranking(rows, styles, setting.score) + left_out_note(setting) + _missing_references(setting),
        "differences": differences_part(setting, styles),
        "costs": costs_part(rows, styles),
        "progress": _average_accuracy(drawings),
        "by-task": by_task_tables(setting, styles),
        "tasks": _accuracy_by_task(setting, drawings),
        "matrices": _matrices(setting, [row.label for row in rows], styles),
        "capacity": capacity_part(setting, [row.label for row in rows], drawings, styles),
        "training": _training(setting, drawings),
        "run": _setup(setting) + _tasks(setting),
    }
    titles = {part: _named(title, setting.score) for part, title in PARTS.items()}
    links = "".join(f'<a href="#{anchor}-{part}">{titles[part]}</a> ' for part, body in bodies.items() if body)
    warning = f'<p class="caution">{escape(caution(setting))}</p>' if caution(setting) else ""
    parts = [f'<h3 id="{anchor}-{part}">{titles[part]}</h3>\n{body}' for part, body in bodies.items() if body]
    return "\n".join([
        f'<section id="{anchor}">\n<h2>{escaped(setting.title)}</h2>',
        f'<p class="summary">{escape(summary(setting))}</p>\n{warning}\n<nav class="parts">{links}</nav>',
        *parts,
        "</section>",
    ])  # fmt: skip


def _ranking(rows: list[Row], styles: dict[str, LineStyle], score: str) -> str:
    """Return the table of all measures, with the references below the methods."""
    measures = [m for m in shown_measures((row.measures for row in rows), score) if m.part == "ranking"]
    heads = ['<th scope="col">Method</th><th scope="col">Seeds</th>']
    for m in measures:
        unit = heading(m).removeprefix(m.title)
        heads.append(f'<th scope="col"><a href="#measure-{m.key}">{m.title}</a>{unit}</th>')
    bodies = []
    for reference in (False, True):
        group = [_row(row, measures, styles) for row in rows if row.reference == reference]
        if group and reference:
            name = f'<th scope="rowgroup" colspan="{2 + len(measures)}"><span>References, not ranked</span></th>'
            group.insert(0, f'<tr class="group">{name}</tr>')
        bodies.append(f"<tbody>{''.join(group)}</tbody>" if group else "")
    text = f"The numbers are mean ± standard deviation over seeds. The method with the best average {score} comes first."
    return f"<p>{text}</p>" + table(heads, bodies, "ranking")


def _row(row: Row, measures: list[Measure], styles: dict[str, LineStyle]) -> str:
    cells = "".join(f"<td>{cell(measure, row.measures.get(measure.key), len(row.seeds))}</td>" for measure in measures)
    return f'<tr><th scope="row">{coloured_label(row.label, styles)}</th><td>{len(row.seeds)}</td>{cells}</tr>\n'


def _missing_references(setting: Setting) -> str:
    why, commands = reference_commands(setting)
    listed = "".join(f"<br><code>{escaped(line)}</code>" for line in commands)
    return f'<p class="note">{why}{listed}</p>' if commands else ""


def _grid(drawings: list[Drawing], *kinds: str) -> str:
    figures = [f"<figure>{d.svg}</figure>" for d in drawings if d.kind in kinds]
    size = "wide" if "accuracy" in kinds else "small" if len(figures) % 4 else "small four"
    return f'<div class="grid {size}">{"".join(figures)}</div>'


def _average_accuracy(drawings: list[Drawing]) -> str:
    text = "The lines show the average over the tasks learned so far; the bands show one standard deviation over seeds."
    if any(d.kind == "ratio" for d in drawings):
        text += " The forgetting ratio is 0 for joint training and −1 for guessing."  # noqa: RUF001
    return f"<p>{text}</p>" + _grid(drawings, "accuracy", "ratio")


def _accuracy_by_task(setting: Setting, drawings: list[Drawing]) -> str:
    text = "Each line is a task. It starts, with the number of the task, when the task is learned; where it falls, the task "
    what = "accuracies in percent" if setting.score == "accuracy" else f"those of the {setting.score}{_unit(setting)}"
    text += f"is being forgotten. The values are {what}, averaged over seeds, on the same scale in all panels."
    return f"<p>{text}</p>" + _grid(drawings, "tasks")


def _matrices(setting: Setting, labels: list[str], styles: dict[str, LineStyle]) -> str:
    """Return all accuracy matrices as tables with the same scale of colours."""
    shown, scale = shown_tasks(len(setting.tasks)), scale_of(setting)
    some = "" if len(shown) == len(setting.tasks) else f" {len(shown)} of {len(setting.tasks)} tasks are shown."
    steps = [scale.low + (scale.high - scale.low) * k / 5 for k in range(6)]
    ends = [f"{100 * v:.0f}" if scale.percent else scale.text(v) for v in steps]
    colours = "".join(_coloured(text, v, scale, "span") for text, v in zip(ends, steps, strict=True))
    score, unit = setting.score, "in percent, averaged" if scale.percent else "averaged"
    text = f"Each row shows the {score} on all tasks after one task was learned; each column shows how the {score} on one "
    text += f"task changes. The values are {unit} over seeds; pale cells are tasks not learned yet.{some}"
    tables = "".join(_matrix(setting, label, shown, scale, styles) for label in labels)
    count = len(shown)  # it decides the width of a matrix on a screen and on paper, and the size of its letters there
    sizes = f"--wide:{150 + 62 * count}px;--narrow:{90 + 36 * count}px;--letters:{min(8.5, 120 / count):.1f}pt"
    return f'<p>{text}</p><p class="scale">{colours}</p><div class="grid matrices" style="{sizes}">{tables}</div>'


def _matrix(setting: Setting, label: str, shown: list[int], scale: Scale, styles: dict[str, LineStyle]) -> str:
    values = mean_matrix(setting.methods[label])
    heads = ["<td>after</td>", *(f'<th scope="col">{unbroken(setting.tasks[i])}</th>' for i in shown)]
    rows = []
    for t in shown:
        cells = [_coloured(_value(values[t, i], scale), values[t, i], scale, "td", faded=i > t) for i in shown]
        rows.append(f'<tr><th scope="row">{unbroken(setting.tasks[t], 18)}</th>{"".join(cells)}</tr>')
    return table(heads, ["<tbody>", *rows, "</tbody>"], "matrix", coloured_label(label, styles))


def _value(value: float, scale: Scale) -> str:
    return scale.text(value) if math.isfinite(value) else MISSING


def _coloured(text: str, value: float, scale: Scale, tag: str, faded: bool = False) -> str:
    background, colour = cell_colours(value, scale.low, faded, scale.high)
    return f'<{tag} style="background:{background};color:{colour}">{text}</{tag}>'


def _training(setting: Setting, drawings: list[Drawing]) -> str:
    if not any(d.kind == "training" for d in drawings):
        return "<p>The records hold no validation accuracies.</p>" + _watched(setting, drawings)
    text = f"The {setting.score} on validation data in every epoch{_unit(setting)}, at seed {setting.seeds[0]} unless the "
    text += "panel names another. Each task has the same colour as above; a dot marks the epoch whose weights were kept."
    if setting.reference("joint", setting.seeds[0]):
        text += " With every task, joint training starts again from the initial weights, on the data of all tasks so far."
    return f"<p>{text}</p>" + _grid(drawings, "training") + _watched(setting, drawings)


def _watched(setting: Setting, drawings: list[Drawing]) -> str:
    """Return the figures of the accuracy on every task after each epoch; empty if no run measured it."""
    if not any(d.kind == "watched" for d in drawings):
        return ""
    text = f"The {setting.score} on the test data of every task after each epoch{_unit(setting)}, averaged over seeds "
    text += (
        "unless the panel names one, because its seeds took different numbers of epochs. A task's line is pale until the "
    )
    text += "task is being learned; there, a vertical line and the number of the task mark its first epoch."
    return f"<p>{text}</p>" + _grid(drawings, "watched")


def _setup(setting: Setting) -> str:
    """Return a list of everything that decided the numbers: benchmark, network, regime, seeds, versions."""
    spec = setting.spec
    facts = {
        "benchmark": spec.benchmark + _options(spec.benchmark_options, " (", ")"),
        "network": spec.network + _options(spec.network_options, " (", ")"),
        "regime": _options(spec.regime),
    }
    named = {"regime", *(f"{kind}{part}" for kind in ("benchmark", "network") for part in ("", "_options"))}
    facts |= {k.replace("_", " "): option_text(v) or "none" for k, v in setting.common.items() if k not in named}
    facts["seeds"] = option_text(setting.seeds)
    names = dict.fromkeys(name for record in setting.records for name in record.versions)
    versions = {name: sorted({str(record.versions.get(name, "?")) for record in setting.records}) for name in names}
    facts["versions"] = ", ".join(f"{name} {' / '.join(values)}" for name, values in versions.items())
    if reached := [f"seed {r.spec.seed} {r.pretraining.valid_accuracy:.1%}" for r in setting.records
                   if r.pretraining and r.pretraining.valid_accuracy is not None]:  # fmt: skip
        facts["pretraining"] = f"accuracy on validation data: {', '.join(dict.fromkeys(reached))}"
    if halved := [f"{r.spec.method} seed {r.spec.seed} {r.halvings}" for r in setting.records if r.halvings]:
        facts["learning rates"] = "; ".join(halved)
    if held := dict.fromkeys(f"{r.spec.method} {r.held}" for r in setting.records if r.held):
        facts["held whole"] = "; ".join(held)
    total = sum(record.seconds.total or 0 for record in setting.records)
    facts["time"] = f"{total:,.1f} seconds for {count_text(len(setting.records), 'run')} together"
    return f"<dl>{''.join(f'<dt>{escaped(name)}</dt><dd>{escaped(text)}</dd>' for name, text in facts.items())}</dl>"


def _options(options: Mapping[str, object], before: str = "", after: str = "") -> str:
    text = ", ".join(f"{name} {option_text(value)}" for name, value in options.items())
    return f"{before}{text}{after}" if text else ""


def _tasks(setting: Setting) -> str:
    """Return the table of tasks, as they are at the first seed."""
    tasks = setting.records[0].tasks
    extra = ["score"] if any(task.score for task in tasks) else []
    heads = [f'<th scope="col">{title}</th>' for title in ("#", "Task", "classes", "training", "validation", "test", *extra)]
    rows = []
    for k in shown_tasks(len(tasks)):
        task = tasks[k]
        counts = (task.classes, task.train, task.valid, task.test)
        cells = "".join(f"<td>{MISSING if count is None else count}</td>" for count in counts)
        cells += f"<td>{escaped(task.score or 'accuracy')}</td>" if extra else ""
        rows.append(f'<tr><td>{k + 1}</td><th scope="row">{escaped(task.name)}</th>{cells}</tr>')
    note = f"<p>The tasks depend on the seed. These are the tasks of seed {setting.spec.seed}.</p>"
    return ("" if setting.same_tasks else note) + table(heads, ["<tbody>", *rows, "</tbody>"], "tasks")


def _glossary(settings: list[Setting]) -> str:
    rows = (row.measures for setting in settings for row in ranking(setting))
    shown = shown_measures(rows, _common_score(settings))
    items = "".join(f'<dt id="measure-{m.key}">{m.title}</dt><dd>{escape(m.meaning)}</dd>\n' for m in shown)
    return f'<section id="glossary"><h2>What the measures mean</h2>\n<dl class="glossary">{items}</dl></section>'
