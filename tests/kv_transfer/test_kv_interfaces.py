"""Which interfaces count as replaced."""

import socket

import pytest

from kv_transfer.links.interface_watch import InterfaceWatch


@pytest.mark.parametrize(
    ("now", "replaced"),
    [
        ([(1, "lo"), (2, "eth0"), (7, "veth1")], []),
        ([(1, "lo"), (2, "eth0"), (9, "veth2")], []),
        ([(1, "lo"), (2, "eth0")], []),
        ([(1, "lo"), (5, "eth0"), (9, "veth2")], ["eth0"]),
    ],
    ids=["same", "another container's", "one is gone", "attached again"],
)
def test_an_interface_is_replaced_that_came_back_under_its_name(monkeypatch, now, replaced):
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (7, "veth1")])
    watch = InterfaceWatch()
    monkeypatch.setattr(socket, "if_nameindex", lambda: now)
    assert watch.replaced() == replaced
