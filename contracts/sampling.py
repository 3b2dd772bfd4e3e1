"""The parameters by which the next token is chosen.

They are all that the engine needs, and nothing that only text needs (stop strings live in the gateway).
"""

import msgspec

MIN_TEMPERATURE = 1e-5


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The sampling parameters of a request, validated by the gateway and trusted by the engine.

    A temperature below MIN_TEMPERATURE is greedy, because logits divided by it overflow. So is a top_k of 1, even if
    more tokens are equally likely. `seed` is always set, by the gateway if the client gave none, so that a replay at
    position n draws the same number on any machine.

    `choice` numbers the answers to one prompt (`n > 1`) and enters the draw. `logprobs` is None for none, or the number
    of alternatives beside the chosen token; `prompt_logprobs` is the same for the prompt's own tokens. If
    `logprob_token_ids` has any, the alternatives are the chosen token and those, whatever their number. `grammar` is
    llguidance's form of what the answer must look like; empty for anything. Nothing can follow where it ends, so
    `ignore_eos` can't be combined with it. `bad_words` are token sequences that the answer never completes. If
    `allowed_token_ids` has any, only those are chosen.
    `speculate` allows speculative decoding, where a worker does it. `returns_embedding`: with token 0 comes what the
    model makes of the prompt's last token.
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
    logprob_token_ids: tuple[int, ...] = ()
    grammar: str = ""
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    speculate: bool = True
    returns_embedding: bool = False

    @property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE or self.top_k == 1
