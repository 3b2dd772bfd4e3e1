"""Grammars that are tried out in a process of their own before a worker gets them."""

import json
import os
import resource
import signal
import threading

import psutil
import pytest
from llguidance import LLMatcher

from checkpoint import open_checkpoint
from contracts.errors import Unavailable
from gateway.grammar.compile_sandbox import CompileSandbox
from tests.gateway.gateway_rig import gateway, pair
from tests.waiting import until

pytestmark = pytest.mark.slow

GOOD = LLMatcher.grammar_from_regex("[a-z]{3}")


def patterns(count: int) -> str:
    """A string that must match all of them."""
    schema = {"allOf": [{"type": "string", "pattern": f"a{{0,{index}}}.*"} for index in range(count)]}
    return LLMatcher.grammar_from_json_schema(json.dumps(schema))


@pytest.fixture(scope="module")
def trials() -> CompileSandbox:
    return CompileSandbox(open_checkpoint(""), timeout_s=1.0)


def least_integer() -> str:
    schema = {"type": "integer", "minimum": -(2**63), "maximum": -(2**63)}
    return LLMatcher.grammar_from_json_schema(json.dumps(schema))


def pid_of(trials: CompileSandbox) -> int:
    assert trials._compiler is not None
    return trials._compiler._process.pid


def test_a_grammar_that_compiles_has_no_verdict_against_it(trials: CompileSandbox):
    assert trials.verdict(GOOD) == ""


def test_one_that_keeps_the_compiler_at_work_for_hours_is_refused_and_the_next_is_tried(trials: CompileSandbox):
    assert not LLMatcher.validate_grammar(patterns(30)), "or it is refused without a trial"
    assert trials.verdict(patterns(30)) == "compiling it takes longer than 1 s; make it simpler"
    assert trials.verdict(LLMatcher.grammar_from_regex("[a-z]{4}")) == ""


def test_a_verdict_is_remembered(trials: CompileSandbox):
    trials.verdict(patterns(30))
    trials.verdict(LLMatcher.grammar_from_regex("[a-z]{5}"))
    before = pid_of(trials)
    assert trials.verdict(patterns(30)) and pid_of(trials) == before, "a trial would have ended the process"


def test_what_llguidance_says_is_told_in_a_line_without_its_state(trials: CompileSandbox):
    verdict = trials.verdict(patterns(16))
    assert verdict.startswith("lexer precomputation failed") and "\n" not in verdict and "<state>" not in verdict


def test_a_process_that_is_gone_is_started_again(trials: CompileSandbox):
    trials.verdict(LLMatcher.grammar_from_regex("[a-z]{6}"))
    gone = pid_of(trials)
    os.kill(gone, signal.SIGKILL)
    until(lambda: trials._compiler is None or trials._compiler.is_gone)
    assert trials.verdict(LLMatcher.grammar_from_regex("[a-z]{7}")) == ""
    assert pid_of(trials) != gone


def test_without_a_process_nothing_is_said_of_the_grammar(monkeypatch: pytest.MonkeyPatch):
    trials, grammar = CompileSandbox(open_checkpoint("")), LLMatcher.grammar_from_regex("[a-z]{10}")
    with monkeypatch.context() as patched:
        patched.setattr("gateway.grammar.compile_sandbox.die_with_parent", lambda command: ["false"])
        with pytest.raises(Unavailable, match="does not start"):
            trials.verdict(grammar)
    assert trials.verdict(grammar) == ""


def test_one_that_takes_the_process_along_is_refused_and_the_next_is_tried(trials: CompileSandbox, monkeypatch):
    trials.verdict(LLMatcher.grammar_from_regex("[a-z]{8}"))
    monkeypatch.setattr(trials, "_timeout_s", 30.0)
    monkeypatch.setattr("gateway.grammar.compile_sandbox._Compiler.is_gone", False)  # its pipes close before it ends
    stopped = pid_of(trials)
    os.kill(stopped, signal.SIGSTOP)
    until(lambda: psutil.Process(stopped).status() == psutil.STATUS_STOPPED)  # until then it may answer
    killing = threading.Timer(0.2, os.kill, (stopped, signal.SIGKILL))
    killing.start()
    verdict = trials.verdict(LLMatcher.grammar_from_regex("[a-z]{9}"))
    killing.join()
    assert verdict == "compiling it takes too much memory; make it simpler"
    assert trials.verdict(LLMatcher.grammar_from_regex("[a-z]{11}")) == ""


def test_one_that_ends_who_reads_it_is_refused_and_the_next_is_tried(trials: CompileSandbox, monkeypatch):
    monkeypatch.setattr(trials, "_timeout_s", 30.0)
    assert trials.fault(least_integer()) == "compiling it takes too much memory; make it simpler"
    assert trials.fault(GOOD) == ""
    assert resource.prlimit(pid_of(trials), resource.RLIMIT_CORE) == (0, 0), "or each leaves its memory in a file"


def test_what_can_be_read_and_not_compiled_is_no_fault(trials: CompileSandbox):
    assert trials.fault(patterns(16)) == "" and trials.verdict(patterns(16))


def test_what_can_not_be_read_is_told_in_the_same_line_either_way(trials: CompileSandbox):
    grammar = LLMatcher.grammar_from_regex("(")
    line = 'at 1(8): invalid regex "(" (in regex): regex parse error: error: unclosed group'
    assert trials.fault(grammar) == trials.verdict(grammar) == line


async def test_the_process_goes_with_its_gateway(checkpoint):
    async with gateway(checkpoint, pair()) as rig, rig.client() as client:
        trials = rig.front.prompting.trials = CompileSandbox(checkpoint)
        body = {"prompt": "x", "max_tokens": 1, "structured_outputs": {"regex": "[a-z]"}}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        pid = pid_of(trials)
    until(lambda: trials._compiler is None or trials._compiler.is_gone)
    assert not psutil.pid_exists(pid)
