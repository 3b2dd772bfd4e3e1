"""The GPU's adapter on the reference kernels, so that its whole way is proven where there is no GPU."""

from pathlib import Path
from typing import Any

import torch
from driving import settings

from checkpoint import open_checkpoint
from engine.cuda.chunks import Chunks
from engine.cuda.load import load_device_engine
from engine.cuda.runner import DeviceRunner
from engine.engine import Engine

FUSIBLE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
"""Changes to a tiny model that make its FP8 decode step one of whole tiles."""


def device_engine(folder: Path, dtype: str = "float32", **changes: Any) -> Engine:
    chosen = settings(model=str(folder), dtype=dtype, **changes)
    torch.set_num_threads(1)
    return load_device_engine(chosen, open_checkpoint(str(folder)), lambda *_: None, device=torch.device("cpu"))


def chunks_of(engine: Engine) -> Chunks:
    assert isinstance(engine.runner, DeviceRunner)
    return engine.runner.chunks
