"""The names under which vLLM's dashboards look for what a gateway knows.

Times are in seconds, lengths in tokens.
"""

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gateway.dispatch.dispatcher import Dispatcher
from gateway.generation.generation_state import GenerationState
from gateway.generation.usage import Usage

_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
_PER_TOKEN = (
    0.001, 0.0025, 0.005, 0.0075,
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
"""vLLM's, which begin at 0.01, and four finer ones: most gaps here are shorter than that."""
_LATENCY = (
    0.01, 0.025, 0.05, 0.1, 0.2,
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
"""vLLM's, which begin at 0.3, and five finer ones."""
_ANSWERS = (1, 2, 5, 10, 20)
_LABELS = ("model_name", "engine")

COUNTERS = {
    "prompt_tokens": "prompt tokens",
    "generation_tokens": "accepted answer tokens",
    "prompt_tokens_cached": "prompt tokens that a prefix cache had",
    "prefix_cache_queries": "prompt tokens looked up in a prefix cache",
    "prefix_cache_hits": "prompt tokens found there",
    "gpu_prefix_cache_queries": "the same under its old name",
    "gpu_prefix_cache_hits": "the same under its old name",
}
TIMES = {
    "time_to_first_token_seconds": "from the request to its first token",
    "inter_token_latency_seconds": "between two tokens of an answer",
    "time_per_output_token_seconds": "the same under its old name",
    "request_time_per_output_token_seconds": "mean of an answer's gaps",
    "e2e_request_latency_seconds": "from the request to its end",
    "request_queue_time_seconds": "waiting for prefill, as its worker tells",
    "request_prefill_time_seconds": "computing the prompt, as its worker tells",
    "request_decode_time_seconds": "from the first token to the last",
    "request_inference_time_seconds": "prefill and decode",
}
LENGTHS = {
    "request_prompt_tokens": "of a request",
    "request_generation_tokens": "of an answer",
    "request_max_num_generation_tokens": "of the longest answer of a request",
    "request_params_n": "answers asked for",
    "request_params_max_tokens": "most tokens asked for",
}


SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


class VllmMetrics:
    """The families of vLLM that a gateway knows by itself."""

    def __init__(self, registry: CollectorRegistry, dispatch: Dispatcher, model: str, max_model_len: int) -> None:
        own = {"registry": registry, "labelnames": _LABELS}
        labels = (model, "0")
        self._counters = {name: Counter(f"vllm:{name}", text, **own).labels(*labels) for name, text in COUNTERS.items()}
        self._histograms = {
            name: Histogram(f"vllm:{name}", text, buckets=_buckets(name, max_model_len), **own).labels(*labels)
            for name, text in (TIMES | LENGTHS).items()
        }
        words = "prompt tokens as each worker got them"
        sources = Counter("vllm:prompt_tokens_by_source", words, (*_LABELS, "source"), registry=registry)
        self._sources = {source: sources.labels(*labels, source) for source in SOURCES}
        success = Counter("vllm:request_success", "ended answers", (*_LABELS, "finished_reason"), registry=registry)
        self._ended = {why: success.labels(*labels, why) for why in ("stop", "length", "abort", "error")}
        for name, count in _gauges(dispatch).items():
            Gauge(f"vllm:{name}", "answers", **own).labels(*labels).set_function(count)

    def count(
        self,
        answers: Sequence[GenerationState],
        usage: Usage,
        work: Usage,
        started_s: float,
        now: float,
        is_error: bool,
    ) -> None:
        """Count a request that had a place and has ended, by whatever end.

        `work`: what the workers computed of it. Times are of the monotonic clock.
        """
        prefix_cache = (work.prompt_tokens, work.cached_tokens)
        counts = (work.prompt_tokens, work.completion_tokens, work.cached_tokens, *prefix_cache, *prefix_cache)
        for counter, value in zip(self._counters.values(), counts, strict=True):
            counter.inc(value)
        handed_over = _prompt_tokens([answer for answer in answers if _was_handed_over(answer)])
        computed = work.prompt_tokens - work.cached_tokens
        for source, tokens in zip(SOURCES, (computed, work.cached_tokens, handed_over), strict=True):
            self._sources[source].inc(tokens)
        for answer in answers:
            self._ended[answer.finish or ("error" if is_error else "abort")].inc()
        for name, values in _observed(answers, usage, started_s, now).items():
            for value in values:
                self._histograms[name].observe(value)


def _buckets(name: str, max_model_len: int) -> Sequence[float]:
    if name == "time_to_first_token_seconds":
        return _FIRST_TOKEN
    if name in TIMES:
        return _PER_TOKEN if "token" in name else _LATENCY
    return _ANSWERS if name == "request_params_n" else _one_two_five(max_model_len)


def _one_two_five(most: int) -> list[int]:
    """Return 1, 2, 5, 10, ... up to `most`."""
    scales = (10**power for power in range(len(str(most))))
    return [digit * scale for scale in scales for digit in (1, 2, 5) if digit * scale <= most]


def _was_handed_over(answer: GenerationState) -> bool:
    """Its prompt's KV went from one worker to another, once its first token was there."""
    return answer.num_tokens > 0 and len({*answer.servers.values()}) > 1


def _prompt_tokens(answers: Sequence[GenerationState]) -> int:
    return sum(len(answer.request.token_ids) for answer in answers)


def _gauges(dispatch: Dispatcher):
    return {
        "num_requests_running": lambda: dispatch.num_answering,
        "num_requests_waiting": lambda: dispatch.num_inflight - dispatch.num_answering,
    }


def _observed(
    answers: Sequence[GenerationState], usage: Usage, started_s: float, now: float
) -> dict[str, Iterable[float]]:
    begun = [answer for answer in answers if answer.first_s is not None]
    stages_s = [answer.stages_s for answer in begun]
    sampling = answers[0].request.sampling
    decode_s = [(answer.last_s or 0.0) - (answer.first_s or 0.0) for answer in begun]
    return {
        "time_to_first_token_seconds": [min(answer.first_s or 0.0 for answer in begun) - started_s] if begun else [],
        "inter_token_latency_seconds": [gap for answer in begun for gap in answer.gaps_s],
        "time_per_output_token_seconds": [gap for answer in begun for gap in answer.gaps_s],
        "request_time_per_output_token_seconds": [sum(a.gaps_s) / len(a.gaps_s) for a in begun if a.gaps_s],
        "e2e_request_latency_seconds": [now - started_s],
        "request_queue_time_seconds": _told(stages_s, "prefill_queue"),
        "request_prefill_time_seconds": _told(stages_s, "prefill_prefill"),
        "request_decode_time_seconds": decode_s,
        "request_inference_time_seconds": [
            told.get("prefill_prefill", 0.0) + s for told, s in zip(stages_s, decode_s, strict=True)
        ],
        "request_prompt_tokens": [usage.prompt_tokens],
        "request_generation_tokens": [answer.num_tokens for answer in answers],
        "request_max_num_generation_tokens": [max(answer.num_tokens for answer in answers)],
        "request_params_n": [len(answers)],
        "request_params_max_tokens": [sampling.max_tokens],
    }


def _told(stages_s: Sequence[Mapping[str, float]], stage: str) -> list[float]:
    return [told[stage] for told in stages_s if stage in told]
