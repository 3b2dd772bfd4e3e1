"""The checks before the first process is started.

They cover the settings of every service, the model's files, and whether its weights fit the GPUs.
"""

import os
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from urllib.parse import urlsplit

from checkpoint import open_checkpoint
from contracts.errors import ConfigError
from coordinator.settings import SCHEMES, CoordinatorSettings
from coordinator.store.local_server import hide_password
from gateway.settings import GatewaySettings
from service.settings import flag_and_variable, read_settings, variable
from tandem.local.gpu_assignment import fit_devices, require_room
from tandem.local.settings import UpSettings
from worker.settings import WorkerSettings

SERVICES = (CoordinatorSettings, WorkerSettings, GatewaySettings)
MAKE_VARIABLES = ("MODEL", "PORT", "PREFILL", "DECODE", "MIXED", "DEVICE", "TRANSFER", "DTYPE", "REDIS_URL")
"""The variables that the Makefile passes on."""
SECRETS = {"--api-key"}
MADE_BY_UP = {"pool", "ready_file", "role", "worker_id"}
"""The settings of services that `tandem up` chooses itself, whatever the environment says."""
OF_COMPOSE = (
    "TANDEM_DECODE_DEVICE", "TANDEM_GRAFANA_PORT", "TANDEM_IMAGE", "TANDEM_MIXED_DEVICE", "TANDEM_MODELS",
    "TANDEM_PREFILL_DEVICE", "TANDEM_PROMETHEUS_PORT", "TANDEM_WORKER_MEMORY",
)  # fmt: skip
"""The variables that only the compose files read."""


SPECULATE, LORA_MODULES = "TANDEM_SPECULATE", "TANDEM_LORA_MODULES"


def absolute_drafter(name: str) -> str:
    """Return the setting with an existing path made absolute: services run from another folder.

    What stands before a + stays. A name with a / that is no path here may be one of the hub.
    """
    before, plus, path = name.rpartition("+")
    found = Path(path).expanduser()
    return f"{before}{plus}{found.absolute()}" if "/" in path and found.exists() else name


def absolute_adapters(modules: str) -> str:
    """Return the setting, NAME=FOLDER with commas, with existing folders made absolute."""
    return ",".join(map(_absolute_adapter, modules.split(",")))


def _absolute_adapter(word: str) -> str:
    name, equals, path = word.partition("=")
    found = Path(path.strip()).expanduser()
    return f"{name}={found.absolute()}" if equals and found.exists() else word


def handed_on(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the options of `tandem up` itself, and as variables those of its services.

    An option may have several values, as vLLM's --served-model-name has. Raises ConfigError for a secret: every user of
    the machine can read a command line.
    """
    services, own, variables, words = _of_services(), [], {}, list(argv)
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if flag not in services:
            own.append(word)
            continue
        if flag in SECRETS:
            raise ConfigError(f"{flag} is a secret, which others could read here: set {variable(services[flag])}")
        given = [value] if equals else []
        while words and not equals and not words[0].startswith("--"):
            given.append(words.pop(0))
        if not given:
            raise ConfigError(f"{flag} needs a value")
        variables[variable(services[flag])] = ",".join(given)
    return own, variables


def read_up_settings(argv: Sequence[str]) -> UpSettings:
    """Return the settings of `tandem up`. Raises ConfigError with a line that names every wrong one."""
    settings = fit_devices(read_settings(UpSettings, argv, _places), os.environ)
    if not settings.is_complete:
        raise ConfigError("nobody could answer: set PREFILL and DECODE to 1 or more, or MIXED")
    if settings.redis_url and (wrong := _wrong_redis_url(settings.redis_url)):
        shown = hide_password(settings.redis_url)
        raise ConfigError(f"redis_url is {shown!r}: {wrong} (set by {_places('redis_url')})")
    return settings


def preflight(settings: UpSettings) -> None:
    """Check settings and model, downloading one that is named by hub id. Raises ConfigError."""
    for kind in SERVICES:  # they read the rest of the environment
        read_settings(kind, (), _service_places)
    try:
        checkpoint = open_checkpoint(settings.model)
    except ConfigError as error:
        raise ConfigError(f"{error} (set by {_places('model')})") from error
    require_room(settings, checkpoint)


def unread(names: Iterable[str]) -> list[str]:
    """Return a line for each variable of an environment that looks like a setting and is none."""
    settings = {variable(name) for kind in (UpSettings, *SERVICES) for name in kind.model_fields}
    known = settings.union(OF_COMPOSE)
    unknown = sorted(name for name in names if name.upper().startswith("TANDEM_") and name.upper() not in known)
    return [f"{name} is no setting{_meant(name.upper(), settings)}" for name in unknown]


def _of_services() -> dict[str, str]:
    """Return the options that services have and `tandem up` has not, with the name of the setting."""
    names = {name for kind in SERVICES for name in kind.model_fields} - UpSettings.model_fields.keys() - MADE_BY_UP
    return {f"--{name.replace('_', '-')}": name for name in sorted(names)}


def _meant(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, known, n=1, cutoff=0.8)
    return f"; {near[0]} is one" if near else ""


def _wrong_redis_url(url: str) -> str:
    if not url.startswith(SCHEMES):
        return f"it must begin with {', '.join(SCHEMES)}"
    try:
        urlsplit(url).port  # noqa: B018  parsed only on access
    except ValueError:  # its message may hold a part of the password
        return "its port must be a number, and / ? # [ in a password are written as %2F %3F %23 %5B"
    return ""


def _service_places(name: str) -> str:
    """Return how a setting of a service is set: as an option of `tandem up`, if it is no secret."""
    flag = f"--{name.replace('_', '-')}"
    return flag_and_variable(name) if flag in _of_services() and flag not in SECRETS else variable(name)


def _places(name: str) -> str:
    made = f" or {name.upper()} of make" if name.upper() in MAKE_VARIABLES else ""
    return f"{flag_and_variable(name)}{made}"
