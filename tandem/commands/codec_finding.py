"""The finding of `tandem doctor` about the compression of KV: what each level does on this machine."""

from engine.cache.sizing import one_group_layout
from kv_transfer.codecs.choice import MAX_NBYTES_PER_S
from kv_transfer.codecs.level import LEVELS
from kv_transfer.data_path.compression import SegmentCodec
from models.config import ModelConfig

BLOCK_SIZE = 16


def codec_words(config: ModelConfig) -> str:
    """Return in a line how much smaller each level makes a model's KV, and below which bandwidth it pays.

    Measured for some tenths of a second, on random values in float32.
    """
    layout = one_group_layout(config, BLOCK_SIZE, "float32")
    found = []
    for name, rate in SegmentCodec(layout, 1, list(LEVELS)).rates().items():
        pays_below = 8 * min(rate.encode_nbytes_per_s, rate.decode_nbytes_per_s, MAX_NBYTES_PER_S)
        found.append(f"{name} {rate.ratio:.1f} times smaller, pays below {pays_below / 1e9:.1f} Gbit/s")
    return f"compression of float32 KV on slow tcp links (--kv-codec): {'; '.join(found)}"
