"""A script that is launched runs as Python runs it, and imports what is beside it."""

import os
import pathlib
import py_compile
import re
import subprocess
import sys
import zipfile

import processes
import pytest


@pytest.mark.slow
def test_a_module_is_started_as_python_does(launcher):
    (launcher.folder / "package").mkdir()
    (launcher.folder / "package" / "__init__.py").touch()
    (launcher.folder / "package" / "train.py").write_text("import sys; print(__name__, __package__, sys.argv[1:])")
    code, out, _, _ = launcher.run("--workers=1", command=["-m", "package.train", "--x=1"])
    assert code == 0
    assert "worker:0 | __main__ package ['--x=1']" in out


@pytest.mark.slow
def test_a_script_finds_the_modules_beside_it(launcher):
    (launcher.folder / "beside.py").write_text("VALUE = 7")
    code, out, _, _ = launcher.run("--workers=1", body="import beside; print(__name__, __file__, beside.VALUE)")
    assert code == 0
    assert f"worker:0 | __main__ {launcher.script} 7" in out


@pytest.mark.slow
def test_what_stands_beside_a_script_is_the_scripts_own(launcher):
    """As under `python train.py`: a module of a name that Python or this toolkit has, too."""
    for name in ("json.py", "toolkit/__init__.py", "record.py"):
        (launcher.folder / name).parent.mkdir(exist_ok=True)
        (launcher.folder / name).write_text(f"MINE = {name!r}")
    launcher.script.write_text(
        "import json, sys, toolkit, record\nprint(json.MINE, toolkit.MINE, record.MINE, sys.path[0])\n"
    )
    how = {"cwd": launcher.folder, "capture_output": True, "text": True, "timeout": 60, "check": True}
    alone = subprocess.run([sys.executable, launcher.script], **how)
    console = str(pathlib.Path(sys.executable).with_name("toolkit"))
    done = subprocess.run(
        [console, "launch", "--workers=1", launcher.script.name],
        env={**os.environ, "PYTHONPATH": str(processes.ROOT)},
        **how,
    )
    assert f"worker:0 | {alone.stdout}" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("mine", ["toolkit.py", "toolkit/__init__.py"])
@pytest.mark.parametrize("line", ["from toolkit import strategies", "import toolkit; toolkit.strategies.create()"])
def test_a_toolkit_beside_a_script_that_wants_the_installed_one_is_named(launcher, mine, line):
    (launcher.folder / mine).parent.mkdir(exist_ok=True)
    (launcher.folder / mine).touch()
    launcher.script.write_text(f"{line}\n")
    done = subprocess.run(
        [str(pathlib.Path(sys.executable).with_name("toolkit")), "launch", "--workers=1", launcher.script.name],
        env={**os.environ, "PYTHONPATH": str(processes.ROOT)},
        cwd=launcher.folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    beside = (launcher.folder / mine).parent if mine.endswith("__init__.py") else launcher.folder / mine
    assert done.returncode == 2
    assert f"{beside} beside it is imported instead of the installed toolkit. Rename it." in done.stdout
    assert "Traceback" not in done.stdout


@pytest.mark.slow
def test_a_folder_that_is_no_package_hides_none(launcher):
    (launcher.folder / "json").mkdir()
    assert launcher.run("--workers=1", body="print(json.dumps(1))")[0] == 0


@pytest.mark.slow
def test_a_request_of_a_script_that_can_not_be_is_a_sentence(launcher):
    body = "from toolkit.errors import StrategyError\nraise StrategyError(asked='a', found='b', remedy='C')"
    code, out, err, _ = launcher.run("--workers=1", body=body)
    assert code == 2
    assert "worker:0 | error: a, but b. C." in out
    assert "Traceback" not in out + err


@pytest.mark.slow
def test_two_dashes_may_stand_before_the_script(launcher):
    script = launcher.write("print('ran', sys.argv[1:])")
    code, out, _, _ = launcher.run("--workers=1", command=["--", str(script), "--x"])
    assert code == 0
    assert "ran ['--x']" in out


@pytest.mark.slow
def test_a_script_is_main_until_its_very_end_as_python_has_it(launcher):
    body = """
import atexit, pickle, threading
class Mine: pass
def at_the_end():
    again = pickle.loads(pickle.dumps(Mine()))
    print("pickled", again.__class__.__module__, __name__, __file__ == sys.modules["__main__"].__file__)
atexit.register(at_the_end)
threading.Thread(target=lambda: (time.sleep(0.3), print("thread", len(pickle.dumps(Mine)) > 0))).start()
os.chdir("/")
print("file", os.path.exists(__file__), os.path.isabs(__file__), sys.argv[0] == given, __spec__, __package__)
"""
    script = launcher.write(f"given = {str(launcher.script.name)!r}\n" + body)
    code, out, err, _ = launcher.run("--workers=1", command=[script.name])
    assert code == 0, err
    assert "file True True True None None" in out
    assert "thread True" in out
    assert "pickled __main__ __main__ True" in out
    (launcher.folder / "module.py").write_text("given = 'no'\n" + "import os, sys, time\n" + body)
    code, out, err, _ = launcher.run("--workers=1", command=["-m", "module"])
    assert code == 0, err
    assert "pickled __main__ __main__ True" in out


@pytest.mark.slow
def test_a_zipped_program_and_a_compiled_one_run(launcher):
    with zipfile.ZipFile(launcher.folder / "app.pyz", "w") as file:
        file.writestr("__main__.py", "import helper; print(helper.WORD, __name__)")
        file.writestr("helper.py", "WORD = 'zipped'")
    assert "zipped __main__" in launcher.run("--workers=1", command=["app.pyz"])[1]
    (launcher.folder / "plain.py").write_text("print('compiled', __name__)")
    py_compile.compile(str(launcher.folder / "plain.py"), cfile=str(launcher.folder / "plain.pyc"))
    assert "compiled __main__" in launcher.run("--workers=1", command=["plain.pyc"])[1]


@pytest.mark.slow
def test_what_a_script_prints_is_not_touched(launcher):
    body = "print('phase: training started')\nprint()\nprint('after a blank line')\nsys.exit(3)"
    code, out, err, _ = launcher.run("--workers=1", body=body, SOME_SECRET_NAME="training")
    assert code == 3
    assert "worker:0 | phase: training started\nworker:0 | \nworker:0 | after a blank line\n" in out
    assert "phase: training started" in err
    assert (launcher.logs() / "worker-0.log").read_text() == "phase: training started\n\nafter a blank line\n"


@pytest.mark.slow
def test_how_many_behind_the_script_is_noticed(launcher):
    script = launcher.write("import sys; print(sys.argv[1:])")
    _, out, err, _ = launcher.run(command=[str(script), "--workers=2"])
    assert "note: --workers=2 after the script: the script gets that. For the launcher, write it before" in err
    assert "['--workers=2']" in out
    assert "after the script" not in launcher.run("--workers=1", command=[str(script)])[2]


@pytest.mark.slow
def test_what_is_piped_in_is_said_to_be_lost(launcher):
    command = [sys.executable, "-m", "toolkit", "launch", "--workers=1", str(launcher.write("print(sys.stdin.read())"))]
    how = {"cwd": launcher.folder, "env": {**os.environ, "PYTHONPATH": str(processes.ROOT)}, "timeout": 60}
    done = subprocess.run(command, input="data", capture_output=True, text=True, check=False, **how)
    assert "note: tasks read nothing from standard input" in done.stderr
    assert "data" not in done.stdout


@pytest.mark.slow
def test_arguments_of_a_hundred_thousand_letters(launcher):
    """As of train.py data/*.tfrecord."""
    script = launcher.write("print('got', sum(map(len, sys.argv)))")
    code, out, _, _ = launcher.run("--workers=1", command=[str(script), *["x" * 1000] * 100])
    assert code == 0
    assert re.search(r"got 10\d{4}", out)


@pytest.mark.slow
def test_what_lies_beside_the_script_is_not_taken_for_what_the_launcher_imports(launcher):
    (launcher.folder / "logging.py").write_text("raise SystemExit('mine')")
    script = launcher.write("print('ran')")
    for flags in ([], ["--detach"]):
        done = subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path[0] = {str(processes.ROOT)!r}; "
             "from toolkit.cli.main import main; main()", "launch", "--workers=1", *flags, str(script)],
            cwd=launcher.folder, env={**os.environ, "XDG_STATE_HOME": str(launcher.folder / "state")},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
