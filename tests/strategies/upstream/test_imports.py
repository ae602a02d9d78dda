"""Each file of the toolkit can be imported with the Keras and the TensorFlow that are installed."""

import pathlib

import processes
import pytest

import toolkit

pytestmark = pytest.mark.versions
IMPORT_ALL = """
import importlib, pkgutil, sys
import toolkit

failed = []
for found in pkgutil.walk_packages(toolkit.__path__, "toolkit."):
    if not found.name.endswith(("__main__", ".templates.train")) and found.name not in sys.argv[1:]:
        importlib.import_module(found.name)
        print(found.name)
"""
# They need packages that only some people install.
OTHERS = ("toolkit.training.ray_report",)


@pytest.mark.slow
def test_every_file_can_be_imported(tmp_path):
    done = processes.python(tmp_path, "-c", IMPORT_ALL, *OTHERS, limit=120)
    assert done.returncode == 0, done.stderr[-3000:]
    files = [path for path in pathlib.Path(toolkit.__file__).parent.rglob("*.py") if path.name != "__main__.py"]
    assert len(done.stdout.split()) > len(files) - 10
