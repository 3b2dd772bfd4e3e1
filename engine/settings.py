"""The settings of one engine, made of a worker's (worker.settings) in worker.core.main."""

from dataclasses import dataclass
from pathlib import Path

MAX_DRAFT_TOKENS = 16
"""The longest draft, in tokens."""


@dataclass(frozen=True)
class EngineSettings:
    """The model, the device and the limits of one engine.

    `model`: see checkpoint.open_checkpoint. `dtype`: "auto", "native" or one of
    engine.cpu.linear.FORMATS.

    None leaves a value to the engine: `kv_cache_nbytes` what a trial needs (cache.sizing), on a GPU what is free;
    `max_model_len` the model's own, as far as the cache holds it; `num_threads` torch's default. `max_batched_tokens`
    is the token budget of one step, `max_mixed_tokens` that of one with answers, None the same
    (scheduler.SchedulerLimits); steps with answers have less where gaps would be longer than `itl_objective_s`, unless
    it is 0.0. What was found out about the CPU is remembered in `cache_dir`. A cache on a GPU that
    takes what is free leaves `spare_nbytes` to others. `tensor_parallel` GPUs, `device` the first of them, share the
    model.

    `speculate`: what guesses tokens, see engine.speculative.choice, and `draft_tokens` of them at most for each answer
    in a step; all of these always, unless `adapts_drafts`. `synthetic_acceptance`: tokens that a round gives whatever
    the model says, see engine.speculative.acceptance_rule; 0.0: the model decides.

    `lora_modules`: the LoRA adapters that are loaded at start, as (name, path); `enable_lora`: others may follow.

    `keeps_whole_blocks`: pages of windows stay as long as their blocks, as tiers below the cache need it, which take
    and give whole blocks.
    """

    model: str = ""
    dtype: str = "auto"
    block_size: int = 16
    kv_cache_nbytes: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_batched_tokens: int = 1024
    max_mixed_tokens: int | None = None
    itl_objective_s: float = 0.0
    num_threads: int | None = None
    device: str = "cpu"
    tensor_parallel: int = 1
    spare_nbytes: int = 0
    prefix_cache: bool = True
    speculate: str = "off"
    draft_tokens: int = 3
    adapts_drafts: bool = True
    synthetic_acceptance: float = 0.0
    enable_lora: bool = False
    lora_modules: tuple[tuple[str, str], ...] = ()
    keeps_whole_blocks: bool = False
    max_num_waiting: int = 1024
    cache_dir: Path = Path.home() / ".cache" / "tandem"

    @property
    def has_lora(self) -> bool:
        """Return whether adapters are served, or may be."""
        return self.enable_lora or bool(self.lora_modules)

    def rounding(self, dtype: str) -> str:
        """Return what tells this engine's KV from that of workers which compute other values, see KVLayout.

        Behind tokens that were kept whatever the model said, KV is of a text that is not the one it is filed under.
        """
        return f"{dtype}, synthetic acceptance" if self.synthetic_acceptance else dtype
