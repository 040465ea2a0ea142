"""List the special-purpose address ranges of IANA's registries, which webhooks must not reach.

Source: "IANA IPv4 Special-Purpose Address Registry" and "IANA IPv6 Special-Purpose Address Registry", started by RFC
6890, with multicast (RFC 5771, RFC 4291) and ranges that were withdrawn but may still be routed (site-local, 6bone).
Python's `is_global` knows most of them, depending on its version; a test compares both. Ranges that the registries call
globally reachable, such as anycast relays and AS112, cannot be a customer's receiver either. Of IPv6 only 2000::/3 is
allocated as global unicast (RFC 4291, section 2.4); everything else is refused.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network

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
