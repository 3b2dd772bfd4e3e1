"""The command that writes docs/configuration.md and the Helm chart's schema of the settings.

Both come from the settings classes. `make docs` runs it, and a test fails when one of them is stale.
"""

import json
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import SecretStr
from pydantic_settings import BaseSettings

from coordinator.settings import CoordinatorSettings
from gateway.settings import GatewaySettings
from service.settings import variable
from tandem.local.settings import UpSettings
from worker.settings import WorkerSettings

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "configuration.md"
CHART_SCHEMA = ROOT / "deploy" / "helm" / "tandem" / "values.schema.json"
COMMANDS: dict[str, type[BaseSettings]] = {
    "tandem up": UpSettings,
    "tandem worker": WorkerSettings,
    "python -m gateway": GatewaySettings,
    "python -m coordinator": CoordinatorSettings,
}
CHART_SETTINGS = {
    "workerSettings": WorkerSettings,
    "gatewaySettings": GatewaySettings,
    "coordinatorSettings": CoordinatorSettings,
}
"""The definitions of the chart's schema -> the settings that a user may give to that service."""
GIVEN_BY_CHART = {
    *("role", "worker_id", "model", "host", "port", "transfer_port", "advertise_host", "redis_url", "pool", "secret"),
    *("api_key", "ready_file", "drain_timeout_s", "kv_disk", "kv_disk_gib"),
}
"""The settings for which the chart has values of its own, or which it knows itself."""
HEAD = """\
# Configuration

Made from the settings classes by `make docs`; a test compares them.

Every setting is an option of a command and a variable of the environment. The command line goes before the environment,
and that before the default. A wrong value ends the start with a line that names the setting, its value and what is
allowed. `auto` is resolved once, at start.

`tandem up` keeps the variables of its own table to itself and hands all others on to the services that it starts:
`TANDEM_KV_CACHE_MIB=4096 tandem up` sets it for every worker, and so does `tandem up --kv-cache-mib 4096`. Their pool,
roles, ids and ready files it names itself. A variable that begins with `TANDEM_` and that no service reads is reported
at start, by `tandem worker`, too. Secrets belong in the environment: command lines are readable by every user of a
machine. Traces are set by OpenTelemetry's own variables ([Operations](operations.md)).
"""
TYPES = {
    "integer": "a whole number",
    "number": "a number",
    "string": "",
    "boolean": "`true` or `false`",
    "object": "a JSON object",
}
BOUNDS = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to"}


def page() -> str:
    return "\n".join([HEAD, *(table(command, kind) for command, kind in COMMANDS.items())])


def table(command: str, kind: type[BaseSettings]) -> str:
    schema = kind.model_json_schema()
    properties, definitions = schema["properties"], schema.get("$defs", {})
    rows = [row(name, field.default, properties[name], definitions) for name, field in kind.model_fields.items()]
    head = [f"## {command}\n", "| setting | default | what |", "|---|---|---|"]
    return "\n".join([*head, *rows, ""])


def row(name: str, default: Any, schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    """Return the three columns, each of at most two lines; more do not fit the page."""
    setting = f"`--{name.replace('_', '-')}`<br>`{variable(name)}`"
    what = "<br>".join(filter(None, [schema["description"], allowed(schema, definitions)]))
    return f"| {setting} | {shown(default)} | {what} |"


def shown(default: Any) -> str:
    value = default.value if isinstance(default, Enum) else default
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if value in ("", None):
        return "empty"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def allowed(schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    """Return the allowed values in words, from a JSON schema; empty for any text."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:  # an optional path
        schema = schema["anyOf"][0]
    if "enum" in schema:
        return f"one of {', '.join(f'`{value}`' for value in schema['enum'])}"
    if schema.get("format") == "path":
        return "a path"
    bounds = [f"{word} {schema[name]:g}" for name, word in BOUNDS.items() if name in schema]
    return " ".join([TYPES[schema["type"]], *bounds])


def chart_schema() -> str:
    """Return the schema of the chart's values, with the settings as they are now."""
    schema = json.loads(CHART_SCHEMA.read_text())
    schema["definitions"] |= {name: settings_schema(kind) for name, kind in CHART_SETTINGS.items()}
    return json.dumps(schema, indent=1) + "\n"


def settings_schema(kind: type[BaseSettings]) -> dict[str, Any]:
    """Return the JSON schema of an object: variable -> value, as YAML has it."""
    schema = kind.model_json_schema()
    names = [name for name in kind.model_fields if name not in GIVEN_BY_CHART]
    properties = {variable(name): checked(schema["properties"][name]) for name in names}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def checked(schema: dict[str, Any]) -> dict[str, Any]:
    """Return of a setting's schema what a value is checked by."""
    return {key: schema[key] for key in ("type", "enum", *BOUNDS, "minLength", "pattern") if key in schema}


if __name__ == "__main__":
    PAGE.write_text(page())
    CHART_SCHEMA.write_text(chart_schema())
