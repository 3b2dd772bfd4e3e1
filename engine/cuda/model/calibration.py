"""Static scales for a checkpoint that brings none.

Twice the largest magnitudes over a text is the end of e4m3. And what smooth keys lose.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from contracts.ids import RequestId
from contracts.sampling import SamplingParams
from engine.cuda.inputs.batch_inputs import prompt_rows
from engine.cuda.kv.kv_cache import DeviceCache
from engine.cuda.model.attention import DeviceAttention
from engine.cuda.model.forward_inputs import Rows
from engine.cuda.model.transformer import Transformer, without_sinks
from engine.cuda.model.weights import MIN_SCALE
from engine.cuda.runtime.upload import upload_all
from engine.scheduler.batch import ScheduledChunk
from engine.sequence import Sequence
from kernels.reference.quant import E4M3_MAX

_MARGIN = 2.0
# Of what smooth keys lose, the first token's share: much of attention goes there, and its key is unlike the others.
# Of 0, 0.15 and 0.3 this one cost SmolLM2 least (docs/models.md, "What FP8 costs").
_FIRST_SHARE = 0.3

TEXT = """The history of the lighthouse begins with fires on hilltops. When trade grew, towers of stone took their
place; the tallest of them stood at Alexandria for over 1500 years. Question: how far can a light at 40 m be seen? The
distance to the horizon is about 3.57 * sqrt(h) km, so sqrt(40) = 6.32 gives 22.6 km. Answer: roughly 23 kilometres.

def horizon_km(height_m: float) -> float:
    \"\"\"Distance to the horizon over a calm sea.\"\"\"
    return 3.57 * height_m ** 0.5

print([round(horizon_km(h), 1) for h in (2, 10, 40, 100)])  # [5.0, 11.3, 22.6, 35.7]

| place | year | height (m) |
|---|---|---|
| Eddystone | 1882 | 49 |
| Le Phare du Creach | 1863 | 55 |

Dear Ms. Keller, thank you for your letter of 3 March. We would be glad to show you the lamp room; please bring good
shoes! Der Leuchtturm ist von April bis Oktober geöffnet. Le phare est fermé le lundi. El faro abre a las diez.
{"name": "Cape Hatteras", "height_m": 64, "stripes": ["black", "white"], "lit": true}
"""


def compute_prompt(model: Transformer, attention: DeviceAttention, cache: DeviceCache, token_ids: list[int]) -> None:
    """Computes them as one prompt, from the cache's first block on."""
    sequence = Sequence(RequestId("calibration"), token_ids, SamplingParams(max_tokens=1, seed=0))
    sequence.blocks.extend(range(cache.layout.num_blocks(len(token_ids))))
    rows = prompt_rows([ScheduledChunk(sequence, 0, len(token_ids))], cache.layout.block_size)
    columns = rows.token_ids, rows.positions, rows.slots, np.zeros(1, np.int32)
    ids, positions, slots, no_decodes = upload_all(columns, cache.device)
    model.head(model(Rows(ids, positions, slots, no_decodes), cache, attention.of_prompts(rows.queries))[-1:])


@dataclass(frozen=True)
class Scales:
    """`[layers, 2]` each.

    `activations`: attention's output and the MLP's middle, for the fused step; `kv`, on the host: K and V in the cache.
    `k_offsets` `[layers, kv_heads, head_dim]`, if keys are smooth.
    """

    activations: Tensor
    kv: Tensor
    k_offsets: Tensor | None = None

    def replaced(self, activations: Tensor | None, kv: Tensor | None) -> "Scales":
        """With those that are there instead."""
        activations = self.activations if activations is None else activations
        return replace(self, activations=activations, kv=self.kv if kv is None else kv)


def calibrate(model: Transformer, attention: DeviceAttention, cache: DeviceCache, token_ids: list[int]) -> Scales:
    """`cache` is fresh: its scales are 1 and its offsets 0, and what is not written is 0."""
    num_layers = cache.layout.only_group.num_layers
    model.peaks = torch.zeros(num_layers, 2, device=cache.device)
    compute_prompt(model, attention, cache, token_ids)
    activations, model.peaks = model.peaks * _MARGIN, None
    layers = [cache.layer(index) for index in range(num_layers)]
    keys = torch.stack([_of_tokens(layer.keys, len(token_ids)) for layer in layers])
    values = torch.stack([_of_tokens(layer.values, len(token_ids)) for layer in layers])
    offsets = _offsets(keys) if model.is_smooth else None
    if offsets is not None:
        keys -= offsets[:, None]
    largest = torch.stack([part.abs().flatten(1).amax(1) for part in (keys, values)], 1)
    kv = _power((largest * _MARGIN / E4M3_MAX).clamp(min=MIN_SCALE)).cpu()
    return Scales(activations, kv, offsets)


def _of_tokens(pages: Tensor, count: int) -> Tensor:
    """`[count, kv_heads, head_dim]` of a prompt that begins with the first of the pages."""
    return pages.transpose(1, 2).flatten(0, 1)[:count].float()


def _offsets(keys: Tensor) -> Tensor:
    """Return about what all keys of a head share.

    `keys` `[layers, tokens, kv_heads, head_dim]`: about what all keys of a head share (as SageAttention takes their
    mean away: Zhang et al. 2024), on the grid of e4m3, so that sums of another order seldom give another one.
    """
    shared = _FIRST_SHARE * keys[:, 0] + (1 - _FIRST_SHARE) * without_sinks(keys, 1).mean(1)
    return shared.to(torch.float8_e4m3fn).float()


def _power(scales: Tensor) -> Tensor:
    """The next power of two, which costs e4m3 no bit.

    So workers of other numbers of GPUs, whose sums differ in the last place, have the same scales, unless one is next
    to a power of two, and pages of one can be read by the other.
    """
    return scales.log2().ceil().exp2()
