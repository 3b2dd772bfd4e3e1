"""A gateway's settings: command line, environment (`TANDEM_*`), defaults; in that order."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from coordinator.migration_policy import DEFAULT_REASONS, MigrationReason
from gateway.tool_calling.registry import ParserName


class GatewaySettings(BaseSettings):
    """Run one gateway: the HTTP API, and the way of each request to the workers of its pool."""

    model_config = SettingsConfigDict(
        env_prefix="TANDEM_",
        frozen=True,
        extra="forbid",
        cli_prog_name="python -m gateway",
        cli_kebab_case=True,
        cli_hide_none_type=True,
        protected_namespaces=(),
    )

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0: a free one")
    model: str = Field("", description="Hugging Face folder, hub id or GGUF file; empty: SmolLM2-135M-Instruct")
    served_model_name: str = Field("", description="ids for clients, with commas; empty: the model's own name")
    chat_template: str = Field("", description="a Jinja file, or the template itself; empty: the model's own")
    default_chat_template_kwargs: dict[str, Any] = Field({}, description="JSON: names for every chat template")
    generation_config: str = Field("auto", description="auto: the model's own; vllm: none; or a folder that has one")
    override_generation_config: dict[str, Any] = Field({}, description="JSON: temperature, top_p, ... by default")
    tool_parser: ParserName = Field("auto", description="how the model writes tool calls; auto: by its chat template")
    redis_url: str = Field("redis://127.0.0.1:6379/0", description="where the coordinator's state lives")
    pool: str = Field("default", description="workers and gateways of one pool serve one model together")
    secret: SecretStr = Field(SecretStr(""), description="shared by all services of a pool (better by environment)")
    api_key: SecretStr = Field(SecretStr(""), description="what clients must show, or several with commas; empty: none")
    tenants: Path | None = Field(None, description="TOML file of tenants, their keys and limits; read when it changes")
    cors_origins: str = Field("", description="sites whose pages may call, with commas; * for all; empty: none")
    root_path: str = Field("", description="path under which a proxy offers this gateway")
    allow_runtime_lora_updating: bool = Field(
        False,
        description="clients may have workers load LoRA adapters from folders there, by POST /v1/load_lora_adapter",
    )
    request_timeout_s: float = Field(600.0, gt=0, description="every accepted request ends within this time")
    max_inflight: int = Field(1024, ge=1, description="most answers in progress; more get 429")
    max_body_nbytes: int = Field(8 << 20, ge=1024, description="longest request body; longer ones get 413")
    migrate_for: str = Field(
        ",".join(DEFAULT_REASONS),
        description="for what running answers move to other workers, with commas: drain, memory (instead of "
        "preemption), balance; empty: never",
    )
    ready_file: Path | None = Field(None, description="written (JSON: pid, url) once the gateway listens")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="how much to say")

    @property
    def model_names(self) -> list[str]:
        """Return the ids that clients may name, the one of answers first; none for the model's own."""
        return _words(self.served_model_name)

    @property
    def migration_reasons(self) -> list[MigrationReason]:
        """Return for what running answers move."""
        return [MigrationReason(name) for name in _words(self.migrate_for)]

    @field_validator("migrate_for")
    @classmethod
    def _check_reasons(cls, text: str) -> str:
        if unknown := [name for name in _words(text) if name not in list(MigrationReason)]:
            raise ValueError(f"{unknown[0]!r} is none of {', '.join(MigrationReason)}")
        return text


def _words(text: str) -> list[str]:
    return [word for word in map(str.strip, text.split(",")) if word]
