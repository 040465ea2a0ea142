from __future__ import annotations

import gc
import importlib
import sys
from importlib.util import find_spec

import pytest

from spard.models import imports
from spard.models.imports import light_imports, unseen


def test_a_package_is_not_found_inside_and_is_found_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "this", raising=False)
    with unseen("this"):
        assert find_spec("this") is None
        with pytest.raises(ImportError):
            importlib.import_module("this")
    assert "this" not in sys.modules
    assert find_spec("this")


def test_it_is_found_again_after_an_import_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "this", raising=False)
    with pytest.raises(ZeroDivisionError), unseen("this"):
        raise ZeroDivisionError
    assert find_spec("this")


def test_what_is_loaded_stays_in_sight() -> None:
    with unseen("json"):
        assert importlib.import_module("json") is sys.modules["json"]
    assert "json" in sys.modules


@pytest.mark.parametrize(("first", "is_found"), [(None, False), ("json", True)])
def test_light_imports_hide_packages_in_the_block_or_from_its_first_module(
    first: str | None, is_found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "this", raising=False)
    monkeypatch.setattr(imports, "OPTIONAL", ("this",))
    with light_imports(first):
        assert not gc.isenabled()
        assert bool(find_spec("this")) == is_found
    assert gc.isenabled()
    assert find_spec("this")
