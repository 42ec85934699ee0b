"""The table of costs on the page, and the lines about methods that are outside a budget."""

from hatrack.reporting.drawing import LineStyle
from hatrack.reporting.elements import cell, coloured_label, escaped, table
from hatrack.reporting.measures import MEASURES, heading
from hatrack.reporting.tables import Row, Setting


def costs_part(rows: list[Row], styles: dict[str, LineStyle]) -> str:
    """Return the table of costs; empty if no record has any."""
    measures = [m for m in MEASURES if m.part == "costs" and any(row.measures[m.key] for row in rows)]
    if not measures:
        return ""
    heads = [f'<th scope="col">{name}</th>' for name in ("Method", *map(heading, measures))]
    body = []
    for row in rows:
        cells = "".join(f"<td>{cell(measure, row.measures[measure.key], len(row.seeds))}</td>" for measure in measures)
        body.append(f'<tr><th scope="row">{coloured_label(row.label, styles)}</th>{cells}</tr>\n')
    text = "What a run used, mean ± standard deviation over seeds. The bytes are those after the last task; steps and "
    text += "operations are those of the training steps."
    return f"<p>{text}</p>" + table(heads, ["<tbody>", *body, "</tbody>"], "ranking")


def left_out_note(setting: Setting) -> str:
    """Return a paragraph that names the methods outside the budget; empty if there are none."""
    lines = "<br>".join(escaped(line) for line in setting.left_out)
    return f'<p class="note">{lines}</p>' if lines else ""
