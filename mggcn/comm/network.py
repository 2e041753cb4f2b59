"""Which address and interface of this machine face the other ranks. Needs no torch."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
import sys
from fcntl import ioctl
from typing import Final

SIOCGIFADDR: Final = 0x8915
"""Linux's request for the IPv4 address of an interface."""
ANY_PORT: Final = 9


def loopback_interface() -> str:
    """The name of the loopback interface, which keeps messages on this machine."""
    return "lo" if sys.platform == "linux" else "lo0"


def address_towards(host: str) -> str:
    """Return the IPv4 address that packets of this machine to a host would have; "" for loopback's, or without a way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, ANY_PORT))  # chooses a route; nothing is sent
            address = str(probe.getsockname()[0])
        except OSError:
            return ""
    return "" if ipaddress.ip_address(address).is_loopback else address


def interface_of(address: str) -> str:
    """Return the name of the interface with an IPv4 address of this machine, "" if none has it as its first."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex() if sys.platform == "linux" else ():
            with contextlib.suppress(OSError):  # an interface without an address
                found = ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return ""
