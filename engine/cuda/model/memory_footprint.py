"""What a model's weights take of a GPU's memory, before any of them is read. Imports no torch."""

from checkpoint import Checkpoint
from models.config import ModelConfig

_NBYTES = {"float32": 4.0, "bfloat16": 2.0, "float8": 1.0, "float8-head": 1.0, "int4": 0.5}
_MXFP4_NBYTES = 17 / 32  # half a byte, and a byte for each 32


def least_weights_nbytes(checkpoint: Checkpoint, dtype: str, num_gpus: int = 1) -> int:
    """Return the bytes of the weights on the fullest of `num_gpus` that share the model.

    `dtype`: of format_choice.DEVICE_DTYPES. It takes no less than this, and some percent more: matrices are counted, as
    if all of a quantized checkpoint's were so, without scales, norms and biases.

    By the shapes that the configuration says, for those alone are loaded; a file may hold more, such as a vision tower.
    """
    config = checkpoint.config
    plain = _NBYTES["float32" if dtype == "float32" else "bfloat16"]
    table = config.vocab_size * config.hidden_size
    matrices = _num_dense(config) * _NBYTES[dtype] + _num_of_experts(config) * _expert_nbytes(config, dtype)
    head = 0.0 if config.tied_embeddings else plain
    if dtype == "float8-head" or (checkpoint.quantization is not None and not config.tied_embeddings):
        head = _NBYTES[dtype]
    return int(plain * table + (matrices + head * table) / num_gpus)


def _num_dense(config: ModelConfig) -> int:
    """Elements of attention's matrices, and of the MLPs that all tokens go through."""
    attention = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    experts = config.experts
    of_all = 0 if experts is None else len(experts.dense_layers)
    num_mlps = config.num_layers if experts is None else of_all
    inner = num_mlps * config.intermediate_size
    if experts is not None and experts.as_llama4:
        inner += (config.num_layers - of_all) * experts.intermediate_size
    return config.hidden_size * (config.num_layers * attention + 3 * inner)


def _num_of_experts(config: ModelConfig) -> int:
    experts = config.experts
    if experts is None:
        return 0
    num_layers = config.num_layers - len(experts.dense_layers)
    return num_layers * experts.count * 3 * config.hidden_size * experts.intermediate_size


def _expert_nbytes(config: ModelConfig, dtype: str) -> float:
    """Return the bytes of an element: grouped products take no INT4, and MXFP4 stays so beside bf16 rows."""
    if config.experts is not None and config.experts.is_mxfp4 and dtype != "float32":
        return _MXFP4_NBYTES
    return _NBYTES["bfloat16" if dtype == "int4" else dtype]
