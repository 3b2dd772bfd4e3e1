"""The loader of a layer for multi-token prediction beside its model on the CPU."""

import logging
from dataclasses import dataclass

import msgspec

from checkpoint import Checkpoint
from contracts.errors import ConfigError
from contracts.layout import KVLayout
from engine.cache.sizing import one_group_layout
from engine.cpu.decoder import DecoderWeights
from engine.cpu.eagle3.draft_cache import DraftCache, draft_layout
from engine.cpu.linear import FORMATS
from engine.cpu.mtp.head import MtpHead
from engine.cpu.weight_loader import load_mtp_weights
from engine.model_loader.checkpoint_weights import StoredWeightSource, WeightSource
from engine.settings import EngineSettings
from engine.speculative.choice import MTP, head_name
from models.config import ModelConfig

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MtpDraft:
    """The layer, before its weights are read. `block_nbytes`: of a block of its cache."""

    config: ModelConfig
    layout: KVLayout

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """What comes out of the model's last layer."""
        return (self.config.num_layers,)

    @property
    def block_nbytes(self) -> int:
        return self.layout.block_nbytes

    def cache(self, num_blocks: int, max_num_seqs: int) -> DraftCache:
        return DraftCache.beside(self.layout, self.config.hidden_size, num_blocks, max_num_seqs)

    def beside_torch(
        self,
        settings: EngineSettings,
        checkpoint: Checkpoint,
        source: WeightSource,
        dtype: str,
        model: DecoderWeights,
        cache: DraftCache,
        max_model_len: int,
    ) -> MtpHead:
        """Return the layer, ready to run. Raises ConfigError for a tensor that is missing or of another shape."""
        weights = load_mtp_weights(self.config, source, FORMATS[dtype], model.embedding)
        _log.info("drafts come from the model's layer for multi-token prediction")
        return MtpHead(self.config, weights, cache.kv, max_model_len)


def open_mtp(
    settings: EngineSettings, checkpoint: Checkpoint, source: StoredWeightSource, target: KVLayout
) -> MtpDraft | None:
    """Return the model's layer for multi-token prediction, or None if settings don't name it.

    Raises ConfigError if the checkpoint states such a layer and has no tensor of it, as those have that were saved
    again by transformers.
    """
    if head_name(settings.speculate) != MTP:
        return None
    config, group = checkpoint.config, target.groups[0]
    if config.num_layers not in source.layers:
        raise ConfigError(
            f"speculate is '{MTP}', and {checkpoint.path} has no tensor of layer {config.num_layers}, the one for "
            "multi-token prediction: take the model as its makers published it"
        )
    (own,) = one_group_layout(config, target.block_size, group.dtype).groups
    kv = msgspec.structs.replace(own, kind="draft", layers=(0,), weights=f"{MTP}-{target.model}-{target.rounding}")
    return MtpDraft(config, draft_layout(target, kv, config.hidden_size))
