"""What the layers of a batch launch is what each of them would launch by itself, chosen once."""

from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

from kernels import catalog
from kernels.caps import Caps, detect
from kernels.cases import KernelCall, prefill_case
from kernels.compiling import compiled_ahead
from kernels.registry import Registry
from kernels.specs import AttnSpec
from kernels.triton.attn_prefill import attn_prefill
from kernels.triton.relaunch import BatchLaunches

HOPPER = Caps("cuda", cc=90, name="H200", sm_count=132, torch=(2, 11), triton=(3, 6))
SPEC = AttnSpec(32, 8, 128)
BATCHES = {
    "few rows": [(20, 1000)],
    "few rows behind many keys": [(20, 9000)],
    "widened in parts": [(130, 700), (1, 300)],
    "widened": [(600, 900), (200, 200)],
}


class Compiled:
    """A kernel as Triton returns it, which notes what it is launched with."""

    def __init__(self, name: str, noted: list[tuple[Any, ...]]) -> None:
        self._name, self._noted = name, noted

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *args: self._noted.append((self._name, grid, *args))


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[Any, ...]]]:
    """Return what was launched through Triton, in `bound`, and what by a kernel that it gave, in `again`."""
    found: dict[str, list[tuple[Any, ...]]] = {"bound": [], "again": []}

    def run(kernel: JITFunction[Any], *args: Any, grid: tuple[int, int, int], warmup: bool, **options: Any) -> Compiled:
        rest = [options[name] for name in kernel.arg_names[len(args) :]]
        found["bound"].append((kernel.__name__, grid, *args, *rest))
        return Compiled(kernel.__name__, found["again"])

    monkeypatch.setattr(JITFunction, "run", run)
    return found


def _layers(chunks: list[tuple[int, int]], count: int, device: str) -> list[KernelCall]:
    """Return the calls of the layers of a pass, which have their own keys, values and scales."""
    case = prefill_case(SPEC, chunks, workspace_mb=64)
    first = case.make(device)
    layers = [first]
    for index in range(1, count):
        q, _, _, *rest = first.args
        more = case.make(device)
        scales = {"k_scale": 0.5 + index, "v_scale": 1.0 + index}
        args = (q, more.args[1], more.args[2], *rest)
        layers.append(KernelCall(args, first.kwargs | scales, first.outputs, batch=first.batch))
    return layers


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.data_ptr() == other.data_ptr() and one.shape == other.shape
    if hasattr(one, "base"):  # a box of rows that the copy engine loads
        return _same(one.base, other.base) and one.shape == other.shape and one.block_shape == other.block_shape
    return one == other


@pytest.mark.parametrize("chunks", BATCHES.values(), ids=BATCHES)
def test_later_layers_launch_what_they_would_have_bound(chunks, noted):
    plans = catalog.registry(HOPPER).plans.table("attn_prefill/triton", SPEC.key(), 90, 132)
    layers = _layers(chunks, 3, "cpu")
    for layer in layers:
        attn_prefill(SPEC, *layer.args, **layer.kwargs, plans=plans)
    expected = noted["bound"][:]
    noted["bound"].clear()
    prepared = BatchLaunches()
    for layer in layers:
        attn_prefill(SPEC, *layer.args, **layer.kwargs, plans=plans, prepared=prepared)
    found = noted["bound"] + noted["again"]
    assert len(noted["bound"]) * 3 == len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert len(one) == len(other) and all(map(_same, one, other))


def test_other_rows_or_keys_elsewhere_are_bound_anew(noted):
    prepared, plans = BatchLaunches(), catalog.registry(HOPPER).plans.table("attn_prefill/triton", SPEC.key(), 90, 132)
    (layer,) = _layers([(20, 1000)], 1, "cpu")
    q, keys, values, *rest = layer.args
    odd = torch.empty(values.numel() + 8, dtype=torch.uint8)[8:].view(values.dtype).view(values.shape)
    assert odd.data_ptr() % 16
    calls = [layer.args, (q, keys, odd, *rest), (q.clone(), keys, values, *rest)]
    for args in calls:
        attn_prefill(SPEC, *args, **layer.kwargs, plans=plans, prepared=prepared)
    attn_prefill(SPEC, *calls[-1], **layer.kwargs | {"max_kv": 1001}, plans=plans, prepared=prepared)
    assert len(noted["bound"]) % 4 == 0 and not noted["again"]


def test_nothing_is_launched_where_kernels_are_only_compiled(noted):
    plans = catalog.registry(HOPPER).plans.table("attn_prefill/triton", SPEC.key(), 90, 132)
    prepared, layers = BatchLaunches(), _layers([(20, 1000)], 2, "cpu")
    with compiled_ahead():
        for layer in layers:
            attn_prefill(SPEC, *layer.args, **layer.kwargs, plans=plans, prepared=prepared)
    assert noted["bound"] and not noted["again"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("chunks", BATCHES.values(), ids=BATCHES)
def test_later_layers_give_the_bits_of_layers_by_themselves(chunks):
    registry: Registry = catalog.registry(detect(), override={"attn_prefill": "triton"})
    op, prepared = registry.get("attn_prefill", SPEC), registry.preparer("attn_prefill", SPEC)
    layers = _layers(chunks, 3, "cuda")
    expected = []
    for layer in layers:
        layer.run(op)
        expected.append(layer.outputs["out"].clone())
    batch = prepared(*layers[0].batch)
    for layer, wanted in zip(layers, expected, strict=True):
        layer.poison()
        op(*layer.args, **layer.kwargs, prepared=batch)
        assert torch.equal(layer.outputs["out"], wanted)
