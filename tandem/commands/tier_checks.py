"""The checks of `tandem doctor` on tiers below the KV cache: what they hold here, and what is wrong."""

import argparse
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from contracts.errors import OutOfBlocks, Unavailable
from kv_transfer.tiers.remote_store import open_record_store
from kv_transfer.tiers.store_url import wrong_store_url
from process.memory_limit import available_nbytes
from process.path_presence import is_folder, is_there

GIB = 1 << 30
Found = tuple[str, bool]
"""What was found, and whether it is well."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kv-host-gib", type=float, default=0.0, help="as for a worker: memory that keeps KV")
    parser.add_argument("--kv-disk", type=Path, help="as for a worker: the folder that keeps KV")
    parser.add_argument("--kv-disk-gib", type=float, default=16.0, help="as for a worker: most that it keeps there")
    parser.add_argument("--kv-store", default="", help="as for a worker: where workers share KV")


def check_tiers(options: argparse.Namespace, token_nbytes: int) -> Iterator[Found]:
    """Yield what each tier that is asked for gives here; `token_nbytes`: of KV, of one token."""
    if options.kv_host_gib:
        left = available_nbytes() / GIB
        words = f"kv_host_gib: {_holds(options.kv_host_gib, token_nbytes)}; {left:.1f} GiB of memory are available"
        is_well = options.kv_host_gib <= left
        yield words + ("" if is_well else ", and a worker does not start: lower it"), is_well
    if options.kv_disk:
        try:
            yield _disk(options.kv_disk, options.kv_disk_gib, token_nbytes)
        except OSError as error:  # such as that of a mount whose server is gone
            yield f"kv_disk can't be read: {error}", False
    if options.kv_store:
        yield _store(options.kv_store)


def _disk(folder: Path, gib: float, token_nbytes: int) -> Found:
    if not folder.is_absolute():
        return f"kv_disk is {str(folder)!r}: it must be an absolute path, such as {folder.absolute()}", False
    there = next(path for path in (folder, *folder.parents) if is_there(path))
    if not is_folder(there) or not os.access(there, os.W_OK):
        return f"kv_disk: {there} is no folder that can be written in: name another, or change its owner", False
    left = shutil.disk_usage(there).free / GIB
    words = f"kv_disk: {_holds(gib, token_nbytes)} in {folder}; {left:.1f} GiB are free there"
    return (words, True) if gib <= left else (f"{words}: lower kv_disk_gib, or make room", False)


def _store(url: str) -> Found:
    if wrong := wrong_store_url(url):
        return f"kv_store can't be used: {wrong}", False
    store = open_record_store(url)
    try:
        return f"kv_store: {store.describe()}", True
    except OutOfBlocks as error:
        return f"kv_store answers, but {error}", False
    except Unavailable as error:
        return f"kv_store does not answer: {error}", False
    finally:
        store.close()


def _holds(gib: float, token_nbytes: int) -> str:
    return f"{gib:g} GiB hold the KV of {int(gib * GIB / token_nbytes):,} tokens or more".replace(",", " ")
