"""The loader of a model on the CPU: number format, cache, weights."""

import logging

import torch

from checkpoint import Checkpoint, Progress
from engine.backend import Backend, Drafting, ignore_accepted
from engine.cache.group_page_table import GroupPageTable
from engine.cache.sizing import (
    cache_nbytes,
    cache_size,
    for_context,
    kv_layout,
    log_capacity,
    model_len,
    wanted_model_len,
)
from engine.cpu.decoder import Decoder
from engine.cpu.draft_model.loader import open_draft_model
from engine.cpu.eagle3.drafter import Eagle3Drafter
from engine.cpu.eagle3.loader import open_head
from engine.cpu.format_choice import resolve_dtype
from engine.cpu.grouped_cache import GroupedKVCache
from engine.cpu.joint_cache import JointCache
from engine.cpu.linear import FORMATS
from engine.cpu.lora_loader import lora_loader
from engine.cpu.mtp.loader import open_mtp
from engine.cpu.native.choice import chosen_kernels
from engine.cpu.native.loader import load_native_backend
from engine.cpu.runner import CpuRunner
from engine.cpu.weight_loader import load_weights
from engine.model_loader.checkpoint_weights import open_weights
from engine.sampling.host_sampler import Sampler
from engine.settings import EngineSettings
from process.memory_limit import available_nbytes
from process.usable_cores import usable_cores

_log = logging.getLogger(__name__)


def load_cpu_backend(settings: EngineSettings, checkpoint: Checkpoint, progress: Progress) -> Backend:
    """Return the model, ready to run. Raises ConfigError, which says what to do."""
    if settings.num_threads or usable_cores() < torch.get_num_threads():
        torch.set_num_threads(settings.num_threads or usable_cores())
    progress("probe", 0, 1)
    checkpoint = for_context(checkpoint, settings)
    source = open_weights(checkpoint)
    if (native := chosen_kernels(settings, checkpoint, source)) is not None:
        return load_native_backend(settings, checkpoint, source, native, torch.get_num_threads(), progress)
    dtype = resolve_dtype(settings, source, checkpoint.config)
    number_format = FORMATS[dtype]
    layout = kv_layout(checkpoint, settings.block_size, number_format.kv_dtype, settings.rounding(dtype), by_span=True)
    head = open_head(settings, checkpoint, layout) or open_mtp(settings, checkpoint, source, layout)
    draft = open_draft_model(settings, checkpoint, layout, dtype)
    draft_nbytes = sum(each.block_nbytes for each in (head, draft) if each is not None)
    nbytes, wanted = cache_nbytes(settings, layout, available_nbytes()), wanted_model_len(checkpoint, settings)
    size = cache_size(nbytes, layout, settings, wanted, draft_nbytes)
    num_blocks, tables = size.num_blocks, [GroupPageTable(size.num_blocks, count) for count in size.num_pages]
    max_model_len = model_len(checkpoint, settings, num_blocks * layout.block_size)
    load_adapter = lora_loader(settings, checkpoint, source, number_format)
    weights = load_weights(checkpoint.config, source, number_format, progress)
    model = Decoder(checkpoint.config, weights, max_model_len, () if head is None else head.aux_layers)
    cache = GroupedKVCache(layout, num_blocks, tables)
    drafting, whole = None, cache
    if head is not None:
        drafts = head.cache(num_blocks, settings.max_num_seqs)
        own = head.beside_torch(settings, checkpoint, source, dtype, weights, drafts, max_model_len)
        drafter = Eagle3Drafter(own, drafts)
        drafting, whole = Drafting(drafter, CpuRunner(model, cache, drafter)), JointCache(cache, drafts.pages)
    runner = CpuRunner(model, cache)
    if draft is not None:
        drafting, pages = draft.drafting(runner, num_blocks, settings, progress)
        whole = JointCache(cache, pages)
    _log.info("%s ready: %s, context of %d tokens", checkpoint.name, dtype, max_model_len)
    log_capacity(layout, size)
    # Where prompts and answers are computed in different formats, an answer's KV is not what a prompt's would be.
    caches_decoded_kv = number_format.is_uniform
    sampler = Sampler(checkpoint.eos_token_ids)
    return Backend(
        whole, runner, sampler, dtype, max_model_len, caches_decoded_kv, drafting=drafting,
        page_tables=tables, load_adapter=load_adapter,
        on_accepted=ignore_accepted if cache.state is None else cache.state.on_accepted,
    )  # fmt: skip
