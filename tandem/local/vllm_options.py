"""The options of `vllm serve`, translated to those of `tandem up`.

What these mean is in tandem.local.settings, worker.settings and gateway.settings.
"""

import json
from collections.abc import Sequence

from contracts.errors import ConfigError

SAME = {
    "-tp": "--tensor-parallel",
    "--tensor-parallel-size": "--tensor-parallel",
    "--max-num-batched-tokens": "--max-batched-tokens",
    "--tool-call-parser": "--tool-parser",
}
"""vLLM's name of an option -> ours."""

DTYPES = {"half": "float16", "float": "float32"}

ALWAYS = {
    "--enable-auto-tool-choice": 0,
    "--enable-prefix-caching": 0,
    "--enable-chunked-prefill": 0,
    "--enable-prompt-tokens-details": 0,
    "--enable-request-id-headers": 0,
    "--enable-server-load-tracking": 0,
    "--disable-log-requests": 0,
    "--reasoning-parser": 1,
    "--scheduling-policy": 1,
}
"""The options whose effect is always on here -> how many words follow each."""

OTHERWISE = {
    "--gpu-memory-utilization": "the KV cache takes what is free; TANDEM_KV_CACHE_MIB sets its size",
    "--kv-cache-memory-bytes": "TANDEM_KV_CACHE_MIB sets the size of the KV cache",
    "--kv-cache-dtype": "the KV cache is as --dtype has the rest",
    "--data-parallel-size": "--prefill, --decode and --mixed say how many workers there are",
    "-dp": "--prefill, --decode and --mixed say how many workers there are",
    "--pipeline-parallel-size": "a model is split by --tensor-parallel alone",
    "-pp": "a model is split by --tensor-parallel alone",
    "--quantization": "a quantized checkpoint says so itself; --dtype quantizes others",
    "-q": "a quantized checkpoint says so itself; --dtype quantizes others",
    "--allowed-origins": "TANDEM_CORS_ORIGINS names the sites, with commas",
    "--trust-remote-code": "no code of a model's folder is run",
    "--max-lora-rank": "adapters of any rank are served; leave it out",
    "--max-loras": "all adapters that are loaded may be in one batch; leave it out",
    "--max-cpu-loras": "all adapters that are loaded stay in memory; leave it out",
    "--fully-sharded-loras": "adapters are served on CPUs, which share no model; leave it out",
    "--ssl-keyfile": "let a proxy end TLS",
    "--ssl-certfile": "let a proxy end TLS",
    "--uds": "the gateway listens on TCP: --host and --port",
    "--config": "every setting is an environment variable: TANDEM_<NAME>",
    "--enforce-eager": "there is no such choice; leave it out",
    "--seed": "each request may bring its `seed`",
    "--max-num-queued-reqs": "TANDEM_MAX_INFLIGHT limits the answers in progress",
}
"""The options without an equal here -> the advice for each."""


ENABLE_LORA = "--enable-lora"
"""The option that has no value there, and one here."""
LORA_MODULES = "--lora-modules"
"""The option with several words, NAME=PATH or JSON, which ours has with commas."""
SPECULATION = "--speculative-config"
_WITH_WEIGHTS = ("draft_model",)
"""The methods that need a model of their own; `eagle3` may have one."""
DRAFTERS = ("ngram", "suffix", "eagle3", "mtp")
"""The methods of vLLM's that are served here, by the same names; a head's folder in place of `eagle3`."""

LENGTHS = {"--max-model-len", "--max-num-seqs", "--max-num-batched-tokens"}
"""The options whose number may have a unit."""
UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def translated(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the command line with our options, and a line for each option that changes nothing.

    A model may be named first, without `--model`. Raises ConfigError on an option that has no place here.
    """
    words, notes, told = list(argv), [], []
    if words and not words[0].startswith("-"):
        words[:1] = ["--model", words[0]]
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if flag in OTHERWISE:
            raise ConfigError(f"{flag} is an option of vLLM's: {OTHERWISE[flag]}")
        if flag == SPECULATION:
            told += _speculation(value if equals else words.pop(0) if words else "")
            continue
        if flag == LORA_MODULES:
            given = [value] if equals else []
            while words and not words[0].startswith("-"):
                given.append(words.pop(0))
            told += [flag, ",".join(map(_adapter, given))]
            continue
        if word == ENABLE_LORA:
            told.append(f"{word}=true")
            continue
        if flag in ALWAYS:
            del words[: 0 if equals else ALWAYS[flag]]
            notes.append(f"{flag} changes nothing: it is so without it")
            continue
        told.append(SAME.get(flag, flag) + equals + _value(flag, value))
        if words and not equals:
            words[0] = _value(flag, words[0])
    return told, notes


def _speculation(given: str) -> list[str]:
    """Return our options for the JSON of vLLM's. Raises ConfigError for what it has that is not served."""
    try:
        config = json.loads(given)
        method, count = config.pop("method", None), config.pop("num_speculative_tokens", None)
        path = config.pop("model", None) if method in (*_WITH_WEIGHTS, "eagle3") else None
    except (ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"{SPECULATION} takes a JSON object, and got {given!r}") from error
    if method not in (*DRAFTERS, *_WITH_WEIGHTS):
        known = ", ".join((*DRAFTERS, *_WITH_WEIGHTS))
        raise ConfigError(f"{SPECULATION}: the method {method!r} is not served; there are {known}")
    if path is not None and not isinstance(path, str):
        raise ConfigError(f"{SPECULATION}: 'model' is {path!r}; a path is expected")
    if method in _WITH_WEIGHTS and not path:
        raise ConfigError(f"{SPECULATION}: the method {method!r} needs the path of a 'model'")
    if config:
        raise ConfigError(f"{SPECULATION}: there is no equal here to {', '.join(config)}; leave it out")
    return ["--speculate", path or method, *([] if count is None else ["--draft-tokens", str(count)])]


def _adapter(given: str) -> str:
    """Return NAME=PATH of what may be a JSON object of vLLM's."""
    if not given.startswith("{"):
        return given
    try:
        table = json.loads(given)
        return f"{table['name']}={table['path']}"
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{LORA_MODULES} takes NAME=PATH, or JSON with 'name' and 'path', and got {given!r}"
        ) from error


def _value(flag: str, given: str) -> str:
    """Return the value of an option as ours has it: 8k is 8000 and 8K is 8192, as with vLLM."""
    if flag == "--dtype":
        return DTYPES.get(given, given)
    if flag == "--max-model-len" and given == "auto":
        return "0"
    number, unit = given[:-1], UNITS.get(given[-1:])
    if flag not in LENGTHS or unit is None or not number.replace(".", "", 1).isdecimal():
        return given
    return str(int(float(number) * unit))
