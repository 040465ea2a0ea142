"""The paper's sweeps are one command, and every method may be had with all weights trained."""

from __future__ import annotations

from pathlib import Path

import pytest
from spard_lab.bench.__main__ import main
from spard_lab.bench.cells import SWEPT, Cell, TableChoices, sweep_cells
from spard_lab.bench.files import FileSource
from spard_lab.bench.methods import fully, method_recipe
from spard_lab.bench.spec import FilesSpec, load_spec

from spard.config import Spard
from spard.errors import InvalidRecipe


@pytest.fixture
def source() -> FileSource:
    spec = load_spec("qwen2.5-7b-gsm8k", {})
    assert isinstance(spec, FilesSpec)
    return FileSource(spec)


def sweep(source: FileSource, *over: tuple[str, tuple[str, ...]], method: str = "spard") -> list[Cell]:
    return sweep_cells(source, TableChoices((method,), ("lat",), ("general",), (1,), over=over))[1:]


def test_a_sweep_without_a_setting_is_over_the_paper_s_four(source: FileSource) -> None:
    found = sweep(source)

    assert [(cell.setting, cell.value) for cell in found] == [(name, each) for name in SWEPT for each in SWEPT[name]]
    assert list(SWEPT) == ["ratio", "tau", "beta", "eta_safe"]


def test_every_usual_value_is_one_that_the_recipe_takes(source: FileSource) -> None:
    by_setting = {cell.setting: cell.recipe for cell in sweep(source)}  # the last value of each

    assert by_setting["ratio"].selection.ratio == 0.1
    assert by_setting["beta"].selection.beta == 8
    taus = [cell.recipe.defense.tau for cell in sweep(source, ("tau", ())) if isinstance(cell.recipe.defense, Spard)]
    assert taus == [0.05, 0.1, 0.2, 0.5, "auto"]


def test_values_of_one_s_own_come_first(source: FileSource) -> None:
    assert [cell.value for cell in sweep(source, ("tau", ("0.3",)), ("beta", ()))] == ["0.3", *SWEPT["beta"]]


def test_settings_without_usual_values_need_some(source: FileSource) -> None:
    with pytest.raises(InvalidRecipe, match="--over epochs: name its values"):
        sweep(source, ("epochs", ()))


def test_an_empty_list_of_values_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "--recipe", "lab", "--out", str(tmp_path), "--over", "tau="]) == 1
    assert "is not SETTING or SETTING=VALUE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "full"),
    [
        ("none", "none_full"),
        ("spard+tau=0.2", "spard_full+tau=0.2"),
        ("none_full", "none_full"),
        ("spard+full+tau=0.2", "spard+full+tau=0.2"),
    ],
)
def test_a_method_is_had_with_all_weights_trained(source: FileSource, method: str, full: str) -> None:
    assert fully(method) == full
    assert method_recipe(full, source.recipe, {}).lora is None
