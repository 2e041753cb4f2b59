"""Print a script with which bash, zsh or fish completes commands, flags, settings, stores and names of data sets.

bash: eval "$(mggcn completion bash)" in ~/.bashrc. zsh: the same in ~/.zshrc, behind compinit.
fish: mggcn completion fish > ~/.config/fish/completions/mggcn.fish
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mggcn.config import TABLES
from mggcn.config.files import Setting, described
from mggcn.errors import ConfigError

SHELLS = ("bash", "zsh", "fish")
# Words are split at = by bash alone, which shtab leaves to others: the values of --set are completed before it is asked.
BASH = """
_mggcn_values() {
  case "$1" in
%(cases)s
  esac
}
_mggcn_setting() { compgen -W "%(keys)s" -- "$1"; }
_mggcn_store_dir() { compgen -d -- "$1"; compgen -W "%(datasets)s" -- "$1"; }
_mggcn() {
  local line="${COMP_LINE:0:COMP_POINT}" split=
  if [[ "$line" =~ --set[\\ =]+([a-z_]+\\.[a-z_]+)=([^\\ ]*)$ ]]; then
    [[ "$COMP_WORDBREAKS" == *=* ]] || split="${BASH_REMATCH[1]}="
    COMPREPLY=($(compgen -P "$split" -W "$(_mggcn_values "${BASH_REMATCH[1]}")" -- "${BASH_REMATCH[2]}"))
    return
  fi
  _shtab_mggcn "$@"
  [[ ${#COMPREPLY[@]} = 1 && "${COMPREPLY[0]}" == *= ]] && compopt -o nospace 2>/dev/null
  return 0
}
"""
ZSH = """
_mggcn_setting() {
  if compset -P '*='; then
    case "${${IPREFIX%%=}##*=}" in
%(cases)s
    esac
  else
    compadd -S '' -- %(keys)s
  fi
}
_mggcn_store_dir() { _files -/; compadd -- %(datasets)s }
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def run(arguments: argparse.Namespace) -> int:
    """Print the completion script of a shell."""
    if importlib.util.find_spec("shtab") is None:
        raise ConfigError('mggcn completion needs the package shtab: pip install "mggcn[completion]"')
    import shtab

    settings = described()
    for action in _actions(arguments.main):
        if found := _completed(action, settings):
            action.complete = found  # type: ignore[attr-defined]
    script = shtab.complete(arguments.main, shell=arguments.shell, preamble=_preamble(settings))
    if arguments.shell == "bash":
        script = script.replace("-F _shtab_mggcn mggcn", "-F _mggcn mggcn")
    print(script)
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """All actions of a parser and of those in it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _actions(inner)
        else:
            yield action


def _completed(action: argparse.Action, settings: Sequence[Setting]) -> Mapping[str, Any] | None:
    """Return how shtab has an argument completed; None as it does anyway, by `choices` or not at all."""
    import shtab

    from mggcn.graph.named.catalogue import DATASETS

    values = {f"setting_{setting.name.partition('.')[2]}": setting.values for setting in settings}
    if action.dest == "set":
        pairs = [f"{s.name}={value}" for s in settings for value in s.values or ("",)]
        return {"bash": "_mggcn_setting", "zsh": "_mggcn_setting", "fish": " ".join(pairs)}
    if action.dest == "key":
        return _words("settings", [*TABLES, *(setting.name for setting in settings)])
    if action.dest == "name" and not action.option_strings:
        return _words("datasets", DATASETS)
    if action.dest in ("store", "source") and action.metavar != "DIR":
        fish = f"(__fish_complete_directories) {' '.join(DATASETS)}"
        return {"bash": "_mggcn_store_dir", "zsh": "_mggcn_store_dir", "fish": fish}
    if words := values.get(action.dest, ()):
        return _words(action.dest, words)
    if action.metavar in ("DIR", "RUN"):
        return shtab.DIRECTORY  # type: ignore[no-any-return]
    return shtab.FILE if action.type is Path else None


def _words(name: str, words: Sequence[str] | Mapping[str, object]) -> dict[str, Any]:
    """Have an argument completed to one of some words."""
    text = " ".join(words)
    function = f'_mggcn_words_{name}() {{ compgen -W "{text}" -- "$1"; }}'
    return {"bash": f"_mggcn_words_{name}", "zsh": f"({text})", "fish": text, "preamble": {"bash": function}}


def _preamble(settings: Sequence[Setting]) -> dict[str, str]:
    """Return the functions that complete settings and stores, of bash and of zsh."""
    from mggcn.graph.named.catalogue import DATASETS

    parts = {"keys": " ".join(f"{setting.name}=" for setting in settings), "datasets": " ".join(DATASETS)}
    limited = {
        setting.name: " ".join(setting.values or ("true", "false")) for setting in settings if _is_limited(setting)
    }
    bash = "\n".join(f'    {name}) echo "{words}" ;;' for name, words in limited.items())
    zsh = "\n".join(f"      {name}) compadd -- {words} ;;" for name, words in limited.items())
    return {"bash": BASH % (parts | {"cases": bash}), "zsh": ZSH % (parts | {"cases": zsh})}


def _is_limited(setting: Setting) -> bool:
    return bool(setting.values) or isinstance(setting.default, bool)
