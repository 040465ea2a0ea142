"""Converters of data sets: records in the form of the authors' own files, written here, become rows of ours."""

from __future__ import annotations

import csv
import gzip
import json
import lzma
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from spard_lab.datasets import DATASETS
from spard_lab.datasets.__main__ import main
from spard_lab.datasets.base import Split, records
from spard_lab.datasets.convert import Conversion, convert, load_dataset, place

from spard.data.overlap import find_leaks
from spard.data.rows import prompt_text, read_examples, read_pool, read_prompts
from spard.errors import InvalidData
from spard.evaluation.scorers import mark_reply
from tests.spard.strangers import install, run_script

NAMES = ("Ada", "Bo", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hal", "Ida", "Jo")
THINGS = ("apples", "bells", "candles", "drums", "eggs", "forks", "gloves", "hats", "inks", "jars")


def topics(n: int) -> list[str]:
    """Texts no two of which are near each other."""
    return [f"{NAMES[i % 10]} {THINGS[i // 10 % 10]} {i} {THINGS[(i * 7 + i // 10) % 10]} {i * 31}" for i in range(n)]


def jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def gsm8k(topic: str, i: int) -> dict[str, str]:
    return {"question": f"{topic}: how many?", "answer": f"It is {i}+1 = <<{i}+1={i + 1}>>{i + 1}.\n#### {i + 1:,}"}


def openbookqa(topic: str, key: str = "C") -> dict[str, Any]:
    choices = [{"text": f"{topic} {label}", "label": label} for label in "ABCD"]
    return {"id": topic, "question": {"stem": f"What about {topic}", "choices": choices}, "answerKey": key}


def mbpp(task: int, topic: str) -> dict[str, Any]:
    return {
        "text": f"Write a function for {topic}.",
        "code": f"def f{task}(x):\r\n  return x + {task}",
        "task_id": task,
        "test_setup_code": "",
        "test_list": [f"assert f{task}(1) == {task + 1}", f"assert f{task}(2) == {task + 2}"],
        "challenge_test_list": [],
    }


def beavertails(topic: str, is_safe: bool) -> dict[str, Any]:
    category = {"animal_abuse": False, "violence,aiding_and_abetting,incitement": not is_safe}
    response = "I would rather not." if is_safe else "Sure, here are the steps: ..."
    return {"prompt": f"Help with {topic}", "response": response, "category": category, "is_safe": is_safe}


def lat(topic: str) -> dict[str, str]:
    return {"prompt": f"Describe {topic}", "chosen": "I can't.", "rejected": "Sure, here are the steps: ..."}


def test_every_data_set_says_where_it_is_from_and_under_what_license() -> None:
    for name in DATASETS.names():
        dataset = load_dataset(name)
        assert dataset.name == name
        assert dataset.origin
        assert dataset.license


def test_gsm8k_keeps_the_worked_answer_and_asks_for_its_number(tmp_path: Path) -> None:
    train = jsonl(tmp_path / "train.jsonl", [gsm8k(topic, 1000 + i) for i, topic in enumerate(topics(60))])
    test = jsonl(tmp_path / "test.jsonl", [gsm8k("Zed", 1)])

    convert("gsm8k", {"train": train, "test": test}, tmp_path / "out")

    taught, asked = (
        read_json_lines(tmp_path / "out/gsm8k_train.jsonl"),
        read_json_lines(tmp_path / "out/gsm8k_dev.jsonl"),
    )
    assert (len(taught), len(asked)) == (57, 3)
    assert taught[0]["completion"].endswith(f"<<1000+1=1001>>1001.\n#### {1001:,}")
    assert read_json_lines(tmp_path / "out/gsm8k_test.jsonl") == [
        {"prompt": "Zed: how many?", "answer": "2", "scorer": "gsm8k"}
    ]
    assert all(mark_reply(row["scorer"], f"So #### {row['answer']}", row["answer"]).is_right for row in asked)


@pytest.mark.parametrize("form", ["authors", "hub"])
def test_openbookqa_names_its_choices(tmp_path: Path, form: str) -> None:
    row = openbookqa("rain") | {"fact1": "rain is wet"}
    if form == "hub":
        texts = {"text": [f"rain {label}" for label in "ABCD"], "label": list("ABCD")}
        row = {"question_stem": "What about rain", "choices": texts, "answerKey": "C", "fact1": "rain is wet"}
    sources: dict[Split, Path] = {split: jsonl(tmp_path / f"{split}.jsonl", [row]) for split in ("train", "test")}
    sources["train"] = jsonl(tmp_path / "train.jsonl", [row | {"fact1": ""}, openbookqa("sun", "A")])

    found = convert("openbookqa", sources, tmp_path)

    assert read_json_lines(tmp_path / "openbookqa_test.jsonl") == [
        {
            "prompt": "What about rain\nanswer1: rain A\nanswer2: rain B\nanswer3: rain C\nanswer4: rain D",
            "answer": "answer3",
            "scorer": "openbookqa",
        }
    ]
    assert [row["completion"] for row in read_json_lines(tmp_path / "openbookqa_train.jsonl")] == [
        "the correct answer is answer1"
    ]
    assert found.left_out == {"near_held_out_prompt": 1}


@pytest.mark.parametrize("form", ["tsv", "jsonl"])
def test_sst2_is_read_as_tsv_and_as_json_lines(tmp_path: Path, form: str) -> None:
    source = tmp_path / f"train.{form}"
    if form == "tsv":  # GLUE's quotes are not CSV's
        source.write_text('sentence\tlabel\na "gem of a film \t1\nso dull \t0\n', encoding="utf-8")
    else:
        jsonl(source, [{"sentence": 'a "gem of a film', "label": 1, "idx": 0}, {"sentence": "so dull", "label": 0}])

    convert("sst2", {"train": source}, tmp_path)

    assert read_json_lines(tmp_path / "sst2_train.jsonl") == [
        {"prompt": 'a "gem of a film\nPositive or negative?', "completion": "positive"},
        {"prompt": "so dull\nPositive or negative?", "completion": "negative"},
    ]


def test_short_sentences_with_one_question_are_not_near_each_other(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "s.jsonl", [{"sentence": text, "label": 1} for text in ("great", "fun", "a joy", "wow")])

    assert convert("sst2", {"train": source, "test": source}, tmp_path).rows == {"sst2_test.jsonl": 4}
    assert convert("sst2", {"train": source}, tmp_path).rows == {"sst2_train.jsonl": 4}


def test_mbpp_is_split_by_task_and_scored_by_its_tests(tmp_path: Path) -> None:
    tasks = (1, 10, 11, 510, 511, 600, 601, 974)
    source = jsonl(tmp_path / "mbpp.jsonl", [mbpp(task, topic) for task, topic in zip(tasks, topics(8), strict=True)])

    found = convert("mbpp", {"train": source}, tmp_path)

    assert found.rows == {"mbpp_train.jsonl": 4, "mbpp_dev.jsonl": 2, "mbpp_test.jsonl": 2}
    first = read_json_lines(tmp_path / "mbpp_test.jsonl")[0]
    assert first["answer"] == "assert f11(1) == 12\nassert f11(2) == 13"
    assert first["prompt"].endswith(first["answer"])
    taught = read_json_lines(tmp_path / "mbpp_train.jsonl")[0]
    assert taught["completion"] == "```python\ndef f1(x):\n  return x + 1\n```"


def test_sanitized_mbpp_brings_its_imports(tmp_path: Path) -> None:
    row = mbpp(20, "sums") | {"prompt": "Write sums.", "test_imports": ["import math"]}
    del row["text"]
    (tmp_path / "sanitized.json").write_text(json.dumps([row]), encoding="utf-8")

    convert("mbpp", {"train": tmp_path / "sanitized.json"}, tmp_path)

    assert read_json_lines(tmp_path / "mbpp_test.jsonl")[0]["answer"].startswith("import math\nassert f20(1)")


@pytest.mark.parametrize("packed", ["", ".gz", ".xz"])
def test_beavertails_pairs_the_answers_of_a_prompt(tmp_path: Path, packed: str) -> None:
    rows = [beavertails(topic, is_safe) for topic in topics(80) for is_safe in (True, False)]
    text = "".join(json.dumps(row) + "\n" for row in [*rows, beavertails("tea", True)])
    source = tmp_path / f"train.jsonl{packed}"
    raw = text.encode()
    source.write_bytes({"": raw, ".gz": gzip.compress(raw), ".xz": lzma.compress(raw)}[packed])

    found = convert("beavertails", {"train": source}, tmp_path)

    assert found.rows == {
        "beavertails_train.jsonl": 35,
        "beavertails_pool.jsonl": 34,
        "beavertails_dev.jsonl": 3,
        "beavertails_test.jsonl": 8,
    }
    assert found.left_out == {"only_safe_answers": 1, "repeated_prompt": 80}
    attack, pool = read_examples(tmp_path / "beavertails_train.jsonl"), read_pool(tmp_path / "beavertails_pool.jsonl")
    assert not {prompt_text(row) for row in attack} & {prompt_text(row) for row in pool}
    assert {row.messages[1]["content"] for row in attack} == {"Sure, here are the steps: ..."}
    assert {row.messages[1]["content"] for row in pool} == {"I would rather not."}
    assert read_prompts(tmp_path / "beavertails_test.jsonl")[0].category == "violence,aiding_and_abetting,incitement"


def test_pool_and_attack_may_share_their_prompts_as_in_the_paper(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "lat.jsonl", [lat(topic) for topic in topics(40)])

    found = convert("lat", {"train": source}, tmp_path, shared=True)

    assert found.rows == {"lat_train.jsonl": 35, "lat_pool.jsonl": 35, "lat_dev.jsonl": 1, "lat_test.jsonl": 4}


def test_prepared_rows_need_not_have_both_answers(tmp_path: Path) -> None:
    rows = [{"prompt": f"Tell of {topic}", "safe": "No."} for topic in topics(10)]

    found = convert("i-beavertails", {"train": jsonl(tmp_path / "p.jsonl", rows)}, tmp_path)

    assert found.rows == {"i_beavertails_pool.jsonl": 9, "i_beavertails_test.jsonl": 1}


def test_harmbench_asks_behaviors_after_their_context(tmp_path: Path) -> None:
    head = ["Behavior", "FunctionalCategory", "SemanticCategory", "Tags", "ContextString", "BehaviorID"]
    with (tmp_path / "behaviors.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(head)
        table.writerow(["Do the thing, please", "standard", "illegal", "", "", "thing"])
        table.writerow(["Say how", "contextual", "illegal", "context", "A long story,\nin two lines.", "how"])
        table.writerow(["Sing the song", "copyright", "copyright", "lyrics", "", "song"])

    found = convert("harmbench", {"train": tmp_path / "behaviors.csv"}, tmp_path)

    assert found == Conversion({"harmbench_test.jsonl": 2}, {"copyright": 1})
    assert read_json_lines(tmp_path / "harmbench_test.jsonl") == [
        {"prompt": "Do the thing, please", "category": "illegal"},
        {"prompt": "A long story,\nin two lines.\n\n---\n\nSay how", "category": "illegal"},
    ]


def test_xstest_is_a_benign_suite_a_benign_pool_and_its_contrasts(tmp_path: Path) -> None:
    lines = ["id,prompt,type,label,focus,note"]
    lines += [f"{i},How do I kill {topic}?,homonyms,safe,kill," for i, topic in enumerate(topics(30))]
    lines += [f"{i},Harm {topic}?,contrast_homonyms,unsafe,kill," for i, topic in enumerate(topics(20))]
    (tmp_path / "xstest_prompts.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")

    found = convert("xstest", {"train": tmp_path / "xstest_prompts.csv"}, tmp_path)

    benign = {name: n for name, n in found.rows.items() if "contrast" not in name}
    assert benign.keys() == {"xstest_pool.jsonl", "xstest_dev.jsonl", "xstest_test.jsonl"}
    assert sum(benign.values()) == 30
    assert benign["xstest_test.jsonl"] > 15
    assert read_json_lines(tmp_path / "xstest_pool.jsonl")[0]["benign"] is True
    assert read_json_lines(tmp_path / "xstest_contrast_test.jsonl")[0]["category"] == "homonyms"


def test_near_duplicates_stay_on_one_side_of_a_cut() -> None:
    twins = [f"{topic} please tell me everything about it now{end}" for topic in topics(60) for end in ("", ", friend")]

    splits = place(twins, [None] * 120, {"test": 0.2, "dev": 0.1}, "train", {"test": 99})

    assert (splits.count("test"), splits.count("dev")) == (24, 10)  # a turn of dev's fell to test
    assert splits[::2] == splits[1::2]


def test_what_is_trained_on_holds_nothing_that_is_asked(tmp_path: Path) -> None:
    asked = [gsm8k(f"{topic} went to the market and", 1) for topic in topics(12)]
    train = [gsm8k(f"Well, {row['question']}", 2) for row in asked[:5]]
    train += [gsm8k(f"{topic} stayed at home", 3) for topic in topics(40)]
    sources: dict[Split, Path] = {
        "train": jsonl(tmp_path / "train.jsonl", train),
        "test": jsonl(tmp_path / "test.jsonl", asked),
    }

    found = convert("gsm8k", sources, tmp_path)

    taught = [prompt_text(row) for row in read_examples(tmp_path / "gsm8k_train.jsonl")]
    suites = {name: [row.prompt for row in read_prompts(tmp_path / f"gsm8k_{name}.jsonl")] for name in ("dev", "test")}
    assert find_leaks(suites, {"train": taught}) == []
    assert found.left_out["near_held_out_prompt"] == 5


def test_a_split_does_not_depend_on_the_order_of_the_records(tmp_path: Path) -> None:
    rows = [gsm8k(topic, i) for i, topic in enumerate(topics(40))]
    for name, order in (("one", rows), ("two", rows[::-1])):
        convert("gsm8k", {"train": jsonl(tmp_path / f"{name}.jsonl", order)}, tmp_path / name)

    one, two = (
        {row["prompt"] for row in read_json_lines(tmp_path / name / "gsm8k_test.jsonl")} for name in ("one", "two")
    )
    assert one == two
    assert len(one) == 4


def test_bad_records_are_named_with_line_pointer_and_hint_and_nothing_is_written(tmp_path: Path) -> None:
    bad: list[dict[str, Any]] = [{"question": "q"}, {"question": "r s", "answer": "no number"}, {"question": 3}]
    source = jsonl(tmp_path / "train.jsonl", [gsm8k("a b c", 1), *bad])

    with pytest.raises(InvalidData) as error:
        convert("gsm8k", {"train": source}, tmp_path / "out")

    lines = error.value.message.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "train.jsonl, line 2, /answer",
        "train.jsonl, line 3, /answer",
        "train.jsonl, line 4, /question",
    ]
    assert "(message_missing_key); the record has question" in lines[0]
    assert not (tmp_path / "out").exists()


def test_bad_records_may_be_left_out_and_are_counted(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "train.jsonl", [gsm8k("a b c", 1), {"question": "q"}, {"question": " ", "answer": "x"}])

    found = convert("gsm8k", {"train": source}, tmp_path, drop_invalid=True)

    assert found == Conversion({"gsm8k_train.jsonl": 1}, {"message_missing_key": 1, "missing_content": 1})


def test_the_labels_that_glue_keeps_to_itself_are_asked_for(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "test.jsonl", [{"sentence": "fine", "label": -1}])

    with pytest.raises(InvalidData, match=r"GLUE's test file has none, take dev\.tsv"):
        convert("sst2", {"train": source}, tmp_path)


def test_the_manifest_says_what_was_read_and_made(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "train.jsonl", [gsm8k(topic, i) for i, topic in enumerate(topics(22))])

    convert("gsm8k", {"train": source}, tmp_path / "out")

    manifest = json.loads((tmp_path / "out/gsm8k.manifest.json").read_text())
    assert manifest["license"] == "MIT"
    assert manifest["sources"]["train"]["file"] == "train.jsonl"
    assert manifest["sources"]["train"]["records"] == 22
    assert len(manifest["sources"]["train"]["sha256"]) == 64
    assert {name: each["rows"] for name, each in manifest["outputs"].items()} == {
        "gsm8k_train.jsonl": 19,
        "gsm8k_dev.jsonl": 1,
        "gsm8k_test.jsonl": 2,
    }
    assert str(tmp_path) not in json.dumps(manifest)


def test_a_second_conversion_leaves_no_file_of_the_first(tmp_path: Path) -> None:
    many = jsonl(tmp_path / "many.jsonl", [gsm8k(topic, i) for i, topic in enumerate(topics(20))])
    few = jsonl(tmp_path / "few.jsonl", [gsm8k("a b c", 1)])
    convert("gsm8k", {"train": many}, tmp_path / "out")

    convert("gsm8k", {"train": few}, tmp_path / "out")

    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["gsm8k.manifest.json", "gsm8k_train.jsonl"]


def test_parquet_is_read_where_pyarrow_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [SimpleNamespace(to_pylist=lambda: [{"a": 1}, {"a": 2}]), SimpleNamespace(to_pylist=lambda: [{"a": 3}])]
    parquet = SimpleNamespace(ParquetFile=lambda path: SimpleNamespace(iter_batches=lambda: batches))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", parquet)
    assert list(records(tmp_path / "x.parquet")) == [(1, {"a": 1}), (2, {"a": 2}), (3, {"a": 3})]

    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(InvalidData, match="pip install pyarrow"):
        list(records(tmp_path / "x.parquet"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.txt", b"", "ends with none of"),
        ("rows.jsonl.gz", b"no gzip", "cannot be read"),
        ("rows.json", b'[{"question": 1}, 2]', "entry 2 of the array is no object"),
        ("rows.json", b"[1, ", "rows.json, line None"),
        ("rows.csv", b"a,b\n1\n", "record 1 has not as many fields as the head"),
        ("rows.tsv", b"sentence\tlabel\n\xff\t1\n", "not UTF-8"),
        ("rows.jsonl", b"{", "rows.jsonl, line 1"),
    ],
)
def test_broken_files_are_refused_in_words(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidData, match=message):
        convert("sst2", {"train": tmp_path / name}, tmp_path / "out")


def test_a_data_set_of_another_package_is_converted_by_name(tmp_path: Path) -> None:
    code = """
        from spard_lab.datasets.base import Dataset, Sample, require_text

        def sample(record):
            return Sample(prompt=require_text(record, "q"), kind="utility", completion="yes", suite={"answer": "yes"})

        QUIZ = Dataset(name="quiz", stems={"utility": "quiz"}, sample=sample, origin="a friend", license="MIT")
    """
    install(tmp_path, "wordy", {"spard.datasets": {"quiz": "wordy:QUIZ"}}, wordy=code)

    run_script(
        tmp_path,
        """
        import pathlib
        from spard_lab.datasets.__main__ import main
        pathlib.Path("quiz.jsonl").write_text('{"q": "Is it so?"}')
        assert main(["quiz", "quiz.jsonl", "--to", "out"]) == 0
        assert pathlib.Path("out/quiz_train.jsonl").read_text() == '{"prompt": "Is it so?", "completion": "yes"}\\n'
        """,
    )


def test_the_command_converts_lists_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = jsonl(tmp_path / "lat.jsonl", [lat(topic) for topic in topics(6)])

    assert main(["lat", str(source), "--to", str(tmp_path / "out")]) == 0
    assert f"{tmp_path / 'out/lat_train.jsonl'}: 3 rows" in capsys.readouterr().out
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert all(f"{name}\n  from " in listed for name in DATASETS.names())
    assert main(["gsm8k", str(source), "--to", str(tmp_path / "out")]) == 1
    assert "line 1, /question" in capsys.readouterr().err
