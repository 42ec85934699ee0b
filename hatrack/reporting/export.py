"""The ranking of a setting as a table for a paper: LaTeX, Markdown or CSV, with options as columns."""

import csv
import io
from collections.abc import Callable, Sequence
from typing import Literal

from hatrack.experiments.statistics import leaders
from hatrack.experiments.tuning_protocols import caution_of
from hatrack.reporting.measures import MISSING, format_number, format_std, heading, measures_of, spreadsheet_text
from hatrack.reporting.tables import Setting, accuracies, changed_options, ranking, tuning_cautions
from hatrack.text import printable

Format = Literal["latex", "markdown", "csv"]
SHOWN = (
    *("accuracy", "learning", "forgetting", "intransigence", "without_task_id", "routed"),
    *("forgetting_ratio", "parameters", "bytes", "steps", "flops"),
)
LATEX = {"\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
         "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}  # fmt: skip


def export(settings: Sequence[Setting], form: Format) -> str:
    """Return the tables of all settings as one text.

    Args:
        settings: what `settings(records)` returned.
        form: "latex", "markdown" or "csv".
    """
    make: dict[str, Callable[[Setting], str]] = {"latex": _latex, "markdown": _markdown, "csv": _csv}
    return "\n".join(make[form](setting) for setting in settings)


def _cells(setting: Setting) -> tuple[list[str], list[list[str]], set[int]]:
    """Return the heads, the rows and which rows are ahead of all others.

    Options that differ from a method's default are columns.
    """
    rows, best = ranking(setting), leaders(accuracies(setting))
    changed = {row.label: changed_options(setting.methods[row.label][0]) for row in rows}
    options = list(dict.fromkeys(name for row in rows for name in changed[row.label]))
    known = [m for m in measures_of(setting.score) if m.key in SHOWN]
    measures = [m for m in known if any(row.measures.get(m.key) for row in rows)]
    heads = ["method", *options, "n", *map(heading, measures)]
    body = []
    for row in rows:
        cells = [(m, row.measures.get(m.key)) for m in measures]
        texts = [f"{format_number(m, s.mean)} {format_std(m, s)}".strip() if s else MISSING for m, s in cells]
        record = setting.methods[row.label][0]
        caution = caution_of(record.tuned, record.spec.seed)
        name = printable(record.spec.method) + (f" ({caution.short})" if caution else "")
        body.append([name, *(changed[row.label].get(o, "") for o in options), str(len(row.seeds)), *texts])
    return heads, body, {k for k, row in enumerate(rows) if best == [row.label]}


def _markdown(setting: Setting) -> str:
    heads, rows, ahead = _cells(setting)
    place = heads.index("n") + 1
    lines = [f"**{printable(setting.title)}**", "", _piped(heads), _piped(["---"] * len(heads))]
    for k, row in enumerate(rows):
        shown = [f"**{text}**" if k in ahead and column == place else text for column, text in enumerate(row)]
        lines.append(_piped(shown))
    lines += [f"\n{printable(line)}." for line in setting.left_out]
    notes = [line for text in tuning_cautions(setting) for line in ("", f"Caution: {text}")]
    return "\n".join([*lines, *notes, ""])


def _piped(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _latex(setting: Setting) -> str:
    heads, rows, ahead = _cells(setting)
    place = heads.index("n") + 1
    lines = [f"% {printable(setting.title)}", rf"\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}", r"\toprule"]
    lines += [_joined(heads), r"\midrule"]
    for k, row in enumerate(rows):
        cells = [_escaped(text) for text in row]
        lines.append(
            " & ".join(rf"\textbf{{{c}}}" if k in ahead and column == place else c for column, c in enumerate(cells))
            + r" \\"
        )
    notes = [f"% {printable(line)}" for line in setting.left_out]
    notes += [f"% caution: {text}" for text in tuning_cautions(setting)]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", *notes, ""])


def _joined(cells: Sequence[str]) -> str:
    return " & ".join(map(_escaped, cells)) + r" \\"


def _escaped(text: str) -> str:
    plain = "".join(LATEX.get(letter, letter) for letter in text)
    return plain.replace("±", r"$\pm$").replace("−", "$-$").replace("ρ≤", r"$\rho_{\leq}$").replace(MISSING, "---")  # noqa: RUF001


def _csv(setting: Setting) -> str:
    heads, rows, ahead = _cells(setting)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["setting", *heads, "ahead"])
    for k, row in enumerate(rows):
        writer.writerow([*map(spreadsheet_text, (setting.title, *row)), "yes" if k in ahead else "no"])
    return out.getvalue()
