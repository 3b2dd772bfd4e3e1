"""The drafter with weights that settings name: an EAGLE3 head, or a smaller model."""

import logging
from pathlib import Path

from checkpoint import Checkpoint, open_checkpoint
from checkpoint.huggingface.eagle3_folder import Eagle3Folder, is_eagle3, open_eagle3, shipped_head
from contracts.errors import ConfigError
from engine.settings import EngineSettings
from engine.speculative.choice import EAGLE3, MTP, PROPOSERS, head_name

_log = logging.getLogger(__name__)


def open_named_head(settings: EngineSettings, checkpoint: Checkpoint) -> Eagle3Folder | None:
    """Return the EAGLE3 head that settings name, or None if they name none.

    Raises ConfigError, which names the field, for a head that is not there or does not fit, or a model without a layer
    for multi-token prediction where that is named.
    """
    name = head_name(settings.speculate)
    if name == MTP:
        _require_mtp(settings, checkpoint)
    if name is None or name == MTP or _is_model(name):
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


def open_named_model(settings: EngineSettings, checkpoint: Checkpoint) -> Checkpoint | None:
    """Return the draft model that settings name, or None if they name none.

    Raises ConfigError, which names the field, for one that is not there or has another vocabulary.
    """
    name = head_name(settings.speculate)
    if name is None or name == MTP or not _is_model(name):
        return None
    try:
        found = open_checkpoint(name)
    except ConfigError as error:
        raise ConfigError(f"speculate is '{name}': {error}") from error
    _require_one_vocabulary(found, checkpoint, name)
    _log.info("drafts come from the model %s", found.path)
    return found


def _require_mtp(settings: EngineSettings, checkpoint: Checkpoint) -> None:
    num_layers = checkpoint.config.num_mtp_layers
    said = f"speculate is '{settings.speculate}'; {checkpoint.name} has {num_layers} layers for multi-token prediction"
    if settings.device != "cpu":
        raise ConfigError(f"speculate is '{settings.speculate}'; such a layer drafts on CPUs: take ngram or suffix")
    if num_layers != 1:  # the layers of a chain each have KV of their own
        raise ConfigError(f"{said} (num_nextn_predict_layers), and one drafts: take {' or '.join(PROPOSERS)}")


def _is_model(name: str) -> bool:
    """Return whether it is a model: a folder without a head, a GGUF file, or a name of the hub."""
    path = Path(name).expanduser()
    if path.is_dir():
        return not is_eagle3(path)
    is_of_hub = name.count("/") == 1 and not name.startswith((".", "/", "~"))
    return path.is_file() or path.suffix == ".gguf" or is_of_hub


def _require_one_vocabulary(draft: Checkpoint, target: Checkpoint, name: str) -> None:
    """Raise ConfigError unless each token that both have has one text.

    Either may have more, which are added for templates or to round a width up.
    """
    theirs, ours = (
        {token_id: text for text, token_id in each.tokenizer().get_vocab().items()} for each in (draft, target)
    )
    differing = [token_id for token_id in sorted(theirs.keys() & ours.keys()) if theirs[token_id] != ours[token_id]]
    if differing:
        first = differing[0]
        raise ConfigError(
            f"speculate is '{name}', whose vocabulary is another: token {first} is {theirs[first]!r} there and "
            f"{ours[first]!r} in {target.name}; take a smaller model of the same family"
        )


def _path_of(name: str, checkpoint: Checkpoint) -> Path:
    if name != EAGLE3:
        return Path(name).expanduser()
    folder = shipped_head(checkpoint.name)
    if folder is None:
        raise ConfigError(
            f"speculate is '{EAGLE3}'; no head comes with this package for {checkpoint.name}: name the folder of one, "
            f"or take {' or '.join(PROPOSERS)}"
        )
    return folder
