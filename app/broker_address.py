"""Parse the broker's address once for everything that connects to it: Celery, rate limits, `spard doctor`, the start.

kombu (Celery's transport) and redis-py parse addresses differently. redis-py accepts any query argument, kombu only
those of its own constructor; a path that is not a number is database 0 to redis-py and an error to kombu; kombu has
another scheme for sockets, and by default does not verify the certificate of `rediss://`. So the address is parsed
here, and each library gets the result in its own form. What cannot be given to both is refused with the reason.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

import redis

from app.errors import Unfit

_FORMS = "redis://:password@host:6379/0, rediss:// for TLS, or unix:///path/of/socket"
_ESCAPES = "In a password, write / as %2F, @ as %40, # as %23 and ? as %3F."
_SCHEMES = ("redis", "rediss", "unix")
_DEFAULT_PORT = 6379
_MIN_SOCKET_TIMEOUT_S = 2.0  # Celery's blocking read alone takes one second
_VERIFICATION = {"required": ssl.CERT_REQUIRED, "optional": ssl.CERT_OPTIONAL, "none": ssl.CERT_NONE}
_YES_OR_NO = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
Value = ssl.VerifyMode | bool | str | int | float | None  # of redis-py's and Celery's arguments

_REASONS = {  # query arguments of redis-py that are refused -> why
    "protocol": "Celery cannot be told which protocol to speak; the server and the client agree on one",
    "username": "the user name is written before the host: redis://user:password@host",
    "password": "the password is written before the host: redis://:password@host",
    "virtual_host": "the number of the database is the path: /0",
}


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """The broker's address and connection options; `socket_path` replaces host and port."""

    host: str = "localhost"
    port: int = _DEFAULT_PORT
    socket_path: str | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    database: int = 0
    tls: Mapping[str, Value] | None = None  # redis-py's `ssl_...` arguments; None: no TLS
    timeouts: Mapping[str, float] = field(default_factory=dict)  # redis-py's names for them, in seconds

    @property
    def verifies(self) -> bool:
        """True if the server's certificate is verified, or if TLS is not used at all."""
        return self.tls is None or self.tls["ssl_cert_reqs"] != ssl.CERT_NONE

    def celery_settings(self, transport_options: Mapping[str, object]) -> dict[str, object]:
        """Return Celery's settings for this broker; timeouts of the address override `transport_options`."""
        settings: dict[str, object] = {
            "broker_url": self._kombu_url(),
            "broker_transport_options": {**transport_options, **self.timeouts},
        }
        if self.tls is not None:  # otherwise kombu accepts any certificate
            settings["broker_use_ssl"] = dict(self.tls)
        return settings

    def open_pool(self, timeout_s: float) -> redis.ConnectionPool:
        """Return a redis-py pool whose connections wait at most `timeout_s`, or less if the address says so."""
        wait_s = {
            name: min(timeout_s, self.timeouts.get(name, timeout_s))
            for name in ("socket_timeout", "socket_connect_timeout")
        }
        options: dict[str, Any] = {"username": self.username, "password": self.password, "db": self.database}
        if "health_check_interval" in self.timeouts:
            options["health_check_interval"] = self.timeouts["health_check_interval"]
        if self.socket_path is not None:
            # redis-py's connection for sockets has no connect timeout.
            options |= {"path": self.socket_path, "socket_timeout": wait_s["socket_timeout"]}
            return redis.ConnectionPool(connection_class=redis.UnixDomainSocketConnection, **options)
        options |= {"host": self.host, "port": self.port, **wait_s}
        if self.tls is not None:
            options.update(self.tls)
            return redis.ConnectionPool(connection_class=redis.SSLConnection, **options)
        return redis.ConnectionPool(**options)

    def _kombu_url(self) -> str:
        user = quote(self.username or "", safe="")
        password = f":{quote(self.password, safe='')}" if self.password else ""
        login = f"{user}{password}@" if user or password else ""
        if self.socket_path is not None:
            return f"redis+socket://{login}{quote(self.socket_path)}?virtual_host={self.database}"
        host = f"[{self.host}]" if ":" in self.host else quote(self.host)
        scheme = "redis" if self.tls is None else "rediss"
        return f"{scheme}://{login}{host}:{self.port}/{self.database}"


def read_broker_address(url: str) -> BrokerAddress:
    """Parse the broker's address; raise `Unfit` with the reason, never the password, if it is not usable."""
    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError:
        raise _unreadable() from None
    is_cut = "#" in url or "@" in parts.path + parts.query  # an unescaped password: no message may show the rest
    if parts.scheme not in _SCHEMES or is_cut:
        raise _unreadable()
    arguments = _read_arguments(parts)
    timeouts = {name: _read_timeout(name, arguments.pop(name)) for name in _TIMEOUTS if name in arguments}
    database = _read_database(parts, arguments.pop("db", None))
    tls = _read_tls(parts, arguments)
    return BrokerAddress(
        host=unquote(parts.hostname or "") or "localhost",
        port=port or _DEFAULT_PORT,
        socket_path=_read_socket_path(parts) if parts.scheme == "unix" else None,
        username=unquote(parts.username or "") or None,
        password=unquote(parts.password or "") or None,
        database=database,
        tls=tls,
        timeouts=timeouts,
    )


def _read_arguments(parts: SplitResult) -> dict[str, str]:
    """Return the query's arguments; raise `Unfit` for an unknown argument and for an argument with two values."""
    found: dict[str, str] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in _TIMEOUTS | _TLS_ARGUMENTS.keys() | {"db"}:
            reason = _REASONS.get(name, f"known are db, {', '.join(sorted(_TIMEOUTS | _TLS_ARGUMENTS.keys()))}")
            raise _refusal(f"has the argument {name!r}, which cannot be used: {reason}")
        if found.setdefault(name, value) != value:
            raise _refusal(f"says {name} twice: leave one")
    return found


def _read_database(parts: SplitResult, argument: str | None) -> int:
    """Return the database number from the path or from `?db=`; the path of a socket has none."""
    path = "" if parts.scheme == "unix" else unquote(parts.path).strip("/")
    # `isdigit` alone accepts digits of other scripts.
    for text in (path, argument or ""):
        if text and not (text.isascii() and text.isdigit()):
            raise _refusal("names its database; a Redis numbers them: end it with a number such as /0")
    if path and argument and int(path) != int(argument):
        raise _refusal("has one database in its path and another one in ?db=: leave one")
    return int(path or argument or 0)


def _read_socket_path(parts: SplitResult) -> str:
    if parts.hostname or not parts.path.strip("/"):
        raise _refusal("names no socket: unix:// is followed by an absolute path, unix:///run/valkey.sock")
    return unquote(parts.path)


def _read_timeout(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = float("nan")
    least = _TIMEOUTS[name]
    if not least <= seconds < float("inf"):
        raise _refusal(f"has {name}, which is a number of seconds, at least {least:g}")
    return seconds


def _read_tls(parts: SplitResult, arguments: Mapping[str, str]) -> Mapping[str, Value] | None:
    """Return redis-py's TLS arguments. Certificate and host name are verified unless the address says otherwise."""
    if parts.scheme != "rediss":
        if arguments:
            raise _refusal(f"has {', '.join(sorted(arguments))}, which are for TLS: begin it with rediss://")
        return None
    read = {name: _TLS_ARGUMENTS[name](name, value) for name, value in arguments.items()}
    return {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_check_hostname": True} | read


def _read_verification(name: str, text: str) -> ssl.VerifyMode:
    """Parse `ssl_cert_reqs` in redis-py's spelling (`required`) or Celery's (`CERT_REQUIRED`)."""
    found = _VERIFICATION.get(text.lower().removeprefix("cert_"))
    if found is None:
        raise _refusal(f"has {name}, which is one of {', '.join(_VERIFICATION)}")
    return found


def _read_switch(name: str, text: str) -> bool:
    found = _YES_OR_NO.get(text.lower())
    if found is None:
        raise _refusal(f"has {name}, which is true or false")
    return found


def _read_file(name: str, text: str) -> str:
    if not Path(text).is_file():
        raise _refusal(f"has {name}, but there is no file {text}")
    return text


def _unreadable() -> Unfit:
    return Unfit(f"SPARD_BROKER_URL is no address of Redis: {_FORMS}. {_ESCAPES}")


def _refusal(fault: str) -> Unfit:
    return Unfit(f"SPARD_BROKER_URL {fault}.")


_TIMEOUTS = {"health_check_interval": 0.0, "socket_connect_timeout": 0.1, "socket_timeout": _MIN_SOCKET_TIMEOUT_S}
_TLS_ARGUMENTS: Mapping[str, Callable[[str, str], Value]] = {
    "ssl_ca_certs": _read_file,
    "ssl_certfile": _read_file,
    "ssl_cert_reqs": _read_verification,
    "ssl_check_hostname": _read_switch,
    "ssl_keyfile": _read_file,
}
