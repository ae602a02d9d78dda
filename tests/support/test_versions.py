from importlib import metadata

import pytest

from toolkit.support.versions import builds, versions


def test_what_is_not_installed_is_left_out():
    assert versions(["keras", "no-such-package"]) == versions(["keras"])
    assert builds("no-such-package") == {}


@pytest.mark.parametrize("there", [{"keras-nightly": "3.16.0"}, {"keras": "3.15.0", "keras-nightly": "3.16.0"}])
def test_a_nightly_build_brings_the_same_module(monkeypatch, there):
    def version(name):
        if name not in there:
            raise metadata.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(metadata, "version", version)
    assert builds("keras") == there
    assert versions(["keras"]) == {"keras": next(iter(there.values()))}
