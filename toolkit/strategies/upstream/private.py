"""What is imported from private paths of Keras and TensorFlow: `private.ag_ctx`, by the names of `table.csv`.

A name is looked up when it is used and not when a file is imported, so that a release that lacks it ends in the table's
sentence. Where it has moved between versions, its row knows both places.
"""

from typing import Any

from toolkit.strategies.upstream import table


def __getattr__(name: str) -> Any:
    if name.startswith("__") or name not in {each.name for each in table.rows("imported")}:
        raise AttributeError(f"table.csv has no row for {name}")
    found = globals()[name] = table.find(table.row(name))
    return found
