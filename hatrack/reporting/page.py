"""The page: one HTML file that needs nothing else, neither a network nor a script."""

import math
from collections.abc import Iterable
from html import escape
from pathlib import Path

from hatrack.reporting.drawing import Drawing, Look, shade
from hatrack.reporting.figures import chosen, lowest, mean_matrix
from hatrack.reporting.measures import MEASURES, MISSING, Measure, deviation, number
from hatrack.reporting.tables import Row, Setting, option_text, ranking
from hatrack.reporting.words import caution, counted, story, supply
from hatrack.text import printable

STYLE = Path(__file__).with_name("style.css")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"  # nothing is loaded, nothing is run
PARTS = {  # of a setting: the end of the anchor and the heading
    "ranking": "Ranking",
    "progress": "From task to task",
    "tasks": "Every task",
    "matrices": "Accuracy matrices",
    "training": "Training",
    "run": "What was run",
}


def page(settings: list[Setting], drawings: list[list[Drawing]], looks: dict[str, Look]) -> str:
    """The whole page, from the settings and the figures of each."""
    sections = [_section(k + 1, *both, looks) for k, both in enumerate(zip(settings, drawings, strict=True))]
    title = settings[0].title if len(settings) == 1 else f"{settings[0].title} and more"
    return "\n".join([
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">',
        f"<title>hatrack report: {clear(title)}</title>",
        f"<style>\n{STYLE.read_text(encoding='utf-8')}</style>\n</head>\n<body>",
        "<header><p>hatrack report</p><h1>What was learned, and what was kept</h1></header>\n<main>",
        _contents(settings) if len(settings) > 1 else "",
        *sections,
        _glossary(),
        "</main>\n<footer><p>Made from the records alone. Beside this page: table.csv holds every number in full, and "
        "figures/ every figure as PNG.</p></footer>\n</body>\n</html>\n",
    ])  # fmt: skip


def clear(text: object) -> str:
    """A name from a record as harmless text."""
    return escape(printable(text))


def _contents(settings: list[Setting]) -> str:
    items = "".join(f'<li><a href="#setting-{k + 1}">{clear(s.title)}</a></li>' for k, s in enumerate(settings))
    return (
        f"<nav><p>{counted(len(settings), 'setting').capitalize()}. Methods can be compared within one of them, "
        f"not from one to another.</p><ol>{items}</ol></nav>"
    )


def _section(index: int, setting: Setting, drawings: list[Drawing], looks: dict[str, Look]) -> str:
    """Everything about one setting."""
    rows, anchor = ranking(setting), f"setting-{index}"
    bodies = {
        "ranking": _ranking(rows, looks) + _supply(setting),
        "progress": _progress(drawings),
        "tasks": _every_task(drawings),
        "matrices": _matrices(setting, [row.label for row in rows], looks),
        "training": _training(setting, drawings),
        "run": _facts(setting) + _tasks(setting),
    }
    links = "".join(f'<a href="#{anchor}-{part}">{heading}</a> ' for part, heading in PARTS.items())
    warning = f'<p class="caution">{escape(caution(setting))}</p>' if caution(setting) else ""
    parts = [f'<h3 id="{anchor}-{part}">{PARTS[part]}</h3>\n{body}' for part, body in bodies.items()]
    return "\n".join([
        f'<section id="{anchor}">\n<h2>{clear(setting.title)}</h2>',
        f'<p class="story">{escape(story(setting))}</p>\n{warning}\n<nav class="parts">{links}</nav>',
        *parts,
        "</section>",
    ])  # fmt: skip


def table(head: Iterable[str], bodies: Iterable[str], kind: str, caption: str = "") -> str:
    """A table in a box of its own, which scrolls where the table is wider than the screen; `head` holds finished cells."""
    title = f"<caption>{caption}</caption>" if caption else ""
    return (
        f'<div class="scroll"><table class="{kind}">{title}\n<thead><tr>{"".join(head)}</tr></thead>\n'
        + "\n".join(bodies)
        + "\n</table></div>"
    )


def _swatch(label: str, looks: dict[str, Look]) -> str:
    first, _, rest = label.partition(" ")
    dot = f'<span class="swatch" style="background:{looks[label].colour}"></span>'
    return f'<span class="whole">{dot}{clear(first)}</span> {clear(rest)}'


def _ranking(rows: list[Row], looks: dict[str, Look]) -> str:
    """The table of all measures; the references stand below the methods."""
    heads = ['<th scope="col">Method</th><th scope="col">Seeds</th>']
    for m in MEASURES:
        unit = ", %" if m.unit == "%" else ""
        heads.append(f'<th scope="col"><a href="#measure-{m.key}">{m.title}</a>{unit}</th>')
    bodies = []
    for reference in (False, True):
        group = [_row(row, looks) for row in rows if row.reference == reference]
        if group and reference:
            name = f'<th scope="rowgroup" colspan="{2 + len(MEASURES)}"><span>References, not ranked</span></th>'
            group.insert(0, f'<tr class="group">{name}</tr>')
        bodies.append(f"<tbody>{''.join(group)}</tbody>" if group else "")
    return "<p>Mean ± standard deviation over seeds, the best average accuracy first.</p>" + table(heads, bodies, "ranking")


def _row(row: Row, looks: dict[str, Look]) -> str:
    cells = "".join(f"<td>{_cell(measure, row)}</td>" for measure in MEASURES)
    return f'<tr><th scope="row">{_swatch(row.label, looks)}</th><td>{len(row.seeds)}</td>{cells}</tr>\n'


def _cell(measure: Measure, row: Row) -> str:
    over = row.measures[measure.key]
    if over is None:
        return MISSING
    parts = [deviation(measure, over), f"of {counted(over.seeds, 'seed')}" if over.seeds < len(row.seeds) else ""]
    return number(measure, over.mean) + "".join(f" <small>{part}</small>" for part in parts if part)


def _supply(setting: Setting) -> str:
    why, commands = supply(setting)
    listed = "".join(f"<br><code>{clear(line)}</code>" for line in commands)
    return f'<p class="note">{why}{listed}</p>' if commands else ""


def _grid(drawings: list[Drawing], *kinds: str) -> str:
    figures = [f"<figure>{d.svg}</figure>" for d in drawings if d.kind in kinds]
    size = "wide" if "accuracy" in kinds else "small" if len(figures) % 4 else "small four"
    return f'<div class="grid {size}">{"".join(figures)}</div>'


def _progress(drawings: list[Drawing]) -> str:
    text = "The average over the tasks learned so far, with a band of one standard deviation over seeds."
    if any(d.kind == "ratio" for d in drawings):
        text += " The forgetting ratio is 0 for joint training and −1 for guessing."  # noqa: RUF001
    return f"<p>{text}</p>" + _grid(drawings, "accuracy", "ratio")


def _every_task(drawings: list[Drawing]) -> str:
    text = "A line begins with the number of its task, when that task is learned. A line that falls is a task that is being "
    text += "forgotten. All panels have one scale, in percent; mean over seeds."
    return f"<p>{text}</p>" + _grid(drawings, "tasks")


def _matrices(setting: Setting, labels: list[str], looks: dict[str, Look]) -> str:
    """All accuracy matrices as tables on one scale of colours."""
    shown, low = chosen(len(setting.tasks)), lowest(setting)
    some = "" if len(shown) == len(setting.tasks) else f" {len(shown)} of {len(setting.tasks)} tasks are shown."
    steps = [low + (1 - low) * k / 5 for k in range(6)]
    scale = "".join(_shaded(f"{100 * v:.0f}", v, low, "span") for v in steps)
    text = (
        "A row is a moment, after learning a task; a column is a task. Down a column one sees what became of it. Mean over "
    )
    text += f"seeds, in percent; faded: not learned yet.{some}"
    tables = "".join(_matrix(setting, label, shown, low, looks) for label in labels)
    count = len(shown)  # the widths that a matrix takes on a screen and on paper, and its letters there
    sizes = f"--wide:{150 + 62 * count}px;--narrow:{90 + 36 * count}px;--letters:{min(8.5, 120 / count):.1f}pt"
    return f'<p>{text}</p><p class="scale">{scale}</p><div class="grid matrices" style="{sizes}">{tables}</div>'


def _matrix(setting: Setting, label: str, shown: list[int], low: float, looks: dict[str, Look]) -> str:
    values = mean_matrix(setting.methods[label])
    heads = ["<td>after</td>", *(f'<th scope="col">{_unbroken(setting.tasks[i])}</th>' for i in shown)]
    rows = []
    for t in shown:
        cells = [_shaded(_percent(values[t, i]), values[t, i], low, "td", faded=i > t) for i in shown]
        rows.append(f'<tr><th scope="row">{_unbroken(setting.tasks[t], 18)}</th>{"".join(cells)}</tr>')
    return table(heads, ["<tbody>", *rows, "</tbody>"], "matrix", _swatch(label, looks))


def _unbroken(name: str, most: int = 0) -> str:
    """A name that is broken between its words alone, and not at all if it has at most `most` letters."""
    parts = [name] if len(name) <= most else name.split()
    return " ".join(f'<span class="whole">{clear(p)}</span>' if len(p) <= max(most, 12) else clear(p) for p in parts)


def _percent(value: float) -> str:
    return f"{100 * value:.1f}" if math.isfinite(value) else MISSING


def _shaded(text: str, value: float, low: float, tag: str, faded: bool = False) -> str:
    back, ink = shade(value, low, faded)
    return f'<{tag} style="background:{back};color:{ink}">{text}</{tag}>'


def _training(setting: Setting, drawings: list[Drawing]) -> str:
    if not any(d.kind == "training" for d in drawings):
        return "<p>No record holds validation accuracies.</p>"
    text = f"Accuracy on validation data in every epoch, in percent, at seed {setting.seeds[0]} where no other is named; "
    text += "a colour per task as above, a dot where the weights were kept."
    if setting.reference("joint", setting.seeds[0]):
        text += " Joint training starts again with every task, on the data of all tasks so far."
    return f"<p>{text}</p>" + _grid(drawings, "training")


def _facts(setting: Setting) -> str:
    """Benchmark, network, regime, seeds, versions: all that decided the numbers."""
    spec = dict(setting.spec)
    facts = {
        kind: f"{spec.pop(kind)}{_options(spec.pop(f'{kind}_options'), ' (', ')')}" for kind in ("benchmark", "network")
    }
    facts["regime"] = _options(spec.pop("regime"))
    facts |= {name.replace("_", " "): option_text(value) or "none" for name, value in spec.items()}
    facts["seeds"] = option_text(setting.seeds)
    names = dict.fromkeys(name for record in setting.records for name in record.versions)
    kept = {name: sorted({str(record.versions.get(name, "?")) for record in setting.records}) for name in names}
    facts["versions"] = ", ".join(f"{name} {' / '.join(values)}" for name, values in kept.items())
    if halved := [f"{r.spec['method']} seed {r.spec['seed']} {r.halvings}" for r in setting.records if r.halvings]:
        facts["learning rates"] = "; ".join(halved)
    total = sum(float(record.seconds.get("total", 0)) for record in setting.records)
    facts["time"] = f"{total:,.1f} seconds for {counted(len(setting.records), 'run')} together"
    return f"<dl>{''.join(f'<dt>{clear(name)}</dt><dd>{clear(text)}</dd>' for name, text in facts.items())}</dl>"


def _options(options: dict[str, object], before: str = "", after: str = "") -> str:
    text = ", ".join(f"{name} {option_text(value)}" for name, value in options.items())
    return f"{before}{text}{after}" if text else ""


def _tasks(setting: Setting) -> str:
    """The tasks, as the first seed saw them."""
    tasks = setting.records[0].tasks
    keys = {"classes": "classes", "train": "training", "valid": "validation", "test": "test"}
    heads = [
        '<th scope="col">#</th><th scope="col">Task</th>',
        *(f'<th scope="col">{title}</th>' for title in keys.values()),
    ]
    rows = []
    for k in chosen(len(tasks)):
        cells = "".join(f"<td>{clear(tasks[k].get(key, MISSING))}</td>" for key in keys)
        rows.append(f'<tr><td>{k + 1}</td><th scope="row">{clear(tasks[k]["name"])}</th>{cells}</tr>')
    note = (
        ""
        if setting.same_tasks
        else f"The tasks depend on the seed; these are those of seed {setting.records[0].spec['seed']}."
    )
    return (f"<p>{note}</p>" if note else "") + table(heads, ["<tbody>", *rows, "</tbody>"], "tasks")


def _glossary() -> str:
    items = "".join(f'<dt id="measure-{m.key}">{m.title}</dt><dd>{m.meaning}</dd>\n' for m in MEASURES)
    return f'<section id="glossary"><h2>What the measures mean</h2>\n<dl class="glossary">{items}</dl></section>'
