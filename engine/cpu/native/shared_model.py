"""A model whose packed matrices are mapped, with other workers of the machine."""

from pathlib import Path

from checkpoint import Checkpoint, Progress
from checkpoint.checkpoint import WeightFormat
from engine.cpu.kv_cache import KVCache
from engine.cpu.native.strips import load_shared
from engine.cpu.native.weights import NativeModel, load_native_model, strips_nbytes
from engine.model_loader.checkpoint_weights import StoredWeightSource
from engine.settings import EngineSettings
from kernels.cpu.build import library_name
from kernels.cpu.native import NativeKernels, PrivateMemory, StripMemory

KV_DTYPE = "bfloat16"


def load_shared_model(
    settings: EngineSettings,
    checkpoint: Checkpoint,
    source: StoredWeightSource,
    kernels: NativeKernels,
    cache: KVCache,
    max_model_len: int,
    progress: Progress,
) -> NativeModel:
    """Return a model over its cache.

    Its matrices are shared with other workers where its file is mapped and not read.
    """

    def load(memory: StripMemory) -> NativeModel:
        return load_native_model(checkpoint.config, source, kernels, cache, max_model_len, progress, memory)

    if checkpoint.format is not WeightFormat.GGUF:
        return load(PrivateMemory())
    digest = Path(library_name()).stem.rpartition("-")[2]
    file = settings.cache_dir / "native" / "strips" / f"{cache.layout.model}-{digest}.strips"
    return load_shared(file, strips_nbytes(checkpoint.config, source, kernels), load)
