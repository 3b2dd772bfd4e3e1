"""The EAGLE3 head that settings name."""

import logging
from pathlib import Path

from checkpoint import Checkpoint
from checkpoint.huggingface.eagle3_folder import Eagle3Folder, open_eagle3, shipped_head
from contracts.errors import ConfigError
from engine.settings import EngineSettings
from engine.speculative.choice import EAGLE3, PROPOSERS, head_name

_log = logging.getLogger(__name__)


def open_named_head(settings: EngineSettings, checkpoint: Checkpoint) -> Eagle3Folder | None:
    """Return the head that settings name, or None if they name none.

    Raises ConfigError, which names the field, for a head that is not there or does not fit.
    """
    name = head_name(settings.speculate)
    if name is None:
        return None
    folder = open_eagle3(_path_of(name, checkpoint), checkpoint.config)
    num_layers = checkpoint.config.num_layers
    if num_layers in folder.config.aux_layers:
        raise ConfigError(
            f"{folder.path}/config.json: eagle_aux_hidden_state_layer_ids lead to what comes out of the last layer; "
            f"the inputs of layers 0 to {num_layers - 1} are read"
        )
    _log.info("drafts come from the EAGLE3 head %s", folder.path)
    return folder


def _path_of(name: str, checkpoint: Checkpoint) -> Path:
    if name != EAGLE3:
        return Path(name)
    folder = shipped_head(checkpoint.name)
    if folder is None:
        raise ConfigError(
            f"speculate is '{EAGLE3}'; no head comes with this package for {checkpoint.name}: name the folder of one, "
            f"or take {' or '.join(PROPOSERS)}"
        )
    return folder
