"""The coordinator's settings: command line, environment (`TANDEM_*`), defaults; in that order."""

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

SCHEMES = ("redis://", "rediss://", "unix://")
"""How a `redis_url` may begin."""


class CoordinatorSettings(BaseSettings):
    """Run one coordinator: it ends what dead gateways and workers left, and shows the pool in numbers."""

    model_config = SettingsConfigDict(
        env_prefix="TANDEM_",
        frozen=True,
        extra="forbid",
        cli_prog_name="python -m coordinator",
        cli_kebab_case=True,
        cli_hide_none_type=True,
    )

    redis_url: str = Field("redis://127.0.0.1:6379/0", description="where the state lives")
    pool: str = Field("default", description="workers and gateways of one pool serve one model together")
    secret: SecretStr = Field(SecretStr(""), description="shared by all services of a pool (better by environment)")
    role_objective_s: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="how long prompts may wait for prefill workers before a decode worker that can be spared turns to "
        "prefill, and back when decode is short; 0: roles stay as they are",
    )
    host: str = Field("127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(0, ge=0, le=65535, description="port to listen on; 0: a free one")
    ready_file: Path | None = Field(None, description="written (JSON: pid, url) once the coordinator serves")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="how much to say")
