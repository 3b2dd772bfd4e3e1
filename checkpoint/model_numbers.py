"""The check of a whole ModelConfig: numbers that files state, and those that families compute."""

from checkpoint.validation import require_amount, require_count, require_head_dim
from contracts.errors import ConfigError
from models.config import Experts, LatentAttention, LongRopeScaling, ModelConfig

_GGUF_NAMES = {
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_model_len": "context_length",
    "intermediate_size_mlp": "feed_forward_length",
    "sliding_window": "attention.sliding_window",
    "rope_local_base_freq": "rope.freq_base_swa",
    "num_experts or num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "routed_scaling_factor": "expert_weights_scale",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "query_pre_attn_scalar or attention_multiplier": "attention.scale",
    "short_factor": "rope_factors_short.weight",
    "long_factor": "rope_factors_long.weight",
}
"""Fields as a config.json has them, and what a GGUF file calls them behind its architecture."""


def require_model(model: ModelConfig, file: object, is_gguf: bool = False) -> None:
    """Raise ConfigError that names the field of the file for a number that can't be computed with."""
    numbers = _Numbers(file, is_gguf)
    numbers.amount("rms_norm_eps", model.norm_eps)
    numbers.amount("rope_theta", model.rope_theta, above=1)
    numbers.count("max_model_len", model.max_model_len)
    numbers.count("intermediate_size_mlp", model.intermediate_size)  # a config.json's other one is checked before
    if model.num_heads % model.num_kv_heads:
        heads, kv_heads = numbers.name("num_attention_heads"), numbers.name("num_key_value_heads")
        raise ConfigError(
            f"{file}: {heads} is {model.num_heads}; a multiple of {kv_heads}, {model.num_kv_heads}, is expected"
        )
    numbers.windows(model)
    numbers.longrope(model)
    numbers.multipliers(model)
    if model.latent is None:
        require_head_dim(model.head_dim, numbers.name("head_dim"), file)
    else:
        numbers.latent(model.latent)
    if model.num_mtp_layers != 0:
        numbers.count("num_nextn_predict_layers", model.num_mtp_layers)
    if model.experts is not None:
        numbers.experts(model.experts)


class _Numbers:
    """The checks, by the names that a kind of file has for the fields."""

    def __init__(self, file: object, is_gguf: bool) -> None:
        self._file, self._is_gguf = file, is_gguf

    def name(self, field: str) -> str:
        return _GGUF_NAMES[field] if self._is_gguf else field

    def count(self, field: str, value: object) -> None:
        require_count(value, self.name(field), self._file)

    def amount(self, field: str, value: object, above: float = 0) -> None:
        require_amount(value, self.name(field), self._file, above)

    def windows(self, model: ModelConfig) -> None:
        if model.windowed_layers and model.segment:
            require_count(model.segment, "attention_chunk_size", self._file)
        elif model.windowed_layers:
            self.count("sliding_window", model.window)
        if model.window_rope is not None:
            self.amount("rope_local_base_freq", model.window_rope.theta, above=1)

    def longrope(self, model: ModelConfig) -> None:
        """Require one factor for each pair of columns that is turned."""
        scaling, num_pairs = model.rope_scaling, model.rotary_width // 2
        if not isinstance(scaling, LongRopeScaling):
            return
        for field, factors in (("long_factor", scaling.long_factors), ("short_factor", scaling.short_factors)):
            if len(factors) != num_pairs:
                raise ConfigError(
                    f"{self._file}: {self.name(field)} has {len(factors)} numbers; heads of {model.head_dim} columns, "
                    f"of which {model.rotary_width} are turned, have {num_pairs} pairs"
                )

    def multipliers(self, model: ModelConfig) -> None:
        stated = model.multipliers
        self.amount("embedding_multiplier", stated.embedding)
        self.amount("residual_multiplier", stated.residual)
        self.amount("logits_scaling", stated.logits)
        if stated.attention is not None:
            self.amount("query_pre_attn_scalar or attention_multiplier", stated.attention)

    def latent(self, latent: LatentAttention) -> None:
        require_head_dim(latent.rope_dim, self.name("qk_rope_head_dim"), self._file)
        self.count("kv_lora_rank", latent.kv_rank)
        if latent.kv_rank % 2:
            raise ConfigError(
                f"{self._file}: {self.name('kv_lora_rank')} is {latent.kv_rank}; an even number is expected"
            )
        self.count("qk_nope_head_dim", latent.nope_dim)
        self.count("v_head_dim", latent.value_dim)
        if latent.q_rank != 0:
            self.count("q_lora_rank", latent.q_rank)

    def experts(self, experts: Experts) -> None:
        self.count("num_experts or num_local_experts", experts.count)
        self.count("num_experts_per_tok", experts.top_k)
        self.count("moe_intermediate_size", experts.intermediate_size)
        if experts.shared_size != 0:
            self.count("shared_expert_intermediate_size", experts.shared_size)
        self.amount("routed_scaling_factor", experts.scale)
