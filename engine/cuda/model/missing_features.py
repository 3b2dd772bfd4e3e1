"""What the CPU computes and a GPU does not. Imports no torch."""

from models.config import Activation, ExpertScoring, ModelConfig, Multipliers, NormPlacement


def missing_feature(config: ModelConfig) -> str | None:
    """Return what the model has that a GPU does not compute, or None."""
    experts = config.experts
    lacking = {
        "a latent for keys and values (kv_lora_rank)": config.latent is not None,
        "experts scored by a sigmoid": experts is not None and experts.scoring is ExpertScoring.SIGMOID,
        "norms after attention and MLP": config.norms is not NormPlacement.BEFORE,
        f"{config.activation} as its activation": config.activation is not Activation.SILU,
        "multipliers of embedding, residual, attention or logits": config.multipliers != Multipliers(),
        "norms of q and k over all heads together": config.joint_qk_norm,
        "rope_parameters of their own in windowed layers": config.window_rope is not None,
        "a sliding_window": bool(config.windowed_layers) and not (config.sinks or config.segment),
        "recurrent layers": config.recurrence is not None,
        "a gate at attention's output": config.output_gate,
        "a head that classifies texts": config.num_labels > 0,
        "a gated shared_expert": experts is not None and experts.shared_size > 0,
    }
    return next((name for name, is_there in lacking.items() if is_there), None)
