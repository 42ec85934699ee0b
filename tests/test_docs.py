"""What the documents say is true: the tree of files, the commands, the example method."""

import copy
import importlib.util
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import torch

import hatrack
from dev import api_reference, formulas, layout, results, site, tuning
from hatrack import METHODS, Network, Regime, Trainer
from hatrack.__main__ import main
from hatrack.experiments.record_parts import Spec
from hatrack.networks.mlp import mlp
from hatrack.recipes import RECIPES
from hatrack.recipes.quantities import summary
from hatrack.recipes.reproduce import read_records
from hatrack.recipes.results import Results
from hatrack.reporting.words import run_command
from tests.helpers.learning import learn, logits
from tests.helpers.toys import toy_tasks

ROOT = Path(__file__).parent.parent
TUTORIAL = ROOT / "docs" / "tutorial" / "what_is_forgetting.py"
CHANGELOG = ROOT / "CHANGELOG.md"
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", CHANGELOG, *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_tree_of_files_is_what_the_docstrings_say():
    assert layout.PAGE.read_text() == layout.page(), "python dev/layout.py"


def test_the_pages_of_results_are_what_the_records_say(capsys):
    assert results.main(check=True) == 0, capsys.readouterr().err


@pytest.mark.slow
def test_the_pages_of_results_have_the_figures_that_the_records_give(tmp_path):
    results.write_figures(read_records(results.RESULTS), tmp_path)
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in (results.RESULTS / "figures").iterdir()}
    assert all((tmp_path / name).stat().st_size > 1000 for name in drawn)


def test_the_page_of_tuning_is_what_the_records_say():
    assert tuning.PAGE.read_text(encoding="utf-8") == tuning.page(), "python -m dev.tuning"


@pytest.mark.parametrize(("name", "label"), [("agem", "A-GEM"), ("er", "ER")])
def test_the_comparison_of_004_on_the_page_of_a_method_is_a_row_with_records(name, label):
    text = (ROOT / "docs" / "methods" / f"{name}.md").read_text(encoding="utf-8")
    (part,) = RECIPES["regimes"].only(("rotated",))
    found = Results(part, read_records(results.RESULTS))
    assert f"`{run_command(Spec.from_dict(found.rows[label].run.spec), [0, 1, 2])}`" in text
    accuracy, forgetting = (found.summary(label, summary(key)) for key in ("accuracy", "forgetting"))
    assert f"accuracy {100 * accuracy.mean:.1f} ± {100 * accuracy.std:.1f} %" in text
    assert f"forgetting {forgetting.mean:.3f} ± {forgetting.std:.3f} (n = 3)" in text


def test_numbers_in_the_text_on_tuning_are_in_its_tables():
    lines = (ROOT / "docs" / "results" / "tuning.md").read_text().splitlines()
    tables = "\n".join(line for line in lines if line.startswith("|"))
    text = "\n".join(line for line in lines if not line.startswith(("|", "hatrack ", "Plain ")))
    assert [number for number in re.findall(r"\b\d+\.\d{3}\b", text) if number not in tables] == []


@pytest.mark.parametrize("name", METHODS)
def test_the_result_on_the_page_of_a_method_is_that_of_its_records(name):
    """The command that some pages have is a row of the page on all methods."""
    text = (ROOT / "docs" / "methods" / f"{name}.md").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "results" / "others.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^## Every method on one small sequence$(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    (row,) = re.findall(rf"^\| {name} \| 3 \| (.+) \| .+ \| (.+) \|$", table, re.MULTILINE)
    _, command, rest = text.partition(f"`hatrack run digits-and-clothes {name} ")
    found = re.findall(r"accuracy (\S+ ± \S+) %.* forgetting (-?\S+ ± [\d.]+\d)", rest)[:1] if command else [row]
    assert [(accuracy, forgetting.removeprefix("-")) for accuracy, forgetting in found] == [row]


def test_a_claim_about_all_data_sets_says_which_it_was_judged_on():
    """A row of the table that the claim leaves out would otherwise contradict it."""
    page = (ROOT / "docs" / "results" / "hat-2018.md").read_text()
    sizes = [float(size) for size in re.findall(r"^\| HAT, \S+ \| \d+ \|[^|]*\| ([\d.]+)", page, re.MULTILINE)]
    (claim,) = re.findall(
        r"^\| HAT compresses a task to 1 to 21 % of the weights(.*) \| \*\*holds\*\*.*\|", page, re.MULTILINE
    )
    assert len(sizes) == 8
    assert max(sizes) < 21.5 or "the six data sets" in claim


def test_the_tree_says_something_of_every_file():
    tree = re.search(r"```text\n(.*?)```", (ROOT / "docs" / "layout.md").read_text(), re.DOTALL)[1]
    files = [line.split(maxsplit=1) for line in tree.splitlines()]
    assert [name for name, *said in files if "." in name and not said] == []


def commands() -> list[str]:
    found = []
    tutorial = re.sub(r"^# ?", "", TUTORIAL.read_text(), flags=re.MULTILINE)
    for text in [tutorial, *(path.read_text() for path in DOCS)]:
        for block in re.findall(r"```(?:sh|bash)\n(.*?)```", text, re.DOTALL):
            found += [line.split("#")[0].strip() for line in block.splitlines()]
        found += re.findall(r"`(hatrack (?:run|list|report|demo|reproduce)[^`]*)`", text)
    return sorted(
        {c for c in found if c.startswith("hatrack ") and "..." not in c and "BENCHMARK" not in c and "DIR" not in c}
    )


@pytest.mark.parametrize("command", commands())
def test_commands_in_the_documents_are_understood(command, capsys, monkeypatch):
    """Every option exists and every value is allowed: with --help in the end nothing is run."""
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "examples"))  # where the documents' own methods are
    words = shlex.split(command)[1:]
    assert main([*words, "--help"]) == 0
    shown = capsys.readouterr().out
    for word in words:
        if word.startswith("--"):
            assert word.split("=")[0] in shown


def test_the_first_two_commands_of_the_readme():
    block = re.search(r"```(?:sh|bash)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert [line.split("#")[0].strip() for line in block[1].splitlines()][:2] == ["make demo", "make test"]


def test_the_python_in_the_readme_works():
    """As it stands there, on made-up data of the classes that it names."""
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    tasks = [toy_tasks(3, classes=count, train=4 * count, test=count)[k] for k, count in enumerate((10, 43, 5))]
    trunk = mlp(tasks[0].shape, widths=(40, 40))
    names = {"torch": torch, "trunk": trunk, "tasks": tasks[:2], "new_task": tasks[2]}
    names["x"] = tasks[0].test.inputs(torch.arange(10))
    exec(block, names)
    assert names["logits"].shape == (10, 10)


def entries() -> list[str]:
    """The entries of the CHANGELOG, each in one line."""
    found = re.split(r"^- ", re.sub(r"^#.*\n", "- ", CHANGELOG.read_text(), flags=re.MULTILINE), flags=re.MULTILINE)
    return [" ".join(entry.split()) for entry in found if entry.strip()]


def test_the_changelog_has_the_parts_of_its_format_each_once_and_short_entries():
    unreleased = CHANGELOG.read_text().split("\n## ")[1]
    parts = re.findall(r"^### (.*)$", unreleased, re.MULTILINE)
    allowed = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
    assert parts == [name for name in allowed if name in parts]
    assert [entry for entry in entries() if len(entry) > 450] == []


def test_names_in_the_changelog_exist():
    """What is said to be there now; old names are those that "was" stands before."""
    text = " ".join(entries())
    names = set(re.findall(r"`hr\.(\w+)", text))
    assert len(names) > 5
    assert {name for name in names if not hasattr(hatrack, name)} == set()
    methods = set(re.findall(r"(?<!was )`method\.(\w+)", text))
    assert {name for name in methods if not hasattr(hatrack.HAT, name)} == set()


def test_links_lead_somewhere():
    for path in DOCS:
        text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)  # code calls heads["a"](x)
        for target in re.findall(r"\]\(([^)#\s]+)[)#]", text):
            if not target.startswith("http"):
                assert (path.parent / target).exists(), f"{path.name} links to {target}"


def load_example(name):
    path = ROOT / "docs" / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, path.read_text()


def example():
    module, text = load_example("anchored")
    return module.Anchored, text


def test_the_example_of_any_network(monkeypatch, capsys):
    module, text = load_example("any_network")
    assert f"```python\n{text}```" in (ROOT / "docs" / "any_network.md").read_text()
    monkeypatch.setattr(module.hr, "Regime", lambda **options: Regime(**options | {"epochs": 1}))
    module.main()
    assert capsys.readouterr().out.count("capacity taken") == 2


def test_the_example_in_the_documents_is_the_file():
    _, text = example()
    assert f"```python\n{text}```" in (ROOT / "docs" / "adding_a_method.md").read_text()


def test_the_example_works():
    anchored, _ = example()
    tasks = toy_tasks(2)
    change = {}
    for strength in (0.0, 10.0):
        net = Network(mlp(tasks[0].shape, widths=(24,), dropout=0.0), [3, 3], tasks[0].train.inputs(torch.arange(2)))
        torch.manual_seed(0)
        method = anchored(net, strength=strength)
        fit = Trainer(Regime(epochs=10, batch=8, lr=0.05), watch=True)
        method.learn(tasks[0], fit)
        before = logits(method, tasks[0])
        learn(method, tasks[1:], fit)
        change[strength] = (before - logits(method, tasks[0])).abs().mean().item()
    assert change[10.0] < change[0.0] / 3
    with pytest.raises(ValueError, match="strength must be at least 0"):
        anchored(copy.deepcopy(net), strength=-1.0)


def test_every_method_has_a_page():
    assert {path.stem for path in (ROOT / "docs" / "methods").glob("*.md")} - {"README"} == set(METHODS)


def test_the_table_of_methods_names_each_once_with_its_class():
    rows = re.findall(r"^\| \[`(.*?)`\]\((.*?)\.md\) \| `hr\.(\w+)` \|", (ROOT / "docs/methods/README.md").read_text(), re.M)
    assert sorted(rows) == sorted((name, name, METHODS[name].__name__) for name in METHODS)


def test_the_readme_is_short_and_names_no_paper_by_number():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    assert re.findall(r"(?<![.,\d])00[0-4]\b", text) == []


def test_the_table_of_methods_in_the_readme_names_all():
    table = re.search(r"\| methods \|(.*?)\n\n", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    named = [name for row in table.splitlines()[2:] for name in re.findall(r"`([\w-]+)`", row.split("|")[1])]
    assert sorted(named) == sorted(METHODS)


def pages() -> set[str]:
    """The pages under docs/ and where they are; the methods have a table of their own."""
    found = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    return {name for name in found if name != "README.md" and not re.match(r"methods/(?!README)", name)}


def test_the_index_leads_to_every_page():
    linked = set(re.findall(r"\]\(([^)#]+)", (ROOT / "docs" / "README.md").read_text()))
    assert pages() | {"tutorial/what_is_forgetting.py", "../CONTRIBUTING.md"} == linked


def test_the_site_has_every_page_in_its_navigation():
    def files(entries):
        for entry in entries:
            for value in entry.values():
                yield from files(value) if isinstance(value, list) else [value]

    named = list(files(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]))
    made = {
        "contributing.md",
        "gallery.md",
        "tutorial/what_is_forgetting.md",
        *(f"api/{stem}.md" for stem in api_reference.PAGES),
    }
    assert sorted(named) == sorted(pages() | {f"methods/{name}.md" for name in METHODS} | {"README.md"} | made)


def test_the_api_reference_has_every_public_name_once():
    named = [name for _, _, names in api_reference.PAGES.values() for name in names]
    assert sorted(named) == sorted(set(hatrack.__all__) - {"__version__"})


def test_a_docstring_becomes_markdown():
    text = """Return the sum.

    Args:
        a: the first number,
            which may be large.
        b: the second.

    Returns:
        The sum.

    Example:
        >>> add(1, 2)
        3
    """
    lines = [line for line in api_reference.markdown(text).splitlines() if line]
    assert lines == [
        "Return the sum.",
        *("**Arguments**", "- `a`: the first number,", "    which may be large.", "- `b`: the second."),
        *("**Returns**", "The sum.", "**Example**", "```python", ">>> add(1, 2)", "3", "```"),
    ]


def test_the_api_reference_shows_what_users_call_of_a_method():
    """Wherever it is defined."""
    text = api_reference.entry("Method")
    assert all(f"{name}(" in text for name in api_reference.SHOWN["Method"] if name not in ("history", "__call__"))


def test_the_api_reference_shows_options_with_their_ranges():
    assert "| `c` | `0.75` | float at least 0 |" in api_reference.entry("HAT")


@pytest.mark.parametrize(
    ("link", "becomes"),
    [
        ("[a](../CONTRIBUTING.md)", "[a](contributing.md)"),
        ("[a](methods/hat.md#options)", "[a](methods/hat.md#options)"),
        ("[a](results/)", "[a](results/README.md)"),
        ("[a](tutorial/what_is_forgetting.py)", "[a](tutorial/what_is_forgetting.md)"),
        ("[`dev/LOG.md`](../dev/LOG.md)", "`dev/LOG.md`"),
        ("[a](https://example.org/x.md)", "[a](https://example.org/x.md)"),
        ("| 1.0 ± 0.2 |", "| 1.0\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}0.2 |"),
        ("```text\n[a](../dev/LOG.md)\n```", "```text\n[a](../dev/LOG.md)\n```"),
    ],
)
def test_links_on_the_site(link, becomes):
    assert site.relink(link, ROOT / "docs" / "design.md", site.OUT / "design.md") == becomes


@pytest.mark.parametrize(
    ("plain", "drawn"),
    [
        ("h_{l-1}^k and g'_ij", "h<sub>l-1</sub><sup>k</sup> and g'<sub>ij</sub>"),
        ("max(a^t, a^{<t})", "max(a<sup>t</sup>, a<sup>&lt;t</sup>)"),
        ("L_1(w_2)^2 <= |w|^(1/T)", "L<sub>1</sub>(w<sub>2</sub>)<sup>2</sup> ≤ |w|<sup>(1/T)</sup>"),
        ("sum_k F_k theta_k <- lambda", "∑<sub>k</sub> F<sub>k</sub> θ<sub>k</sub> ← λ"),
        ("the sum of `per_class`, [a](b_c.md)", "the sum of `per_class`, [a](b_c.md)"),
        ("alphabet, log_file_", "alphabet, log<sub>file</sub>_"),
    ],
)
def test_formulas_on_the_site(plain, drawn):
    page = "# m_1\n\n## Formulas\n\n{}\n\n## Options\n\nx_1^2\n"
    assert formulas.set_formulas(page.format(plain)) == page.format(drawn)


def test_no_formula_of_a_method_is_left_plain_on_the_site():
    for path in (ROOT / "docs" / "methods").glob("*.md"):
        for section in formulas.SECTION.findall(formulas.set_formulas(path.read_text())):
            assert re.findall(r"\w[_^][\w{(]|<[=-]", re.sub(r"`[^`]*`|\([^)]*\.md[^)]*\)", "", section)) == [], path.name


def test_the_glossary_has_the_words_of_the_library():
    words = {word.lower() for word in re.findall(r"\*\*([^*]+)\*\*", (ROOT / "docs" / "glossary.md").read_text())}
    needed = "task head trunk gate mask seed regime epoch benchmark run record forgetting capacity checkpoint step batch fit"
    assert set(needed.split()) | {"forgetting ratio", "roll back"} <= words
