"""What each answer to a request needs: the result of the pipeline."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from contracts.request import AdapterRef
from contracts.sampling import SamplingParams


@dataclass(frozen=True)
class GenerationRequest:
    """One answer to produce.

    `prompt` numbers the prompts of a request; `index` is the choice the client sees.

    `echo` is shown before the answer; with `echo_offsets` the prompt's tokens are, too, and that is where they begin in
    it. `is_echo_only`: nothing of the answer is shown. `prompt_logprobs`: how many alternatives the client wants.
    `markers`: special tokens, by id, that are shown though others are skipped; behind those of `headers` no stop string
    is looked for until the next marker. `answer_prefix`: the token whose text the answer goes on from; empty if it is a
    text of its own. `begun`: what the prompt has begun of the answer's form (gateway/reasoning). `adapter`: the LoRA
    adapter that computes it.
    """

    index: int
    prompt: int
    token_ids: list[int]
    sampling: SamplingParams
    stops: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    echo: str = ""
    echo_offsets: tuple[int, ...] = ()
    is_echo_only: bool = False
    prompt_logprobs: int | None = None
    returns_token_ids: bool = False
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    weight: float = 1.0
    room: float = 1.0
    markers: Mapping[int, str] = field(default_factory=dict)
    headers: Collection[str] = ()
    answer_prefix: tuple[int, ...] = ()
    begun: str = ""
    adapter: AdapterRef | None = None

    @property
    def has_details(self) -> bool:
        return self.returns_token_ids or self.prompt_logprobs is not None
