import os

import pytest

from toolkit.support import files


def test_a_file_is_replaced_when_all_of_it_is_written(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with files.replacing(path) as aside:
        aside.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        files.write_text(path, "half of it \ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_pipe_that_is_in_the_way_is_no_file_to_wait_for(tmp_path):
    os.mkfifo(tmp_path / ".a.txt.writing")
    files.write_text(tmp_path / "a.txt", "new")
    assert (tmp_path / "a.txt").read_text() == "new"
