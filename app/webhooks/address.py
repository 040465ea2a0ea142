"""Decide which addresses webhooks may call: public ones over TLS, because others may reach the provider's network.

A name is resolved once, all of its addresses are checked, and the connection goes to a checked address. So a name that
resolves differently the second time gains nothing.
"""

from __future__ import annotations

import re
import socket
from concurrent.futures import Future
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from threading import Thread
from typing import Any, cast
from urllib.parse import urlsplit

from app.errors import InvalidRequest

# List the special-purpose address ranges of IANA's registries, which webhooks must not reach.
#
# Source: "IANA IPv4 Special-Purpose Address Registry" and "IANA IPv6 Special-Purpose Address Registry", started by
# RFC 6890, with multicast (RFC 5771, RFC 4291) and ranges that were withdrawn but may still be routed (site-local,
# 6bone). Python's `is_global` knows most of them, depending on its version; a test compares both. Ranges that the
# registries call globally reachable, such as anycast relays and AS112, cannot be a customer's receiver either. Of
# IPv6 only 2000::/3 is allocated as global unicast (RFC 4291, section 2.4); everything else is refused.

SPECIAL: tuple[IPv4Network | IPv6Network, ...] = tuple(
    ip_network(network)
    for network in (
        "0.0.0.0/8",  # "this network", RFC 791
        "10.0.0.0/8",  # private use, RFC 1918
        "100.64.0.0/10",  # shared address space, RFC 6598
        "127.0.0.0/8",  # loopback, RFC 1122
        "169.254.0.0/16",  # link-local, RFC 3927
        "172.16.0.0/12",  # private use, RFC 1918
        "192.0.0.0/24",  # IETF protocol assignments, RFC 6890: DS-Lite, PCP and TURN anycast, NAT64 discovery
        "192.0.2.0/24",  # documentation, RFC 5737
        "192.31.196.0/24",  # AS112, RFC 7535
        "192.52.193.0/24",  # AMT, RFC 7450
        "192.88.99.0/24",  # 6to4 relay anycast, deprecated, RFC 7526
        "192.168.0.0/16",  # private use, RFC 1918
        "192.175.48.0/24",  # AS112, RFC 7534
        "198.18.0.0/15",  # benchmarking, RFC 2544
        "198.51.100.0/24",  # documentation, RFC 5737
        "203.0.113.0/24",  # documentation, RFC 5737
        "224.0.0.0/4",  # multicast, RFC 5771
        "240.0.0.0/4",  # reserved, RFC 1112, and limited broadcast, RFC 8190
        "::/96",  # unspecified, loopback and IPv4-compatible, RFC 4291
        "::ffff:0:0/96",  # IPv4-mapped, RFC 4291
        "::ffff:0:0:0/96",  # IPv4-translated, RFC 2765
        "64:ff9b::/96",  # NAT64, RFC 6052
        "64:ff9b:1::/48",  # NAT64 for local use, RFC 8215
        "100::/64",  # discard only, RFC 6666
        "100:0:0:1::/64",  # dummy prefix, RFC 9780
        "2001::/23",  # IETF protocol assignments, RFC 2928: Teredo, PCP, TURN, benchmarking, AMT, AS112, ORCHID, DRIP
        "2001:db8::/32",  # documentation, RFC 3849
        "2002::/16",  # 6to4, RFC 3056
        "2620:4f:8000::/48",  # AS112, RFC 7534
        "3ffe::/16",  # 6bone, withdrawn, RFC 3701
        "3fff::/20",  # documentation, RFC 9637
        "5f00::/16",  # segment routing identifiers, RFC 9602
        "fc00::/7",  # unique local, RFC 4193
        "fe80::/10",  # link-local, RFC 4291
        "fec0::/10",  # site-local, deprecated, RFC 3879
        "ff00::/8",  # multicast, RFC 4291
    )
)


_GLOBAL_UNICAST = IPv6Network("2000::/3")


def is_special(address: IPv4Address | IPv6Address) -> bool:
    """Return True if an address is in one of the ranges, or is an IPv6 address outside of global unicast."""
    if isinstance(address, IPv6Address) and address not in _GLOBAL_UNICAST:
        return True
    return any(address in network for network in SPECIAL)


LOOKUP_S = 4.0
_MAX_URL = 2048
_HOST = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*\.?")
_NUMERIC = re.compile(r"(0x[0-9a-f]*|[0-9]+)\.?")  # a last label that resolvers may parse as a number


class Refused(InvalidRequest):
    """Raised for an address that may not be called; the message does not reveal what was found there."""

    code = "invalid_webhook_url"

    def __init__(self, message: str) -> None:
        super().__init__(message, param="url")


@dataclass(frozen=True, slots=True)
class Target:
    """A checked connection target: the address, and the host name that its certificate must have."""

    is_tls: bool
    host: str
    port: int
    address: str
    path: str


def resolve(url: str, *, allow_local: bool) -> Target:
    """Resolve a URL once and check its addresses; raise `Refused` if it may not be called.

    `allow_local` permits plain HTTP to this machine, for development.
    """
    if len(url) > _MAX_URL or not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        raise Refused(f"The URL must have at most {_MAX_URL} plain ASCII characters; write names in their ASCII form.")
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").lower(), parts.port
    except ValueError:
        raise Refused("This is not a URL.") from None
    if parts.username is not None or parts.password is not None:
        raise Refused("The URL must not hold a user name or a password.")
    is_local = allow_local and parts.scheme == "http"
    if parts.scheme != "https" and not is_local:
        raise Refused("The URL must begin with https://.")
    # Other ports may reach services that are not web servers.
    if not is_local and port not in (None, 443):
        raise Refused("The port must be 443.")
    port = port or (80 if is_local else 443)
    found = _addresses(host, port)
    if not all(address.is_loopback if is_local else _is_public(address) for address in found):
        raise Refused("The URL must lead to a public address, with every address that its name has.")
    query = f"?{parts.query}" if parts.query else ""
    return Target(not is_local, host, port, str(found[0]), (parts.path or "/") + query)


def _addresses(host: str, port: int) -> list[IPv4Address | IPv6Address]:
    """Return a host's addresses; numeric hosts other than dotted decimals are refused, as parsers disagree."""
    try:
        return [ip_address(host)]
    except ValueError:
        pass
    if not _HOST.fullmatch(host) or _NUMERIC.fullmatch(host.rstrip(".").rpartition(".")[2]):
        raise Refused("The URL has no host name that could be looked up.")
    answers = _look_up_host(host, port)
    return [ip_address(cast("str", answer[4][0]).partition("%")[0]) for answer in answers]


def _look_up_host(host: str, port: int) -> list[Any]:
    """Look up a name within a time limit; a look-up cannot be cancelled, so one that hangs is abandoned."""
    answer: Future[list[Any]] = Future()

    def look_up() -> None:
        try:
            answer.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            answer.set_exception(error)

    # A daemon thread: a look-up that hangs does not keep the process from ending.
    Thread(target=look_up, daemon=True).start()
    try:
        return answer.result(LOOKUP_S)
    except TimeoutError:
        raise Refused(f"The name service did not answer for the host of the URL within {LOOKUP_S:g} s.") from None
    except (OSError, UnicodeError):
        raise Refused("The host of the URL is not known to the name service.") from None


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    return address.is_global and not address.is_multicast and not is_special(address)
