"""Which form a model's calls have: by its chat template, or as the operator says."""

from collections.abc import Callable
from typing import Literal

from gateway.tool_calling import hermes, llama3_json, mistral, smollm2
from gateway.tool_calling.tool_format import ToolFormat

ParserName = Literal["auto", "hermes", "llama3_json", "mistral", "smollm2"]

_BY_NAME: dict[str, Callable[[str], ToolFormat]] = {
    "hermes": hermes.form_of,
    "llama3_json": lambda template: llama3_json.FORM,
    "mistral": mistral.form_of,
    "smollm2": lambda template: smollm2.FORM,
}


def form_of(template: str, name: ParserName = "auto", shows_tools: bool = True) -> ToolFormat | None:
    """Return the form of calls by the template's source, without comments, and by whether it shows tools.

    None: it knows tools in a form that is not known here.
    """
    if name == "auto":
        return _by_template(template) if shows_tools else smollm2.FORM
    return _BY_NAME[name](template)


def _by_template(template: str) -> ToolFormat | None:
    if "[TOOL_CALLS]" in template:
        return mistral.form_of(template)
    if "<tool_call>" in template:
        is_json = "<function=" not in template and "<arg_key>" not in template  # as Qwen3-Coder's and GLM-4.5's are not
        return hermes.form_of(template) if is_json else None
    if "<|python_tag|>" in template or '"parameters": ' in template:
        return llama3_json.FORM
    return None
