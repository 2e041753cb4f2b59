"""Write the scores of every vertex, in the original order, with the weights of a run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from mggcn.cli.answer import add_json
from mggcn.comm.rank import require_one_process
from mggcn.errors import ConfigError, printable
from mggcn.files import read_text, reason, require_file
from mggcn.runs import predict as predicting


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="file to write, by its suffix: .npy (N x C in the run's precision), or .csv or .parquet, with the id of each "
        "vertex (its number, if the store has no ids), as it is: a spreadsheet takes ids that begin with = + - @ for "
        "formulas; default: RUN/scores.npy",
    )
    parser.add_argument(
        "--weights",
        choices=("best", "last"),
        default="best",
        help="weights of the best validation score (default), or of the last epoch",
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="SEED",
        help="with --repeat: seed of the run whose weights are used; default: the one of the best validation score",
    )
    parser.add_argument("--probabilities", action="store_true", help="write probabilities instead of scores")
    parser.add_argument(
        "--classes", action="store_true", help="write the class of each vertex, or 0 and 1 for each of several labels"
    )
    parser.add_argument(
        "--layer",
        type=int,
        metavar="K",
        help="write the output of the K-th hidden layer (embeddings), from 1, instead of scores; default: RUN/layer-K.npy",
    )
    parser.add_argument(
        "--store", type=Path, metavar="DIR", help="score another store, which has the same features and needs no labels"
    )
    parser.add_argument(
        "--vertices",
        metavar="ID,...|FILE",
        help="compute and write these alone, in this order: their ids as the store has them (row numbers, if it has "
        "none), or a file of them: .npy, also a mask, or .txt, one a line; default file: RUN/scores-selected.npy",
    )
    parser.add_argument(
        "--pairs",
        metavar="FILE",
        help="of a run that predicts links: write the scores of these pairs instead, .npy (K,): a file of their ids, .npy "
        "(K, 2) or .txt, two a line; default file: RUN/pairs.npy",
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write predictions and print the path of the file."""
    require_one_process("mggcn predict")
    path = predicting.predict(
        arguments.run_folder,
        arguments.out,
        weights=arguments.weights,
        seed=arguments.seed,
        probabilities=arguments.probabilities,
        classes=arguments.classes,
        layer=arguments.layer,
        store=arguments.store,
        vertices=None if arguments.vertices is None else _listed(arguments.vertices),
        pairs=None if arguments.pairs is None else _paired(arguments.pairs),
    )
    kind = "probabilities" if arguments.probabilities else "classes" if arguments.classes else "scores"
    what = kind if arguments.layer is None else f"layer-{arguments.layer}"
    arguments.answer = {"file": path, "what": what, "weights": arguments.weights}
    print(printable(path))
    return 0


def _paired(text: str) -> Any:
    """Return the pairs of a file (K, 2). Raises: ConfigError."""
    if Path(text).suffix not in (".npy", ".txt"):
        raise ConfigError(f"--pairs expects a file of ids, .npy (K, 2) or .txt with two a line, got {text}")
    found = _listed(text, "--pairs")
    if isinstance(found, list):
        lines = [line.split() for line in found]
        if bad := [line for line in found if len(line.split()) != 2]:
            raise ConfigError(f"--pairs {text} expects two ids a line, got {bad[0]!r}")
        return np.array(lines)
    return found


def _listed(text: str, flag: str = "--vertices") -> Any:
    """Return the ids that a flag lists, or those of a file. Raises: ConfigError."""
    path = Path(text)
    if path.suffix not in (".npy", ".txt"):
        return text.split(",")
    try:
        if path.suffix == ".npy":
            return np.load(require_file(path), allow_pickle=False)
        return [line for line in read_text(path).splitlines() if line]
    except OSError as error:
        raise ConfigError(
            f"{flag} {text} cannot be read: {reason(error)}; give a file of ids, or ids separated by commas"
        ) from error
    except (ValueError, EOFError) as error:
        raise ConfigError(f"{flag} {text} holds no list of ids: {error}") from error
