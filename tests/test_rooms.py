"""The order of the rooms: a module imports only rooms below its own, and nothing of ours inside a function."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "hatrack"
ROOMS = (
    ("options", "seeds", "regime", "registry", "text", "_version"),  # the ground floor, single files
    *(("files",), ("tasks",), ("tracing",), ("networks",), ("datasets",), ("benchmarks",), ("methods",), ("engine",)),
    *(
        ("tracking",),
        ("training",),
        ("guard",),
        ("inspection",),
        ("experiments",),
        ("clusters",),
        ("reporting",),
        ("watching",),
    ),
    *(("recipes",), ("cli",), ("__main__",)),
)
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
LAZY = ("__init__.py", "cli/group.py", "__main__.py")  # where our own modules may be imported inside a function


def wrong_imports(source: str, room: str, file: str) -> list[str]:
    """The imports of a module of this room that break the order, each with what is wrong."""
    tree, found = ast.parse(source), []
    inside = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) for n in ast.walk(f)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "hatrack":
            found.append(f"line {node.lineno}: a name of the package itself; import it from its module")
        if isinstance(node, ast.Constant) and (place := re.fullmatch(r"hatrack\.(\w+)[\w.]*(:\w+)?", str(node.value))):
            if id(node) in inside and file not in LAZY:
                found.append(f"line {node.lineno}: {node.value!r} inside a function")
            elif file not in LAZY and LEVEL.get(place[1], 99) > LEVEL[room]:
                found.append(f"line {node.lineno}: {node.value!r} is above {room}")
        match node:
            case ast.ImportFrom(module=str(module), level=0) if module.split(".")[0] == "hatrack":
                rooms = [module.split(".")[1]] if "." in module else [alias.name for alias in node.names]
            case ast.Import():
                rooms = [
                    a.name.split(".")[1] if "." in a.name else "" for a in node.names if a.name.split(".")[0] == "hatrack"
                ]
            case ast.ImportFrom(level=level) if level:
                found.append(f"line {node.lineno}: a relative import")
                continue
            case _:
                continue
        for other in rooms:
            where = f"line {node.lineno}: {ast.unparse(node)}"
            if id(node) in inside and file not in LAZY:
                found.append(f"{where}: inside a function")
            elif file != "__init__.py" and LEVEL.get(other, 99) > LEVEL[room]:
                found.append(f"{where}: {other} is above {room}")
    return found


MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module):
    room = module.split("/")[0].removesuffix(".py")
    assert room == "__init__" or room in LEVEL, f"{room} is no room"
    assert wrong_imports((PACKAGE / module).read_text(), room, module) == []


@pytest.mark.parametrize(
    ("source", "room"),
    [
        ("from hatrack.training.trainer import Trainer", "methods"),
        ("import hatrack.cli.run", "experiments"),
        ("from hatrack import Trainer", "methods"),
        ("import hatrack", "methods"),
        ("def f():\n    from hatrack.files import schema", "methods"),
        ("async def f():\n    import hatrack.files.schema", "methods"),
        ("class A:\n    def f(self):\n        from hatrack.methods import method", "cli"),
        ("if TYPE_CHECKING:\n    from hatrack.training.trainer import Trainer", "methods"),
        ("from . import method", "methods"),
        ("from hatrack.nowhere import x", "cli"),
        ("import hatrack.files.atomic\nTrainer = hatrack.Trainer", "methods"),
        ('def f():\n    return importlib.import_module("hatrack.files.schema")', "methods"),
        ('TABLE = {"x": "hatrack.training.trainer:Trainer"}', "methods"),
        ('load("hatrack.cli.run:command")', "experiments"),
    ],
)
def test_an_import_that_breaks_the_order_is_seen(source, room):
    """The check can fail."""
    assert len(wrong_imports(source, room, f"{room}/some.py")) == 1


def test_an_import_in_order_is_not_reported():
    source = "from hatrack.files import schema\nfrom hatrack.options import Option"
    assert wrong_imports(source, "methods", "methods/some.py") == []


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements within a node: expressions, which are most of a file, have none."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            yield child
            yield from statements(child)


def imports_of_tests(source: str) -> list[str]:
    """The imports of a test file that take something from another test file."""
    nodes = [node for node in statements(ast.parse(source)) if isinstance(node, ast.ImportFrom | ast.Import)]
    return [line for line in map(ast.unparse, nodes) if re.search(r"\btests(\.\w+)*\.test_\w+| import test_\w+", line)]


@pytest.mark.parametrize("path", sorted(PACKAGE.parent.glob("tests/**/*.py")), ids=lambda path: path.stem)
def test_no_test_file_imports_another(path):
    assert imports_of_tests(path.read_text()) == []


def test_an_import_of_a_test_file_is_seen():
    for source in ("from tests.guard.test_steps import step", "import tests.test_api", "from tests.guard import test_steps"):
        assert imports_of_tests(source) == [source]
    assert imports_of_tests("from tests.helpers.guarded import data") == []
