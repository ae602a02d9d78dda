"""Secrets in what tasks write: replaced however the stream is cut, and nothing else held back."""

import os
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from toolkit.launch.agent.masking import Masker
from toolkit.launch.display.output import Output
from toolkit.support import redaction

LETTERS = "ab\n"
secrets = st.lists(st.text(LETTERS, min_size=1, max_size=6), min_size=1, max_size=3, unique=True)


@given(secrets=secrets, pieces=st.lists(st.text(LETTERS + "c", max_size=8), max_size=8))
@example(secrets=["ab", "abab"], pieces=["a", "b", "a", "a"])
@example(secrets=["aab", "ab"], pieces=["aa", "a", "b"])
@example(secrets=["ba", "abb"], pieces=["ab", "a"])
def test_however_the_stream_is_cut_it_is_masked_as_in_one_piece(secrets, pieces):
    secrets.sort(key=lambda value: (-len(value), value))
    whole = "".join(pieces)
    masker = Masker(secrets)
    shown = b"".join(masker.feed(piece.encode()) for piece in pieces)
    shown += masker.flush()
    assert shown.decode() == redaction.pattern(secrets).sub("***", whole)
    assert not masker.holds


@given(st.binary(), st.binary(min_size=8, max_size=12))
def test_only_what_can_be_a_beginning_is_held_back(data, secret):
    masker = Masker([os.fsdecode(secret)])
    shown = masker.feed(data)
    if secret not in data:
        rest = data[len(shown) :]
        assert data.startswith(shown)
        assert secret.startswith(rest)
        assert len(rest) < len(secret)
        assert all(not secret.startswith(data[start:]) for start in range(len(shown)))
    assert masker.flush() == re.sub(re.escape(secret), b"***", data)[len(shown) :]


def test_without_secrets_everything_goes_through_at_once():
    masker = Masker()
    assert masker.feed(b"x") == b"x"
    assert masker.flush() == b""


def test_log_and_lines_are_masked_and_a_tail_waits(tmp_path):
    masker, output = Masker(["12345678"]), Output(tmp_path / "log")
    assert output.take(masker.feed(b"it is 1234")) == []
    assert (tmp_path / "log").read_bytes() == b"it is "
    assert output.take(masker.feed(b"5678!\nnot 1234")) == [b"it is ***!"]
    assert masker.holds
    assert output.take(masker.flush()) == []
    assert output.flush() == [b"not 1234"]
    assert (tmp_path / "log").read_bytes() == b"it is ***!\nnot 1234"
    assert output.last_lines() == ["it is ***!", "not 1234"]
    output.close()


@pytest.mark.slow
def test_a_launched_task_leaves_none_in_logs_lines_or_the_failure(launcher):
    body = (
        "value = os.environ['MY_TOKEN']\n"
        "sys.stdout.write(value[:5]); sys.stdout.flush(); time.sleep(0.3); print(value[5:])\n"
        "raise SystemExit('it was ' + value)"
    )
    code, out, err, _ = launcher.run("--workers=1", body=body, MY_TOKEN="hunter2-hunter2")
    assert code == 1
    log = (launcher.logs() / "worker-0.log").read_text()
    assert log == "***\nit was ***\n"
    for text in (out, err, (launcher.logs() / "failure.json").read_text()):
        assert "hunter2" not in text
    assert "it was ***" in err
