"""No webhook goes where a customer could not go: refused when it is saved, and again when it is sent."""

from __future__ import annotations

import datetime
import ipaddress
import random
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread, current_thread

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from app.webhooks.address import SPECIAL, Refused, Target, is_special, resolve
from app.webhooks.delivery import Answer, Unanswered, post

PUBLIC, PRIVATE = "93.184.215.14", "10.0.0.5"


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Decide what names stand for, question by question; every question is noted."""

    def set_answers(*answers: list[str]) -> list[str]:
        asked: list[str] = []
        left = list(answers)

        def answer(host: str, port: int, **kw: object) -> list[object]:
            asked.append(host)
            found = left.pop(0) if len(left) > 1 else left[0]
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

        monkeypatch.setattr(socket, "getaddrinfo", answer)
        return asked

    return set_answers


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "224.0.0.1",
        "255.255.255.255", "198.18.0.1", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1",
        "192.0.0.9", "192.31.196.1", "192.52.193.1", "192.88.99.1", "192.175.48.1", "192.0.2.1", "203.0.113.1",
        "::ffff:93.184.215.14", "::93.184.215.14", "::ffff:0:93.184.215.14", "64:ff9b:1::1", "100::1", "100:0:0:1::1",
        "2001::1", "2001:1::1", "2001:2::1", "2001:3::1", "2001:4:112::1", "2001:10::1", "2001:20::1", "2001:30::1",
        "2001:db8::1", "2002:5db8:d70e::", "2620:4f:8000::1", "3ffe::1", "3fff:fff::1", "5f00::1", "fec0::1",
        "200::1", "400::1", "1fff::1", "4000::1", "8000::1", "e000::1", "fe00::1",
        "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "2001:0:7f00:1::1",
    ],
)  # fmt: skip
def test_a_name_that_leads_inside_is_refused(address: str, names: Callable[..., list[str]]) -> None:
    names([address])
    with pytest.raises(Refused, match="public address"):
        resolve("https://hooks.example/", allow_local=False)
    names([PUBLIC, address])
    with pytest.raises(Refused, match="public address"):
        resolve("https://hooks.example/", allow_local=False)


# What CPython 3.11 and its main branch of November 2026 take for not global, without their exceptions: a few ranges
# are in one of them only.
NOT_GLOBAL = (
    *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24"),
    *("192.0.2.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "240.0.0.0/4"),
    *("::1/128", "::/128", "::ffff:0:0/96", "64:ff9b:1::/48", "100::/64", "2001::/23", "2001:2::/48", "2001:10::/28"),
    *("2001:db8::/32", "2002::/16", "3fff::/20", "fc00::/7", "fe80::/10"),
)


@pytest.mark.parametrize("text", NOT_GLOBAL)
def test_the_table_has_what_any_python_takes_for_not_global(text: str) -> None:
    network = ipaddress.ip_network(text)
    assert any(network.version == each.version and network.subnet_of(each) for each in SPECIAL)  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", [32, 128])
def test_what_this_python_takes_for_not_global_is_special(bits: int) -> None:
    kind = ipaddress.IPv4Address if bits == 32 else ipaddress.IPv6Address
    edges = [each for each in SPECIAL if each.max_prefixlen == bits]
    places = [int(end) + step for each in edges for end in (each[0], each[-1]) for step in (-1, 0, 1)]
    places += [top << (bits - 12) for top in range(1 << 12)]  # every prefix of 12 bits
    drawn = random.Random(0)
    places += [drawn.randrange(1 << bits) for _ in range(4000)]
    addresses = [kind(each % (1 << bits)) for each in places]
    assert [each for each in addresses if not each.is_global and not is_special(each)] == []
    assert any(not is_special(each) for each in addresses)


@pytest.mark.parametrize(
    "url",
    [
        "http://hooks.example/", "ftp://hooks.example/", "file:///etc/passwd", "gopher://hooks.example/",
        "https://127.0.0.1/", "https://[::1]/", "https://[::ffff:127.0.0.1]/", "https://[::ffff:7f00:1]/",
        "https://2130706433/", "https://0x7f000001/", "https://0177.0.0.1/", "https://127.1/", "https://0x7f.1/",
        "https://0/", "https://a@hooks.example/", "https://a:b@hooks.example/", "https://hooks.example:22/",
        "https://hooks.example:6379/", "https://hooks.example:99999/", "https://h\u00f6oks.example/", "https://\u2460.example/",
        "https://hooks.example/ x", "https://hooks.example\\@127.0.0.1/", "https:///x", "https://", "https://[::1",
        "https://hooks.example/\n", "https://127.0.0.1./", "https://a_b.example/",
        "hooks.example", "https://hooks.example/" + "x" * 2048,
    ],
)  # fmt: skip
def test_a_url_of_another_form_is_refused_before_any_name_is_looked_up(
    url: str, names: Callable[..., list[str]]
) -> None:
    asked = names([PUBLIC])
    with pytest.raises(Refused):
        resolve(url, allow_local=False)
    assert asked == []


def test_plain_http_reaches_this_machine_only_and_only_where_that_is_allowed(names: Callable[..., list[str]]) -> None:
    assert resolve("http://127.0.0.1:8080/x", allow_local=True) == Target(False, "127.0.0.1", 8080, "127.0.0.1", "/x")
    for url, allowed in (("http://127.0.0.1/", False), (f"http://{PUBLIC}/", True), (f"http://{PRIVATE}/", True)):
        with pytest.raises(Refused):
            resolve(url, allow_local=allowed)


def test_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: object, **kw: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(Refused, match="name service"):
        resolve("https://hooks.example/", allow_local=False)


def test_a_name_service_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = Event()
    monkeypatch.setattr("app.webhooks.address.LOOKUP_S", 0.05)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kw: answered.wait(30))
    with pytest.raises(Refused, match="did not answer"):
        resolve("https://hooks.example/", allow_local=False)
    answered.set()


def test_the_connection_goes_to_the_address_that_was_checked(
    names: Callable[..., list[str]], secure: tuple[int, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, went_to = names([PUBLIC], [PRIVATE]), []
    port, got = secure

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        went_to.append(address)
        return _local(port, timeout)

    monkeypatch.setattr(socket, "create_connection", connect)
    target = resolve("https://hooks.example/in?a=b", allow_local=False)
    assert post(target, b"{}", {"webhook-id": "1"}) == Answer(204)
    assert (went_to, asked) == ([(PUBLIC, 443)], ["hooks.example"])
    assert got[0].startswith(b"POST /in?a=b HTTP/1.1\r\n")
    assert b"host: hooks.example\r\n" in got[0]


def test_a_certificate_of_another_name_is_not_trusted(
    names: Callable[..., list[str]], secure: tuple[int, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    names([PUBLIC])
    monkeypatch.setattr(socket, "create_connection", lambda address, timeout: _local(secure[0], timeout))
    with pytest.raises(Unanswered, match="SSLCertVerificationError"):
        post(resolve("https://other.example/", allow_local=False), b"{}", {})


def test_a_receiver_that_dribbles_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.webhooks.delivery._TOTAL_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = Thread(target=_dribble, args=(server,))
        thread.start()
        port = server.getsockname()[1]
        with pytest.raises(Unanswered):
            post(resolve(f"http://127.0.0.1:{port}/", allow_local=True), b"{}", {})
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture
def secure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, list[bytes]]]:
    """A TLS server that is hooks.example; its certificate is trusted here."""
    certificate = _certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    got: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = Thread(target=_answer_once, args=(server, context, got))
        thread.start()
        yield server.getsockname()[1], got
        thread.join(60)


def _local(port: int, timeout: float) -> socket.socket:
    plain = socket.socket()
    plain.settimeout(timeout)
    plain.connect(("127.0.0.1", port))
    return plain


def _answer_once(server: socket.socket, context: ssl.SSLContext, got: list[bytes]) -> None:
    plain, _ = server.accept()
    try:
        with context.wrap_socket(plain, server_side=True) as connection:
            sent = b""
            while not sent.endswith(b"{}"):
                sent += connection.recv(65536)
            got.append(sent)
            connection.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")
    except OSError:
        plain.close()


def _dribble(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        try:
            connection.sendall(b"HTTP/1.1 2")
            while connection.send(b"x"):
                connection.settimeout(0.05)
                try:
                    if not connection.recv(65536):
                        return
                except TimeoutError:
                    pass
        except OSError:
            pass


def _certificate(folder: Path) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "hooks.example")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("hooks.example")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = folder / "certificate.pem"
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(secret + made.public_bytes(serialization.Encoding.PEM))
    return path


def test_a_url_may_have_2048_characters(names: Callable[..., list[str]]) -> None:
    names([PUBLIC])
    start = "https://hooks.example/"
    assert resolve(start + "x" * (2048 - len(start)), allow_local=False).port == 443
    with pytest.raises(Refused, match="2048"):
        resolve(start + "x" * (2049 - len(start)), allow_local=False)


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("https://Hooks.Example", Target(True, "hooks.example", 443, PUBLIC, "/")),
        ("https://hooks.example:443/in?a=b", Target(True, "hooks.example", 443, PUBLIC, "/in?a=b")),
        ("https://hooks.example./x#y", Target(True, "hooks.example.", 443, PUBLIC, "/x")),
        ("https://1.hooks2.example/?a", Target(True, "1.hooks2.example", 443, PUBLIC, "/?a")),
        (f"https://{PUBLIC}/", Target(True, PUBLIC, 443, PUBLIC, "/")),
        ("https://[2606:4700::1111]/", Target(True, "2606:4700::1111", 443, "2606:4700::1111", "/")),
    ],
)
def test_a_public_url_is_a_target(url: str, target: Target, names: Callable[..., list[str]]) -> None:
    names([PUBLIC, "93.184.215.15"])
    found = resolve(url, allow_local=False)
    assert (found.is_tls, found.host, found.port, found.path) == (target.is_tls, target.host, target.port, target.path)
    assert ipaddress.ip_address(found.address) == ipaddress.ip_address(target.address)


@pytest.mark.parametrize("url", ["https://hooks.example/", "https://hooks.example:443/"])
def test_https_leads_outside_where_plain_http_is_allowed_too(url: str, names: Callable[..., list[str]]) -> None:
    names([PUBLIC])
    assert resolve(url, allow_local=True) == Target(True, "hooks.example", 443, PUBLIC, "/")
    names(["127.0.0.1"])
    with pytest.raises(Refused, match="public address"):
        resolve(url, allow_local=True)


def test_the_usual_port_of_plain_http_is_80(names: Callable[..., list[str]]) -> None:
    assert resolve("http://127.0.0.1", allow_local=True) == Target(False, "127.0.0.1", 80, "127.0.0.1", "/")


@pytest.mark.parametrize("url", ["ftp://127.0.0.1/", "ftp://hooks.example/", "https://hooks.example:444/"])
def test_other_schemes_and_ports_are_refused_where_plain_http_is_allowed_too(
    url: str, names: Callable[..., list[str]]
) -> None:
    names([PUBLIC])
    with pytest.raises(Refused):
        resolve(url, allow_local=True)


def test_a_refusal_names_its_parameter() -> None:
    with pytest.raises(Refused) as caught:
        resolve("ftp://hooks.example/", allow_local=False)
    assert (caught.value.param, caught.value.code) == ("url", "invalid_webhook_url")


@pytest.mark.parametrize("url", ["https://@hooks.example/", "https://:b@hooks.example/", "https://a\\b.example/"])
def test_a_name_or_a_password_alone_is_refused(url: str, names: Callable[..., list[str]]) -> None:
    asked = names([PUBLIC])
    with pytest.raises(Refused):
        resolve(url, allow_local=False)
    assert asked == []


def test_a_hanging_lookup_keeps_no_process_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    daemons: list[bool] = []

    def look_up(host: str, port: int, **kw: object) -> list[object]:
        daemons.append(current_thread().daemon)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (PUBLIC, port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    resolve("https://hooks.example/", allow_local=False)
    assert daemons == [True]
