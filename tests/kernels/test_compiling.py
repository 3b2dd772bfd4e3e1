"""How often Triton compiles, counted by its own hook; for a GPU that need not be here."""

import os
import pickle
import subprocess
import sys
import time

import psutil
import pytest
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.errors import CompilationError
from triton.runtime import driver
from triton.runtime._async_compile import active_mode

from kernels import compiling
from kernels.compile_server import frame
from kernels.compiling import compiled_ahead
from kernels.specs import NormSpec
from kernels.triton.norm import add_rmsnorm_quant, norm_kernel
from tests.environment import import_path
from tests.kernels.aot import source_of
from tests.kernels.compile_cases import CASES
from tests.kernels.odd_kernels import Noise, Slow, make_kernel, wrong_kernel

pytestmark = pytest.mark.slow

HANG = "import time; time.sleep(60)"
NORM = NormSpec(64, "none", deferred=True)


class AbsentHopper:
    """What Triton asks of a driver to compile."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, _):
        return 0


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Names of kernels, one for each time that one is compiled."""
    names = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", AbsentHopper())
    # As if this process began later: who runs the tests has perhaps just written the sources.
    monkeypatch.setattr("kernels.compiling._SERVER", [*compiling._SERVER[:-1], str(time.time() + 60)])
    monkeypatch.setattr(norm_kernel, "device_caches", type(norm_kernel.device_caches)(norm_kernel.create_binder))

    def hook(*, fn, **_):
        names.append(fn.name)

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", hook)
    yield names
    active_mode.set(None)  # Triton leaves it behind a kernel that does not compile


def norm(num_rows):
    x, gain, scale = torch.ones(num_rows, 64), torch.ones(64), torch.ones(num_rows)
    add_rmsnorm_quant(NORM, x, x.clone(), gain, 1e-5, x.clone(), scale, token_scale=scale, channel_scale=gain)


def test_a_kernel_is_compiled_once_for_all_numbers_of_rows(compiled):
    with compiled_ahead():
        for num_rows in (1, 2, 3, 16, 17, 48, 64):
            norm(num_rows)
    assert compiled == ["norm_kernel"]


def test_a_kernel_is_compiled_once_more_where_it_is_launched_otherwise(compiled):
    with compiled_ahead():
        norm(64)
        norm(65)  # fewer warps
        norm(128)
    assert compiled == ["norm_kernel"] * 2


def test_what_is_compiled_stays_so(compiled):
    for _ in range(2):
        with compiled_ahead():
            norm(5)
    assert compiled == ["norm_kernel"]


def test_each_kernel_is_told_of_and_how_many_there_are(compiled):
    told = []
    with compiled_ahead(lambda done, total: told.append((done, total))):
        norm(64)
        norm(65)
        assert not told
    assert told == [(1, 2), (2, 2)] and len(compiled) == 2


def test_launches_are_launches_again_afterwards(compiled):
    launch = triton.JITFunction.run
    with pytest.raises(KeyError), compiled_ahead():
        raise KeyError
    assert triton.JITFunction.run is launch


def test_one_thread_parses_at_a_time(compiled, monkeypatch):
    parse, now, most = triton.JITFunction.parse, 0, 0

    def slowly(kernel):
        nonlocal now, most
        now += 1
        most = max(most, now)
        time.sleep(0.02)
        tree = parse(kernel)
        now -= 1
        return tree

    monkeypatch.setattr(triton.JITFunction, "parse", slowly)
    with compiled_ahead():
        norm(64)
        norm(128)
    assert (compiled, most) == (["norm_kernel"] * 2, 1)
    assert triton.JITFunction.parse is slowly


@pytest.fixture
def compiled_here(compiled, monkeypatch):
    """Names of kernels that this process compiles itself, and does not find in Triton's cache."""
    names = []

    def listen(*, src, cache_hit, **_):
        if not cache_hit:
            names.append(src.name)

    monkeypatch.setattr(knobs.compilation, "listener", listen)
    return names


def test_what_is_not_there_yet_is_compiled_by_other_processes(compiled, compiled_here):
    told = []
    with compiled_ahead(lambda done, total: told.append((done, total)), in_processes=True):
        norm(64)
        norm(65)
    assert (compiled, compiled_here, told) == (["norm_kernel"] * 2, [], [(1, 2), (2, 2)])


def test_what_is_in_the_cache_needs_no_other_process(compiled, compiled_here, monkeypatch):
    with compiled_ahead():
        norm(64)
    assert compiled_here == ["norm_kernel"]
    monkeypatch.setattr(norm_kernel, "device_caches", type(norm_kernel.device_caches)(norm_kernel.create_binder))
    monkeypatch.setattr("kernels.compiling.CompileServerClient._tell", None)
    with compiled_ahead(in_processes=True):
        norm(64)
    assert (compiled, compiled_here) == (["norm_kernel"] * 2, ["norm_kernel"])


def test_later_launches_compile_in_this_process_again(compiled, compiled_here):
    with compiled_ahead(in_processes=True):
        norm(64)
    with compiled_ahead():
        norm(65)
    assert compiled_here == ["norm_kernel"]


def test_a_server_that_cannot_be_started_is_done_without(compiled, compiled_here, monkeypatch):
    monkeypatch.setattr("kernels.compiling._SERVER", ["there is no such program"])
    with compiled_ahead(in_processes=True):
        norm(64)
    assert compiled == compiled_here == ["norm_kernel"]


def test_a_source_that_changed_since_it_was_read_is_compiled_here(compiled, compiled_here, monkeypatch):
    monkeypatch.setattr("kernels.compiling._SERVER", [*compiling._SERVER[:-1], "0"])
    with compiled_ahead(in_processes=True):
        norm(64)
    assert compiled == compiled_here == ["norm_kernel"]


@pytest.mark.parametrize(
    "code", ["raise SystemExit(1)", "import sys; sys.stdin.buffer.read(1)", "import os; os.abort()"]
)
def test_a_server_that_ends_loses_nothing(code, compiled, compiled_here, monkeypatch):
    """At once, with a job half read, or killed."""
    monkeypatch.setattr("kernels.compiling._SERVER", [sys.executable, "-c", code])
    with compiled_ahead(in_processes=True):
        norm(64)
        norm(65)
        norm(5)
    assert compiled == compiled_here == ["norm_kernel"] * 2


def servers():
    """That this process has started."""
    children = psutil.process_iter(["ppid", "cmdline"])  # of one that ended meanwhile nothing is said
    ours = [child.info["cmdline"] or [] for child in children if child.info["ppid"] == os.getpid()]
    return [command for command in ours if command[1:3] in (compiling._SERVER[1:3], ["-c", HANG])]


def test_a_server_that_hangs_is_waited_for_no_longer_than_it_may(compiled, compiled_here, monkeypatch):
    monkeypatch.setattr("kernels.compiling._SERVER", [sys.executable, "-c", HANG])
    monkeypatch.setattr("kernels.compiling._COMPILE_TIMEOUT_S", 0.1)
    monkeypatch.setattr("kernels.compiling._CLOSE_TIMEOUT_S", 0.1)
    with compiled_ahead(in_processes=True):
        norm(64)
    assert compiled == compiled_here == ["norm_kernel"]
    assert not servers()


def start_server():
    command = [sys.executable, "-m", "kernels.compile_server", str(time.time() + 60)]
    environ = os.environ | {"PYTHONPATH": import_path(os.getcwd())}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ)


def test_what_a_module_prints_is_no_answer():
    with start_server() as server:
        answers, _ = server.communicate(frame(7, Noise(), None, {}), timeout=60)
    assert (server.returncode, answers) == (0, b"7 1\n")


def test_forks_end_with_the_server(tmp_path):
    """The fork has a job that would take a minute."""
    server = start_server()
    assert server.stdin is not None
    server.stdin.write(frame(1, Slow(tmp_path / "began"), GPUTarget("cuda", 90, 32), {}))
    server.stdin.flush()
    while not (tmp_path / "began").exists():
        time.sleep(0.01)
    forks = psutil.Process(server.pid).children()
    server.communicate(timeout=60)
    assert server.returncode == 0 and len(forks) == 1
    assert not psutil.wait_procs(forks, timeout=30)[1]


def test_the_server_ends_with_its_last_kernel(compiled):
    with compiled_ahead(in_processes=True):
        norm(64)
        while not servers():
            time.sleep(0.01)
    assert not servers()


def test_a_kernel_that_does_not_compile_says_why(compiled):
    with pytest.raises(CompilationError, match="unknown_name"), compiled_ahead(in_processes=True):
        wrong_kernel[(1,)](1)


def test_a_kernel_without_a_name_is_compiled_here(compiled, compiled_here):
    nameless = make_kernel()
    with compiled_ahead(in_processes=True):
        nameless[(1,)](1)
    assert compiled_here == ["nameless_kernel"]


@pytest.mark.parametrize("case", [case for case in CASES if 90 in case.archs][::7], ids=lambda case: case.name)
def test_what_kernels_are_compiled_with_crosses_to_another_process(case):
    """Types, constants, layouts and options arrive as they are: what is compiled there is found here."""
    source = source_of(case)
    job = frame(1, source, GPUTarget("cuda", 90, 32), dict(case.options))
    arrived, target, options = pickle.loads(job[16:])
    assert (target, options) == (GPUTarget("cuda", 90, 32), dict(case.options))
    assert type(arrived) is type(source) and arrived.hash() == source.hash()
