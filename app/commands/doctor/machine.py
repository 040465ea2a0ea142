"""Checks of this machine: installed packages, GPU, port and sandbox."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from urllib.parse import urlsplit

import httpx2

from app.commands.data_folder import running_service
from app.commands.doctor.findings import Finding, note, ok, problem
from app.http.connections import SERVER, UNBOUNDED
from app.ops import gpus
from app.ops.children import environment
from app.settings import Settings
from spard.isolation import walls

_WORKER = ("torch", "transformers", "peft", "safetensors", "accelerate", "numpy")
_WAIT_S = 2.0
_USUAL_PORT = 8000
_THIS_MACHINE = ("127.0.0.1", "::1", "localhost", "0.0.0.0")  # noqa: S104 - what an address says, not what is bound


def checks(settings: Settings, port: int | None) -> Iterator[Finding]:
    """Check versions, packages, GPU, port and sandbox."""
    yield versions()
    yield packages()
    yield gpu(settings)
    yield free_port(port or own_port(settings))
    yield sandbox()


def versions() -> Finding:
    """Check that library and service have the same version."""
    found = {}
    for name in ("spard", "spard-service"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            return problem("versions", f"{name} is not installed as a package.", f"pip install {name}")
    if len(set(found.values())) > 1:
        shown = ", ".join(f"{name} {number}" for name, number in found.items())
        return problem("versions", f"{shown} do not belong together.", "install both of one version")
    return ok("versions", f"spard and spard-service {found['spard']}")


def packages() -> Finding:
    """Check that the packages that a worker needs are installed; a machine with only the API needs none."""
    missing = [name for name in _WORKER if find_spec(name) is None]
    if missing:
        cure = "pip install 'spard-service[worker]' where workers run; the API alone needs none of it"
        return problem("packages", f"No worker can train here: {', '.join(missing)} not installed.", cure)
    return ok("packages", "all that a worker needs is installed")


def gpu(settings: Settings) -> Finding:
    """Compare the settings with the GPUs that the driver shows; if torch is installed, run the GPU probe."""
    found = gpus.count()
    if settings.device == "cuda" and not found:
        cure = "install the NVIDIA driver, give the container a GPU, or set SPARD_DEVICE=cpu"
        return problem("gpu", "SPARD_DEVICE is cuda, but the driver shows no GPU.", cure)
    if settings.device != "cpu" and 0 < found < settings.gpus_per_job:
        cure = f"set SPARD_GPUS_PER_JOB to {found} at most, or give this machine more GPUs"
        return problem("gpu", f"A job is to have {settings.gpus_per_job} GPUs, and there are {found}.", cure)
    if settings.device != "cpu" and found and find_spec("torch") and not _computes(settings):
        cure = "install a torch for this driver, or a newer driver; `python -m worker.gpu_probe` shows the error"
        return problem("gpu", f"The driver shows {found} GPUs, and torch cannot compute there.", cure)
    return ok("gpu", f"{found} GPUs") if found else note("gpu", "none; workers here train on the CPU")


def _computes(settings: Settings) -> bool:
    return gpus.gpu_probe_succeeds(gpus.PROBE, environment(settings), settings.gpus_per_job, quiet=True)


def own_port(settings: Settings) -> int:
    """Return the port of the running service, else of SPARD_BASE_URL if that is this machine, else 8000."""
    running = running_service(settings.data_dir)
    for url in (running[0] if running else "", os.environ.get("SPARD_BASE_URL", "")):
        with suppress(ValueError):
            parts = urlsplit(url)
            if parts.hostname in _THIS_MACHINE and parts.port:
                return parts.port
    return _USUAL_PORT


def free_port(port: int) -> Finding:
    """Check that the port of `spard up` is free, or that a SPARD service listens on it."""
    try:
        with socket.create_server(("127.0.0.1", port)):
            return ok("port", f"{port} is free")
    except OSError as error:
        try:
            if httpx2.get(f"http://127.0.0.1:{port}/healthz", timeout=_WAIT_S).json() == {"status": "ok"}:
                return _listening(port)
        except (httpx2.TransportError, ValueError):
            pass
        cure = "stop the other program, or start with `spard up --port PORT`"
        return problem("port", f"Something else listens on {port}: {error.strerror}.", cure)


def _listening(port: int) -> Finding:
    """Check that the service on a port limits its connections."""
    with suppress(httpx2.TransportError, ValueError, AttributeError):
        ready = httpx2.get(f"http://127.0.0.1:{port}/readyz", timeout=_WAIT_S).json()
        if UNBOUNDED in ready.get("warnings", ()):
            return problem("port", f"The service on {port}: {UNBOUNDED}", f"add --http {SERVER} to its start line")
    return ok("port", f"a SPARD service listens on {port}")


def sandbox() -> Finding:
    """Check which sandbox this machine supports for jobs."""
    found = walls.find_walls()
    if found.kind == "none":
        cure = "run workers on Linux 5.13 or newer, and let the container make user namespaces"
        return problem("sandbox", f"Jobs run without isolation; missing: {'; '.join(found.missing)}.", cure)
    text = f"jobs are isolated by {found.kind}"
    return note("sandbox", f"{text}, without {'; '.join(found.missing)}") if found.missing else ok("sandbox", text)
