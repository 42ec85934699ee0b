"""Sets the formulas of a page of the site: Greek letters, signs, and indices as HTML, which need no script and no fonts.

The pages keep them as plain text, theta_k and a^{<t}, which can be read in an editor.
"""

import html
import re

SECTION = re.compile(r"(?<=^## Formulas\n).*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"(`[^`]*`|\]\([^)]*\))")  # and targets of links
GREEK = {"alpha": "α", "beta": "β", "delta": "δ", "theta": "θ", "lambda": "λ", "omega": "ω", "Omega": "Ω"}  # noqa: RUF001
SIGNS = {"<=": "≤", "<-": "←", " . ": " · "}
INDEX = re.compile(r"(?<=[\w)'|\]}\u2211])([_^])(?:\{([^}]*)\}|(\([^)]*\)|\d+|[^\W\d_]+))")


def set_formulas(text: str) -> str:
    """Return a page of the site whose section "Formulas" is set; code in it stays as it is."""
    return SECTION.sub(lambda found: "".join(map(_set, CODE.split(found[0]))), text)


def _set(text: str) -> str:
    if CODE.fullmatch(text):
        return text
    text = re.sub(r"\bsum(?=_)", "\u2211", text)
    text = re.sub(rf"(?<![^\W_])({'|'.join(GREEK)})(?![^\W_])", lambda found: GREEK[found[1]], text)
    for plain, sign in SIGNS.items():
        text = text.replace(plain, sign)
    return INDEX.sub(_index, text)


def _index(found: re.Match[str]) -> str:
    tag = "sub" if found[1] == "_" else "sup"
    return f"<{tag}>{html.escape(found[2] or found[3])}</{tag}>"
