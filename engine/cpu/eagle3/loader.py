"""The loader of an EAGLE3 head beside its target on the CPU."""

import logging
from dataclasses import dataclass
from pathlib import Path

from checkpoint import Checkpoint
from checkpoint.fingerprint import weights_fingerprint
from checkpoint.huggingface.eagle3_folder import Eagle3Folder, open_eagle3, shipped_head
from contracts.errors import ConfigError
from contracts.layout import KVLayout
from engine.cpu.eagle3.draft_cache import DraftCache, draft_layout
from engine.cpu.eagle3.drafter import spare_blocks
from engine.model_loader.checkpoint_weights import WeightSource
from engine.model_loader.decoder_tensors import ModelTensors
from engine.model_loader.eagle3_tensors import Eagle3Tensors
from engine.settings import EngineSettings
from engine.speculative.choice import EAGLE3, PROPOSERS, head_name

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
        num_spare = max_num_seqs * spare_blocks(self.layout.block_size)
        return DraftCache(self.layout, self.folder.config, num_blocks, num_spare)

    def tensors(self, checkpoint: Checkpoint, source: WeightSource) -> Eagle3Tensors:
        target = ModelTensors(checkpoint.config, source, interleaved=True)
        return Eagle3Tensors(self.folder, target, checkpoint.config)


def open_head(settings: EngineSettings, checkpoint: Checkpoint, target: KVLayout) -> DraftHead | None:
    """Return the head that settings name, or None if they name none.

    Raises ConfigError, which names the field, for a head that is not there or does not fit.
    """
    name = head_name(settings.speculate)
    if name is None:
        return None
    folder = open_eagle3(_folder_of(name, checkpoint), checkpoint.config)
    num_layers = checkpoint.config.num_layers
    if num_layers in folder.config.aux_layers:
        raise ConfigError(
            f"{folder.path}/config.json: eagle_aux_hidden_state_layer_ids lead to what comes out of the last layer; "
            f"on a CPU the inputs of layers 0 to {num_layers - 1} are read"
        )
    _log.info("drafts come from the EAGLE3 head %s", folder.path)
    return DraftHead(folder, draft_layout(target, folder.config, weights_fingerprint(folder.path)))


def _folder_of(name: str, checkpoint: Checkpoint) -> Path:
    if name != EAGLE3:
        return Path(name)
    folder = shipped_head(checkpoint.name)
    if folder is None:
        raise ConfigError(
            f"speculate is '{EAGLE3}'; no head comes with this package for {checkpoint.name}: name the folder of one, "
            f"or take {' or '.join(PROPOSERS)}"
        )
    return folder
