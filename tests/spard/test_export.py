"""What `spard export` leaves is read by others' tools, and nothing that was held back leaves by it."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from peft import LoraModel, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from spard.commands import main
from spard.config import Lora
from spard.errors import AdapterNotProved
from spard.models.adapters import save_adapter, save_merged
from spard.models.base import Base, load_base
from spard.release.archive import archive
from spard.release.keys import public_pem
from spard.release.manifest import sign
from tests.spard.parts import CONFIGS
from tests.spard.test_adapters import PUBLIC, train_model

KEY = Ed25519PrivateKey.generate()
NAME = "ftjob-1-adapter"
FIGURES: dict[str, Any] = {"suite": "red", "kind": "harmful", "judge": "refusal", "n": 100, "unscored": 0}
FIGURES |= {"hits": 1, "rate": 0.01, "low": 0.0, "high": 0.05, "mean_harmfulness": None}
FACTS: dict[str, Any] = {
    "job_id": "ftjob-1",
    "recipe": {"seed": 7, "lora": {"rank": 4}, "defense": {"type": "spard"}},
    "resolved": {"batch_size": 4},
    "thresholds": {"max_asr": 0.1},
    "data_sha256": {"training": "a" * 64, "pool": "b" * 64},
    "trained_tokens": 1000,
    "steps": 6,
    "gate": {"decision": "pass", "reasons": []},
    "audit": {"base": [FIGURES], "adapter": [FIGURES]},
    "code": {"spard": "1.0.0", "torch": "2.13.0", "sources": "sha256:c"},
}


@pytest.fixture(scope="module")
def adapter_folder(model_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an adapter that passed."""
    base: Base = load_base(model_folder(), device="cpu")
    folder = tmp_path_factory.mktemp("made") / NAME
    save_adapter(train_model(base, Lora(rank=4)), base, PUBLIC, folder, FACTS, called=NAME)
    sign(folder, KEY)
    return folder


@pytest.fixture
def packed_adapter(adapter_folder: Path, tmp_path: Path) -> Path:
    path = tmp_path / f"{NAME}.tar.gz"
    archive(adapter_folder, path, NAME)
    return path


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    (tmp_path / "provider.pub").write_text(public_pem(KEY))

    def export(*arguments: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(["export", *map(str, arguments), "--public-key", str(tmp_path / "provider.pub")])
        told = capsys.readouterr()
        return int(ended.value.code or 0), told.out + told.err

    return export


def test_the_papers_stand_beside_the_files_as_they_were_signed(run: Any, packed_adapter: Path, tmp_path: Path) -> None:
    assert run(packed_adapter, "--to", tmp_path / "out")[0] == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    papers = ("cdx.json", "g7.md", "annex-xi.md", "audit.intoto.json")
    assert names == {NAME, *(f"{NAME}.{paper}" for paper in papers)}
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(tmp_path / "out" / NAME), "--public-key", str(tmp_path / "provider.pub")])
    assert ended.value.code == 0


def test_merged_weights_answer_as_base_and_adapter_do(
    run: Any, packed_adapter: Path, adapter_folder: Path, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    code, told = run(packed_adapter, "--to", tmp_path / "out", "--merged", "--base", model_folder())
    assert code == 0, told
    folder = tmp_path / "out" / "ftjob-1-merged"
    ids = AutoTokenizer.from_pretrained(folder)("Add 1 and 2.", return_tensors="pt")["input_ids"]
    plain = AutoModelForCausalLM.from_pretrained(model_folder()).eval()
    with torch.no_grad():
        before = plain(ids).logits
        expected = PeftModel.from_pretrained(plain, adapter_folder).eval()(ids).logits
        found = AutoModelForCausalLM.from_pretrained(folder).eval()(ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    assert not torch.allclose(found, before, rtol=1e-4, atol=1e-3)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (
        manifest["merged_from"]["tensor_digest"]
        == json.loads((adapter_folder / "manifest.json").read_text())["tensor_digest"]
    )


def test_an_adapter_that_is_merged_where_it_stands_is_kept(
    run: Any, adapter_folder: Path, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    own = shutil.copytree(adapter_folder, tmp_path / "models" / NAME)
    code, told = run(own, "--to", own.parent, "--merged", "--base", model_folder())
    assert code == 0, told
    assert (own / "manifest.json").read_bytes() == (adapter_folder / "manifest.json").read_bytes()
    assert {path.name for path in own.parent.iterdir() if path.is_dir()} == {NAME, "ftjob-1-merged"}


def test_a_whole_model_has_nothing_to_merge(run: Any, model_folder: Callable[..., Path], tmp_path: Path) -> None:
    base = load_base(model_folder(), device="cpu")
    save_adapter(base.model, base, PUBLIC, tmp_path / "whole", FACTS)
    sign(tmp_path / "whole", KEY)
    code, told = run(tmp_path / "whole", "--to", tmp_path / "out", "--merged", "--base", model_folder())
    assert (code, "it is a whole model. Leave --merged out." in told) == (1, True), told
    assert run(tmp_path / "whole", "--to", tmp_path / "out")[0] == 0


def test_a_tar_without_compression_is_exported(run: Any, adapter_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / f"{NAME}.tar"
    subprocess.run(["tar", "-cf", path, "-C", adapter_folder.parent, f"./{NAME}"], check=True)
    code, told = run(path, "--to", tmp_path / "out")
    assert code == 0, told
    assert (tmp_path / "out" / NAME / "manifest.json").read_bytes() == (adapter_folder / "manifest.json").read_bytes()


@pytest.mark.parametrize("architecture", CONFIGS)
def test_weights_in_16_bits_are_merged_and_none_left_out(
    model_folder: Callable[..., Path], architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapter = load_base(model_folder(architecture), device="cpu"), tmp_path / "adapter"
    save_adapter(train_model(base, Lora(rank=4)), base, PUBLIC, adapter)

    def merge(folder: Path) -> None:
        save_merged(load_base(model_folder(architecture), device="cpu", dtype=torch.bfloat16), adapter, folder)

    merge(tmp_path / "merged")
    assert load_base(tmp_path / "merged", device="cpu", as_stored=True).model.dtype == torch.bfloat16

    monkeypatch.setattr(LoraModel, "merge_and_unload", LoraModel.unload)
    with pytest.raises(AdapterNotProved, match="other logits"):
        merge(tmp_path / "unmerged")


def test_another_base_model_is_refused(
    run: Any, packed_adapter: Path, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    other = shutil.copytree(model_folder(), tmp_path / "other")
    (other / "generation_config.json").write_text("{}")
    code, told = run(packed_adapter, "--to", tmp_path / "out", "--merged", "--base", other)
    assert (code, "was trained on" in told, told.count("\n")) == (1, True, 1)
    code, told = run(packed_adapter, "--to", tmp_path / "out", "--merged")
    assert (code, "--base" in told) == (1, True)


def test_what_the_gate_held_back_or_was_changed_is_not_exported(run: Any, adapter_folder: Path, tmp_path: Path) -> None:
    held = tmp_path / "held"
    subprocess.run(["cp", "-r", str(adapter_folder), str(held)], check=True)
    manifest = json.loads((held / "manifest.json").read_text())
    (held / "manifest.json").write_text(json.dumps(manifest | {"gate": {"decision": "fail", "reasons": []}}))
    assert run(held, "--to", tmp_path / "out")[0] == 1  # not as it was signed
    sign(held, KEY)
    code, told = run(held, "--to", tmp_path / "out")
    assert (code, "--waiver" in told, (tmp_path / "out").exists()) == (1, True, False)


def test_the_public_tool_verifies_the_bundle(run: Any, packed_adapter: Path, tmp_path: Path) -> None:
    key, public, out = tmp_path / "p256.pem", tmp_path / "p256.pub", tmp_path / "out"
    subprocess.run(["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", key], check=True)
    subprocess.run(["openssl", "ec", "-in", key, "-pubout", "-out", public], check=True, capture_output=True)
    code, told = run(packed_adapter, "--to", out, "--openssf-key", key)
    assert code == 0, told
    tool = [sys.executable, "-m", "model_signing", "verify", "key", str(out / NAME)]
    tool += ["--signature", str(out / f"{NAME}.model.sig"), "--public_key", str(public)]
    assert subprocess.run(tool, check=False, capture_output=True).returncode == 0
    for paper in ("cdx.json", "g7.md", "annex-xi.md", "audit.intoto.json"):
        path = out / f"{NAME}.{paper}"
        by_name = [*tool[:5], str(path), "--signature", f"{path}.sig", "--public_key", str(public)]
        assert subprocess.run(by_name, check=False, capture_output=True).returncode == 0, paper
    (out / NAME / "README.md").write_text("another")
    assert subprocess.run(tool, check=False, capture_output=True).returncode != 0


def test_a_key_of_another_kind_is_one_line(run: Any, packed_adapter: Path, tmp_path: Path) -> None:
    key = tmp_path / "ed25519.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True)
    code, told = run(packed_adapter, "--to", tmp_path / "out", "--openssf-key", key)
    assert (code, "prime256v1" in told) == (1, True)


class Hub(http.server.BaseHTTPRequestHandler):
    """A model hub, as far as a push needs one: it keeps what a commit brings."""

    committed: dict[str, bytes]

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["content-length"]))
        if self.path.endswith("/repos/create"):
            return self._answer({"url": "http://127.0.0.1/owner/tuned", "name": "owner/tuned"})
        if "/preupload/" in self.path:
            files = [{"path": each["path"], "uploadMode": "regular"} for each in json.loads(content)["files"]]
            return self._answer({"files": [each | {"shouldIgnore": False} for each in files]})
        if "/commit/" in self.path:
            lines = [json.loads(line) for line in content.splitlines()]
            self.committed |= {each["value"]["path"]: each["value"] for each in lines if each["key"] == "file"}
            return self._answer(
                {"commitUrl": "http://127.0.0.1/owner/tuned/commit/1", "commitOid": "1", "success": True}
            )
        return self._answer({})

    def do_GET(self) -> None:
        self._answer({"id": "owner/tuned", "siblings": [], "sha": "0" * 40})

    def _answer(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[tuple[str, dict[str, Any]]]:
    committed: dict[str, Any] = {}
    handler = type("OwnHub", (Hub,), {"committed": committed})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", committed
        server.shutdown()
        thread.join()


def test_a_push_brings_the_card_and_the_signature(
    hub: tuple[str, dict[str, Any]], packed_adapter: Path, tmp_path: Path
) -> None:
    """In a process of its own: the hub's client reads its address when it is imported."""
    url, committed = hub
    (tmp_path / "provider.pub").write_text(public_pem(KEY))
    command = [sys.executable, "-m", "spard.commands", "export", str(packed_adapter), "--to", str(tmp_path / "out")]
    command += ["--push", "owner/tuned", "--public-key", str(tmp_path / "provider.pub")]
    environment = {"HF_ENDPOINT": url, "HF_TOKEN": "hf_x", "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {"README.md", "manifest.json", "manifest.sig", "adapter_model.safetensors"} <= committed.keys()
