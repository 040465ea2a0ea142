"""promptfoo configurations as suites: what becomes a row, what is named, and what is never run or read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.move_in import promptfoo, promptfoo_files
from app.move_in.promptfoo import Conversion, Kind, convert

EVAL = """
description: capitals
providers: [openai:gpt-4o-mini]
prompts:
  - "What is the capital of {{country}}?"
tests:
  - vars: {country: France}
    assert:
      - {type: equals, value: Paris}
      - {type: latency, threshold: 900}
  - vars: {country: Spain}
    assert: [{type: icontains, value: madrid}]
  - vars: {country: Peru}
    assert: [{type: llm-rubric, value: names Lima}]
"""


def write(folder: Path, text: str, **files: str) -> Path:
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content, encoding="utf-8")
    path = folder / "promptfooconfig.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def read(folder: Path, text: str, kind: Kind = "utility", **files: str) -> Conversion:
    return convert(write(folder, text, **files), kind)


def test_a_test_becomes_a_row_with_the_answer_that_a_scorer_compares(tmp_path: Path) -> None:
    found = read(tmp_path, EVAL)
    assert found.rows == [
        {"prompt": "What is the capital of France?", "answer": "Paris", "scorer": "exact"},
        {"prompt": "What is the capital of Spain?", "answer": "madrid", "scorer": "contains"},
    ]
    assert [*found.left_out.values()] == [["test 3"]]
    assert "llm-rubric" in next(iter(found.left_out))
    assert found.changed["assertion `latency`, since a row holds one answer"] == ["test 1"]
    assert [line for line in found.summary() if "llm-rubric" in line and "1 x" in line]


@pytest.mark.parametrize("kind", ["harmful", "benign"])
def test_only_a_suite_with_right_answers_holds_them(tmp_path: Path, kind: Kind) -> None:
    found = read(tmp_path, EVAL, kind)
    assert [list(row) for row in found.rows] == [["prompt"]] * 3
    assert sum(map(len, found.changed.values())) == 1 + 4  # the providers, and each assertion


def test_a_test_that_expects_the_opposite_of_its_suite_is_left_out(tmp_path: Path) -> None:
    config = """
prompts: ["{{q}}"]
tests:
  - {vars: {q: a}, assert: [{type: is-refusal}]}
  - {vars: {q: b}, assert: [{type: not-is-refusal}]}
"""
    assert [row["prompt"] for row in read(tmp_path, config, "harmful").rows] == ["a"]
    assert [row["prompt"] for row in read(tmp_path, config, "benign").rows] == ["b"]


def test_every_prompt_is_asked_with_every_test_and_each_of_a_list_of_vars(tmp_path: Path) -> None:
    config = """
prompts:
  - "1 {{q}}"
  - {id: file://second.txt, label: second}
tests:
  - vars: {q: [a, b]}
  - vars: {q: c}
    prompts: [second]
  - vars: {q: d}
    prompts: [third]
"""
    found = read(tmp_path, config, "benign", second__txt="2 {{q}}\n---\n3 {{ q }}\n")
    assert [row["prompt"] for row in found.rows] == ["1 a", "1 b", "2 a", "2 b", "3 a", "3 b", "2 c", "3 c"]
    assert found.left_out == {"it names prompts that the configuration does not have": ["test 3"]}


def test_the_default_test_is_merged(tmp_path: Path) -> None:
    config = """
prompts: ["{{greeting}} {{q}}"]
defaultTest:
  vars: {greeting: Hello}
  assert: [{type: contains, value: "{{ right }}"}]
  options: {suffix: "!"}
tests:
  - vars: {q: one, right: "1"}
  - vars: {q: two, greeting: Bye}
    assert: [{type: equals, value: "2"}]
    options: {disableDefaultAsserts: true}
"""
    assert read(tmp_path, config).rows == [
        {"prompt": "Hello one!", "answer": "1", "scorer": "contains"},
        {"prompt": "Bye two!", "answer": "2", "scorer": "exact"},
    ]


def test_assertions_that_tests_share_are_resolved(tmp_path: Path) -> None:
    config = """
prompts: ["{{q}}"]
assertionTemplates:
  noise: {type: icontains, value: arrr}
tests:
  - {vars: {q: a}, assert: [{$ref: "#/assertionTemplates/noise"}]}
  - {vars: {q: b}, assert: [{$ref: "#/assertionTemplates/other"}]}
"""
    found = read(tmp_path, config)
    assert found.rows == [{"prompt": "a", "answer": "arrr", "scorer": "contains"}]
    assert "#/assertionTemplates/other" in next(iter(found.left_out))


CSV = """question,__expected,__expected2,__suffix,__metadata:category,__metric
"What is 2+2, please?",equals: 4,contains: four, Now.,math,accuracy
"Say ""yes"".",no,,,,
Weather?,llm-rubric: tells it,,,,
"""


def test_tests_stand_in_files_beside_the_configuration(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        "prompts: ['{{question}}']\ntests: [file://a.csv, file://b.jsonl, c.json, file://d.yaml]\n",
        a__csv="\ufeff" + CSV,
        b__jsonl='{"vars": {"question": "b"}, "assert": [{"type": "equals", "value": 8}]}\n\n',
        c__json='[{"vars": {"question": "c"}, "assert": [{"type": "equals", "value": true}]}]',
        d__yaml="- vars: {question: d}\n  assert: [{type: equals, value: no}]\n",
    )
    assert not found.faults
    assert found.rows == [
        {"prompt": "What is 2+2, please? Now.", "answer": "4", "scorer": "exact", "category": "math"},
        {"prompt": 'Say "yes".', "answer": "no", "scorer": "exact"},
        {"prompt": "b", "answer": "8", "scorer": "exact"},
        {"prompt": "d", "answer": "no", "scorer": "exact"},
    ]
    assert [place for places in found.left_out.values() for place in places] == ["a.csv test 3", "c.json test 1"]


def test_a_chat_of_one_request_is_a_row(tmp_path: Path) -> None:
    chat = [
        {"role": "developer", "content": "Answer with one word: \U0001f600"},
        {"role": "user", "content": [{"type": "input_text", "text": "{{item.input}}"}]},
    ]
    several = [*chat, {"role": "assistant", "content": "What?"}, chat[1]]
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]
    prompts = [json.dumps(each) for each in (chat, several, image)] + ["- role: user\n  content: 'Hi {{item.input}}'"]
    tests = [{"vars": {"item": {"input": "Well?"}}}]
    path = tmp_path / "export.json"
    path.write_text(json.dumps({"prompts": prompts, "tests": tests}), encoding="utf-8")
    found = convert(path, "benign")
    assert [row["prompt"] for row in found.rows] == ["Answer with one word: \U0001f600\n\nWell?", "Hi Well?"]
    assert [*found.left_out.values()] == [["prompt 2"], ["prompt 3"]]
    assert found.changed == {"its system message stands before the request in the row": ["test 1"]}


@pytest.mark.parametrize(
    "prompt",
    [
        "{{ q | upper }}",
        "{% for x in q %}{{ x }}{% endfor %}",
        "{{ q.constructor('return 1')() }}",
        "{{ env['HOME'] }}",
        "{{ env.OPENAI_API_KEY }}",
        "{{ missing }}",
        "{# note #}{{ q }}",
        "{{ '{{' }}",
    ],
)
def test_a_template_with_more_than_plain_names_is_refused_by_name(tmp_path: Path, prompt: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"prompts": [prompt], "tests": [{"vars": {"q": "a"}}]}), encoding="utf-8")
    found = convert(path, "benign")
    assert (found.rows, found.faults) == ([], [])
    (reason,) = found.left_out
    assert prompt[:4] in reason or "no value for {{" in reason


@pytest.mark.parametrize("value", ["{{ env.HOME }}", "{% raw %}", "file://secret.txt", "package:@a/b"])
def test_a_var_is_neither_rendered_nor_followed(tmp_path: Path, value: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"prompts": ["{{q}}"], "tests": [{"vars": {"q": value}}]}), encoding="utf-8")
    (tmp_path / "secret.txt").write_text("hidden")
    assert convert(path, "benign").rows == []


@pytest.mark.parametrize(
    ("prompts", "tests"),
    [
        ("file://run.py", "x.csv"),
        ("run.js", "x.csv"),
        ("file://run.py:make", "x.csv"),
        ("exec:./run.sh", "x.csv"),
        ("Hi {{q}}", "file://run.py:make"),
        ("Hi {{q}}", "run.js"),
        ("Hi {{q}}", "huggingface://datasets/a/b"),
        ("Hi {{q}}", "https://docs.google.com/spreadsheets/d/1"),
        ("Hi {{q}}", "file://book.xlsx#Sheet2"),
    ],
)
def test_programs_and_other_places_are_left_out_by_name(tmp_path: Path, prompts: str, tests: str) -> None:
    program = "import pathlib\npathlib.Path('ran').touch()\n"
    files = {"run__py": program, "run__js": program, "x__csv": "q\na\n"}
    found = read(tmp_path, f"prompts: ['{prompts}']\ntests: ['{tests}']\n", "benign", **files)
    assert (found.rows, found.faults) == ([], [])
    wrong = prompts if prompts != "Hi {{q}}" else tests
    assert any(wrong in line for line in found.summary())
    assert not (tmp_path / "ran").exists()


def test_code_that_changes_a_reply_leaves_no_answer_to_compare(tmp_path: Path) -> None:
    config = """
prompts: ["{{q}}"]
extensions: [file://hook.js:before]
tests:
  - {vars: {q: a}, assert: [{type: equals, value: x, transform: output.trim()}]}
  - {vars: {q: b}, assert: [{type: equals, value: x}], options: {transform: output.trim()}}
  - {vars: {q: c}, assert: [{type: javascript, value: output.length > 1}]}
  - {vars: {q: d}, assert: [{type: equals, value: file://answer.txt}]}
  - {vars: {q: e}, assert: [{type: contains, value: "+"}, {type: contains, value: plus}]}
"""
    found = read(tmp_path, config)
    assert [row["prompt"] for row in found.rows] == ["e"]
    assert sorted(place for places in found.left_out.values() for place in places) == [
        "extensions",
        *(f"test {i}" for i in range(1, 5)),
    ]
    assert any("no word" in reason for reason in found.changed)


def test_a_file_outside_the_folder_is_not_read(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "secret.txt").write_text("hidden")
    (inner / "link.txt").symlink_to(tmp_path / "secret.txt")
    for name in ("../secret.txt", str(tmp_path / "secret.txt"), "link.txt", "../*.txt"):
        found = read(inner, f"prompts: ['file://{name}']\ntests: [{{vars: {{q: a}}}}]\n", "benign")
        assert "outside the folder" in found.faults[0]
        assert found.rows == []


FAULTS: dict[str, tuple[str, dict[str, str], str]] = {
    "no YAML": ("prompts: [\n", {}, "line 2 is not YAML"),
    "a key twice": ("prompts: [a]\nprompts: [b]\ntests: []\n", {}, "'prompts' comes twice"),
    "a tag": ("prompts: !!python/name:os.system\ntests: [{}]\n", {}, "line 1 is not YAML"),
    "other YAML": ("- a\n", {}, "no promptfoo configuration"),
    "no tests": ("prompts: [a]\n", {}, "no promptfoo configuration"),
    "nested": ("prompts: [a]\ntests: " + "[" * 60 + "]" * 60, {}, "nested deeper than 50 levels"),
    "lists of merges": ("a: &a {q: 1}\nb: {<<: [*a, *a]}\n", {}, "merges a list"),
    "a test of text": ("prompts: [a]\ntests: [file://b.jsonl]\n", {"b__jsonl": '"x"\n'}, "b.jsonl test 1 is a text"),
    "no file": ("prompts: [a]\ntests: tests.csv\n", {}, "'tests.csv' cannot be read"),
    "no files": ("prompts: [a]\ntests: 'cases/*.yaml'\n", {}, "matches no file"),
    "a broken line": ("prompts: [a]\ntests: b.jsonl\n", {"b__jsonl": '{}\n{"vars"\n'}, "'b.jsonl' line 2 is not JSON"),
    "a short row": ("prompts: [a]\ntests: b.csv\n", {"b__csv": "q,r\n1,2\n1\n"}, "line 3 has 1 cells"),
    "equal columns": ("prompts: [a]\ntests: b.csv\n", {"b__csv": "q,q\n1,2\n"}, "two columns of the same name"),
    "an open quote": ("prompts: [a]\ntests: b.csv\n", {"b__csv": 'q\n"1\n'}, "line 2 is not CSV"),
    "a default test": ("prompts: [a]\ntests: [{}]\ndefaultTest: [1]\n", {}, "defaultTest is a list"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_file_is_one_finding(tmp_path: Path, name: str) -> None:
    text, files, words = FAULTS[name]
    found = read(tmp_path, text, "benign", **files)
    assert (len(found.faults), found.rows) == (1, [])
    assert words in found.faults[0]


def test_each_fault_is_found_in_one_go(tmp_path: Path) -> None:
    config = "prompts: [file://a.txt, 'Hi {{q}}']\ntests: [b.csv, c.csv, {vars: {q: x}}]\n"
    faults = read(tmp_path, config, "benign", c__csv="q\n").faults
    assert [words in fault for words, fault in zip(("a.txt", "b.csv"), faults, strict=True)] == [True, True]


def test_a_summary_is_short_and_does_not_control_a_terminal(tmp_path: Path) -> None:
    names = [f"key{i}\u001b[31m" + "x" * 900 for i in range(60)]
    path = tmp_path / "a.json"
    tests = [{"vars": {"q": "a"}, name: 1} for name in names]
    path.write_text(json.dumps({"prompts": ["{{q}}"], "tests": tests}), encoding="utf-8")
    found = convert(path, "benign")
    assert (len(found.rows), len(found.changed)) == (60, 60)
    assert found.summary()[-1] == "changed: 10 x for 10 further reasons"
    assert all(len(line) <= 400 and line.isprintable() for line in found.summary())


def test_size_files_and_rows_have_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promptfoo, "MAX_ROWS", 9)
    lists: dict[str, Any] = {name: ["x", "y"] for name in "abcd"}
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"prompts": ["{{a}}"], "tests": [{"vars": lists}]}))
    assert "more than 9 combinations" in next(iter(convert(path, "benign").left_out))
    path.write_text(json.dumps({"prompts": ["{{a}}"], "tests": [{"vars": {"a": "x"}}] * 20}))
    found = convert(path, "benign")
    assert (len(found.faults), "9 rows" in found.faults[0] or "over 9" in found.faults[0]) == (1, True)
    monkeypatch.setattr(promptfoo_files, "MAX_FILES", 2)
    many = read(tmp_path, "prompts: [a.txt, b.txt]\ntests: [{}]\n", a__txt="a", b__txt="b")
    assert "more than 2 files" in many.faults[0]
    monkeypatch.setattr(promptfoo_files.Folder, "__init__", small_folder(promptfoo_files.Folder.__init__))
    assert "larger than" in read(tmp_path, EVAL + "#" * 2000).faults[0]


def small_folder(make: Any) -> Any:
    return lambda folder, root: make(folder, root, _left=1000)
