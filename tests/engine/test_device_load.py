"""A start on a GPU, on the reference kernels: what it tells of itself, and that weights go to their device."""

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch

from checkpoint import open_checkpoint
from contracts.errors import ConfigError
from engine.cuda.kv.kv_cache import DeviceCache
from engine.cuda.loader import DeviceBackendBuilder
from engine.cuda.model.number_formats import DEVICE_FORMATS
from engine.cuda.model.weight_loader import load_device_weights
from engine.cuda.model.weights import DeviceLayerWeights, shortened
from engine.cuda.runtime.pinned_copy import PinnedCopier
from engine.loader import load_device_engine, load_engine
from engine.model_loader.checkpoint_weights import open_weights
from tests.engine.device_engines import FUSIBLE, tensors_of
from tests.engine.driving import settings
from tests.engine.launches import noted_launches
from tests.engine.tiny_models import DEVICE_FAMILIES, save_mxfp4, save_tiny

pytestmark = pytest.mark.slow

PLAIN = [dtype for dtype in DEVICE_FORMATS if dtype != "int4"]
CPU, META = torch.device("cpu"), torch.device("meta")
STAGES = ("compile", "calibrate", "capture", "warm up")


def test_every_stage_is_told_from_nothing_to_all(tmp_path):
    save_tiny(tmp_path, "llama", num_hidden_layers=5)
    seen: list[tuple[str, int, int]] = []
    chosen = settings(model=str(tmp_path))
    load_device_engine(chosen, open_checkpoint(str(tmp_path)), lambda *step: seen.append(step), device=CPU)
    layers = [("load", done, 5) for done in range(6)]
    assert seen == [*layers, *((stage, done, 1) for stage in STAGES for done in (0, 1))]


def test_a_layer_is_told_of_when_it_is_there(tmp_path, monkeypatch):
    """And all of them once the ends are there, too."""
    save_tiny(tmp_path, "llama")
    checkpoint, read = open_checkpoint(str(tmp_path)), []
    source = open_weights(checkpoint, PinnedCopier(CPU).carry)
    whole = source.tensor
    monkeypatch.setattr(source, "tensor", lambda name, *cut: read.append(name) or whole(name, *cut))
    seen = []

    def progress(stage: str, done: int, total: int) -> None:
        layers = {int(name.split(".")[2]) for name in read if ".layers." in name}
        seen.append((stage, done, total, len(layers), "model.norm.weight" in read))

    load_device_weights(checkpoint.config, source, DEVICE_FORMATS["float32"], 64, CPU, progress)
    assert seen == [("load", done, 3, done, done == 3) for done in range(4)]


def test_each_kernel_that_is_compiled_is_told_of(tmp_path, monkeypatch):
    """What comes behind needs a GPU."""

    @contextmanager
    def compiled_ahead(progress, in_processes):
        yield
        progress(1, 2)
        progress(2, 2)

    def stop(*_: Any) -> None:
        raise ConfigError("compiled")

    save_tiny(tmp_path, "llama", **FUSIBLE)
    seen: list[tuple[str, int, int]] = []
    monkeypatch.setattr("kernels.compiling.compiled_ahead", compiled_ahead)
    monkeypatch.setattr(DeviceBackendBuilder, "_captures", True)
    monkeypatch.setattr(DeviceBackendBuilder, "_calibrate", stop)
    chosen = settings(model=str(tmp_path), dtype="bfloat16")
    with noted_launches(), pytest.raises(ConfigError, match="compiled"):
        load_device_engine(chosen, open_checkpoint(str(tmp_path)), lambda *step: seen.append(step), device=CPU)
    behind = [step for step in seen if step[0] != "load"]
    assert behind == [("compile", 0, 1), ("kernels", 1, 2), ("kernels", 2, 2), ("compile", 1, 1), ("calibrate", 0, 1)]


def test_what_was_written_while_kernels_were_loaded_is_gone_when_scales_are_looked_for(tmp_path, monkeypatch):
    """A prompt's last block has zeros behind it: what is masked weighs nothing, and 0 times a NaN is a NaN."""
    written, clear = [], DeviceCache.clear

    def rest(cache):
        layers = [cache.layer(index) for index in range(cache.layout.only_group.num_layers)]
        return [float(pages.float().abs().sum()) for layer in layers for pages in (layer.keys, layer.values)]

    def clear_noted(cache):
        written.extend(rest(cache))
        clear(cache)

    def stop(_, cache):
        assert not any(rest(cache))
        raise ConfigError("loaded")

    save_tiny(tmp_path, "llama")
    monkeypatch.setattr("kernels.compiling.compiled_ahead", lambda *_, **__: nullcontext())
    monkeypatch.setattr("engine.cuda.loader.require_kernels", lambda *_: None)
    monkeypatch.setattr(DeviceCache, "clear", clear_noted)
    monkeypatch.setattr(DeviceBackendBuilder, "_captures", True)
    monkeypatch.setattr(DeviceBackendBuilder, "_calibrate", stop)
    with pytest.raises(ConfigError, match="loaded"):
        load_device_engine(
            settings(model=str(tmp_path), dtype="bfloat16"), open_checkpoint(str(tmp_path)), print, device=CPU
        )
    assert any(written)


@dataclass(frozen=True)
class Layer:
    """A layer of one kind; the scales of all layers differ."""

    kind: str
    scale: float
    weight: torch.Tensor


@pytest.mark.parametrize(
    ("kinds", "kept"),
    [
        ("A", "A"),
        ("AB", "AB"),
        ("AAAAAAAA", "AAA"),  # a first one, one between, a last one
        ("AAAAAAAB", "AAB"),
        ("BAAAAAAB", "BAAB"),
        ("ABABABAB", "ABAB"),
        ("ABACABACABAC", "ABACAC"),
        ("ABCDEF", "ABCDEF"),
    ],
)
def test_a_few_layers_stand_for_all(kinds, kept):
    """Every neighbourhood is among them, and none that is not in the model."""
    layers = [Layer(kind, float(number), torch.full((2,), number)) for number, kind in enumerate(kinds)]
    few = shortened(cast(list[DeviceLayerWeights], layers))
    assert "".join(layer.kind for layer in cast(list[Layer], few)) == kept
    assert few[0] is layers[0] and few[-1] is layers[-1]


@pytest.mark.parametrize("dtype", PLAIN)
@pytest.mark.parametrize("family", [*DEVICE_FAMILIES, "mxfp4"])
def test_all_weights_are_made_on_the_device_that_is_asked_for(family, dtype, tmp_path):
    """ "meta" stands for a GPU: an operation on a tensor there and one on the CPU fails."""
    if family == "mxfp4":
        save_mxfp4(tmp_path, save_tiny(tmp_path, "gpt_oss", hidden_size=128, intermediate_size=128))
    else:
        save_tiny(tmp_path, family)
    checkpoint = open_checkpoint(str(tmp_path))
    weights = load_device_weights(
        checkpoint.config, open_weights(checkpoint), DEVICE_FORMATS[dtype], 64, META, lambda *_: None
    )
    assert {tensor.device for tensor in tensors_of(weights)} == {META}


@pytest.mark.parametrize("is_named", [True, False])
def test_files_are_read_to_the_device_that_is_asked_for(is_named, tmp_path, monkeypatch):
    """Or, where its number is not said, to the one that the caller uses."""
    save_tiny(tmp_path, "llama")
    carried, asked, used = [], [], []

    class NotedFerry:
        def __init__(self, device):
            asked.append(device)

        def carry(self, tensor):
            carried.append(tensor)
            return tensor

    def load(config, source, number_format, max_model_len, device, *_):
        source.tensor("model.norm.weight")
        asked.append(device)
        raise ConfigError("asked")

    monkeypatch.setattr("engine.cuda.loader.PinnedCopier", NotedFerry)
    monkeypatch.setattr("engine.cuda.loader.load_device_weights", load)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    chosen = settings(model=str(tmp_path), dtype="bfloat16", device="cuda:1")
    with noted_launches(), pytest.raises(ConfigError, match="asked"):
        if is_named:
            load_engine(chosen)
        else:
            load_device_engine(chosen, open_checkpoint(str(tmp_path)), lambda *_: None, device=torch.device("cuda"))
    assert len(carried) == 1 and asked == [torch.device("cuda:1" if is_named else "cuda")] * 2
    assert used == ["cuda:1", 1][not is_named :]  # the caller, and the thread that imports kernels
