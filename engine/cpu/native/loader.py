"""The loader of the native path: cache, weights, runner."""

import logging

from checkpoint import Checkpoint, Progress
from engine.backend import Backend, Drafting
from engine.cache.sizing import CacheSize, blocks_in, cache_nbytes, kv_layout, log_capacity, model_len
from engine.cpu.draft_model.loader import open_draft_model
from engine.cpu.eagle3.drafter import Eagle3Drafter
from engine.cpu.eagle3.loader import open_head
from engine.cpu.joint_cache import JointCache
from engine.cpu.kv_cache import KVCache
from engine.cpu.native.choice import NATIVE
from engine.cpu.native.eagle3_head import EmbeddingRows, load_native_head
from engine.cpu.native.runner import NativeRunner
from engine.cpu.native.shared_model import KV_DTYPE, load_shared_model
from engine.cpu.native.threads import start_threads
from engine.model_loader.checkpoint_weights import StoredWeightSource
from engine.sampling.host_sampler import Sampler
from engine.settings import EngineSettings
from kernels.cpu.native import NUMERICS, NativeKernels
from process.memory_limit import available_nbytes

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
    start_threads(kernels, num_threads)
    layout = kv_layout(checkpoint, settings.block_size, kv_dtype, settings.rounding(NATIVE), f"-{NATIVE}{NUMERICS}")
    head = open_head(settings, checkpoint, layout)
    draft = open_draft_model(settings, checkpoint, layout, kv_dtype)
    draft_nbytes = sum(each.block_nbytes for each in (head, draft) if each is not None)
    num_blocks = blocks_in(cache_nbytes(settings, layout, available_nbytes()), layout, draft_nbytes)
    size = CacheSize(num_blocks, (), num_blocks * (layout.block_nbytes + draft_nbytes))
    max_model_len = model_len(checkpoint, settings, num_blocks * layout.block_size)
    cache = KVCache(layout, num_blocks)
    model = load_shared_model(settings, checkpoint, source, kernels, cache, max_model_len, progress)
    drafting, whole = None, cache
    if head is not None:
        drafts, tensors = head.cache(num_blocks, settings.max_num_seqs), head.tensors(checkpoint, source)
        own, is_exact = model.struct, kv_dtype == "float32"
        embedding = EmbeddingRows(own.embedding_kind, own.embedding, own.embedding_row_nbytes, model)
        native = load_native_head(tensors, kernels, drafts, embedding, max_model_len, is_exact)
        drafter = Eagle3Drafter(native, drafts)
        drafting = Drafting(drafter, NativeRunner(kernels, model, drafter, head.aux_layers))
        whole = JointCache(cache, drafts.pages)
    runner = NativeRunner(kernels, model)
    if draft is not None:
        drafting, pages = draft.drafting(runner, num_blocks, settings, progress)
        whole = JointCache(cache, pages)
    _log.info("%s ready: %s, context of %d tokens", checkpoint.name, NATIVE, max_model_len)
    log_capacity(layout, size)
    # One kernel for all rows: what an answer writes is what a prompt would.
    sampler = Sampler(checkpoint.eos_token_ids)
    return Backend(whole, runner, sampler, NATIVE, max_model_len, caches_decoded_kv=True, drafting=drafting)
