"""The bytes of a token that is no text by itself: a part of a character."""

import re

REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def raw_bytes(token: str) -> bytes:
    """Return the bytes of a token as the vocabulary spells it.

    That is SentencePiece's `<0xE6>`, or GPT-2's one character for each byte.

    Any other spelling is taken for the text itself.
    """
    if (match := _BYTE_TOKEN.fullmatch(token)) is not None:
        return bytes([int(match[1], 16)])
    if all(character in _BYTES for character in token):
        return bytes(_BYTES[character] for character in token)
    return token.encode()


def _byte_characters() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 stands for itself, the other bytes for U+0100 and on, in order.

    https://github.com/openai/gpt-2/blob/master/src/encoder.py, bytes_to_unicode
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTES = _byte_characters()
