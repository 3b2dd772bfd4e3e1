"""The findings of `tandem doctor` about what may guess tokens of a model's answers."""

from collections.abc import Iterator

from checkpoint import open_checkpoint
from checkpoint.huggingface.eagle3_folder import open_eagle3, shipped_head
from checkpoint.huggingface.safetensors_index import weight_files
from contracts.errors import ConfigError
from engine.speculative.choice import EAGLE3, MTP, PROPOSERS, proposer_name


def draft_words(model: str) -> Iterator[str]:
    """Yield a line for each way; nothing about a model that can't be opened, which is told elsewhere."""
    yield (
        f"--speculate {', '.join(PROPOSERS)}: guess tokens without weights, as many as pay by what steps take and how "
        f"many guesses are right; auto takes {proposer_name('auto', 'cpu')} on a CPU, and nothing on a GPU"
    )
    try:
        checkpoint = open_checkpoint(model)
    except ConfigError:
        return
    if checkpoint.config.num_mtp_layers == 1:
        yield f"--speculate {MTP}: the model's layer for multi-token prediction drafts, on a CPU"
    folder = shipped_head(checkpoint.name)
    if folder is None:
        words = f"no EAGLE3 head comes with this package for {checkpoint.name}"
        yield f"{words}; --speculate takes the folder of one, or a smaller model with the same tokens"
        return
    head = open_eagle3(folder, checkpoint.config).config
    nbytes = sum(file.stat().st_size for file in weight_files(folder))
    yield (
        f"--speculate {EAGLE3}: the EAGLE3 head that comes with the package, {nbytes / 1e6:.1f} MB, drafts "
        f"{head.draft_vocab_size} of {head.vocab_size} tokens from layers {', '.join(map(str, head.aux_layers))}; "
        f"in a pair both workers take the same, or drafts begin behind the prompt; suffix+{EAGLE3} asks it where the "
        "text says nothing"
    )
