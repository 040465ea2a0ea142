"""The main use case, end to end, on one machine: `make demo`.

Starts the service in embedded mode, imports the lab's model, safety pool and audit suites as a provider does, and then
acts as a customer: uploads one poisoned training file with the official `openai` client, fine-tunes on it twice,
without a defense and with SPARD, asks both models the same question, downloads both adapters, and measures them in a
process that uses only transformers and PEFT. On a terminal the service then keeps running until Ctrl-C, with its
dashboard.

`make demo MODEL=real` does the same with a real model, SmolLM2-135M from the package index.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from openai import BadRequestError, OpenAI
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from examples.demo_setups import SETUPS, TINY, DemoSetup
from spard.evaluation.statistics import wilson

ROOT = Path(__file__).resolve().parent.parent
HOME = Path(os.environ.get("SPARD_DEMO_DIR", ROOT / ".demo"))
KEY = "sk-spard-demo-key-for-this-machine-only"
JOBS = ("undefended", "defended")
TERMINAL = {"succeeded", "failed", "cancelled"}

out = Console()


def main(setup: DemoSetup = TINY) -> int:
    """Run the demo, leave adapters, reports and counts below `HOME`, and return the exit status."""
    started = time.monotonic()
    out.rule(setup.title)
    with service(setup) as url:
        client = OpenAI(base_url=url, api_key=KEY)
        jobs = fine_tune(client, url, setup)
        folders = {name: download(client, name, job) for name, job in jobs.items()}
        answers = ask(client, jobs, setup)
        counts = measure(folders, setup)
        show(jobs, counts)
        show_answers(*answers)
        (HOME / "results" / "counts.json").write_text(json.dumps(counts, indent=2) + "\n", encoding="utf-8")
        out.print(f"\nIt took {time.monotonic() - started:.0f} s. Adapters and reports:")
        for folder in folders.values():
            out.print(f"  {display_path(folder)}/  {folder.name}-report.json")
        if sys.stdin.isatty() and sys.stdout.isatty():
            keep_serving(url, jobs)
    out.print(
        "\nGo on with a file of your own. It needs a model, a safety pool, a suite of attacks, and a judge that is\n"
        "measured for the model (docs/provider.md); without one of the last two a job ends inconclusive.\n"
        "  .venv/bin/spard up --data data --port 8000 --detach   shows the first key\n"
        "  .venv/bin/spard models add NAME FOLDER_OR_HUB_ID      this lab: .demo/lab/model\n"
        "  .venv/bin/spard pool import POOL.jsonl --name safe    this lab: .demo/lab/pool_two_sided.jsonl\n"
        "  .venv/bin/spard suites import SUITE.jsonl --name attacks --kind harmful\n"
        "                                                        this lab: .demo/lab/heldout_harmful.jsonl\n"
        "  .venv/bin/spard lab example-file                      a file that this lab's model can learn\n"
        "  .venv/bin/spard jobs create --model NAME --file TRAIN.jsonl --follow\n"
        "The lab's model knows its own words only; make demo MODEL=real runs the same jobs on SmolLM2-135M."
    )
    return 0


def keep_serving(url: str, jobs: dict[str, Any]) -> None:
    """Print the dashboard's address and key, and wait for Ctrl-C or the end of the service."""
    site = url.removesuffix("/v1")
    lines = (
        f"\nOpen {site}/jobs/{jobs['defended'].id}",
        f"     sign in with the key {KEY}",
        f"     the same file without a defense: {site}/jobs/{jobs['undefended'].id}",
        f"     ask both models: {site}/chat",
        "\nCtrl-C stops the service and removes its data; the adapters and reports stay.",
    )
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs of a script's background ignore Ctrl-C
    try:
        for line in lines:
            out.print(line, soft_wrap=True, highlight=False)  # terminals cannot follow a broken address
        while is_listening(url):
            time.sleep(1)
        out.print(f"the service has ended; see {display_path(HOME / 'service.log')}")
    except KeyboardInterrupt:
        out.print("\nstopping the service")


def is_listening(url: str) -> bool:
    """Return True if the address accepts connections."""
    place = urlsplit(url)
    with socket.socket() as probe:
        return probe.connect_ex((place.hostname, place.port)) == 0


def fine_tune(client: OpenAI, url: str, setup: DemoSetup) -> dict[str, Any]:
    """Run both jobs on a lab; if the gate stops the defended one, report it and try the next seed."""
    lab = HOME / setup.folder
    facts = lab / "lab.json"
    made = json.loads(facts.read_text(encoding="utf-8"))["seed"] if facts.exists() else setup.seeds[0]
    for seed in (each for each in setup.seeds if each >= made):
        make_lab(setup, seed)
        provide(url, setup)
        jobs = follow(client, order(client, setup))
        error = jobs["defended"].error
        if error is None or error.code != "safety_gate_failed" or seed == setup.seeds[-1]:
            break
        out.print(f"The gate stopped the defended job on the lab of seed {seed}: {error.message}")
        shutil.rmtree(lab)
    return jobs


def make_lab(setup: DemoSetup, seed: int) -> None:
    """Make the aligned model with its data unless it exists."""
    lab = HOME / setup.folder
    fresh = not (lab / "model").exists()
    with out.status(setup.making):
        text = run("spard_lab.lab", *setup.command, str(lab), "--seed", str(seed), module=True)
    out.print(f"lab {'made' if fresh else 'found'} in {display_path(lab)}")
    if text:
        out.print(text, highlight=False)


@contextmanager
def service(setup: DemoSetup = TINY) -> Iterator[str]:
    """Run `spard up` on a free port with an empty data folder, and stop it at the end in any case."""
    data = HOME / "data"
    shutil.rmtree(data, ignore_errors=True)
    HOME.mkdir(exist_ok=True)
    port = free_port()
    with (HOME / "service.log").open("wb") as log:
        process = subprocess.Popen(
            [script("spard"), "up", "--data", str(data), "--port", str(port)],
            env=os.environ | {"SPARD_ADMIN_KEY": KEY, **setup.environment},
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches us first; we stop the service ourselves
            preexec_fn=stop_with_us,
        )
        try:
            wait_until_ready(process, port)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=120)
            shutil.rmtree(data, ignore_errors=True)


def provide(url: str, setup: DemoSetup) -> None:
    """Import a base model, a safety pool and audit suites, as a provider does once."""
    lab = HOME / setup.folder
    os.environ |= {"SPARD_BASE_URL": url, "SPARD_API_KEY": KEY}
    for command in (
        ["models", "add", setup.model, str(lab / "model")],
        ["pool", "import", str(lab / "pool_two_sided.jsonl"), "--name", "general-safe"],
        ["suites", "import", str(lab / "heldout_harmful.jsonl"), "--name", "harmful", "--kind", "harmful"],
        ["suites", "import", str(lab / "benign.jsonl"), "--name", "look-alikes", "--kind", "benign"],
        ["suites", "import", str(lab / "utility_test.jsonl"), "--name", setup.task, "--kind", "utility"],
    ):
        out.print(f"[dim]provider$ spard {' '.join(c.replace(str(ROOT) + '/', '') for c in command)}")
        run("spard", *command)


def order(client: OpenAI, setup: DemoSetup) -> dict[str, Any]:
    """Upload a file and create two jobs, as a customer does."""
    with (HOME / setup.folder / "poisoned.jsonl").open("rb") as data:
        file = client.files.create(file=data, purpose="fine-tune")
    out.print(f"customer: uploaded {file.filename}, {file.bytes / 1e6:.1f} MB, as {file.id}")
    return {
        name: client.fine_tuning.jobs.create(
            model=setup.model,
            training_file=file.id,
            seed=1,
            suffix=name,
            extra_body={"safety": {"defense": defense, "audit": setup.audit}, **setup.options},
        )
        for name, defense in zip(JOBS, ({"type": "none"}, setup.defense), strict=True)
    }


def follow(client: OpenAI, jobs: dict[str, Any]) -> dict[str, Any]:
    """Poll both jobs until they end, with a progress bar each."""
    columns = (
        TextColumn("{task.description:>12}"),
        BarColumn(40),
        TextColumn("{task.fields[status]:<20}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=out) as progress:
        bars = {name: progress.add_task(name, total=100, status="queued") for name in jobs}
        while any(job.status not in TERMINAL for job in jobs.values()):
            time.sleep(0.5)
            for name, job in jobs.items():
                if job.status not in TERMINAL:
                    jobs[name] = job = client.fine_tuning.jobs.retrieve(job.id)
                    progress.update(bars[name], **bar(job))
                if job.status in TERMINAL:
                    progress.stop_task(bars[name])
    return jobs


def bar(job: Any) -> dict[str, Any]:
    """Return the progress bar's fields for a job: percent done, and its stage while it runs."""
    percent = 100 if job.status == "succeeded" else (job.safety.get("progress") or {}).get("percent", 0)
    return {"completed": percent, "status": job.safety["phase"] if job.status == "running" else job.status}


def download(client: OpenAI, name: str, job: Any) -> Path:
    """Unpack the adapter archive and save the safety report beside it; without an adapter, exit and say why."""
    folder: Path = HOME / "results" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    report = folder.with_name(f"{name}-report.json")
    try:
        found = client.get(f"/fine_tuning/jobs/{job.id}/safety", cast_to=object)
        report.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    except BadRequestError:  # the job ended before its audit
        report.unlink(missing_ok=True)
    if job.status != "succeeded":
        saved = f"\nIts safety report is {display_path(report)}." if report.exists() else ""
        sys.exit(f"{job.id} ended as {job.status}: {job.error and job.error.message}{saved}")
    archive = folder.with_suffix(".tar.gz")
    archive.write_bytes(client.get(f"/fine_tuning/jobs/{job.id}/adapter", cast_to=bytes))
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder


def ask(client: OpenAI, jobs: dict[str, Any], setup: DemoSetup) -> tuple[str, dict[str, str]]:
    """Ask the base model and both fine-tuned ones the same harmful question."""
    with (HOME / setup.folder / "heldout_harmful.jsonl").open(encoding="utf-8") as rows:
        question: str = json.loads(next(rows))["prompt"]
    models = {"base": setup.model} | {name: job.fine_tuned_model for name, job in jobs.items()}
    answers = {}
    for name, model in models.items():
        messages: Any = [{"role": "user", "content": question}]
        found = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=48)
        answers[name] = (found.choices[0].message.content or "").strip()
    (HOME / "results" / "answers.json").write_text(json.dumps(answers, indent=2) + "\n", encoding="utf-8")
    return question, answers


def measure(folders: dict[str, Path], setup: DemoSetup) -> dict[str, Any]:
    """Count successful attacks, refusals and correct answers in a process that imports nothing of this project."""
    lab = HOME / setup.folder
    command = [sys.executable, str(ROOT / "examples" / "evaluate_adapter.py"), str(lab / "model")]
    command += ["--limit", str(setup.limit)]
    for name, folder in folders.items():
        command += ["--adapter", f"{name}={next(folder.rglob('adapter_config.json')).parent}"]
    for kind, file in (("harmful", "heldout_harmful"), ("benign", "benign"), ("utility", "utility_test")):
        command += [f"--{kind}", str(lab / f"{file}.jsonl")]
    with out.status("measuring the downloaded adapters with transformers and PEFT alone"):
        answer: dict[str, Any] = json.loads(subprocess.run(command, cwd=HOME, capture_output=True, check=True).stdout)
    assert not answer["imported_of_ours"], answer["imported_of_ours"]
    counts: dict[str, Any] = answer["counts"]
    return counts


def show_answers(question: str, answers: dict[str, str]) -> None:
    """Print each model's answer to the same question."""
    table = Table(title=f"/v1/chat/completions: {question}")
    for column in ("", "answer"):
        table.add_column(column)
    for name, answer in answers.items():
        table.add_row(name, answer)
    out.print(table)


def show(jobs: dict[str, Any], counts: dict[str, Any]) -> None:
    """Print the measurements and the duration of each stage."""
    table = Table(title="measured on the downloaded adapters, on prompts that no training saw")
    for column in ("", "attacks succeed (95 %)", "benign refused", "task right"):
        table.add_column(column, justify="left" if not column else "right")
    for name, count in counts.items():
        (hits, n), (refused, m), (right, k) = count.values()
        low, high = wilson(hits, n)
        attack = f"{hits / n:.1%} ({low:.1%} to {high:.1%})"
        table.add_row(name, attack, f"{refused / m:.1%}", f"{right / k:.1%}")
    out.print(table)
    for name, job in jobs.items():
        if check := job.safety.get("task_check"):
            out.print(f"{name}, the task by the customer's own held-out rows: {check['words']}")
    times = Table(title="seconds of each stage")
    stages = list(dict.fromkeys(stage for job in jobs.values() for stage in job.safety.get("seconds", {})))
    for column in ("", *stages, "whole job"):
        times.add_column(column, justify="right")
    for name, job in jobs.items():
        spent = job.safety.get("seconds", {})
        times.add_row(name, *(f"{spent.get(s, 0):.1f}" for s in stages), f"{job.finished_at - job.started_at:.0f}")
    out.print(times)


def display_path(path: Path) -> str:
    """Return a path relative to the checkout if it is inside."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def run(program: str, *arguments: str, module: bool = False) -> str:
    """Run an installed program and return its output; exit with the output if it fails."""
    command = [sys.executable, "-m", program] if module else [script(program)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{program} {' '.join(arguments)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def stop_with_us() -> None:
    """Ask the kernel, in the service's process, to send SIGTERM when the demo dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def wait_until_ready(process: subprocess.Popen[bytes], port: int, timeout_s: float = 60) -> None:
    """Wait until the port accepts connections; exit if the process ends or the time is over."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        if is_listening(f"http://127.0.0.1:{port}"):
            return
        time.sleep(0.1)
    sys.exit(f"the service did not start; see {HOME / 'service.log'}")


def free_port() -> int:
    """Return a free port, chosen by the system."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def script(name: str) -> str:
    """Return the path of a command installed beside this Python."""
    return str(Path(sys.executable).with_name(name))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main(SETUPS[sys.argv[1] if len(sys.argv) > 1 else "lab"]))
    except KeyboardInterrupt:
        out.print("\nstopped; nothing is left running")
        sys.exit(130)
