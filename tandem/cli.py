"""The command `tandem`: one subcommand per thing a person wants to do."""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from contracts.errors import TandemError
from tandem.local.run_dir import state_home

CODES = """\
exit codes:
  0  done, or stopped on request
  1  could not start, or could not do it; one line says why and what to do
  2  the command line is wrong
"""
VITAL_CODE = "  3  a process died that the system can't do without\n"

EPILOG = f"""\
getting started:
  tandem up                                   the default model on http://127.0.0.1:8000
  tandem chat                                 talk to it, from another terminal
  tandem up --model ./Qwen3-0.6B --port 9000  another model, beside the first system
  tandem up --prefill 2 --decode 2            more workers
  tandem ps                                   what runs, and where the logs are
  tandem bench serve --concurrency 1,4,16     how it bears load
  tandem COMMAND --help                       examples and every option; the settings of `up` and `worker` are also
                                              environment variables, TANDEM_<NAME>

{CODES}{VITAL_CODE}"""

UP_EXAMPLES = f"""
examples:
  tandem up                                   the default model on http://127.0.0.1:8000
  tandem up --model ./Qwen3-0.6B --port 9000  another model, beside the first system
  tandem up --prefill 2 --decode 2            two workers of each role
  tandem up --prefill 0 --decode 0 --mixed 1  one worker that does both, to compare with
  TANDEM_TRANSFER=tcp tandem up               each option is an environment variable too
  tandem up --kv-cache-mib 512                the options of a worker go to each of them: `tandem worker --help`

{CODES}{VITAL_CODE}"""

WORKER_EXAMPLES = f"""
examples:
  tandem worker --role decode --redis-url redis://10.0.0.5:6379/0 --pool main --host 0.0.0.0
                                              joins the system whose state that Redis keeps; TANDEM_SECRET must be the
                                              one of its other services
  tandem worker --role decode --kv-cache-mib 512 ...   with a KV cache of a size of your own

{CODES}"""

BENCH_EXAMPLES = (
    """\
examples:
  tandem bench serve --help      load on an OpenAI-compatible server; has options of its own
  tandem bench engine transfer   two of the benchmarks behind Tandem's own figures (see bench/README.md)

The others run from a checkout, on an idle machine, and write to bench/results.

"""
    + CODES
)

COMMANDS = {
    "up": "start a whole system on this machine and keep it running until Ctrl-C",
    "chat": "talk to the model of a running system, and see how fast it answers",
    "ps": "show the processes that `tandem up` started",
    "top": "watch the running systems: load, KV caches, transfers, speed",
    "role": "give a running worker another role",
    "doctor": "say what this machine has, what of it is used, and what is missing",
    "tokenize": "show the tokens of a text",
    "bench": "measure; `tandem bench serve` puts load on a server",
    "worker": "run one worker, to join a system that is up (here or elsewhere)",
    "completion": "print a script for your shell's completion",
    "version": "print the version",
}
TOOLS = {
    "chat": "chat",
    "ps": "ps",
    "top": "top",
    "role": "role",
    "doctor": "doctor",
    "tokenize": "tokenize",
    "bench serve": "bench_serve",
}
"""Commands that are a module with DESCRIPTION, EXAMPLES, add_arguments(parser) and run(options, home)."""

OK, FAILED, WRONG = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    # Until a command handles signals, Ctrl-C ends the process at once, without a traceback: imports take a second.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    arguments = sys.argv[1:] if argv is None else list(argv)
    if not arguments:
        make_parser().print_help(sys.stderr)
        return WRONG
    if arguments[0] == "--version":
        return run_version(arguments[1:])
    # The rest belongs to the command, --help included.
    command = make_parser().parse_args(arguments[:1]).command
    run = RUNNERS.get(command)
    return run(arguments[1:]) if run else run_tool(command, arguments[1:])


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's name."""
    parser = argparse.ArgumentParser(
        prog="tandem",
        description="Serve a language model with prefill and decode in separate services.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help=COMMANDS["version"])
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    for name, words in COMMANDS.items():
        commands.add_parser(name, help=words, add_help=False)
    return parser


def run_tool(command: str, arguments: Sequence[str]) -> int:
    """Run a command that is a module, and return its exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    options = tool_parser(command).parse_args(arguments)
    try:
        return _tool(command).run(options, state_home(dict(os.environ)))
    except TandemError as error:
        print(f"tandem {command}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return OK
    except BrokenPipeError:
        write_no_more()
        return OK


def write_no_more() -> None:
    """Discard what is still to be flushed, since the reader of the output, `head` say, has closed it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def tool_parser(command: str) -> argparse.ArgumentParser:
    """Return the parser of a command that is a module."""
    tool = _tool(command)
    parser = argparse.ArgumentParser(
        prog=f"tandem {command}",
        description=tool.DESCRIPTION,
        epilog=f"{tool.EXAMPLES}\n{CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tool.add_arguments(parser)
    return parser


def _tool(command: str):
    """Import the module of a command when it is used: other commands should not wait for its imports."""
    return importlib.import_module(f"tandem.commands.{TOOLS[command]}")


def run_up(arguments: Sequence[str]) -> int:
    with examples_after_help(arguments, UP_EXAMPLES):
        return importlib.import_module("tandem.commands.up").main(list(arguments), dict(os.environ))


def run_worker(arguments: Sequence[str]) -> int:
    with examples_after_help(arguments, WORKER_EXAMPLES):
        for line in importlib.import_module("tandem.local.preflight").unread(os.environ):
            print(f"tandem worker: {line}", file=sys.stderr)
        return importlib.import_module("worker.main").main(list(arguments))


@contextmanager
def examples_after_help(arguments: Sequence[str], examples: str) -> Iterator[None]:
    """Print examples after the help of a command.

    It is for commands whose parser is made from settings, which has no place for examples.
    """
    try:
        yield
    except SystemExit as ended:
        if not ended.code and {"-h", "--help"} & set(arguments):
            try:
                print(examples, end="", flush=True)
            except BrokenPipeError:
                write_no_more()
        raise


def run_bench(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["serve"]:
        return run_tool("bench serve", arguments[1:])
    return importlib.import_module("bench.__main__").main(bench_parser().parse_args(arguments).name)


def bench_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tandem bench",
        description="Measure. `serve` puts load on a running server; the others bring up what they measure.",
        epilog=BENCH_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = importlib.import_module("bench.__main__").ALL
    parser.add_argument("name", nargs="+", choices=("serve", *known), metavar="NAME", help=", ".join(("serve", *known)))
    return parser


def run_version(arguments: Sequence[str]) -> int:
    argparse.ArgumentParser(prog="tandem version", description="Print the version.").parse_args(arguments)
    print(f"tandem {importlib.import_module('service.version').release()} ({Path(__file__).resolve().parent.parent})")
    return OK


def run_completion(arguments: Sequence[str]) -> int:
    completion = importlib.import_module("tandem.commands.completion")
    parser = argparse.ArgumentParser(
        prog="tandem completion",
        description=completion.DESCRIPTION,
        epilog=f"{completion.EXAMPLES}\n{CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    completion.add_arguments(parser)
    settings = {
        "up": importlib.import_module("tandem.local.settings").UpSettings,
        "worker": importlib.import_module("worker.settings").WorkerSettings,
    }
    options = {name: {"--help": ()} for name in COMMANDS}
    options |= {name: completion.options_of_settings(kind) for name, kind in settings.items()}
    options |= {
        "bench": completion.options_of_parser(bench_parser()),
        "completion": completion.options_of_parser(parser),
    }
    options |= {name: completion.options_of_parser(tool_parser(name)) for name in TOOLS}
    print(completion.script(parser.parse_args(arguments).shell, options), end="")
    return OK


RUNNERS: dict[str, Callable[[Sequence[str]], int]] = {
    "up": run_up,
    "worker": run_worker,
    "bench": run_bench,
    "completion": run_completion,
    "version": run_version,
}
