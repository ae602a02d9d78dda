from importlib import metadata

from toolkit.support.versions import versions


def test_what_is_not_installed_is_left_out():
    assert versions(["keras", "no-such-package"]) == {"keras": metadata.version("keras")}
