"""An EAGLE3 head beside the model on a GPU: its weights, the memory that it takes, and its passes."""

import torch
from torch import Tensor

from checkpoint import Checkpoint
from checkpoint.fingerprint import weights_fingerprint
from checkpoint.huggingface.eagle3_folder import Eagle3Folder
from contracts.errors import ConfigError
from contracts.layout import KVLayout
from engine.cuda.eagle3_drafter import DeviceEagle3Drafter
from engine.cuda.graphs.head_pass import HeadPass
from engine.cuda.inputs.decode_state import DecodeState
from engine.cuda.inputs.head_inputs import HeadState
from engine.cuda.kv.kv_cache import DeviceCache
from engine.cuda.launcher import Launcher
from engine.cuda.model.eagle3_head import DeviceEagle3Head, DeviceHeadWeights, load_device_head
from engine.cuda.model.number_formats import DeviceFormat
from engine.model_loader.checkpoint_weights import WeightSource
from engine.model_loader.decoder_tensors import ModelTensors
from engine.model_loader.eagle3_tensors import Eagle3Tensors
from engine.settings import MAX_DRAFT_TOKENS, EngineSettings
from engine.speculative.choice import head_name
from engine.speculative.named_drafter import open_named_head
from kernels.registry import Registry
from models.config import ModelConfig


class DeviceDraftHead:
    """A head that fits, without weights until `load`.

    Its KV is as the rows are, since it is one layer of many.
    """

    def __init__(
        self, folder: Eagle3Folder, settings: EngineSettings, number_format: DeviceFormat, block_size: int
    ) -> None:
        self._folder, self._settings, self._format = folder, settings, number_format
        self._weights: DeviceHeadWeights | None = None
        config = folder.config
        self._layout = KVLayout.uniform(
            model=weights_fingerprint(folder.path),
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=block_size,
            dtype="float32" if number_format.rows is torch.float32 else "bfloat16",
        )

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self._folder.config.aux_layers

    @property
    def block_nbytes(self) -> int:
        """The bytes that it takes of a block: KV, and the feature of the last token."""
        return self._layout.block_nbytes + self._folder.config.hidden_size * self._format.rows.itemsize

    def load(self, config: ModelConfig, source: WeightSource, embedding: Tensor, max_model_len: int) -> None:
        """Read the weights, for a model with this embedding. Raises ConfigError for what it does not take."""
        target = ModelTensors(config, source, interleaved=False)
        tensors = Eagle3Tensors(self._folder, target, config, interleaved=False)
        self._weights = load_device_head(tensors, self._format, config, embedding, max_model_len)

    def passes(
        self, registry: Registry, state: DecodeState, aux: Tensor, num_blocks: int, max_draft_rows: int
    ) -> HeadPass:
        """Return the head over a cache of its own, whose blocks have the ids of the model's.

        `aux` `[max_rows, fc_width]`: the model's rows that it reads.
        """
        assert self._weights is not None, "a head runs once it is loaded"
        settings, device, rows_type = self._settings, aux.device, self._format.rows
        max_drafting = min(settings.max_num_seqs, max_draft_rows)
        cache = DeviceCache(self._layout, num_blocks, rows_type, device)
        head = DeviceEagle3Head(self._folder.config, self._weights, self._format, registry, cache, max_drafting, device)
        # Sequences that are about to end are there beside those that run.
        reads = HeadState(
            len(aux), state.max_rows, max_drafting, min(settings.draft_tokens, MAX_DRAFT_TOKENS),
            2 * settings.max_num_seqs, num_blocks, self._folder.config.hidden_size, rows_type, device,
        )  # fmt: skip
        return HeadPass(head, state, reads, aux)


def open_draft_head(
    settings: EngineSettings, checkpoint: Checkpoint, number_format: DeviceFormat, block_size: int
) -> DeviceDraftHead | None:
    """Return the head that settings name, or None if they name none.

    Raises ConfigError as open_named_head, and for a head of several layers.
    """
    folder = open_named_head(settings, checkpoint)
    if folder is None:
        if (name := head_name(settings.speculate)) is not None:
            raise ConfigError(f"speculate is '{name}', a draft model; they draft on CPUs: take a head, ngram or suffix")
        return None
    if folder.config.num_layers != 1:
        raise ConfigError(
            f"{folder.path}/config.json: num_hidden_layers is {folder.config.num_layers}; on a GPU heads have one layer"
        )
    return DeviceDraftHead(folder, settings, number_format, block_size)


def drafter_of(launcher: Launcher, block_size: int) -> DeviceEagle3Drafter | None:
    """Return what knows on the host what a launcher's head has read; None without a head."""
    return None if launcher.head is None else DeviceEagle3Drafter(launcher.head.state, block_size)
