"""Text in llguidance's Lark, in which some markers are tokens."""

import json
import re
from collections.abc import Mapping


def terms(text: str, token_ids: Mapping[str, int]) -> str:
    """Return `text` in Lark: tokens by id, what is between them as strings; empty if there is nothing."""
    if not token_ids:
        return json.dumps(text) if text else ""
    pieces = re.split("(" + "|".join(map(re.escape, token_ids)) + ")", text)
    return " ".join(f"<[{token_ids[p]}]>" if p in token_ids else json.dumps(p) for p in pieces if p)
