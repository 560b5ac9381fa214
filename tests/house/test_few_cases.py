"""Check how the quick tests are chosen."""

from pathlib import Path

import pytest


def test_a_test_without_parameters_is_never_left_out(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
):
    own = next(
        plugin
        for plugin in request.config.pluginmanager.get_plugins()
        if getattr(plugin, "__file__", None) == str(request.config.rootpath / "tests/conftest.py")
    )
    for folder in ("jit", "kernels"):
        monkeypatch.setattr(request.node, "path", Path(folder) / "test_any.py")
        own.pytest_collection_modifyitems([request.node])
        assert not request.node.get_closest_marker("slow")
