"""Makes the tutorial a page with its outputs and figures, or a notebook.

python -m dev.tutorial FOLDER                    # run it, write FOLDER/what_is_forgetting.md and its figures
python -m dev.tutorial --notebook FILE.ipynb     # write it as a notebook; nothing is run
"""

import contextlib
import io
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

SCRIPT = Path(__file__).resolve().parent.parent / "docs" / "tutorial" / "what_is_forgetting.py"


def notebook() -> Any:
    """Return the script as a notebook, without the docstring at its top."""
    import jupytext  # which takes a second: tests of the site import this module and need no notebook

    book = jupytext.read(SCRIPT, fmt="py:percent")
    del book.cells[0]
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return book


def page(folder: Path, run: bool) -> str:
    """Run the cells in order and return the text, with what they printed and the figures that they showed."""
    names: dict[str, Any] = {"__name__": "tutorial"}
    parts: list[str] = []
    figures = 0
    for cell in notebook().cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(cell.source, str(SCRIPT), "exec") if run else "", names)
        parts.append(f"```python\n{cell.source}\n```")
        if printed.getvalue():
            parts.append(f"```text\n{printed.getvalue().rstrip()}\n```")
        for number in plt.get_fignums():
            figures += 1
            plt.figure(number).savefig(folder / f"{SCRIPT.stem}-{figures}.png", dpi=150)
            parts.append(f"![Figure {figures}]({SCRIPT.stem}-{figures}.png)")
        plt.close("all")
    return "\n\n".join(parts) + "\n"


def write(folder: Path, run: bool = True) -> None:
    """Write the page into a folder, with its figures if it is run."""
    mpl.use("agg")
    folder.mkdir(parents=True, exist_ok=True)
    plt.show = lambda: None  # type: ignore[assignment]  # a page shows the figures that are open after a cell
    (folder / f"{SCRIPT.stem}.md").write_text(page(folder, run))


if __name__ == "__main__":
    if sys.argv[1] == "--notebook":
        import jupytext

        jupytext.write(notebook(), sys.argv[2])
        print(f"wrote {sys.argv[2]}; open it with Jupyter or an editor that shows notebooks")
    else:
        write(Path(sys.argv[1]))
