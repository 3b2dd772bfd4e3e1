"""The same weights in transformers: the reference for numbers and the peer for speed."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from checkpoint import Checkpoint
from checkpoint.checkpoint import WeightFormat
from engine.model_loader.checkpoint_weights import open_weights


def oracle(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a transformers model in eval mode, with the dequantized weights of a GGUF file if it is one."""
    if checkpoint.format is WeightFormat.SAFETENSORS:
        return AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=dtype).eval()
    config = checkpoint.config
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            max_position_embeddings=config.max_model_len,
            tie_word_embeddings=config.tied_embeddings,
        )
    )
    source = open_weights(checkpoint)
    for name, parameter in model.named_parameters():
        tensor = source.tensor(name)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = _to_halves(tensor, config.head_dim)
        parameter.data.copy_(tensor)
    torch.nn.Module.to(model, dtype)
    return model.eval()


def _to_halves(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Undo the row order of llama.cpp's converter.

    It puts rotary pairs side by side; transformers rotates halves.
    """
    pairs = weight.view(-1, head_dim // 2, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)


@torch.inference_mode()
def greedy(model: PreTrainedModel, token_ids: list[int], num_tokens: int) -> list[int]:
    """Return the greedy continuation.

    transformers' own `generate` is not used, because it masks prompts that contain its padding token.
    """
    answer: list[int] = []
    step = model(torch.tensor([token_ids]), use_cache=True, logits_to_keep=1)
    while len(answer) < num_tokens:
        answer.append(int(step.logits[0, -1].argmax()))
        step = model(torch.tensor([answer[-1:]]), past_key_values=step.past_key_values, use_cache=True)
    return answer
