"""The settings of `tandem up`: command line, environment (`TANDEM_*`), defaults, in that order."""

import os
from pathlib import Path

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from worker.settings import Dtype, Transfer


class UpSettings(BaseSettings):
    """Start a whole system on this machine: Redis, coordinator, workers, gateway. Ctrl-C ends all of it."""

    model_config = SettingsConfigDict(
        env_prefix="TANDEM_",
        frozen=True,
        extra="forbid",
        cli_prog_name="tandem up",
        cli_kebab_case=True,
        cli_hide_none_type=True,
        protected_namespaces=(),
    )

    model: str = Field(default="", description="Hugging Face folder, hub id or GGUF file; empty: SmolLM2-135M-Instruct")
    host: str = Field(
        default="127.0.0.1", min_length=1, description="address the gateway listens on; 0.0.0.0 lets other machines in"
    )
    port: int = Field(
        default=8000, ge=0, le=65535, description="the gateway's port; 0: a free one. All others are free ones"
    )
    prefill: int = Field(default=1, ge=0, description="number of prefill workers")
    decode: int = Field(default=1, ge=0, description="number of decode workers")
    mixed: int = Field(default=0, ge=0, description="number of workers that do both")
    device: str = Field(
        default="cpu", description="where models run: cpu, cuda for the GPUs that are visible, cuda:N for one of them"
    )
    tensor_parallel: int = Field(default=1, ge=1, description="GPUs of each worker, which share the model")
    transfer: Transfer = Field(default="auto", description="KV transport; auto: the fastest that both ends have")
    dtype: Dtype = Field(default="auto", description="how weights are held; auto: the fastest sound way")
    redis_url: str = Field(default="", description="a Redis of your own; empty: one is started")
    secret: SecretStr = Field(
        default=SecretStr(""), description="shared by all services; empty: a random one (environment only)"
    )
    start_timeout_s: float = Field(
        default=900.0, gt=0, description="longest wait for all to be ready, model download included"
    )

    @field_validator("model")
    @classmethod
    def _absolute(cls, model: str) -> str:
        """Make the path of an existing model absolute: services run from another folder."""
        return os.path.abspath(model) if model and Path(model).exists() else model

    @property
    def is_complete(self) -> bool:
        """Return whether these workers can answer a request together."""
        return self.mixed > 0 or (self.prefill > 0 and self.decode > 0)
