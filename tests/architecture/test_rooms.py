"""The house as CONTRIBUTING.md and the rooms' own docstrings draw it."""

import ast
import importlib
import pathlib
import re
import subprocess
import sys

import pytest

import toolkit

ROOT = pathlib.Path(toolkit.__file__).parent.parent
LIBRARY = ROOT / "toolkit"


def listed(docstring):
    """The names in the list of a docstring, each followed by two spaces or more, in order."""
    return re.findall(r"^ *(\w+)  +\S", docstring, re.MULTILINE)


ROOMS = listed(toolkit.__doc__)
PACKAGES = [room for room in ROOMS if (LIBRARY / room).is_dir()]


def imports(path):
    """Modules of the toolkit that a file imports, anywhere in it, as (room, file or None)."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "toolkit":
            parts = node.module.split(".")[1:]
            if len(parts) < 2:
                found += [(*parts, alias.name)[:2] for alias in node.names]
            else:
                found.append((parts[0], parts[1]))
        elif isinstance(node, ast.Import):
            found += [tuple(a.name.split(".")[1:3]) for a in node.names if a.name.startswith("toolkit.")]
    return found


def test_every_room_is_listed_and_every_listed_room_exists():
    there = {p.name for p in LIBRARY.iterdir() if p.is_dir() and p.name != "__pycache__"}
    there |= {p.stem for p in LIBRARY.glob("*.py")} - {"__init__", "__main__"}
    assert set(ROOMS) == there


@pytest.mark.parametrize("room", PACKAGES)
def test_every_file_is_listed_in_its_room(room):
    docstring = ast.get_docstring(ast.parse((LIBRARY / room / "__init__.py").read_text()), clean=False)
    assert set(listed(docstring)) == {p.stem for p in (LIBRARY / room).glob("*.py")} - {"__init__"}


@pytest.mark.parametrize("room", PACKAGES)
def test_a_room_imports_only_rooms_above_it_and_a_file_only_files_above_it(room):
    docstring = ast.get_docstring(ast.parse((LIBRARY / room / "__init__.py").read_text()), clean=False)
    files = listed(docstring)
    for path in (LIBRARY / room).glob("*.py"):
        for other, *rest in imports(path):
            if other == "__version__":
                continue
            if other != room:
                assert ROOMS.index(other) < ROOMS.index(room), f"{path} imports {other}, which is not above {room}"
            elif path.stem != "__init__" and rest and rest[0] in files:
                assert files.index(rest[0]) < files.index(path.stem), f"{path} imports {rest[0]}, which is below it"


def test_contributing_lists_the_rooms_in_the_same_order():
    picture = re.search(r"    toolkit/\n(.*?)\n    recipes/", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)[1]
    drawn = re.findall(r"^      (\w+)(?:\.py|/) ", picture, re.MULTILINE)
    assert [name for name in drawn if name != "__init__"] == ROOMS


@pytest.mark.parametrize("room", ROOMS)
def test_all_is_complete(room):
    module = importlib.import_module(f"toolkit.{room}")
    public = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and f"{getattr(value, '__module__', '')}.".startswith(f"{module.__name__}.")
    }
    assert public <= set(module.__all__), "public names missing from __all__"
    assert all(hasattr(module, name) for name in module.__all__)


def test_recipes_import_no_other_recipe():
    for path in (ROOT / "recipes").glob("*.py"):
        assert not re.search(r"^\s*(from|import) recipes", path.read_text(), re.MULTILINE), path


def test_flags_are_defined_only_in_cli_and_recipes():
    for path in LIBRARY.rglob("*.py"):
        if path.parent.name != "cli":
            assert "absl" not in path.read_text(), path


def test_nothing_writes_the_environment():
    write = re.compile(r"os\.environ\[[^]]*\]\s*=|environ\.(update|setdefault|pop)\(|os\.putenv|del os\.environ")
    for path in [*LIBRARY.rglob("*.py"), *(ROOT / "recipes").glob("*.py")]:
        assert not write.search(path.read_text()), path


def test_no_file_has_a_second_idea():
    long = {str(p): n for p in LIBRARY.rglob("*.py") if (n := len(p.read_text().splitlines())) > 300}
    assert not long


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


def test_an_unknown_room_is_an_attribute_error():
    with pytest.raises(AttributeError, match="kitchen"):
        toolkit.kitchen  # noqa: B018
