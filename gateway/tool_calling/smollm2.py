"""SmolLM2: a list of calls in one `<tool_call>`, empty if there is nothing to call.

https://huggingface.co/HuggingFaceTB/SmolLM2-1.7B-Instruct, "Function Calling". Its chat template does not know tools:
the model is told of them in words (tool_prompt.py), as is every model whose template does not.
"""

from gateway.tool_calling.hermes import HermesParser
from gateway.tool_calling.tool_format import ToolFormat

FORM = ToolFormat(
    parser=HermesParser,
    begin="<tool_call>[",
    join=", ",
    end="]</tool_call>",
    markers=("<tool_call>", "</tool_call>"),
)
