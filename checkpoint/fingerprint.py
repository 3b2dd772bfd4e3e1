"""Which weights a checkpoint holds, told without reading all of them."""

import hashlib
from pathlib import Path

from checkpoint.huggingface.safetensors_index import weight_files

_NUM_SAMPLES, _SAMPLE_NBYTES = 256, 4096
_HEAD_NBYTES = 1 << 16


def weights_fingerprint(path: Path) -> str:
    """16 hexadecimal digits of a GGUF file or of a folder's safetensors, without others that lie beside the model's;
    those of no file where there is none.

    Of each file its size, its beginning (where the tensors' names and shapes are) and 256 pages spread evenly over it:
    two fine-tunes of one model differ in nearly all of them. Read in milliseconds, at any size.
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
