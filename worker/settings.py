"""The settings of a worker, from command line, environment (`TANDEM_*`) and defaults, in that order."""

import socket
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from engine.settings import MAX_DRAFT_TOKENS
from kv_transfer.tiers.store_url import wrong_store_url

Dtype = Literal[
    "auto", "native", "float32", "float16", "bfloat16", "mixed16", "mixed4", "int4", "int8", "float8", "float8-head"
]
"""The names of native.choice.NATIVE, linear.FORMATS and number_formats.DEVICE_FORMATS of the engine, which the front
would need torch to import.
"""
Side = Literal["prefill", "decode", "mixed"]
"""The names of contracts.node.WorkerRole: for an enum, the help would show the Python names of its members."""
Transfer = Literal["auto", "nvlink", "ucx", "shm", "tcp"]
KVCodec = Literal["auto", "off", "lossless", "8bit", "6bit", "4bit", "3bit"]
"""The names of kv_transfer.codecs.level, written out for the help."""
DRAFTERS = ("auto", "off", "ngram", "suffix", "eagle3", "mtp", "suffix+eagle3", "suffix+mtp")
"""The names of engine.speculative.choice; a head's folder is told by its /."""


class WorkerSettings(BaseSettings):
    """Run one worker: it computes prompts, answers or both, for the gateways of the pool that it joins."""

    model_config = SettingsConfigDict(
        env_prefix="TANDEM_",
        frozen=True,  # what was resolved at start is what `/health` reports and benchmarks record
        extra="forbid",
        cli_prog_name="tandem worker",
        cli_kebab_case=True,
        cli_hide_none_type=True,
        protected_namespaces=(),
    )

    role: Side = Field("mixed", description="prefill, decode, or mixed (both)")
    worker_id: str = Field(
        "",
        pattern=r"^[A-Za-z0-9._-]{0,128}$",
        description="unique name of letters, digits, '.', '_', '-'; empty: made of role, host name and a random suffix",
    )
    model: str = Field("", description="Hugging Face folder, hub id or GGUF file; empty: SmolLM2-135M-Instruct")
    dtype: Dtype = Field("auto", description="how weights are held; auto: the fastest sound way")
    device: str = Field("cpu", description="where the model runs: cpu, cuda:N for a GPU, auto for the first one if any")
    tensor_parallel: int = Field(1, ge=1, description="GPUs that share the model, from `device` on; a process each")
    transfer: Transfer = Field("auto", description="KV transport; auto: the fastest that both ends have")
    kv_codec: KVCodec = Field("auto", description="compression of KV on slow tcp links; auto: lossless, where it pays")
    transfer_checksum: bool = Field(
        True, description="check every chunk of KV that arrives; what nobody checked enters no cache"
    )
    transfer_port: int = Field(0, ge=0, le=65535, description="port of the KV control listener; 0: a free one")
    redis_url: str = Field("redis://127.0.0.1:6379/0", description="where the coordinator's state lives")
    pool: str = Field("default", description="workers and gateways of one pool serve one model together")
    secret: SecretStr = Field(SecretStr(""), description="shared by all services of a pool (better by environment)")
    host: str = Field("127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(0, ge=0, le=65535, description="port of the HTTP front; 0: a free one")
    advertise_host: str = Field("", description="address that others reach this worker by; empty: the one listened on")
    ready_file: Path | None = Field(
        None, description="written (JSON: pid, core_pid, url, role, id) once the worker serves"
    )
    block_size: int = Field(16, ge=1, description="tokens in a KV block")
    kv_cache_mib: int = Field(
        0, ge=0, description="memory for the KV cache, of each GPU; 0: for 16384 tokens, on a GPU all that is free"
    )
    kv_host_gib: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="memory that keeps KV which the cache has no room for, of each worker; 0: none",
    )
    kv_disk: Path | None = Field(
        None,
        description="absolute path of a folder that keeps KV over restarts; each worker has its own in it",
    )
    kv_disk_gib: float = Field(16.0, gt=0, allow_inf_nan=False, description="most that a worker keeps in `kv_disk`")
    kv_store: str = Field(
        "", description="where workers share KV: redis://, rediss://, redis+cluster://HOST:PORT, file:///FOLDER"
    )
    max_model_len: int = Field(0, ge=0, description="longest prompt plus answer, in tokens; 0: the model's")
    max_num_seqs: int = Field(0, ge=0, description="most sequences in one step; 0: 64, on a GPU 256")
    max_batched_tokens: int = Field(0, ge=0, description="token budget of one step; 0: 512, on a GPU 2048")
    max_mixed_tokens: int = Field(
        0,
        ge=0,
        description="token budget of a step with answers, a quarter of it prompts'; 0: as others, on a GPU 1024",
    )
    speculate: str = Field(
        "off",
        description="guess tokens of answers and verify several in one step: auto, off, ngram (from the request's "
        "text), suffix (from earlier answers too; auto takes it on a CPU), eagle3 (the model's own head), mtp (its "
        "layer for multi-token prediction), suffix+eagle3 and suffix+mtp (these where the text says nothing), or the "
        "path of a head's folder or of a smaller model, with a /",
    )
    draft_tokens: int = Field(
        3, ge=1, le=MAX_DRAFT_TOKENS, description="most tokens that are guessed of an answer at a time"
    )
    synthetic_acceptance: float = Field(
        0.0,
        ge=0,
        le=MAX_DRAFT_TOKENS + 1,
        description="to measure with random weights: a step with a draft gives so many tokens on average, whatever the "
        "model says of them; answers are nonsense then, and say so in system_fingerprint; 0: the model decides",
    )
    enable_lora: bool = Field(
        False, description="serve LoRA adapters that are loaded while it runs, with those of `lora_modules`; on CPUs"
    )
    lora_modules: str = Field(
        "",
        description="LoRA adapters in PEFT's format that are served from the start, with commas: NAME=FOLDER, whose "
        "name clients give as `model`; on CPUs",
    )
    itl_objective_ms: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="longest gap between an answer's tokens that prompts beside it may make: steps with answers get as "
        "small as that takes, unless prompts wait long; 0: none, they have all of `--max-mixed-tokens`",
    )
    num_threads: int = Field(0, ge=0, description="CPU threads of the engine; 0: all cores")
    grant_timeout_s: float = Field(5.0, gt=0, description="how long a computed prompt waits for pages at decode")
    drain_timeout_s: float = Field(8.0, ge=0, description="how long what runs may go on after a signal to stop")
    hang_timeout_s: float = Field(
        20.0, gt=0, description="a core that makes no turn for so long is unhealthy, and killed after twice that"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="how much to say")

    @field_validator("kv_disk")
    @classmethod
    def _is_absolute(cls, folder: Path | None) -> Path | None:
        if folder is not None and not folder.is_absolute():
            raise ValueError(f"it must be an absolute path, such as {folder.absolute()}")
        return folder

    @field_validator("speculate")
    @classmethod
    def _names_a_drafter(cls, name: str) -> str:
        if name not in DRAFTERS and "/" not in name:
            raise ValueError(
                f"it may be {', '.join(DRAFTERS)}, or the path of an EAGLE3 head or of a smaller model, with a /"
            )
        return name

    @field_validator("lora_modules")
    @classmethod
    def _names_adapters(cls, text: str) -> str:
        adapters = _adapters(text)
        if wrong := [name or folder for name, folder in adapters if not (name and folder)]:
            raise ValueError(f"NAME=FOLDER is expected, with commas between, where {wrong[0]!r} stands")
        if len(dict(adapters)) < len(adapters):
            raise ValueError("each adapter needs a name of its own")
        return text

    @field_validator("kv_store")
    @classmethod
    def _names_a_store(cls, url: str) -> str:
        if wrong := url and wrong_store_url(url):
            raise ValueError(wrong)
        return url

    @property
    def adapters(self) -> tuple[tuple[str, str], ...]:
        """Return the names and the folders of the LoRA adapters that are loaded at start."""
        return _adapters(self.lora_modules)

    @property
    def has_tiers(self) -> bool:
        """Return whether KV is kept in tiers below the cache."""
        return bool(self.kv_host_gib or self.kv_disk or self.kv_store)

    @property
    def advertised_host(self) -> str:
        if self.advertise_host:
            return self.advertise_host
        return socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host


def _adapters(text: str) -> tuple[tuple[str, str], ...]:
    pairs = (word.partition("=") for word in map(str.strip, text.split(",")) if word)
    return tuple((name.strip(), folder.strip()) for name, _, folder in pairs)
