"""The loader of an EAGLE3 head beside its target on the CPU."""

import logging
from dataclasses import dataclass

import torch

from checkpoint import Checkpoint
from checkpoint.fingerprint import weights_fingerprint
from checkpoint.huggingface.eagle3_folder import Eagle3Folder
from contracts.layout import KVGroup, KVLayout
from engine.cpu.decoder import DecoderWeights
from engine.cpu.eagle3.draft_cache import DraftCache, draft_layout
from engine.cpu.eagle3.head_rows import DraftingHead
from engine.cpu.eagle3.torch_head import load_torch_head
from engine.cpu.linear import FORMATS
from engine.cpu.native.eagle3_head import EmbeddingRows, load_native_head, unfit_widths
from engine.cpu.native.threads import start_threads
from engine.model_loader.checkpoint_weights import WeightSource
from engine.model_loader.decoder_tensors import ModelTensors
from engine.model_loader.eagle3_tensors import Eagle3Tensors
from engine.settings import EngineSettings
from engine.speculative.named_drafter import open_named_head
from kernels.cpu.build import BuildError
from kernels.cpu.native import NativeKernels, load_kernels
from models.eagle3 import Eagle3Config

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DraftHead:
    """A head that fits, before its weights are read. `block_nbytes`: of a block of its cache."""

    folder: Eagle3Folder
    layout: KVLayout

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.folder.config.aux_layers

    @property
    def block_nbytes(self) -> int:
        return self.layout.block_nbytes

    def cache(self, num_blocks: int, max_num_seqs: int) -> DraftCache:
        return DraftCache.beside(self.layout, self.folder.config.hidden_size, num_blocks, max_num_seqs)

    def tensors(self, checkpoint: Checkpoint, source: WeightSource) -> Eagle3Tensors:
        target = ModelTensors(checkpoint.config, source, interleaved=True)
        return Eagle3Tensors(self.folder, target, checkpoint.config, interleaved=True)

    def beside_torch(
        self,
        settings: EngineSettings,
        checkpoint: Checkpoint,
        source: WeightSource,
        dtype: str,
        model: DecoderWeights,
        cache: DraftCache,
        max_model_len: int,
    ) -> DraftingHead:
        """Return the head beside a model in torch."""
        tensors = self.tensors(checkpoint, source)
        kernels = None if dtype == "float32" else _kernels(settings, tensors.config)
        if kernels is None:
            return load_torch_head(tensors, FORMATS[dtype], cache, model.embedding, max_model_len)
        return load_native_head(tensors, kernels, cache, EmbeddingRows.of_tensor(model.embedding), max_model_len)


def open_head(settings: EngineSettings, checkpoint: Checkpoint, target: KVLayout) -> DraftHead | None:
    """Return the head that settings name, or None if they name none.

    Raises ConfigError as open_named_head.
    """
    folder = open_named_head(settings, checkpoint)
    if folder is None:
        return None
    config = folder.config
    kv = KVGroup(
        kind="draft",
        layers=tuple(range(config.num_layers)),
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=target.block_size,
        dtype=target.groups[0].dtype,
        weights=weights_fingerprint(folder.path),
    )
    return DraftHead(folder, draft_layout(target, kv, config.hidden_size))


def _kernels(settings: EngineSettings, config: Eagle3Config) -> NativeKernels | None:
    """Return what computes a head beside torch's path, if it can be had.

    One row through torch's small operations takes several times as long as the bytes of the head do.
    """
    try:
        kernels = None if unfit_widths(config) else load_kernels(settings.cache_dir, _log.info)
    except (BuildError, OSError) as error:
        _log.info("the head is computed by torch, since the native kernels are not here: %s", error)
        return None
    if kernels is not None:
        start_threads(kernels, torch.get_num_threads())
    return kernels
