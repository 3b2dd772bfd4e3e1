"""Which workers can't do what they are there for, and how that is said."""

import pytest

from contracts.ids import WorkerId
from contracts.layout import KVLayout
from contracts.node import NodeInfo, TransferCapabilities, WorkerRole
from gateway.dispatch.compatibility import incompatible_workers
from tests.nodes import node_info, ways

TO_AUTO = ": leave --transfer at auto for both"


def layout(dtype: str) -> KVLayout:
    return KVLayout.uniform(model="m", num_layers=1, num_kv_heads=1, head_dim=2, block_size=16, dtype=dtype)


WIDE, NARROW = layout("bfloat16"), layout("float8_e4m3fn")


def worker(name: str, by: str = "tcp", memory: str = "host", **changes) -> NodeInfo:
    """Its role is in the first letter of its name."""
    role = {"p": WorkerRole.PREFILL, "d": WorkerRole.DECODE, "m": WorkerRole.MIXED}[name[0]]
    return node_info(worker_id=WorkerId(name), role=role, **({"ways": ways("l", by=by, memory=memory)} | changes))


def of(layout: KVLayout, takes: dict[str, list[str]], sends: str) -> dict:
    said = TransferCapabilities(memory="cuda", sends=sends.split(), takes=takes)
    return {"layout": layout, "layout_id": layout.layout_id, "ways": said}


@pytest.mark.parametrize(
    ("source", "sink", "difference"),
    [
        (worker("p", "tcp"), worker("d", "shm@a"), "transfer is shm here, tcp there" + TO_AUTO),
        (worker("p", "ucx"), worker("d", "shm@a tcp"), "transfer is shm/tcp here, ucx there" + TO_AUTO),
        (worker("p", "shm@a"), worker("d", "shm@b"), "transfer is shm@b here, shm@a there" + TO_AUTO),
        (worker("p", ""), worker("d", "shm@a tcp"), "transfer is shm/tcp here, unavailable there" + TO_AUTO),
        (
            worker("p", memory="cuda"),
            worker("d"),
            "memory is host here, cuda there: run prefill and decode on the same kind of device",
        ),
        (
            worker("p", **of(WIDE, {WIDE.layout_id: ["nvlink@a"]}, "nvlink@a")),
            worker("d", **of(NARROW, {NARROW.layout_id: ["nvlink@a", "ucx"], WIDE.layout_id: ["ucx"]}, "ucx")),
            "transfer is ucx here, nvlink there" + TO_AUTO,
        ),
        (
            worker("p", **of(NARROW, {NARROW.layout_id: ["tcp"]}, "tcp")),
            worker("d", **of(WIDE, {WIDE.layout_id: ["tcp"]}, "tcp")),
            "groups[0].dtype is bfloat16 here, float8_e4m3fn there: start all with the same model and --dtype, and "
            "native kernels for all or none (tandem doctor)",
        ),
        (worker("p", layout_id="l"), worker("d", layout_id="x", ways=ways("x")), "layout_id is x here, l there"),
    ],
)
def test_what_keeps_a_pair_apart_is_said_at_decode(source: NodeInfo, sink: NodeInfo, difference: str) -> None:
    assert incompatible_workers([source, sink], "m") == {"d": f"it can't take the KV of p: {difference}"}


def test_who_has_one_partner_is_no_misfit_and_an_idle_prefill_is_named() -> None:
    infos = [worker("p0", "tcp"), worker("p1", "shm@a ucx"), worker("d0", "shm@a")]
    words = f"d0 can't take its KV: transfer is tcp here, shm there{TO_AUTO}"
    assert incompatible_workers(infos, "m") == {"p0": words}
    assert incompatible_workers(infos[1:], "m") == {}


def test_who_is_alone_or_both_is_no_misfit() -> None:
    assert (
        incompatible_workers([worker("p")], "m")
        == incompatible_workers([worker("d")], "m")
        == incompatible_workers([worker("m0", "")], "m")
        == {}
    )
    assert list(incompatible_workers([worker("m0", "tcp"), worker("p", "shm@a"), worker("d", "shm@b")], "m")) == [
        "d",
        "p",
    ]


def test_another_model_is_named_and_is_nobodys_partner() -> None:
    words = incompatible_workers([worker("p", model="x"), worker("d")], "m")
    assert words == {"p": "it serves x, this gateway speaks for m: name the same model for both"}
