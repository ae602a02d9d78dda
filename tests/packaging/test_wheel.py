"""A wheel and a source distribution: what they contain, and that the main job runs from one without the repository."""

import email
import os
import subprocess
import sys
import tarfile
import zipfile

import processes
import psutil
import pytest

from toolkit import __version__

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

MAIN = ("--gpus=2", "--epochs=1", "--steps_per_epoch=3")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with both, made of a copy of what git has."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=processes.ROOT, capture_output=True, check=True, timeout=60)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (processes.ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((processes.ROOT / name).read_bytes())
    how = {"cwd": source, "check": True, "timeout": 300, "capture_output": True}
    subprocess.run([sys.executable, "setup.py", "-q", "sdist", "--dist-dir", folder], **how)
    wheel = ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, "."]
    subprocess.run([sys.executable, *wheel], **how)
    return folder


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """Where the wheel alone is installed; what it needs comes from this environment."""
    target = tmp_path_factory.mktemp("installed")
    (wheel,) = built.glob("*.whl")
    command = ["-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", target, wheel]
    subprocess.run([sys.executable, *command], check=True, timeout=300, capture_output=True)
    return target


@pytest.fixture(scope="module", params=["3.10", "3.12", "3.13"])
def empty(request, built, tmp_path_factory):
    """The interpreter of an environment that had nothing in it, with the wheel and what it asks for."""
    made_by = {**os.environ, "PYENV_VERSION": request.param}  # Where Pythons come from pyenv.
    made_by.pop("PYTHONPATH", None)
    folder = tmp_path_factory.mktemp("empty") / "an env"
    try:
        subprocess.run(
            [f"python{request.param}", "-m", "venv", folder], env=made_by, check=True, timeout=100, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(f"no python{request.param} with venv is here")
    (wheel,) = built.glob("*.whl")
    for what in ("pip", str(wheel)):  # An old pip looks for hours for what goes together.
        install = [folder / "bin/python", "-m", "pip", "install", "-q", "--upgrade", what]
        subprocess.run(install, env=made_by, check=True, timeout=900, capture_output=True)
    return folder / "bin/python"


def run(installed, folder, *arguments, python=sys.executable):
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [python, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_the_wheel_has_what_is_needed_and_nothing_else(built):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (described,) = (name for name in names if name.endswith("/METADATA"))
        facts = email.message_from_bytes(archive.read(described))
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {"toolkit", "recipes"}
    assert {"toolkit/py.typed", "toolkit/observe/report/page.html.j2", "toolkit/strategies/upstream/table.csv"} <= set(
        names
    )
    assert facts["Version"] == __version__
    assert "Operating System :: POSIX :: Linux" in facts.get_all("Classifier")
    assert {"gpu", "datasets", "test", "docs", "bench", "ray"} <= set(facts.get_all("Provides-Extra"))
    needed = [line for line in facts.get_all("Requires-Dist") if "extra ==" not in line]
    assert not [line for line in needed if line.startswith("tensorflow-datasets")], "only CIFAR-10 needs it"


def test_the_source_distribution_makes_the_wheel(built, tmp_path):
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    assert {"CHANGELOG.md", "LICENSE", "README.md", "CITATION.cff", "docs", "tf_configs"} <= {
        each.name for each in folder.iterdir()
    }
    command = ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, "."]
    subprocess.run([sys.executable, *command], cwd=folder, check=True, timeout=300, capture_output=True)
    (again,), (wheel,) = tmp_path.glob("*.whl"), built.glob("*.whl")
    assert zipfile.ZipFile(again).namelist() == zipfile.ZipFile(wheel).namelist()


@pytest.mark.parametrize("way", [["-m", "recipes.cifar_mirrored"], ["-m", "toolkit", "recipe", "cifar_mirrored"]])
def test_the_main_job_runs_from_the_wheel(installed, tmp_path, way):
    where = run(installed, tmp_path, "-c", "import toolkit, recipes; print(toolkit.__file__, recipes.__file__)")
    assert where.split() == [str(installed / name / "__init__.py") for name in ("toolkit", "recipes")]
    out = run(installed, tmp_path, *way, *MAIN)
    assert "epoch 1/1" in out
    assert list((tmp_path / "runs").iterdir())


@pytest.mark.timeout(1800)
def test_an_empty_environment_of_another_python_has_all_it_needs(empty, tmp_path):
    nowhere = tmp_path / "no path"
    out = run(nowhere, tmp_path, "-m", "toolkit", "recipe", "cifar_mirrored", *MAIN, python=empty)
    assert "epoch 1/1" in out
    run(nowhere, tmp_path, "-m", "toolkit", "init", python=empty)
    train = ["-m", "toolkit", "launch", "--show=all", "--workers=2", "train.py"]
    with (tmp_path / "out").open("wb") as out, subprocess.Popen([empty, *train], cwd=tmp_path, stdout=out) as job:
        processes.wait_for(lambda: list(tmp_path.glob("runs/train/**/manifest.json")), job, limit=200)
        for process in (*psutil.Process(job.pid).children(recursive=True), job):
            process.kill()
    assert "Resumed after step" in run(nowhere, tmp_path, *train, python=empty)


def test_two_workers_are_launched_from_the_wheel(installed, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import toolkit\nstrategy = toolkit.strategies.create()\nprint('replicas', strategy.num_replicas_in_sync)\n"
    )
    out = run(installed, tmp_path, "-m", "toolkit", "launch", "--show=all", "--workers=2", str(script))
    assert "replicas 2" in out
