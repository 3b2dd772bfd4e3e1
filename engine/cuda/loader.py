"""The loader of a model on a GPU.

Weights, warm-up, a cache of what memory is left, decode steps captured.
"""

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import msgspec
import torch

from checkpoint import Checkpoint, Progress, open_checkpoint
from contracts.errors import ConfigError, TransferError
from contracts.layout import KVLayout
from engine.backend import Backend, Drafting
from engine.cache.sizing import MIN_BLOCKS, blocks_in, for_context, kv_layout, model_len, wanted_model_len
from engine.cuda.device_sampler import DeviceSampler, SamplingKernel
from engine.cuda.draft_head import drafter_of, open_draft_head
from engine.cuda.graphs.decode_graphs import DecodeGraphs
from engine.cuda.graphs.last_layer_graphs import LastLayerGraphs
from engine.cuda.graphs.mixed_batch_attention import MixedBatchAttention
from engine.cuda.graphs.plain_steps import PlainSteps
from engine.cuda.graphs.prefill_graphs import PrefillGraphs
from engine.cuda.graphs.prefill_rows import PrefillRows
from engine.cuda.inputs.decode_state import DecodeState
from engine.cuda.kv.kv_cache import DeviceCache, whole_blocks
from engine.cuda.launcher import Launcher
from engine.cuda.model.attention import DeviceAttention, attention_specs
from engine.cuda.model.calibration import TEXT, Scales, calibrate, compute_prompt
from engine.cuda.model.format_choice import resolve_device_dtype, smooths_keys
from engine.cuda.model.fused_decode import FusedDecode, is_fusible
from engine.cuda.model.number_formats import DEVICE_FORMATS, DeviceFormat
from engine.cuda.model.required_kernels import require_kernels
from engine.cuda.model.required_settings import MIN_BLOCK_SIZE, require_settings
from engine.cuda.model.transformer import Transformer
from engine.cuda.model.tuned_plans import agreed_plans
from engine.cuda.model.weight_loader import load_device_weights
from engine.cuda.model.weights import DeviceWeights, shortened
from engine.cuda.runner import DeviceRunner
from engine.cuda.runtime.full_gpu import SMALLER, TOO_LARGE, advising, full_in_words
from engine.cuda.runtime.graph_capture import free_nbytes
from engine.cuda.runtime.pinned_copy import PinnedCopier
from engine.cuda.runtime.process_group import SINGLE_PROCESS, ProcessGroup
from engine.cuda.tensor_parallel import TensorParallelGroup
from engine.cuda.warmup import WarmUp
from engine.model_loader.checkpoint_weights import WeightSource, open_weights
from engine.model_loader.tensor_parallel_shards import Shard, ShardedWeights, kv_shard, shard_config
from engine.sampling.prompt_logprobs import ROWS
from engine.settings import EngineSettings
from engine.speculative.choice import max_draft_rows
from kernels import catalog
from kernels.registry import Registry
from kernels.timing import eager_us

_log = logging.getLogger(__name__)

# Left free beside the cache, whatever captured launches take; and with them at least.
_SPARE_NBYTES, _LEAST_SPARE_NBYTES = 1 << 29, 1 << 30
LOGIT_NBYTES = 18
"""For each logit: a batch that is drawn from adjusted ones has them four times in float32, and a mask."""

OpenModel = Callable[[str, torch.device], tuple[Checkpoint, WeightSource]]
"""(EngineSettings.model, device) -> what is loaded, in any process."""


def open_model(model: str, device: torch.device) -> tuple[Checkpoint, WeightSource]:
    """Return a checkpoint and its own weights, which go to the device."""
    checkpoint = open_checkpoint(model)
    return checkpoint, open_weights(checkpoint, PinnedCopier(device).carry)


def load_device_backend(
    settings: EngineSettings,
    checkpoint: Checkpoint,
    progress: Progress,
    source: WeightSource | None = None,
    device: torch.device | None = None,
    reopen: OpenModel = open_model,
) -> Backend:
    """Return the model, ready to run.

    `source`: weights from elsewhere than the checkpoint's files, and `reopen` how the processes of other GPUs come
    by them; `device`: "cpu" runs the reference kernels.

    Raises ConfigError, which says what to do.
    """
    device = device or torch.device("cuda")
    source = source or open_weights(checkpoint, PinnedCopier(device).carry)
    if settings.tensor_parallel == 1:
        return DeviceBackendBuilder(settings, checkpoint, source, device).build(progress)
    shard_config(checkpoint.config, Shard(0, settings.tensor_parallel))
    require_settings(settings, checkpoint, device)  # each follower would end of them, and this process of its end
    followers = TensorParallelGroup.start(settings, device, reopen)
    try:
        with full_in_words():
            team = followers.join(device)
        return DeviceBackendBuilder(settings, checkpoint, source, device, team).build(progress, followers)
    except BaseException:
        followers.abandon()
        raise


class DeviceBackendBuilder:
    """One process's part of a backend. All of a team do the same, but for what the first one keeps."""

    def __init__(
        self,
        settings: EngineSettings,
        checkpoint: Checkpoint,
        source: WeightSource,
        device: torch.device,
        team: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        checkpoint = for_context(checkpoint, settings)
        found = require_settings(settings, checkpoint, device)
        self._settings = replace(settings, dtype=resolve_device_dtype(settings.dtype, checkpoint, found.cc))
        self._checkpoint, self._group, self._device = checkpoint, team, device
        self._config = shard_config(checkpoint.config, team.shard)
        self._source = source if team is SINGLE_PROCESS else ShardedWeights(source, checkpoint.config, team.shard)
        self._registry: Registry = catalog.registry(found, plans=agreed_plans(settings.cache_dir, found, team))
        self._format: DeviceFormat = DEVICE_FORMATS[self._settings.dtype]
        self._block_size = max(settings.block_size, MIN_BLOCK_SIZE)
        self._max_draft_rows = max_draft_rows(settings)
        self._head = open_draft_head(self._settings, checkpoint, self._format, self._block_size)
        self._max_rows = max(settings.max_batched_tokens, settings.max_num_seqs + self._max_draft_rows)

    def build(self, progress: Progress, followers: TensorParallelGroup | None = None) -> Backend:
        launcher, max_model_len = self.prepare(progress)
        tell = followers.broadcast if followers else nullcontext
        runner, drafting = DeviceRunner(launcher, self._sampler, tell, self._max_draft_rows), None
        if (drafter := drafter_of(launcher, self._block_size)) is not None:
            reading = DeviceRunner(launcher, self._sampler, tell, self._max_draft_rows, drafter)
            drafting = Drafting(drafter, reading)

        def close() -> None:
            launcher.release()
            if followers is not None:
                followers.close()

        # Prompts and answers are computed by different kernels; so are prompts that are cut into other chunks.
        return Backend(
            launcher.cache, runner, self._sampler, self._settings.dtype, max_model_len, True, drafting, close
        )

    def prepare(self, progress: Progress) -> tuple[Launcher, int]:
        """What a batch needs, ready for the first one; the longest context."""
        with full_in_words():
            return self._prepare(progress)

    @torch.inference_mode()
    def _prepare(self, progress: Progress) -> tuple[Launcher, int]:
        settings = self._settings
        rounding = settings.dtype.removesuffix("-head")  # the head computes no KV
        layout = kv_layout(self._checkpoint, self._block_size, self._format.kv_dtype, rounding, "-halves")
        layout = msgspec.structs.replace(layout, tp_size=kv_shard(self._checkpoint.config, self._group.shard).size)
        self._load(layout, progress)
        with self._stage("compile", progress):
            with advising(TOO_LARGE, SMALLER):
                scratch = self._cache(layout, layout.num_blocks(self._longest_prompt))
            if self._captures:
                self._compile(scratch, progress)
        with self._stage("calibrate", progress):
            scales = self._calibrate(scratch)
        captured = self._captured_nbytes(scratch, scales)
        del scratch
        nbytes = self._cache_nbytes(layout, captured)
        draft_nbytes = 0 if self._head is None else self._head.block_nbytes
        num_blocks = self._group.smallest(
            whole_blocks(blocks_in(nbytes, layout, draft_nbytes), layout.only_group.page_nbytes(layout.tp_size))
        )
        max_model_len = model_len(self._checkpoint, settings, num_blocks * layout.block_size)
        with advising("the KV cache does not fit on the GPU", "lower kv_cache_mib, or free the GPU"):
            cache = self._cache(layout, num_blocks, scales)
        launcher = self._launcher(self._model, self._weights, cache, scales, max_model_len)
        with self._stage("capture", progress):
            self._share(cache)
            if self._captures:
                launcher.capture()
                if self._group is SINGLE_PROCESS:  # members that time differently would part
                    launcher.chunks.leave_out_slow(partial(eager_us, count=1, groups=5))
        with self._stage("warm up", progress):
            if self._device.type == "cuda":
                self._warm_up(launcher, max_model_len)
        _log.info(
            "%s ready: %s on %s, context of %d tokens, %d KV blocks; %s",
            self._checkpoint.name, settings.dtype, self._registry.caps.name, max_model_len, num_blocks,
            ", ".join(f"{stage} {time_s:.1f} s" for stage, time_s in self._seconds.items()),
        )  # fmt: skip
        return launcher, max_model_len

    def _cache(self, layout: KVLayout, num_blocks: int, scales: Scales | None = None) -> DeviceCache:
        kv, offsets = (scales.kv, scales.k_offsets) if scales else (None, None)
        if self._is_smooth and offsets is None:
            group = layout.only_group
            offsets = torch.zeros(group.num_layers, group.num_kv_heads, group.head_dim, device=self._device)
        return DeviceCache(layout, num_blocks, self._format.pages, self._device, kv, offsets)

    def _share(self, cache: DeviceCache) -> None:
        """The first of a team hands over the pages of all."""
        is_first = self._group.shard.rank == 0
        told = self._group.exchange("cache", b"" if is_first else cache.export())
        if not is_first:
            return
        try:
            cache.share(self._registry, told[1:])
        except TransferError as error:
            raise ConfigError(
                f"tensor_parallel is {self._group.shard.size}, and its GPUs can't reach each other's memory ({error}): "
                "use GPUs that can, or fewer"
            ) from error

    @contextmanager
    def _stage(self, name: str, progress: Progress) -> Iterator[None]:
        progress(name, 0, 1)
        start = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self._seconds[name] = time.perf_counter() - start
        progress(name, 1, 1)

    def _load(self, layout: KVLayout, progress: Progress) -> None:
        config, settings, device = self._config, self._settings, self._device
        longest = self._longest = self._longest_possible(layout)
        start = time.perf_counter()
        with self._importing_kernels():
            self._weights = load_device_weights(
                config, self._source, self._format, longest, device, progress, self._group.shard
            )
        self._seconds = {"weights": time.perf_counter() - start}
        # Scales that a checkpoint brings are of keys as they are; members of a team would have to agree on offsets.
        self._is_smooth = (
            self._format.is_fp8
            and smooths_keys(config)
            and self._weights.kv_scales is None
            and self._group is SINGLE_PROCESS
        )
        max_rows = settings.max_num_seqs + self._max_draft_rows
        self._attention = DeviceAttention(
            config, self._registry, self._format.kv, self._block_size, settings.max_num_seqs * (longest + 128),
            max_rows, device,
        )  # fmt: skip
        if self._head is not None:
            self._head.load(config, self._source, self._weights.embedding, longest)
        self._model = self._transformer(self._weights)
        self._state = DecodeState(max_rows, layout.num_blocks(longest), config.vocab_size, device)
        self._sampling_kernel = SamplingKernel(self._registry, config.vocab_size, max_rows, device, self._group)
        self._sampler = DeviceSampler(self._checkpoint.eos_token_ids, self._sampling_kernel)
        self._longest_prompt = min(self._max_rows, longest)
        if self._captures:
            require_kernels(self._registry, config, self._format, self._block_size)

    @contextmanager
    def _importing_kernels(self) -> Iterator[None]:
        """Import prompts' attention meanwhile, which DeviceAttention asks for again.

        FlashInfer takes 1.2 s to import, and meanwhile weights can be read.
        """
        use_device = None
        if self._device.type == "cuda":  # a thread begins with the first GPU
            index = torch.cuda.current_device() if self._device.index is None else self._device.index
            use_device = partial(torch.cuda.set_device, index)
        with ThreadPoolExecutor(1, "kernels", use_device) as pool:
            for spec in attention_specs(self._config, self._format.kv, self._block_size).values():
                pool.submit(self._registry.get, "attn_prefill", spec)
            yield

    def _longest_possible(self, layout: KVLayout) -> int:
        """No context is longer, nor a full prompt.

        Llama 4 Scout has ten million positions, and four GPUs of 80 GiB have KV of 3.5 million: what rope turns all of
        them by takes 5 GiB of each GPU, and twice that of the host at start.
        """
        nbytes = self._settings.kv_cache_nbytes or torch.cuda.mem_get_info()[1]
        most = self._group.smallest(blocks_in(nbytes, layout)) * layout.block_size
        return min(wanted_model_len(self._checkpoint, self._settings), max(most, self._max_rows))

    @property
    def _captures(self) -> bool:
        """Not float32, whose attention reads lengths on the host."""
        return self._device.type == "cuda" and self._format.kv != "fp32"

    def _compile(self, cache: DeviceCache, progress: Progress) -> None:
        """Compile what steps and warm-up will launch, telling `progress`, and load what is captured."""
        from kernels.compiling import compiled_ahead  # imports Triton, which a CPU does without

        longest = self._longest
        # Of a few layers: the others launch the same, and 32 of them took 8 s.
        weights = replace(self._weights, layers=tuple(shortened(self._weights.layers)))
        scales = Scales(torch.ones(len(weights.layers), 2, device=self._device), torch.ones(0))
        launcher = self._launcher(
            self._transformer(weights), weights, cache, scales if self._format.is_fp8 else None, longest
        )
        with compiled_ahead(partial(progress, "kernels"), in_processes=True):
            launcher.run_all()
            self._warm_up(launcher, longest)
        launcher.run_all()
        cache.clear()

    def _warm_up(self, launcher: Launcher, max_model_len: int) -> None:
        cache, max_num_seqs = launcher.cache, self._settings.max_num_seqs
        runner = DeviceRunner(launcher, self._sampler, drafter=drafter_of(launcher, self._block_size))
        WarmUp(cache.layout, cache.num_blocks, self._max_rows, max_num_seqs, max_model_len).run(runner)

    def _calibrate(self, cache: DeviceCache) -> Scales | None:
        """Finds out what a full batch takes.

        The scales of e4m3 where they are fixed, those that the checkpoint brings before those that are found.
        """
        model, attention, longest = self._model, self._attention, self._longest_prompt
        scales = None
        if self._format.is_fp8:
            found = calibrate(model, attention, cache, self._checkpoint.tokenizer().encode(TEXT).ids[:longest])
            found = replace(found, kv=self._group.largest(found.kv))
            scales = found.replaced(self._weights.input_scales(), self._weights.kv_scales)
        compute_prompt(model, attention, cache, [index % self._config.vocab_size for index in range(longest)])
        return scales

    def _transformer(self, weights: DeviceWeights) -> Transformer:
        return Transformer(
            self._config, self._format, weights, self._registry, self._block_size, self._max_rows, self._group,
            self._is_smooth, self._attention.wants_e4m3,
            () if self._head is None else self._head.aux_layers,
        )  # fmt: skip

    def _launcher(
        self,
        model: Transformer,
        weights: DeviceWeights,
        cache: DeviceCache,
        scales: Scales | None,
        max_model_len: int,
    ) -> Launcher:
        config, state = self._config, self._state
        if scales is not None and is_fusible(config, self._format, weights):
            make = FusedDecode(
                config, weights, self._registry, cache, state, scales.activations, self._group,
                self._max_draft_rows > 0, model.note_aux,
            ).step  # fmt: skip
        else:
            make = PlainSteps(model, self._attention, cache, state).step
        steps = DecodeGraphs(make, self._sampling_kernel, state, max_model_len)
        rows = PrefillRows(self._max_rows, self._device)
        chunks = PrefillGraphs(model, cache, rows, self._max_rows)
        beside = MixedBatchAttention(model, self._attention, cache, state, max_model_len)
        endings = LastLayerGraphs(model, self._attention, cache, state, max_model_len)
        head = self._head and self._head.passes(
            self._registry, state, model.aux, cache.num_blocks, self._max_draft_rows
        )
        return Launcher(
            model, self._attention, cache, state, rows, steps, chunks, beside, endings, self._sampling_kernel,
            head,
        )  # fmt: skip

    def _captured_nbytes(self, scratch: DeviceCache, scales: Scales | None) -> int:
        """Return what a launcher will take of the memory that is left.

        The rooms of its steps, which for 1024 sequences of Llama-8B's shape are half a GiB, and all that is captured.
        80 layers shared by two GPUs took 2.6 GiB.
        """
        if not self._captures or self._settings.kv_cache_nbytes is not None:
            return 0
        torch.cuda.empty_cache()
        left = free_nbytes()
        launcher = self._launcher(self._model, self._weights, scratch, scales, self._longest)
        return left - free_nbytes() + launcher.expected_nbytes()

    def _cache_nbytes(self, layout: KVLayout, captured_nbytes: int) -> int:
        """What settings say, or all that is left. Raises ConfigError if too little is."""
        if self._settings.kv_cache_nbytes is not None:
            return self._settings.kv_cache_nbytes
        torch.cuda.empty_cache()
        free = free_nbytes()
        kept = self._settings.spare_nbytes + max(_LEAST_SPARE_NBYTES, captured_nbytes + _SPARE_NBYTES)
        kept += self._logits_nbytes
        if free - kept < MIN_BLOCKS * layout.shard_nbytes:
            raise ConfigError(
                f"{free / 2**30:.2f} GiB of the GPU's memory are free beside the model, of which {kept / 2**30:.2f} "
                f"are for other things than the KV cache, and nothing is left for that: {SMALLER}"
            )
        return free - kept

    @property
    def _logits_nbytes(self) -> int:
        """The bytes that lie beside the cache at the end of a step.

        Logits that are drawn from, or the rows of prompts that are all scored, a few at a time. A team whose first
        member has no room for these ends.
        """
        row_nbytes = LOGIT_NBYTES * self._config.vocab_size
        scored_nbytes = ROWS * row_nbytes + self._model.finish_nbytes(self._max_rows)
        return max(self._state.max_rows * row_nbytes, scored_nbytes)
