"""The choice of a drafter by the settings of an engine."""

from contracts.errors import ConfigError
from engine.settings import EngineSettings
from engine.speculative.ngram import NgramProposer
from engine.speculative.proposer import Proposer
from engine.speculative.speculator import Speculator
from engine.speculative.suffix import SuffixProposer
from engine.speculative.suffix_first import SuffixFirstProposer

OFF, AUTO = "off", "auto"
PROPOSERS: dict[str, type[Proposer]] = {"ngram": NgramProposer, "suffix": SuffixProposer}
"""The drafters without weights, by the name that `speculate` has for each."""
AUTO_PROPOSER = "suffix"
MAX_DRAFT_ROWS = 192
"""What a step on a GPU may compute of drafts: three tokens each of 64 answers, beyond which few rows pay."""
EAGLE3 = "eagle3"
"""The name of the head that comes with the package for the model; what else has weights is named by a path."""
MTP = "mtp"
"""The name of the model's own layer for multi-token prediction, which drafts on a CPU."""
SUFFIX_FIRST = "suffix+"
"""What stands before the name of a head or a model for drafts from texts where these have a long match."""


def speculator_of(settings: EngineSettings, max_model_len: int, drafter: Proposer | None) -> Speculator | None:
    """Return what drafts for this engine, or None. Raises ConfigError, which names the field.

    `drafter`: of the head or the model that settings name, if they name one.
    """
    name = proposer_name(settings.speculate, settings.device)
    if name is None:
        if settings.synthetic_acceptance:
            raise ConfigError(
                f"synthetic_acceptance needs drafts, and speculate is '{settings.speculate}': name a drafter"
            )
        return None
    if settings.draft_tokens < 1:
        raise ConfigError(f"draft_tokens is {settings.draft_tokens}; a draft has 1 token at least: speculate=off")
    if head_name(name) is None:
        proposer = PROPOSERS[name]()
    else:
        assert drafter is not None, f"the backend was loaded without {name}"
        proposer = SuffixFirstProposer(drafter) if name.startswith(SUFFIX_FIRST) else drafter
    return Speculator(proposer, settings.draft_tokens, max_model_len, settings.adapts_drafts)


def max_draft_rows(settings: EngineSettings) -> int:
    """Return how many rows of a step on a GPU may be of drafts, for which it captures its graphs.

    Raises ConfigError for a drafter that it does not have.
    """
    name = proposer_name(settings.speculate, settings.device)
    if name is None:
        return 0
    if settings.tensor_parallel > 1 and head_name(name) is not None:
        raise ConfigError(
            f"tensor_parallel is {settings.tensor_parallel} and speculate '{name}'; heads draft on one GPU: take suffix"
        )
    return min(settings.max_num_seqs * settings.draft_tokens, MAX_DRAFT_ROWS)


def head_name(speculate: str) -> str | None:
    """Return which head or model is to draft, EAGLE3, MTP or a path; None for none."""
    name = speculate.removeprefix(SUFFIX_FIRST)
    return name if name in (EAGLE3, MTP) or "/" in name else None


def proposer_name(speculate: str, device: str) -> str | None:
    """Return the drafter's name for a device, or None for none. Raises ConfigError, which says what to do."""
    is_cpu = device == "cpu"
    if speculate == OFF or (speculate == AUTO and not is_cpu):
        return None
    if speculate != AUTO and speculate not in PROPOSERS and head_name(speculate) is None:
        known = ", ".join((AUTO, OFF, *PROPOSERS, EAGLE3, MTP, SUFFIX_FIRST + EAGLE3, SUFFIX_FIRST + MTP))
        raise ConfigError(
            f"speculate is '{speculate}'; it may be {known}, or the path of a head or a smaller model, with a /, or "
            f"{SUFFIX_FIRST} and this path"
        )
    return AUTO_PROPOSER if speculate == AUTO else speculate
