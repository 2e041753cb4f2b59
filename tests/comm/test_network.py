"""Which address and interface face another machine."""

from __future__ import annotations

import socket

import pytest

from mggcn.comm import distributed
from mggcn.comm.control_store import Peers
from mggcn.comm.network import address_towards, interface_of, loopback_interface


def test_loopback_is_no_way_to_another_machine() -> None:
    """Fails if gloo is told loopback because a machine's own name leads there, or a name without a way is an error."""
    assert address_towards("127.0.1.1") == address_towards("localhost") == ""
    assert address_towards("no such name") == ""
    assert interface_of("127.0.0.1") == loopback_interface()
    assert interface_of("192.0.2.1") == interface_of("") == ""


def test_the_interface_is_that_of_the_route(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a machine whose name is an address of loopback does not take the way to another rank."""
    ways = {"10.0.0.1": "10.0.0.1", "10.0.0.2": "10.0.0.1"}
    monkeypatch.setattr(distributed, "address_towards", lambda host: ways.get(host, ""))
    monkeypatch.setattr(distributed, "interface_of", {"10.0.0.1": "ib0"}.__getitem__)
    assert distributed._interface(Peers(addresses=["10.0.0.1", "10.0.0.2"], store="10.0.0.1")) == "ib0"
    assert distributed._interface(Peers(addresses=["", "10.0.0.2"], store="node-0")) == "ib0"
    assert distributed._interface(Peers(addresses=["", ""], store=socket.gethostname())) == ""
