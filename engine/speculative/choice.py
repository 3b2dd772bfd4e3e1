"""The choice of a drafter by the settings of an engine."""

from contracts.errors import ConfigError
from engine.settings import EngineSettings
from engine.speculative.ngram import NgramProposer
from engine.speculative.proposer import Proposer
from engine.speculative.speculator import Speculator
from engine.speculative.suffix import SuffixProposer

OFF, AUTO = "off", "auto"
PROPOSERS: dict[str, type[Proposer]] = {"ngram": NgramProposer, "suffix": SuffixProposer}
"""The drafters without weights, by the name that `speculate` has for each."""
AUTO_PROPOSER = "suffix"


def speculator_of(settings: EngineSettings, max_model_len: int) -> Speculator | None:
    """Return what drafts for this engine, or None. Raises ConfigError, which names the field."""
    name = proposer_name(settings.speculate, settings.device)
    if name is None:
        return None
    if settings.draft_tokens < 1:
        raise ConfigError(f"draft_tokens is {settings.draft_tokens}; a draft has 1 token at least: speculate=off")
    return Speculator(PROPOSERS[name](), settings.draft_tokens, max_model_len, settings.adapts_drafts)


def proposer_name(speculate: str, device: str) -> str | None:
    """Return the drafter's name for a device, or None for none. Raises ConfigError, which says what to do."""
    is_cpu = device == "cpu"
    if speculate == OFF or (speculate == AUTO and not is_cpu):
        return None
    if speculate != AUTO and speculate not in PROPOSERS:
        known = ", ".join((AUTO, OFF, *PROPOSERS))
        raise ConfigError(f"speculate is '{speculate}'; it may be {known}")
    if not is_cpu:
        raise ConfigError(f"speculate is '{speculate}' on {device}; drafts are verified on the CPU only: set it to off")
    return AUTO_PROPOSER if speculate == AUTO else speculate
