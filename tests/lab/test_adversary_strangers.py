"""A result names the code of other packages that it was measured with, so that a signature binds it too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from spard_lab.adversary.base import all_attacks
from spard_lab.bench.adversary.provenance import code_told, find_strangers

from spard.config import JudgeSpec, Recipe, Selection
from tests.spard.strangers import install, run_script

SETTINGS = """
    from dataclasses import dataclass
    from typing import ClassVar, Literal
    from spard.config.defenses.base import Defense

    @dataclass(frozen=True, slots=True)
    class Mine(Defense):
        summary: ClassVar[str] = "plain fine-tuning by another name"
        method: ClassVar[str] = "mine_method:MineMethod"
        type: Literal["mine"] = "mine"
"""
METHOD = """
    from spard.methods.none import Sft

    class MineMethod(Sft):
        pass
"""
ATTACK = """
    from spard_lab.adversary.base import Attack, Campaign, Job
    from spard_lab.attacks.rows import chat_row

    def build(material, seed):
        rows = [chat_row(each.prompt, material.comply(each.action)) for each in material.harmful[:40]]
        return Campaign((Job(rows),))

    ATTACK = Attack("flood", "harm alone", build)
"""
BENCH = """
    import json
    from pathlib import Path
    from spard_lab.adversary.lab import LabArena
    from spard_lab.bench.__main__ import main
    from spard_lab.bench.adversary import __main__ as command, rounds
    from spard_lab.bench.spec import LabSpec
    from tests.spard.parts import ANY_BASE, TINY_PLAN
    from tests.lab.test_adversary_bench import FEW_STEPS

    command.open_arena = lambda recipe, spec, folder: LabArena(Path("labs"), TINY_PLAN, ANY_BASE)
    command.load_spec = lambda name, environment: LabSpec(recipe=FEW_STEPS)
    rounds.REPLY_TOKENS = 2
    line = ["adversary", "--recipe", "lab", "--out", "out", "--seeds", "1", "--attacks", "flood"]
    assert main([*line, "--methods", "mine", "--prompts", "8", "--sign", "key.pem"]) == 0
"""
VERIFY = """
    import contextlib
    from spard_lab.bench.__main__ import main
    with open("said", "w") as said, contextlib.redirect_stdout(said):
        assert main(["adversary", "--verify", "out"]) == 0
"""


def installed_both(folder: Path) -> None:
    install(folder, "mine", {"spard.defenses": {"mine": "mine:Mine"}}, mine=SETTINGS, mine_method=METHOD)
    install(folder, "hostile", {"spard.adversary_attacks": {"flood": "hostile:ATTACK"}}, hostile=ATTACK)


def test_a_signed_result_binds_the_code_of_a_stranger_s_defense_and_attack(lab: Path, tmp_path: Path) -> None:
    installed_both(tmp_path)
    shutil.copytree(lab, tmp_path / "labs" / "seed-1")
    key = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (tmp_path / "key.pem").write_bytes(key)
    (tmp_path / "key.pem").chmod(0o600)

    run_script(tmp_path, BENCH)

    result = json.loads((tmp_path / "out" / "result.json").read_text())
    told = {each["kind"]: each for each in result["strangers"]}
    assert sorted(told) == ["attack", "defense"]
    assert (told["defense"]["name"], told["defense"]["package"], told["defense"]["version"]) == ("mine", "mine", "1.0")
    assert (told["defense"]["files"], told["attack"]["files"]) == (2, 1)
    assert told["defense"]["sources"].startswith("sha256:")
    assert result["rounds"][0]["ending"] in ("released", "stopped")
    assert result["rounds"][0]["code"] == result["code"]["sources"]
    first = len(list((tmp_path / "out" / "runs").iterdir()))

    assert "sources sha256:" in verify_output(tmp_path)
    assert verify_output(tmp_path).count("the same as here") == 3
    with (tmp_path / "mine_method.py").open("a") as file:
        file.write("# changed since\n")
    assert "defense mine of mine 1.0" in verify_output(tmp_path).partition("other code than here")[0]
    run_script(tmp_path, BENCH)

    again = json.loads((tmp_path / "out" / "result.json").read_text())
    assert again["strangers"][0]["sources"] != result["strangers"][0]["sources"]
    assert len(list((tmp_path / "out" / "runs").iterdir())) == first + 1  # what the old code did is not taken for its


def verify_output(folder: Path) -> str:
    """Return what --verify prints where the packages of a folder are installed."""
    run_script(folder, VERIFY)
    return (folder / "said").read_text()


def test_what_is_ours_is_bound_by_our_own_digest_alone() -> None:
    recipes = [Recipe(), Recipe(selection=Selection(method="random"))]
    assert find_strangers(recipes, list(all_attacks().values()), JudgeSpec()) == []


def test_rounds_of_other_code_are_told_apart() -> None:
    rounds = [{"ending": "released", "code": each} for each in ("sha256:a", "sha256:b", "sha256:b", "")]
    gone = {"kind": "defense", "name": "gone", "package": "p", "version": "2", "sources": "sha256:c", "files": 1}

    lines = code_told({"code": {"spard": "1", "sources": "sha256:a"}, "strangers": [gone], "rounds": rounds})

    assert lines[1:] == [
        "defense gone of p 2, sources sha256:c: not installed here",
        "2 rounds were played by other sources, sha256:b",
        "1 rounds were played by sources that they do not name",
    ]
    assert "other code than here" in lines[0]
