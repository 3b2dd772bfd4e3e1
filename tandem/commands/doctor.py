"""The command `tandem doctor`: what this machine has, which of it is used, and what is missing."""

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoint import Checkpoint, open_checkpoint
from contracts.errors import ConfigError, TandemError
from coordinator.store.local_server import RedisServer, find_server, hide_password
from engine.cuda.model.format_choice import experts_changed, kept_as, resolve_device_dtype
from engine.cuda.model.memory_footprint import least_weights_nbytes
from engine.cuda.model.missing_features import missing_feature
from process.memory_limit import available_nbytes, limit_nbytes
from service.version import release
from tandem.commands import tier_checks
from tandem.commands.codec_finding import codec_words
from tandem.commands.draft_finding import draft_words
from tandem.commands.stored_weights import groups_as, has_mxfp4, quantized_as, stored_as
from tandem.local.gpu_assignment import Gpu, count_gpus, look_at, what_holds
from tandem.local.system_plan import require_redis

if TYPE_CHECKING:
    from kernels.caps import Caps

DESCRIPTION = "Say what this machine has, what Tandem would use of it, and what is missing. Starts nothing that stays."
EXAMPLES = """\
examples:
  tandem doctor                       the default model
  tandem doctor --model ./Qwen3-0.6B  another one: its weights, and the memory that a KV cache of it takes
  tandem doctor --kv-store redis://kv:6379/0  what a tier below the KV cache gives here
  tandem doctor --json                for a bug report

ok is not marked; a warning costs speed or matters only to some; BROKEN keeps Tandem from running, and the code is 1.
"""
PACKAGES = ("torch", "triton", "ucxx-cu13", "libucx-cu13", "flashinfer-python", "fastapi", "redis")
OPTIONAL = ("flashinfer-python",)
COMMAND_TIMEOUT_S = 30.0
SMALL_NBYTES = 2 << 30


class Level(StrEnum):
    """The weight of a finding."""

    OK = "ok"
    WARNING = "warning"
    BROKEN = "BROKEN"


@dataclass(frozen=True)
class Finding:
    """A finding of a check. `words` say what was found and, unless it is well, what to do."""

    section: str
    words: str
    level: Level = Level.OK


Check = Callable[[argparse.Namespace], Iterator[tuple[str, Level]]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="", help="as for `tandem up`; SmolLM2-135M-Instruct by default")
    parser.add_argument("--redis-url", default="", help="a Redis of your own, to see whether it answers")
    tier_checks.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="a JSON array of findings")


def run(options: argparse.Namespace, home: Path) -> int:
    findings: list[Finding] = []
    for finding in examine(options):
        findings.append(finding)
        if not options.json:
            mark = "" if finding.level is Level.OK else f"{finding.level}: "
            print(f"{finding.section:<11}{mark}{finding.words}", flush=True)
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    return int(any(finding.level is Level.BROKEN for finding in findings))


def examine(options: argparse.Namespace) -> Iterator[Finding]:
    """Yield the findings of all checks; a check that fails is a finding too."""
    for section, check in CHECKS.items():
        try:
            for words, level in check(options):
                yield Finding(section, words, level)
        except (TandemError, ImportError, OSError) as error:
            yield Finding(section, str(error), Level.BROKEN)


def _versions(options: argparse.Namespace) -> Iterator[tuple[str, Level]]:
    yield f"tandem {release()}, Python {platform.python_version()}, {platform.platform()}", Level.OK
    for package in PACKAGES:
        try:
            yield f"{package} {version(package)}", Level.OK
        except PackageNotFoundError:
            is_needed = package not in OPTIONAL
            words = "`make setup` installs it" if is_needed else "needed by some kernels for NVIDIA GPUs only"
            yield f"{package} is not installed: {words}", Level.BROKEN if is_needed else Level.OK


def _cpu(options: argparse.Namespace) -> Iterator[tuple[str, Level]]:
    # Here and in _gpu: torch takes seconds to import, and the findings before it should not wait.
    from engine.cpu.format_choice import resolve_dtype
    from engine.cpu.native.choice import NATIVE, chosen_kernels, native_kernels
    from engine.model_loader.checkpoint_weights import open_weights
    from engine.settings import EngineSettings
    from kernels.cpu.isa import apply_isa, is_bfloat16_fast, probe_isa

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    yield f"{len(os.sched_getaffinity(0))} CPUs, {names[0] if names else platform.machine()}", Level.OK
    isa = probe_isa(EngineSettings.cache_dir)
    apply_isa(isa)
    if not isa.has_bfloat16:
        yield (
            "bfloat16 matmuls can't run here: the dtypes bfloat16, mixed16 and mixed4 are refused, float16, int4 and "
            "int8 are not",
            Level.WARNING,
        )
    else:
        cap = f", with oneDNN capped at {isa.onednn_cap}" if isa.onednn_cap else ""
        speed = "faster than with float16 weights" if is_bfloat16_fast(isa) else "but float16 weights are faster"
        yield f"bfloat16 matmuls run here, {speed}{cap}", Level.OK
    try:
        checkpoint = open_checkpoint(options.model)
    except ConfigError:  # reported by _model
        return
    settings, source = EngineSettings(model=options.model), open_weights(checkpoint)
    chosen = chosen_kernels(settings, checkpoint, source)
    dtype = NATIVE if chosen is not None else resolve_dtype(settings, source, checkpoint.config)
    yield f"dtype auto holds this model's weights as {dtype} here", Level.OK
    for words in groups_as(checkpoint, dtype):
        yield f"  {words}", Level.OK
    try:
        kernels = native_kernels(settings, checkpoint, source)
    except ConfigError as error:
        yield str(error), Level.OK
    else:
        words = f"with {kernels.best_level}, on activations rounded to 8 bits"
        yield f"dtype {NATIVE} computes this model's weights as they are stored, {words}", Level.OK


def _memory(options: argparse.Namespace) -> Iterator[tuple[str, Level]]:
    left, limit = available_nbytes(), limit_nbytes()
    limited = f", of {_gib(limit)} that the control group allows" if limit is not None else ""
    advice = ": a worker needs its weights and a KV cache (TANDEM_KV_CACHE_MIB)" if left < SMALL_NBYTES else ""
    yield f"{_gib(left)} available{limited}{advice}", Level.WARNING if advice else Level.OK


def _tiers(options: argparse.Namespace) -> Iterator[tuple[str, Level]]:
    if not (options.kv_host_gib or options.kv_disk or options.kv_store):
        return
    config = open_checkpoint(options.model).config
    if config.recurrence is not None:
        yield "no tier keeps KV of this model, whose recurrent layers keep states of some blocks alone", Level.WARNING
        return
    token_nbytes = config.num_kv_layers * config.kv_width * 4  # in float32, the largest
    for words, is_well in tier_checks.check_tiers(options, token_nbytes):
        yield words, Level.OK if is_well else Level.WARNING


def _transports(options: argparse.Namespace) -> Iterator[tuple[str, Level]]:
    from kv_transfer.transports.registry import Transports

    names = Transports().available()
    yield f"for KV: {', '.join(names)}", Level.OK if "ucx" in names else Level.WARNING
    program, libraries = _ucx_info()
    if program is None:
        yield "UCX's own list of devices can't be shown: ucx_info is not installed", Level.OK
        return
    env = os.environ | {"LD_LIBRARY_PATH": str(libraries)}
    said = subprocess.run([program, "-d"], env=env, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S).stdout
    yield f"UCX: {ucx_devices(said)}", Level.OK


def _codec(options: argparse.Namespace) -> Iterator[tuple[str, Level]]:
    try:
        config = open_checkpoint(options.model).config
    except ConfigError:  # reported by _model
        return
    yield codec_words(config), Level.OK


def ucx_devices(said: str) -> str:
    """Return `ucx_info -d` in a line: each transport with its devices, as "tcp (eth0, lo), cma"."""
    devices: dict[str, list[str]] = {}
    transport = ""
    for line in said.splitlines():
        name, _, value = line.strip("# ").partition(":")
        if name == "Transport":
            transport = value.strip()
        elif name == "Device" and value.strip() not in devices.setdefault(transport, []):
            devices[transport].append(value.strip())
    shown = [f"{name} ({', '.join(found)})" for name, found in devices.items()]
    return ", ".join(shown) or "no device"


def _ucx_info() -> tuple[Path | None, Path]:
    spec = find_spec("libucx")
    folder = Path((spec.submodule_search_locations or [""])[0]) if spec is not None else Path()
    program = folder / "bin" / "ucx_info"
    return (program if program.exists() else None), folder / "lib"


def _redis(options: argparse.Namespace) -> Iterator[tuple[str, Level]]:
    if options.redis_url:
        require_redis(options.redis_url, "leave --redis-url out")
        yield f"answers at {hide_password(options.redis_url)}", Level.OK
        return
    program = find_server()
    said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S).stdout
    with RedisServer(program):
        yield f"{program} starts and answers: {' '.join(said.split()[:3])}", Level.OK


def _gpu(options: argparse.Namespace) -> Iterator[tuple[str, Level]]:
    from kernels import caps

    found = caps.detect()
    yield from explain_device(found)
    try:
        checkpoint = open_checkpoint(options.model)
    except ConfigError:  # reported by _model
        return
    yield from explain_weights(checkpoint, found)
    if found.device == "cuda" and not missing_feature(checkpoint.config):
        yield from explain_room(checkpoint, [look_at(index) for index in range(count_gpus())])


def explain_weights(checkpoint: Checkpoint, found: "Caps") -> Iterator[tuple[str, Level]]:
    """Explain how a GPU of these capabilities holds a model's weights, and why not as they are stored."""
    if found.device != "cuda":
        return
    if lacking := missing_feature(checkpoint.config):
        yield f"a GPU does not serve this model, which has {lacking}: set --device to cpu", Level.WARNING
        return
    chosen = resolve_device_dtype("auto", checkpoint, found.cc)
    yield f"dtype auto holds this model's weights as {chosen} here", Level.OK
    quantization, is_mxfp4 = checkpoint.quantization, has_mxfp4(checkpoint)
    if is_mxfp4 and chosen != "float32":
        yield "the matrices of its experts are kept as they are stored, in MXFP4, beside rows in bf16", Level.OK
    elif quantization is not None and chosen in ("float8", "int4"):
        if checkpoint.config.experts is not None:
            changed = experts_changed(quantization, chosen)
            level = Level.WARNING if changed else Level.OK
            yield f"the matrices of its experts are {changed or 'kept as they are stored'}", level
    elif quantization is not None or is_mxfp4:
        reason = kept_as(checkpoint)[1] if found.cc >= 90 else "the kernels want compute capability 9.0"
        yield f"its quantized matrices are widened on load, and take the memory of plain ones: {reason}", Level.WARNING


def explain_room(checkpoint: Checkpoint, gpus: Sequence[Gpu]) -> Iterator[tuple[str, Level]]:
    """Explain how much of a GPU a model's weights take, and what to do if that is all or most of it."""
    if not gpus:
        return
    gpu = min(gpus, key=lambda gpu: gpu.nbytes)
    dtype = resolve_device_dtype("auto", checkpoint, gpu.cc)
    least = least_weights_nbytes(checkpoint, dtype)
    words = f"its weights take at least {_gib(least)} as {dtype}, of {_gib(gpu.nbytes)} that a GPU has"
    if least > gpu.nbytes:
        yield f"{words}, and do not fit: {what_holds(checkpoint, dtype, gpu.nbytes)}", Level.WARNING
    elif least > gpu.nbytes - SMALL_NBYTES:
        todo = what_holds(checkpoint, dtype, gpu.nbytes - SMALL_NBYTES)
        yield f"{words}, which leaves little for a batch and a KV cache: {todo}", Level.WARNING
    else:
        yield words, Level.OK


def explain_device(found: "Caps") -> Iterator[tuple[str, Level]]:
    """Explain what runs on a device of these capabilities, and why nothing better does."""
    from kernels import caps, catalog, standard

    if found.device != "cuda":
        yield "none that CUDA shows: models run on the CPU", Level.OK
        return
    registry = catalog.registry(found)
    cases = {case.op: case for case in standard.cases(found.device)}.values()
    choices = [registry.resolve(case.op, case.spec) for case in sorted(cases, key=lambda case: case.op)]
    yield f"{found.name}, sm_{found.cc}, {found.sm_count} multiprocessors", Level.OK
    for words in caps.missing(found):
        yield words, Level.WARNING
    yield "each operation takes the best implementation that runs here; `not` says why a better one does not:", Level.OK
    for choice in choices:
        against = "".join(f"; not {name}: {reason}" for name, reason in choice.rejected)
        yield f"  {choice.op}: {choice.impl.name}{against}", Level.OK


def _speculation(options: argparse.Namespace) -> Iterator[tuple[str, Level]]:
    for words in draft_words(options.model):
        yield words, Level.OK


def _model(options: argparse.Namespace) -> Iterator[tuple[str, Level]]:
    config = (checkpoint := open_checkpoint(options.model)).config
    yield f"{checkpoint.name} at {checkpoint.path}", Level.OK
    of_kv = f"{config.num_kv_heads} of them for keys and values"
    if config.latent is not None:
        of_kv = f"which share a latent of {config.latent.width} numbers a token"
    heads = f"{config.num_heads} heads, {of_kv}"
    yield f"{config.num_layers} layers, {heads}, context of {config.max_model_len} tokens", Level.OK
    if config.experts is not None:
        layers = config.num_layers - len(config.experts.dense_layers)
        chosen = f"{config.experts.count} experts, {config.experts.top_k} of them for each token"
        yield f"a mixture in {layers} of its layers: {chosen}; all of their weights are held", Level.OK
    yield f"weights as stored: {stored_as(checkpoint)}", Level.OK
    if quantized := quantized_as(checkpoint):
        yield f"quantized: {quantized}; widened on load for a CPU", Level.OK
    token_nbytes = config.num_kv_layers * config.kv_width * 4
    whole, least = (f"{nbytes / 1024:.0f} KiB" for nbytes in (token_nbytes, token_nbytes // config.num_kv_heads))
    yield f"KV cache: {whole} a token in float32, half of it in bfloat16", Level.OK
    if config.recurrence is not None:
        num_layers, numbers = (
            len(config.recurrent_layers),
            config.recurrence.num_key_heads * config.recurrence.state_width,
        )
        state = f"{num_layers * numbers * 4 / 2**20:.1f} MiB"
        yield f"and a state of {state} in {num_layers} recurrent layers, 2 for each running request at least", Level.OK
    elif config.latent is None:
        yield f"of it one KV head's, {least}, is the least that each of several GPUs has (tensor_parallel)", Level.OK
    if checkpoint.chat_template is None:
        yield "no chat template: it completes text, and refuses chats", Level.WARNING


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"


CHECKS: dict[str, Check] = {
    "versions": _versions,
    "memory": _memory,
    "redis": _redis,
    "model": _model,
    "tiers": _tiers,
    "transports": _transports,
    "kv codec": _codec,
    "cpu": _cpu,
    "drafts": _speculation,
    "gpu": _gpu,
}
