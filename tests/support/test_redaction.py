"""No secret of the environment is written: not by its name on a command line, nor as a value anywhere."""

import contextlib
import io
import json
import logging
import os

import pytest

from toolkit.cli.console import show_log
from toolkit.cli.main import _run
from toolkit.cli.program import exit_code
from toolkit.errors import RequestError
from toolkit.observe import report
from toolkit.support import redaction
from toolkit.training.directory import RunDirectory

VALUE = 'hunter2\'s "$(x)" value'


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "PGPASSWORD", "MYSQL_PASSWD", "WANDB_API_KEY", "APIKEY",
     "SSH_PRIVATE_KEY", "GOOGLE_APPLICATION_CREDENTIALS", "client_secret", "--api-key"],
)  # fmt: skip
def test_a_name_says_that_its_value_is_secret(name):
    assert redaction.is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "PATH",
        "TF_CONFIG",
        "KEYBOARD",
        "SSH_AUTH_SOCK",
        "seed",
        "PASS",
        "--tokenizer",
        "pad_token",
        "--token_dropout",
        "max_tokens_per_batch",
    ],
)
def test_other_names_are_not_secret(name):
    assert not redaction.is_secret(name)


def test_short_values_are_no_secrets_and_the_longest_come_first():
    environ = {"A_TOKEN": "1234567", "B_TOKEN": "12345678", "C_TOKEN": " 123456789\n", "PATH": "/usr/bin/x"}
    assert redaction.values(environ) == (" 123456789\n", "123456789", "12345678")
    assert redaction.masked("12345678 123456789 1234567", environ) == "*** *** 1234567"
    assert redaction.masked_all({"12345678": ["x12345678", 5, None]}, environ) == {"***": ["x***", 5, None]}


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["--password=abc", "x"], ["--password=***", "x"]),
        (["--token", "abc", "x"], ["--token", "***", "x"]),
        (["API_KEY=abc"], ["API_KEY=***"]),
        (["--tokens_per_batch", "--seed=1"], ["--tokens_per_batch", "--seed=1"]),
        (
            ["--max_tokens=4096", "--max-new-tokens", "64", "--tokens=a,b"],
            ["--max_tokens=4096", "--max-new-tokens", "64", "--tokens=***"],
        ),
        (["tokens.txt", "secret"], ["tokens.txt", "secret"]),
        (["--url=http://me:12345678@host"], ["--url=http://me:***@host"]),
    ],
)
def test_secrets_of_a_command_line_are_masked(command, shown):
    assert redaction.masked_command(command, {"X_TOKEN": "12345678"}) == shown


@pytest.fixture
def secret(monkeypatch):
    monkeypatch.setenv("MY_API_TOKEN", VALUE)
    return VALUE


@pytest.mark.parametrize("engine", ["local", "slurm"])
def test_a_dry_run_shows_none(secret, engine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        _run(["launch", "--dry_run", f"--on={engine}", "--workers=2", "train.py", f"--url=http://x:{secret}@y"])
    assert "hunter2" not in out.getvalue()
    assert "--url=http://x:***@y" in out.getvalue()


def test_errors_and_messages_show_none(secret, capsys):
    def fail():
        raise RequestError(asked=f"--url={secret}", found="it is wrong", remedy="Mend it")

    exit_code(fail, interrupted="")
    show_log()
    logging.getLogger("toolkit.x").warning("it is %s", secret)
    shown = "".join(capsys.readouterr())
    assert "hunter2" not in shown
    assert "--url=***, but it is wrong" in shown
    assert "it is ***" in shown


def test_a_run_directory_holds_none_and_can_be_resumed(secret, tmp_path):
    for resume in (False, True):
        directory = RunDirectory(tmp_path / "run", recipe="mine", resume=resume)
        directory.record_config({"data": f"http://{secret}@host"})
        (directory.checkpoints / "step-00000001").mkdir(parents=True, exist_ok=True)
        directory.close()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["config"] == {"data": "http://***@host"}


def test_a_page_shows_none_of_what_an_earlier_run_has_written(secret, tmp_path):
    path = tmp_path / secret
    path.mkdir()
    (path / "summary.json").write_text(json.dumps({"recipe": "x", "dataset": secret, "command": ["x", secret]}))
    text = report.write([path]).read_text()
    assert "hunter2" not in text
    assert "x &#39;***&#39;" in text


def test_a_manifest_with_a_secret_is_remarked_on(capsys):
    _run(["launch", "--on=kubernetes", "--name=a", "--workers=2", "--image=i", "--env=MY_TOKEN=x", "-m", "recipes.x"])
    assert "anyone who can read the manifest can read MY_TOKEN" in capsys.readouterr().err


def test_the_environment_is_left_as_it_is(secret):
    assert os.environ["MY_API_TOKEN"] == VALUE
