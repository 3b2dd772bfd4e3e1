"""The fingerprint of a checkpoint's weights, made without reading all of them."""

import hashlib
from pathlib import Path

from checkpoint.huggingface.safetensors_index import weight_files

_NUM_SAMPLES, _SAMPLE_NBYTES = 256, 4096
_HEAD_NBYTES = 1 << 16


def weights_fingerprint(path: Path) -> str:
    """Return 16 hexadecimal digits for a GGUF file or a folder's safetensors files.

    Other safetensors files beside the model's are left out; a folder without any has the digits of no file. Of each
    file its size, its beginning (which has the tensors' names and shapes) and 256 pages spread evenly over it enter:
    two fine-tunes of one model differ in nearly all of them. This takes milliseconds for any size.
    """
    files = [path] if path.is_file() else weight_files(path)
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        size = file.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with file.open("rb") as stream:
            digest.update(stream.read(_HEAD_NBYTES))
            for index in range(_NUM_SAMPLES):
                stream.seek(size * index // _NUM_SAMPLES)
                digest.update(stream.read(_SAMPLE_NBYTES))
    return digest.hexdigest()
