"""The loader of an EAGLE3 head beside its target on the CPU."""

from dataclasses import dataclass

from checkpoint import Checkpoint
from checkpoint.fingerprint import weights_fingerprint
from checkpoint.huggingface.eagle3_folder import Eagle3Folder
from contracts.layout import KVLayout
from engine.cpu.eagle3.draft_cache import DraftCache, draft_layout
from engine.model_loader.checkpoint_weights import WeightSource
from engine.model_loader.decoder_tensors import ModelTensors
from engine.model_loader.eagle3_tensors import Eagle3Tensors
from engine.settings import EngineSettings
from engine.speculative.named_drafter import open_named_head
from engine.speculative.proposer import spare_blocks


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
        num_spare = max_num_seqs * spare_blocks(self.layout.block_size)
        return DraftCache(self.layout, self.folder.config, num_blocks, num_spare)

    def tensors(self, checkpoint: Checkpoint, source: WeightSource) -> Eagle3Tensors:
        target = ModelTensors(checkpoint.config, source, interleaved=True)
        return Eagle3Tensors(self.folder, target, checkpoint.config, interleaved=True)


def open_head(settings: EngineSettings, checkpoint: Checkpoint, target: KVLayout) -> DraftHead | None:
    """Return the head that settings name, or None if they name none.

    Raises ConfigError as open_named_head.
    """
    folder = open_named_head(settings, checkpoint)
    if folder is None:
        return None
    return DraftHead(folder, draft_layout(target, folder.config, weights_fingerprint(folder.path)))
