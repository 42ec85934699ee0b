"""How things are said to people: texts for terminals, pages and warnings."""


def printable(text: object) -> str:
    """On one line and without control characters, so that any name can go into any file."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())


def shorten(text: str, most: int = 1000) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def one_line(message: Warning | str, category: object, filename: object, lineno: object, line: object = None) -> str:
    """How a warning is shown: for `warnings.formatwarning`."""
    return f"hatrack: {message}\n"


SCARCE = 0.05  # a layer with less of it free is worth a word
