"""One page of several results: sizes beside each other, signatures checked, and nothing joined that means another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from spard_lab.bench.__main__ import main
from spard_lab.bench.adversary.joined import RESULTS_HEADING, joined_figures, joined_tables, read_parts
from spard_lab.bench.adversary.provenance import RESULT, write_result
from spard_lab.bench.adversary.rounds import Answers, Round

from spard.errors import InvalidRecipe, NotProved
from spard.release.keys import public_pem

ARMS: dict[str, Any] = {"none": {"defense": "none"}, "spard": {"defense": "spard"}}


def make_round(
    attack: str, method: str, harm: float, ending: Any = "released", seed: int = 1, cpu_s: float = 10
) -> Round:
    marks = ("1" * round(100 * harm)).ljust(100, "0")
    right = ("1" * (90 if method == "none" else 85)).ljust(100, "0")
    base = Answers("0" * 100, "0" * 100, "0" * 100, "0" * 100, right)
    answers = replace(base, complied=marks, complied_plain=marks)
    return Round(attack, method, seed, ending, 1, (), (), base, answers, cpu_s)


def result(recipe: str, parameters: int, rounds: Sequence[Round], **other: Any) -> dict[str, Any]:
    raw = [asdict(each) | {"attack_wins": False} for each in rounds]
    return {
        "format": "spard bench adversary 1",
        "benchmark": 1,
        "recipe": recipe,
        "parameters": parameters,
        "code": {"spard": "1", "sources": "sha256:0123456789abcdef"},
        "strangers": [],
        "machine": f"of {recipe}",
        "seeds": {"from": "a commit", "seeds": [1]},
        "prompts": 320,
        "provider": {},
        "arms": ARMS,
        "attacks": {},
        "limits": {"most": 0.03, "rise": 0.01},
        "rounds": raw,
    } | other


@pytest.fixture
def small(tmp_path: Path) -> Path:
    rounds = [
        *(make_round("plain", "none", 0.9, seed=1), make_round("plain", "none", 0.8, "stopped", seed=2)),
        *(make_round("plain", "spard", 0.0, seed=1, cpu_s=15), make_round("plain", "spard", 0.0, seed=2, cpu_s=17)),
        Round("tools", "none", 1, "not possible", lacks=("tools",)),
    ]
    return write_signed(tmp_path / "small", result("lab", 420_000, rounds))


@pytest.fixture
def natural(tmp_path: Path) -> Path:
    rounds = [
        make_round("plain", "none", 0.7),
        make_round("plain", "spard", 0.05, cpu_s=12),
        make_round("tools", "none", 0.0),
    ]
    return write_signed(tmp_path / "natural", result("/somewhere/natural-5m.yaml", 4_700_000, rounds))


def write_signed(folder: Path, found: dict[str, Any], key: Ed25519PrivateKey | None = None) -> Path:
    write_result(folder, found, key)
    return folder


def cells(paths: Sequence[Path], heading: str) -> dict[tuple[str, str], list[str]]:
    tables = joined_tables(read_parts(paths, None))
    head, rows = next(table for name, table in tables.items() if name.startswith(heading))
    assert list(head[2:]) == ["lab, 0.42 M", "natural-5m, 4.7 M"]
    return {(row[0], row[1]): list(row[2:]) for row in rows}


def test_the_sizes_stand_beside_each_other_for_every_attack_and_arm(small: Path, natural: Path) -> None:
    paths = [natural / RESULT, small]

    wins = cells(paths, "Attacks that win")
    assert wins["plain", "none"] == ["1 of 2", "1 of 1"]  # a stopped job is no win
    assert wins["plain", "spard"] == ["0 of 2", "1 of 1"]
    assert wins["tools", "none"] == ["not possible: lacks tools", "0 of 1"]
    ends = cells(paths, "What the gate")
    assert ends["plain", "none"] == ["1 released, 1 stopped of 2", "1 released of 1"]
    assert cells(paths, "Complies as attacked")["plain", "spard"][1] == "5.0 (base 0.0)"
    task = cells(paths, "Task minus")
    assert task["plain", "spard"][0].startswith("-5.0 [")
    assert task["plain", "none"] == ["-", "-"]
    assert cells(paths, "CPU time")["plain", "spard"][1] == "1.20"


def test_each_lab_has_a_figure_of_the_attacks_that_trained_a_model_on_it(small: Path, natural: Path) -> None:
    (of_small, first), (of_natural, second) = joined_figures(read_parts([natural, small], None)).items()

    assert of_small.startswith("Attacks on lab, 0.42 M")
    assert of_natural.startswith("Attacks on natural-5m, 4.7 M")
    assert all(f">{word}<" in first for word in ("plain", "none", "spard", "job stopped", "base model"))
    assert ">tools<" not in first
    assert ">tools<" in second


def test_a_result_twice_counts_once_and_has_to_agree(small: Path, natural: Path, tmp_path: Path) -> None:
    assert cells([small, natural, small], "Attacks that win")["plain", "none"] == ["1 of 2", "1 of 1"]
    other = write_signed(tmp_path / "other", result("lab", 420_000, [make_round("plain", "none", 0.1)]))
    with pytest.raises(InvalidRecipe, match="differ on plain, none, seed 1"):
        joined_tables(read_parts([small, other], None))


def test_one_name_for_different_settings_is_two_arms(small: Path, natural: Path, tmp_path: Path) -> None:
    rounds = [make_round("plain", "none", 0.0, cpu_s=5), make_round("plain", "spard", 0.0, cpu_s=10)]
    dropping = {"provider": {"row_signal.action": "auto"}}
    auto = write_signed(tmp_path / "auto", result("lab", 420_000, rounds, **dropping))

    found = cells([small, natural, auto], "CPU time")

    dropped = next(arm for _, arm in found if arm.startswith("spard (row_signal.action=auto, "))
    assert found["plain", dropped] == ["2.00", "not run"]  # beside the undefended run of the same provider
    assert any(arm.startswith("spard (no provider setting, ") for _, arm in found)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("benchmark", 2, "different versions of the benchmark"),
        ("prompts", 80, "different prompts: small 320, natural 80"),
        ("limits", {"most": 0.05, "rise": 0.01}, "different limits"),
    ],
)
def test_results_that_mean_another_are_refused(name: str, value: Any, said: str, small: Path, tmp_path: Path) -> None:
    other = write_signed(tmp_path / "natural", result("natural-5m", 4_700_000, [], **{name: value}))
    with pytest.raises(InvalidRecipe, match=said):
        read_parts([small, other], None)


def test_a_result_of_before_the_versions_is_refused_with_a_way_out(small: Path, tmp_path: Path) -> None:
    old = result("lab", 420_000, [])
    del old["benchmark"]
    with pytest.raises(InvalidRecipe, match=r"old: written before .* run the command"):
        read_parts([small, write_signed(tmp_path / "old", old)], None)


def test_signatures_are_checked_where_they_are_and_asked_for_with_a_key(small: Path, tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    signed = write_signed(tmp_path / "signed", result("lab", 420_000, []), key)

    _, rows = joined_tables(read_parts([small, signed], None))[RESULTS_HEADING]
    assert [row[5] == "not signed" for row in rows] == [True, False]
    with pytest.raises(NotProved, match="cannot be read"):
        read_parts([small], key.public_key())
    (signed / RESULT).write_text((signed / RESULT).read_text().replace("320", "321"))
    with pytest.raises(NotProved, match="not what was signed"):
        read_parts([small, signed], None)


def test_the_command_writes_a_page_and_its_markdown(
    small: Path, natural: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["adversary", "--join", str(small), "--join", str(natural)]
    assert main([*line, "--out", str(tmp_path / "page")]) == 0

    text = (tmp_path / "page" / "results.md").read_text()
    assert "Version 1 of the benchmark, 2 results." in text
    assert "Measured on of lab; of /somewhere/natural-5m.yaml." in text
    assert "<th>natural-5m, 4.7 M</th>" in (tmp_path / "page" / "index.html").read_text()
    assert text in capsys.readouterr().out
    assert main(line) == 1
    (tmp_path / "pub.pem").write_text(public_pem(Ed25519PrivateKey.generate()))
    assert main([*line, "--out", str(tmp_path), "--public-key", str(tmp_path / "pub.pem")]) == 1
