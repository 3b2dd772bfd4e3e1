"""The loader of the native path: cache, weights, runner."""

import logging
from pathlib import Path

from checkpoint import Checkpoint, Progress
from checkpoint.checkpoint import WeightFormat
from engine.backend import Backend, Drafting
from engine.cache.sizing import blocks_in, cache_nbytes, kv_layout, log_capacity, model_len
from engine.cpu.eagle3.drafter import Eagle3Drafter
from engine.cpu.eagle3.loader import open_head
from engine.cpu.joint_cache import JointCache
from engine.cpu.kv_cache import KVCache
from engine.cpu.native.choice import NATIVE
from engine.cpu.native.eagle3_head import EmbeddingRows, load_native_head
from engine.cpu.native.runner import NativeRunner
from engine.cpu.native.strips import load_shared
from engine.cpu.native.weights import NativeModel, load_native_model, strips_nbytes
from engine.model_loader.checkpoint_weights import StoredWeightSource
from engine.sampling.host_sampler import Sampler
from engine.settings import EngineSettings
from kernels.cpu.build import library_name
from kernels.cpu.native import NUMERICS, NativeKernels, PrivateMemory, StripMemory
from process.memory_limit import available_nbytes

KV_DTYPE = "bfloat16"
_log = logging.getLogger(__name__)


def load_native_backend(
    settings: EngineSettings,
    checkpoint: Checkpoint,
    source: StoredWeightSource,
    kernels: NativeKernels,
    num_threads: int,
    progress: Progress,
    kv_dtype: str = KV_DTYPE,
) -> Backend:
    """Return the model, ready to run. Raises ConfigError, which says what to do."""
    kernels.set_threads(num_threads)
    layout = kv_layout(checkpoint, settings.block_size, kv_dtype, NATIVE, f"-{NATIVE}{NUMERICS}")
    head = open_head(settings, checkpoint, layout)
    draft_nbytes = 0 if head is None else head.block_nbytes
    num_blocks = blocks_in(cache_nbytes(settings, layout, available_nbytes()), layout, draft_nbytes)
    max_model_len = model_len(checkpoint, settings, num_blocks * layout.block_size)
    cache = KVCache(layout, num_blocks)
    model = _load_model(settings, checkpoint, source, kernels, cache, max_model_len, progress)
    drafting, whole = None, cache
    if head is not None:
        drafts, tensors = head.cache(num_blocks, settings.max_num_seqs), head.tensors(checkpoint, source)
        own, is_exact = model.struct, kv_dtype == "float32"
        embedding = EmbeddingRows(own.embedding_kind, own.embedding, own.embedding_row_nbytes, model)
        native = load_native_head(tensors, kernels, drafts, embedding, max_model_len, is_exact)
        drafter = Eagle3Drafter(native, drafts)
        drafting = Drafting(drafter, NativeRunner(kernels, model, drafter, head.aux_layers))
        whole = JointCache(cache, drafts.pages)
    _log.info("%s ready: %s, context of %d tokens", checkpoint.name, NATIVE, max_model_len)
    log_capacity(layout, num_blocks, draft_nbytes)
    # One kernel for all rows: what an answer writes is what a prompt would.
    sampler = Sampler(checkpoint.eos_token_ids)
    runner = NativeRunner(kernels, model)
    return Backend(whole, runner, sampler, NATIVE, max_model_len, caches_decoded_kv=True, drafting=drafting)


def _load_model(
    settings: EngineSettings,
    checkpoint: Checkpoint,
    source: StoredWeightSource,
    kernels: NativeKernels,
    cache: KVCache,
    max_model_len: int,
    progress: Progress,
) -> NativeModel:
    """Return the model, its matrices shared with other workers where its file is mapped and not read."""

    def load(memory: StripMemory) -> NativeModel:
        return load_native_model(checkpoint.config, source, kernels, cache, max_model_len, progress, memory)

    if checkpoint.format is not WeightFormat.GGUF:
        return load(PrivateMemory())
    digest = Path(library_name()).stem.rpartition("-")[2]
    file = settings.cache_dir / "native" / "strips" / f"{cache.layout.model}-{digest}.strips"
    return load_shared(file, strips_nbytes(checkpoint.config, source, kernels), load)
