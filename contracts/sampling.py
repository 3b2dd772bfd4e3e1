"""How the next token is chosen.

Everything the engine needs, nothing that only text needs (stop strings live in the gateway).
"""

import msgspec

MIN_TEMPERATURE = 1e-5


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Validated by the gateway; the engine trusts it.

    A temperature below MIN_TEMPERATURE is greedy: logits divided by it are no numbers any more. So is a top_k of 1,
    though more tokens may be as likely. `seed` is always set: drawn by the gateway if the client gave none, so a replay
    at position n draws the same number on any machine.
    `choice` numbers the answers of one prompt (`n > 1`) and enters the draw. `logprobs`: None for none, else how many
    alternatives beside the chosen token; `prompt_logprobs`: the same of the prompt's own tokens. `grammar`:
    llguidance's own form of what the answer must look like; empty for anything. Nothing can follow where it ends, so
    `ignore_eos` does not go with it.
    `bad_words`: token sequences that the answer never completes. `allowed_token_ids`: nothing else is ever chosen;
    empty for all.
    """

    max_tokens: int
    seed: int
    choice: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: str = ""
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()

    @property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE or self.top_k == 1
