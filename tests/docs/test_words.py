"""Words of stiff English, of which each has a plain one: in the manual, in messages, docstrings and comments."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *(ROOT / "docs").rglob("*.md"),
]
SOURCES = [path for folder in ("toolkit", "recipes", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
INSTEAD = {
    r"anew": "again",
    r"whoever|whomever": "the program, user or task that is meant",
    r"wherefrom|wherein|thereof|therein": "from which, in which",
    r"an? [\w`.-]+ of (its|their|one's|the user's|your) own": "its own ...",
    r"(what|which) is (said|kept) of": "the thing that is meant",
    r"which (is said|says so)": "a message says so",
    r"which has which": "the thing that is meant",
}


def without_parts(path):
    """A page without what is made of the code: see docs/generated.py."""
    text = path.read_text(encoding="utf-8")
    return (
        re.sub(r"<!-- made of the code: .*?<!-- end -->", "", text, flags=re.DOTALL) if path.suffix == ".md" else text
    )


@pytest.mark.parametrize("path", [*PAGES, *SOURCES], ids=lambda path: str(path.relative_to(ROOT)))
def test_a_plain_word_is_used(path):
    text = " ".join(without_parts(path).split())
    found = {
        match[0]: plain
        for word, plain in INSTEAD.items()
        for match in re.finditer(rf"\b({word})\b", text, re.IGNORECASE)
    }
    assert not found, f"{path}: write {found}"
