"""From a checkpoint to an engine on a GPU: weights, warm-up, a cache of what memory is left, decode steps captured."""

import logging
import math
from dataclasses import replace

import torch

from checkpoint import Checkpoint, Progress
from contracts.layout import KVLayout
from engine.backend import Backend
from engine.cuda.attention import DeviceAttention
from engine.cuda.cache import DeviceCache
from engine.cuda.calibration import TEXT, Scales, calibrate, warm_up
from engine.cuda.drawing import DeviceSampler, Drawer
from engine.cuda.formats import DEVICE_FORMATS, DeviceFormat, resolve_device_dtype
from engine.cuda.fused import FusedDecode, is_fusible
from engine.cuda.memory import MAX_PITCH_NBYTES
from engine.cuda.runner import DeviceRunner
from engine.cuda.state import DecodeState
from engine.cuda.steps import DecodeSteps, MakeStep, Step
from engine.cuda.transformer import Rows, Transformer
from engine.cuda.weights import DeviceWeights, load_device_weights
from engine.engine import Engine
from engine.messages import EngineSettings
from engine.sizing import blocks_in, kv_layout, model_len, wanted_model_len
from engine.weights import WeightSource, open_weights
from kernels import caps, catalog
from kernels.registry import Registry

_log = logging.getLogger(__name__)

# The kernels were tuned for pages of 64 tokens.
_MIN_BLOCK_SIZE = 64
# Left free beside the cache: for captured steps, and for logits that are made whole in float32.
_SPARE_NBYTES, _LOGIT_NBYTES = 1 << 30, 16
_MEMORY_PAGE_NBYTES = 2 << 20


def load_device_engine(
    settings: EngineSettings,
    checkpoint: Checkpoint,
    progress: Progress,
    source: WeightSource | None = None,
    device: torch.device | None = None,
) -> Engine:
    """`source`: weights from elsewhere than the checkpoint's files; `device`: "cpu" runs the reference kernels.

    Raises ConfigError, which says what to do.
    """
    device = device or torch.device("cuda")
    return _Builder(settings, checkpoint, source or open_weights(checkpoint, device), device).build(progress)


class _Builder:
    def __init__(
        self, settings: EngineSettings, checkpoint: Checkpoint, source: WeightSource, device: torch.device
    ) -> None:
        found = caps.detect(device.type)
        self._settings = replace(settings, dtype=resolve_device_dtype(settings.dtype, checkpoint, found))
        self._checkpoint, self._config, self._source, self._device = checkpoint, checkpoint.config, source, device
        self._registry: Registry = catalog.registry(found)
        self._format: DeviceFormat = DEVICE_FORMATS[self._settings.dtype]
        self._block_size = max(settings.block_size, _MIN_BLOCK_SIZE)
        self._max_rows = max(settings.max_batched_tokens, settings.max_num_seqs)

    @torch.inference_mode()
    def build(self, progress: Progress) -> Engine:
        settings, config, device = self._settings, self._config, self._device
        longest = wanted_model_len(self._checkpoint, settings)
        layout = kv_layout(self._checkpoint, self._block_size, self._format.kv_dtype, "-halves")
        weights = load_device_weights(config, self._source, self._format, longest, device, progress)
        model = Transformer(config, self._format, weights, self._registry, self._block_size, self._max_rows)
        attention = self._attention(longest)
        state = DecodeState(
            settings.max_num_seqs, layout.num_blocks(longest), config.vocab_size, self._format.rows, device
        )
        progress("warm up", 0, 2)
        scales = self._warm_up(model, weights, attention, layout)
        num_blocks = _whole(blocks_in(self._cache_nbytes(), layout), layout.page_nbytes)
        max_model_len = model_len(self._checkpoint, settings, num_blocks * layout.block_size)
        cache = DeviceCache(layout, num_blocks, self._format.pages, device, scales.kv if scales else None)
        cache.share(self._registry)
        progress("warm up", 1, 2)
        drawer = Drawer(self._registry, config.vocab_size, device)
        if scales is not None and is_fusible(config, self._format, weights):
            make = FusedDecode(config, weights, self._registry, cache, state, scales.activations).step
        else:
            make = self._plain(model, attention, cache, state)
        captures = device.type == "cuda" and self._format.kv != "fp32"  # whose attention reads lengths on the host
        steps = DecodeSteps(make, drawer, state, max_model_len, captures)
        progress("warm up", 2, 2)
        sampler = DeviceSampler(self._checkpoint.eos_token_ids, drawer)
        runner = DeviceRunner(model, attention, cache, state, steps, drawer, sampler)
        _log.info(
            "%s ready: %s on %s, context of %d tokens, %d KV blocks",
            self._checkpoint.name, settings.dtype, self._registry.caps.name, max_model_len, num_blocks,
        )  # fmt: skip
        # Prompts and answers are computed by different kernels, which round differently.
        return Engine(settings, self._checkpoint, Backend(cache, runner, sampler, False), max_model_len)

    def _attention(self, longest: int) -> DeviceAttention:
        config, settings = self._config, self._settings
        max_tokens = settings.max_num_seqs * (longest + 128)
        return DeviceAttention(
            config, self._registry, self._format.kv, self._block_size, max_tokens, settings.max_num_seqs, self._device
        )

    def _warm_up(
        self, model: Transformer, weights: DeviceWeights, attention: DeviceAttention, layout: KVLayout
    ) -> Scales | None:
        """Compiles kernels and finds out what a full batch takes; the scales of e4m3 where they are fixed, those that
        the checkpoint brings before those that are found.
        """
        config, longest = self._config, min(self._max_rows, wanted_model_len(self._checkpoint, self._settings))
        cache = DeviceCache(layout, layout.num_blocks(longest), self._format.pages, self._device)
        scales = None
        if self._format.is_fp8:
            found = calibrate(model, attention, cache, self._checkpoint.tokenizer().encode(TEXT).ids[:longest])
            scales = found.replaced(weights.input_scales(), weights.kv_scales)
        warm_up(model, attention, cache, [index % config.vocab_size for index in range(longest)])
        return scales

    def _cache_nbytes(self) -> int:
        """What settings say, or all that is left."""
        if self._settings.kv_cache_nbytes is not None:
            return self._settings.kv_cache_nbytes
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        return free - _SPARE_NBYTES - _LOGIT_NBYTES * self._settings.max_num_seqs * self._config.vocab_size

    def _plain(
        self, model: Transformer, attention: DeviceAttention, cache: DeviceCache, state: DecodeState
    ) -> MakeStep:
        def make(rows: int, max_len: int) -> Step:
            attend = attention.of_decodes(state.tables[:rows], state.lengths[:rows], max_len)

            def step() -> None:
                inputs = Rows(state.gather_tokens(rows), state.positions[:rows], state.slots[:rows], None)
                state.logits[:rows].copy_(model.head(model(inputs, cache, attend)))

            return step

        return make


def _whole(num_blocks: int, page_nbytes: int) -> int:
    """At most so many that, with the spare one, a plane's pages end where a page of the GPU's memory does, and that a
    copy's pitch allows. Pulled from planes that end elsewhere, 512 MiB came at 265 GB/s, not at 273 to 287 (two H200).
    """
    num_pages = min(num_blocks + 1, MAX_PITCH_NBYTES // page_nbytes)
    step = _MEMORY_PAGE_NBYTES // math.gcd(_MEMORY_PAGE_NBYTES, page_nbytes)
    return (num_pages // step * step if num_pages >= 16 * step else num_pages) - 1
