"""Archives of graphs as their authors published them, each read into the arguments of `from_arrays`.

All are read whole: the largest, Reddit's, takes 2 GB. Raises: OSError, ValueError, LookupError, TypeError or AttributeError
for files of another form; who calls says which data set they were to hold.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from mggcn.files import read_object, require_file
from mggcn.graph.build.room import Room

LARGEST_JSON = 1 << 29
"""Bytes of a list of classes, roles or links: Yelp lists 100 labels of 716,847 vertices, some 220 MB."""


def read_heterophilous(path: Path, _: Room) -> dict[str, Any]:
    """Read the one file of a heterophilous graph, with its ten splits."""
    with np.load(require_file(path), allow_pickle=False) as found:
        masks = {part: found[f"{part}_masks"] for part in ("train", "val", "test")}
        return {
            "edges": found["edges"].T,
            "features": found["node_features"],
            "labels": found["node_labels"],
            "splits": masks,
        }


def read_reddit(path: Path, _: Room) -> dict[str, Any]:
    """Read the two files of Reddit's posts."""
    adj = sp.load_npz(require_file(path / "reddit_graph.npz"))
    with np.load(require_file(path / "reddit_data.npz"), allow_pickle=False) as found:
        types = found["node_types"]
        splits = {part: types == number for number, part in enumerate(("train", "val", "test"), 1)}
        return {"adj": adj, "features": found["feature"], "labels": found["label"], "splits": splits}


def read_graphsaint(path: Path, _: Room) -> dict[str, Any]:
    """Read the four files of a graph of GraphSAINT: a class of each vertex, or a list of 0 and 1; unlisted are unknown."""
    roles, classes = (read_object(path / name, LARGEST_JSON) for name in ("role.json", "class_map.json"))
    listed = np.array(list(classes.values()))
    features = np.load(require_file(path / "feats.npy"), allow_pickle=False)
    labels = np.full((len(features), *listed.shape[1:]), -1)
    labels[np.array(list(classes), np.int64)] = listed
    splits = {part: np.array(roles[part[:2]], np.int64) for part in ("train", "val", "test")}
    adj = sp.load_npz(require_file(path / "adj_full.npz"))
    return {"adj": adj, "features": features, "labels": labels, "splits": splits}


def read_ppi(path: Path, _: Room) -> dict[str, Any]:
    """Read the tissues of PPI, 20 to train on and 2 each to validate and to test, as one graph of 24 parts.

    Edges are given once, and loops are left out: both are listed now and then.
    """
    first, splits, found = 0, {}, []
    for part, name in (("train", "train"), ("val", "valid"), ("test", "test")):
        files = (require_file(path / f"{name}_{what}.npy") for what in ("feats", "labels"))
        features, labels = (np.load(file, allow_pickle=False) for file in files)
        links = read_object(path / f"{name}_graph.json", LARGEST_JSON)["links"]
        ends = np.array([(link["source"], link["target"]) for link in links], np.int64)
        if ends.size and not 0 <= ends.min() <= ends.max() < len(features):
            raise ValueError(f"{name}_graph.json links vertices {ends.min()} to {ends.max()} of {len(features)}")
        splits[part] = np.arange(first, first + len(features))
        found.append((features, labels, ends + first))
        first += len(features)
    features, labels, ends = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    edges = np.unique(np.sort(ends[ends[:, 0] != ends[:, 1]], axis=1), axis=0)
    return {"edges": edges.T, "features": features, "labels": labels, "splits": splits}
