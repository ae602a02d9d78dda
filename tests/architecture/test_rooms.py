"""The house as CONTRIBUTING.md and the rooms' own docstrings draw it."""

import ast
import graphlib
import importlib
import pathlib
import re
import subprocess
import sys

import pytest

import toolkit
from toolkit.strategies.context import Step

ROOT = pathlib.Path(toolkit.__file__).parent.parent
LIBRARY = ROOT / "toolkit"
MOST_PUBLIC_NAMES = 12


PACKAGES = sorted(path.parent for path in LIBRARY.rglob("__init__.py"))
NAMES = {path: ".".join(path.relative_to(ROOT).parts) for path in PACKAGES}
# CONTRIBUTING's picture of the wings, from the lowest to the highest.
PICTURE = re.search(r"    toolkit/\n(.*?)\n    recipes/", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)[1]
WINGS = re.findall(r"^      (\w+)(?:\.py|/) ", PICTURE, re.MULTILINE)


def imported(path):
    """Modules and names of the toolkit that a file imports, anywhere in it: "toolkit.support.files"."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "toolkit":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("toolkit."))


def parts(package):
    """The files and rooms of a package, by name, and which of the others each imports."""
    files = {path.stem: [path] for path in package.glob("*.py") if path.stem not in ("__init__", "__main__")}
    files |= {path.parent.name: list(path.parent.rglob("*.py")) for path in package.glob("*/__init__.py")}
    prefix = f"{NAMES[package]}."
    imports = {
        name: {
            module.removeprefix(prefix).split(".")[0]
            for path in paths
            for module in imported(path)
            if module.startswith(prefix)
        }
        for name, paths in files.items()
    }
    return {name: (found & set(files)) - {name} for name, found in imports.items()}


@pytest.mark.parametrize("package", PACKAGES, ids=NAMES.get)
def test_imports_make_no_circle(package):
    """Neither among the files of a package nor among its rooms, imports within functions included."""
    graphlib.TopologicalSorter(parts(package)).prepare()


def test_no_wing_imports_one_that_stands_below_it_in_the_picture():
    imports = parts(LIBRARY)
    assert set(imports) == set(WINGS)
    upward = {wing: set(imports[wing]) & set(WINGS[place:]) for place, wing in enumerate(WINGS)}
    assert not any(upward.values()), upward


def test_few_names_are_public():
    assert len(toolkit.__all__) <= MOST_PUBLIC_NAMES
    assert set(toolkit.__all__) == {"__version__", *WINGS} - {"support"}


@pytest.mark.parametrize("package", PACKAGES, ids=NAMES.get)
def test_a_room_says_who_comes_here(package):
    assert ast.get_docstring(ast.parse((package / "__init__.py").read_text()))


def test_contributing_names_only_files_that_exist():
    named = re.findall(
        r"`((?:toolkit|recipes|tests|benchmarks|scripts|docs)/[\w./]+)`", (ROOT / "CONTRIBUTING.md").read_text()
    )
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("package", [path for path in PACKAGES if path != LIBRARY], ids=NAMES.get)
def test_all_is_complete(package):
    module = importlib.import_module(NAMES[package])
    public = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and f"{getattr(value, '__module__', '')}.".startswith(f"{module.__name__}.")
    }
    assert public <= set(getattr(module, "__all__", ())), "public names missing from __all__"
    assert all(hasattr(module, name) for name in getattr(module, "__all__", ()))


def test_recipes_import_no_other_recipe():
    for path in (ROOT / "recipes").glob("*.py"):
        assert not re.search(r"^\s*(from|import) recipes", path.read_text(), re.MULTILINE), path


def test_flags_are_defined_only_in_cli_and_recipes():
    for path in LIBRARY.rglob("*.py"):
        if path.parent.name != "cli":
            assert "absl" not in path.read_text(), path


def test_nothing_writes_the_environment():
    write = re.compile(r"os\.environ\[[^]]*\]\s*=|environ\.(update|setdefault|pop)\(|os\.putenv|del os\.environ")
    # gRPC would reach the tasks of a cluster through a proxy, and nothing but the environment tells it not to.
    allowed = LIBRARY / "cluster/rendezvous.py"
    for path in {*LIBRARY.rglob("*.py"), *(ROOT / "recipes").glob("*.py")} - {allowed}:
        assert not write.search(path.read_text()), path


@pytest.mark.slow
@pytest.mark.parametrize(
    "statement",
    [
        "import toolkit",
        "import toolkit.cli, toolkit.cluster, toolkit.devices, toolkit.strategies, toolkit.models, toolkit.training",
    ],
)
def test_importing_costs_no_tensorflow(statement):
    heavy = "[m for m in ('tensorflow', 'keras', 'rich', 'tensorflow_datasets') if m in sys.modules]"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {statement}; print({heavy})"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_an_unknown_wing_is_an_attribute_error():
    with pytest.raises(AttributeError, match="kitchen"):
        toolkit.kitchen  # noqa: B018


def attributes_set(path):
    """The attributes of `this_step` that a file sets."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "having":
            yield from (each.arg for each in node.keywords)  # None: what replicas.py knows of a replica.
        elif isinstance(node, ast.Assign):
            yield from (each.attr for each in node.targets if re.fullmatch(r"this_step\.\w+", ast.unparse(each)))


def test_a_step_says_which_file_sets_which_of_its_attributes():
    said = {
        path: set(re.findall(r"\w+", names.replace("all from strategy to on_cpus", "None")))
        for path, names in re.findall(r"- `(\S+)`, where .*?: (.*)\.$", Step.__doc__, re.MULTILINE)
    }
    files = [path for path in LIBRARY.rglob("*.py") if path.name != "context.py"]
    found = {str(path.relative_to(LIBRARY)): {str(each) for each in attributes_set(path)} for path in files}
    assert said == {path: names for path, names in found.items() if names}
