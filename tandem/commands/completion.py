"""The command `tandem completion`, which gives a shell the commands, options and values to complete."""

import argparse
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Literal, get_args, get_origin

from pydantic_settings import BaseSettings

DESCRIPTION = "Print a script that lets your shell complete tandem's commands, options and values."
EXAMPLES = """\
examples:
  source <(tandem completion bash)                                 in ~/.bashrc
  source <(tandem completion zsh)                                  in ~/.zshrc
  tandem completion fish > ~/.config/fish/completions/tandem.fish
"""

Options = Mapping[str, tuple[str, ...]]
"""Option -> the values it may have; none means any, a file name say. Under "" are the words that may stand without an
option.
"""

BASH = """\
_tandem() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} command=${{COMP_WORDS[1]}} words=""
  [[ $current == "=" ]] && current=""
  [[ $previous == "=" ]] && previous=${{COMP_WORDS[COMP_CWORD-2]}}
  if ((COMP_CWORD == 1)); then
    words="{commands}"
  else
    ((COMP_CWORD == 2)) || case "$command ${{COMP_WORDS[2]}}" in {pairs}) command+=" ${{COMP_WORDS[2]}}" ;; esac
    case "$command $previous" in
{values}
    esac
    [[ -n $words || $current != -* ]] || case "$command" in
{options}
    esac
    [[ -n $words || $current == -* ]] || case "$command" in
{words}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _tandem tandem
"""
ZSH = "autoload -U +X compinit bashcompinit\n(( $+functions[compdef] )) || compinit\nbashcompinit\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


def script(shell: str, commands: Mapping[str, Options]) -> str:
    """Return the script for these commands and their options; a command may be two words, "bench serve"."""
    if shell == "fish":
        return _fish(commands)
    return (ZSH if shell == "zsh" else "") + _bash(commands)


def options_of_settings(kind: type[BaseSettings]) -> Options:
    """Return the options of settings, named as pydantic-settings does on the command line."""
    fields = kind.model_fields.items()
    return {f"--{name.replace('_', '-')}": _values(field.annotation) for name, field in fields} | {"--help": ()}


def options_of_parser(parser: argparse.ArgumentParser) -> Options:
    """Return the options of a command's parser, with the words that it takes without an option."""
    options = {
        name: tuple(map(str, action.choices or ()))
        for name, action in parser._option_string_actions.items()
        if name.startswith("--")
    }
    words = [str(word) for action in parser._get_positional_actions() for word in action.choices or ()]
    return options | ({"": tuple(words)} if words else {})


def _values(annotation: object) -> tuple[str, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(map(str, annotation)) if isinstance(annotation, type) and issubclass(annotation, StrEnum) else ()


def _bash(commands: Mapping[str, Options]) -> str:
    return BASH.format(
        commands=" ".join(_first_words(commands)),
        pairs="|".join(f'"{command}"' for command in commands if " " in command),
        values=_cases(
            (f"{command} {option}", allowed)
            for command, options in commands.items()
            for option, allowed in options.items()
            if option and allowed
        ),
        options=_cases((command, filter(None, options)) for command, options in commands.items()),
        words=_cases((command, options[""]) for command, options in commands.items() if "" in options),
    )


def _cases(cases: Iterable[tuple[str, Iterable[str]]]) -> str:
    return "\n".join(f'      "{case}") words="{" ".join(words)}" ;;' for case, words in cases)


def _first_words(commands: Mapping[str, Options]) -> list[str]:
    return [command for command in commands if " " not in command]


def _fish(commands: Mapping[str, Options]) -> str:
    first = "complete -c tandem -n __fish_use_subcommand"
    lines = [f"{first} -f -a '{' '.join(_first_words(commands))}'"]
    for command, options in commands.items():
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in command.split())
        for option, allowed in options.items():
            name = f" -l {option.removeprefix('--')}" if option else " -f"
            values = f"{' -x' if option else ''} -a '{' '.join(allowed)}'" if allowed else ""
            lines.append(f"complete -c tandem -n '{seen}'{name}{values}")
    return "\n".join(lines) + "\n"
