"""The registry of defenses: what each says of itself, who reads it, and how another package adds one."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from textwrap import dedent

import pytest
from spard_lab.bench.methods import METHODS

from spard.config import Spard, Variant, customer_defenses, defenses
from spard.config.defenses import Defense, defense_type
from spard.methods import open_method
from spard.methods.base import Method
from tests.spard.strangers import install, run_script

ROOT = Path(__file__).parents[2]
EVERY = list(defenses().items())


@pytest.mark.parametrize(("name", "kind"), EVERY)
def test_a_defense_is_two_files_that_fit(name: str, kind: type[Defense]) -> None:
    defense = kind()
    method = open_method(defense)
    assert isinstance(method, Method)
    assert method.settings == defense
    assert defense_type(kind) == defense.type == name
    assert kind.__module__ == f"spard.config.defenses.{name}"
    assert kind.method.startswith("spard.methods.")


@pytest.mark.parametrize(("name", "kind"), EVERY)
def test_settings_cannot_be_changed(name: str, kind: type[Defense]) -> None:
    with pytest.raises((FrozenInstanceError, AttributeError, TypeError)):
        kind().type = "other"  # type: ignore[misc]  # what mypy refuses must fail at run time too


def test_the_order_of_the_api_is_the_declared_one() -> None:
    assert list(defenses()) == [
        *("spard", "spard_paper", "spard_authors"),
        *("none", "ptst", "safeinstr", "lisa", "safegrad", "safelora"),
    ]


def test_customers_get_what_they_cannot_take_off() -> None:
    assert customer_defenses() == ("spard", "safegrad", "lisa", "safeinstr")


def test_the_bench_has_an_arm_for_every_defense() -> None:
    assert set(defenses()) <= set(METHODS)
    assert {"trust_region", "preconditioned", "gated", "closed_form", "reference"} <= set(METHODS)


def test_the_published_arms_are_the_paper_s_and_the_authors_and_have_nothing_of_ours() -> None:
    published = {"tau": 0.2, "constraint": "mean", "augment": (), "bound": "loss", "margin": 0.0, "eta_safe": "auto"}
    own = {
        "spard_paper": {"variant": "closed_form", "delta": 0.0, "safe_batch_size": 1},  # eta_safe: the learning rate
        "spard_authors": {"variant": "reference", "delta": 0.1, "safe_batch_size": 4},  # and 1
    }
    for name, settings in own.items():
        method = METHODS[name]
        assert isinstance(method, Spard)
        assert {key: getattr(method, key) for key in published | settings} == published | settings
        assert (method.every, method.anchor) == (1, 0.0)
    same: tuple[Variant, ...] = ("closed_form", "reference")
    for name in same:  # the same steps with our settings
        assert METHODS[name] == Spard(variant=name, check_every=1, anchor_weight=0.0)


def test_the_manual_s_table_is_the_registry() -> None:
    manual = (ROOT / "docs" / "library.md").read_text()
    table = re.search(r"\| type \| what it does .*?\n\|---.*?\n(.*?)\n\n", manual, re.DOTALL)
    assert table
    wanted = [
        f"| `{name}` | {kind.summary} | {'yes' if kind.trains_on_safe_rows else 'no'} | "
        f"{'admins' if kind.customer_rank is None else 'customers'} |"
        for name, kind in EVERY
    ]
    assert table[1].splitlines() == wanted


def test_nobody_else_asks_which_defense_it_is() -> None:
    names = "|".join(kind.__name__ for _, kind in EVERY)
    question = re.compile(rf"isinstance\([^)]*\b({names})\b|case ({names})\(|match .*defense")
    home = (ROOT / "spard" / "methods", ROOT / "spard" / "config" / "defenses")
    files = [path for top in ("spard", "app", "worker") for path in (ROOT / top).rglob("*.py")]
    found = [path for path in files if not path.is_relative_to(home[0]) and not path.is_relative_to(home[1])]
    assert [path.name for path in found if question.search(path.read_text())] == []


SETTINGS = """
    from dataclasses import dataclass
    from typing import Annotated, ClassVar, Literal

    from spard.config import Bound, Defense

    @dataclass(frozen=True, slots=True)
    class Halved(Defense):
        \"\"\"Every update is made smaller.\"\"\"

        summary: ClassVar[str] = "smaller updates"
        method: ClassVar[str] = "halved_method:HalvedMethod"

        type: Literal["halved"] = "halved"
        share: Annotated[float, Bound(ge=0, le=1)] = 0.5
"""
METHOD = """
    import torch
    from spard.methods import Method

    class HalvedMethod(Method):
        def finish_(self, model):
            with torch.no_grad():
                for name, part in model.named_parameters():
                    if "lora_B" in name:
                        part.mul_(self.settings.share)
"""


def stranger(folder: Path, entries: dict[str, str] | None = None) -> None:
    entries = entries or {"halved": "halved_settings:Halved"}
    install(folder, "halved", {"spard.defenses": entries}, halved_settings=SETTINGS, halved_method=METHOD)


def test_a_defense_of_another_package_trains_by_its_type_in_a_recipe(tmp_path: Path) -> None:
    stranger(tmp_path)
    run_script(
        tmp_path,
        """
        from pathlib import Path
        import torch
        from spard.config import Hyperparameters, Recipe, resolve
        from spard.config.run_spec import run_from_mapping, to_mapping
        from spard.models.base import load_base
        from spard.training.train import train
        from tests.spard.parts import sums, write_model

        def weights(defense):
            raw = {"model": "m", "training_file": "t", "recipe": {"defense": defense, "lora": {"rank": 4}}}
            raw["recipe"]["hyperparameters"] = {"n_epochs": 1, "batch_size": 8}
            spec = run_from_mapping(raw)
            assert run_from_mapping(to_mapping(spec)) == spec
            base = load_base(folder, device="cpu")
            train(base, sums(base), [], spec.recipe, resolve(spec.recipe, 24, base.hidden_size))
            return {name: part for name, part in base.model.named_parameters() if "lora_B" in name}

        folder = write_model(Path("model"))
        plain, halved = weights({"type": "none"}), weights({"type": "halved", "share": 0.25})
        assert all(torch.equal(halved[name], 0.25 * part) for name, part in plain.items())
        assert any(part.any() for part in plain.values())
        """,
    )


def test_a_defense_of_another_package_is_in_the_api_and_its_policies(tmp_path: Path) -> None:
    stranger(tmp_path)
    run_script(
        tmp_path,
        """
        from app.jobs.request import JobCreate
        from app.policies.schemas import Policy
        from pydantic import ValidationError
        asked = {"model": "m", "training_file": "f", "safety": {"defense": {"type": "halved", "share": 0.25}}}
        assert JobCreate.model_validate(asked).safety.defense.share == 0.25
        asked["safety"]["defense"]["share"] = 2
        try:
            JobCreate.model_validate(asked)
        except ValidationError as error:
            assert error.errors()[0]["type"] == "less_than_equal"
        else:
            raise AssertionError("out of bounds")
        assert JobCreate.model_json_schema()["$defs"]["Halved"]["properties"]["share"]["maximum"] == 1
        policy = Policy(defenses=["halved"], ranges={"safety.defense.share": {"max": 0.5}})
        assert policy.defenses == ["halved"] and "halved" not in Policy().defenses
        """,
    )


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            {"spard": "halved_settings:Halved"},
            "registers the defense 'spard', a name of spard's own",
        ),
        ({"half": "halved_settings:Halved"}, "the defense 'half' of the package halved (halved_settings:Halved) must"),
        ({"halved": "halved_method:HalvedMethod"}, "is no dataclass that inherits from spard.config.Defense"),
        ({"halved": "halved_settings:Nothing"}, "cannot be imported"),
    ],
)
def test_a_wrong_registration_is_an_error_that_names_the_package(
    tmp_path: Path, entries: dict[str, str], message: str
) -> None:
    stranger(tmp_path, entries)
    run_script(
        tmp_path,
        f"""
        from spard.config import defenses
        from spard.errors import InvalidExtension
        try:
            defenses()
        except InvalidExtension as error:
            assert {message!r} in error.message and "the package halved" in error.message, error.message
        else:
            raise AssertionError("accepted")
        """,
    )


def test_a_method_that_cannot_be_imported_is_named_with_its_defense(tmp_path: Path) -> None:
    (tmp_path / "halved_settings.py").write_text(dedent(SETTINGS))
    run_script(
        tmp_path,
        """
        from halved_settings import Halved
        from spard.errors import InvalidExtension
        from spard.methods import open_method
        try:
            open_method(Halved())
        except InvalidExtension as error:
            assert "halved_method:HalvedMethod of the defense 'halved' cannot be imported" in error.message
        else:
            raise AssertionError("opened")
        """,
    )


def test_a_setting_is_told_apart_from_a_fact() -> None:
    assert [each.name for each in fields(defenses()["none"])] == ["type"]  # type: ignore[arg-type]  # a dataclass
