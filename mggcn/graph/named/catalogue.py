"""Data sets that have a name: what is known of each, and where its files come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mggcn.graph.build.room import Room
from mggcn.graph.named.planetoid import PARTS, read_planetoid
from mggcn.graph.named.published import read_graphsaint, read_heterophilous, read_ppi, read_reddit
from mggcn.graph.sources.ogb import read_ogb


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """A published graph. files: its path in the data folder once it is unpacked; inside: in the archive.

    parts: names, appended to `url`, of the files of a folder, where there is no archive. sha256: of the archive or the
    file, or of each of the parts; () where none is known: then an archive's own checksums count.

    vertices, edges, features, classes: as published, edges before they are symmetrised; `metric` is the published score.
    """

    name: str
    url: str
    files: str
    inside: str = ""
    parts: tuple[str, ...] = ()
    sha256: tuple[str, ...] = ()
    vertices: int
    edges: int
    features: int
    classes: int
    metric: str = "accuracy"
    licence: str
    source: str
    read: Callable[[Path, Room], dict[str, Any]]


def _published(name: str, counts: tuple[int, ...], **more: Any) -> Dataset:
    vertices, edges, features, classes = counts
    return Dataset(name=name, vertices=vertices, edges=edges, features=features, classes=classes, **more)


def _saint(name: str, counts: tuple[int, ...], metric: str) -> Dataset:
    url = f"https://data.dgl.ai/dataset/{name}.zip"
    about = {"licence": "not stated", "source": "Zeng et al. 2020", "metric": metric}
    return _published(name, counts, url=url, files=f"{name}_raw", read=read_graphsaint, **about)


def _ogb(name: str, archive: str, counts: tuple[int, ...], sha256: tuple[str, ...] = ()) -> Dataset:
    url = f"https://snap.stanford.edu/ogb/data/nodeproppred/{archive}.zip"
    files = {"url": url, "files": name.replace("-", "_"), "inside": archive, "sha256": sha256, "read": read_ogb}
    licence = "Amazon" if name == "ogbn-products" else "ODC-BY"
    return _published(name, counts, licence=licence, source="Hu et al. 2020", **files)


def _heterophily(name: str, counts: tuple[int, ...], sha256: str, metric: str = "accuracy") -> Dataset:
    commit = "a431395582e929d88271309716bea4fe24ce6318"
    url = f"https://raw.githubusercontent.com/yandex-research/heterophilous-graphs/{commit}/data/{name}.npz"
    about = {"licence": "MIT", "source": "Platonov et al. 2023", "metric": metric}
    files = {"files": f"{name}.npz", "sha256": (sha256,), "read": read_heterophilous}
    return _published(name, counts, url=url, **files, **about)


def _planetoid(name: str, counts: tuple[int, ...], sha256: tuple[str, ...]) -> Dataset:
    commit = "af6abf468a772cc055bec88c52e4d6f51b7c37e3"
    url = f"https://raw.githubusercontent.com/kimiyoung/planetoid/{commit}/data/"
    parts = tuple(f"ind.{name}.{part}" for part in PARTS)
    files = {"files": f"{name}_raw", "parts": parts, "sha256": sha256, "read": lambda folder, _: read_planetoid(folder)}
    return _published(name, counts, url=url, licence="MIT", source="Yang et al. 2016", **files)


_ALL = (
    _planetoid(
        "cora",
        (2_708, 10_556, 1_433, 7),
        (
            "23cfa55d91c6f624233f5eb7b6e3f141f1bd2b2ae39608a63cf5d084bb27baab",
            "b9afbaa4a400df991f6f02ef677e1e44da55ffc04801fd02f9e673987829226a",
            "9419ba2f26f5c35243db64aba110e0f35a04851609e0dc5433450676ca6b8543",
            "94465c14eb53e04ca262198dcbb2521ee8af60fb3f3d546cd6ca24a511b0e7d1",
            "41f5ac76596a1699cc33f53084a2419e92961c42bb75f36fc38e616d348532ad",
            "2b998f5cc7fedc86e7f97ca2498f47a1ffc1462c29e2d578b23bf3f62b6e7d71",
            "58f13302f39dde8852dad6fe6d15b89b077b6d7f837626bce671ef80344b383d",
            "297ce89af2b51a6a194181c7dbe1796c6a1cf9cd9349a88383b1b1e227867875",
        ),
    ),
    _planetoid(
        "citeseer",
        (3_327, 9_104, 3_703, 6),
        (
            "d20de19150741e555de0ed037195630fc194114ebc7fd72ced62810148aa22f6",
            "539a8906a2da97628d212f2fdd668c109a8b3f0d36574b59e5d3fd5b5303da21",
            "2ac30345d95c9ec933a817ee0bdd6a5f077f8c184a20e696910192d534414668",
            "8ba87e515d8e3ee3cf52f6d2c5b86aa73f11ecad825a808455209ec26cd54924",
            "55e5bd1ba1e733a04598753ad1a8d57957f4b8f89e74519f41f4f4938767e4ce",
            "f704b2d986dde6c2669934de1f3ae5696a6cf9455c0f6b2646a2d135ea0a1c95",
            "d79a4ef9d3e7169aee8946145f6b7306e35bc79bffad26346cfb94e10e9912a7",
            "2af990671580b6b2df5d158d1038f8292e30c9cd821b5453f399659b25b723d4",
        ),
    ),
    _planetoid(
        "pubmed",
        (19_717, 88_648, 500, 3),
        (
            "fbe9cb5c47200d1b7769a26e579be3b7130b556831f9d850e77c4c74f2599b33",
            "4eb5f5d0f30f26497eb0ac6ac9719d09c67e284f1ed0385c93f3ef27a671da3d",
            "508e538e2abdccdd54c4d3e9f49d638b4af7107d85845f66ddea5a5152658b7e",
            "e6c807633307a07ed659249006536a147c7999c797f11a2560752990181b41b3",
            "ee2e0d4819d9fbcc403689c3bf2e49face401b605932f093bc58ab6461130fdd",
            "0c37bbe3b5014ec365e9d393cf4791925e5ed94fb194305d74f064a8d7b50f0e",
            "5b89f0036ca22909471f1e6558eb42fa06e0c730a577bde5b058b40638f81dc9",
            "b101d421688bbaecbd82e8a18f1e282378d6830f3a37666f28ebc47f844341b5",
        ),
    ),
    _ogb(
        "ogbn-arxiv",
        "arxiv",
        (169_343, 1_166_243, 128, 40),
        sha256=("49f85c801589ecdcc52cfaca99693aaea7b8af16a9ac3f41dd85a5f3193fe276",),
    ),
    _ogb(
        "ogbn-products",
        "products",
        (2_449_029, 61_859_140, 100, 47),
        sha256=("5ea0a112edaec2141c0a2a612dd4aed58df97ff3e1ab1a0ca8238f43cbbb50a8",),
    ),
    _ogb("ogbn-papers100M", "papers100M-bin", (111_059_956, 1_615_685_872, 128, 172)),
    _published(
        "reddit",
        (232_965, 114_615_892, 602, 41),
        url="https://data.dgl.ai/dataset/reddit.zip",
        files="reddit_raw",
        sha256=("9a16353c28f8ddd07148fc5ac9b57b818d7911ea0fbe9052d66d49fc32b372bf",),
        licence="not stated",
        source="Hamilton et al. 2017",
        read=read_reddit,
    ),
    _saint("flickr", (89_250, 899_756, 500, 7), metric="accuracy"),
    _published(
        "ppi",
        (56_944, 793_632, 50, 121),
        url="https://data.dgl.ai/dataset/ppi.zip",
        files="ppi_raw",
        sha256=("1f5b2b09ac0f897fa6aa1338c64ab75a5473674cbba89380120bede8cddb2a6a",),
        metric="micro_f1",
        licence="not stated",
        source="Zitnik & Leskovec 2017",
        read=read_ppi,
    ),
    _saint("yelp", (716_847, 13_954_819, 300, 100), metric="micro_f1"),
    _heterophily(
        "roman_empire", (22_662, 32_927, 300, 18), "a58ba741d123bf892fe5c872138d07463d75a2e9012360b8dd78ac2d4766d428"
    ),
    _heterophily(
        "amazon_ratings", (24_492, 93_050, 300, 5), "4c3a3e3b9d9f6cba0fede4625a00aad8c5721c1a36ed771367f446763241c7dd"
    ),
    _heterophily(
        "minesweeper",
        (10_000, 39_402, 7, 2),
        "e664c8dacf1e8ac466c2c09ed4b237bd2c5541f47a6eae9c6092cb87f16412b3",
        metric="roc_auc",
    ),
    _heterophily(
        "tolokers",
        (11_758, 519_000, 10, 2),
        "dacf3ac94cec53d03cd2adb5255c08b33dee1656c33ca8164a464bd9450a1667",
        metric="roc_auc",
    ),
    _heterophily(
        "questions",
        (48_921, 153_540, 301, 2),
        "757ebd772bab1475c4dd951ca9e364400c6db161656cff9d21780ee874cf3074",
        metric="roc_auc",
    ),
)
DATASETS: Final = {dataset.name: dataset for dataset in _ALL}

_OF_PYG: Final = {
    **{name: f'Amazon(root, "{name.title()}")' for name in ("computers", "photo")},
    "cs": 'Coauthor(root, "CS")',
    "physics": 'Coauthor(root, "Physics")',
    **{name: f'WebKB(root, "{name.title()}")' for name in ("cornell", "texas", "wisconsin")},
    **{name: f'WikipediaNetwork(root, "{name}")' for name in ("chameleon", "squirrel")},
    "wikics": "WikiCS(root)",
    "actor": "Actor(root)",
    "reddit2": "Reddit2(root)",
    "amazonproducts": "AmazonProducts(root)",
}
"""By bare name: data sets of PyG that are downloaded by it alone."""


def dataset_named(name: str) -> Dataset | None:
    """Return the data set of a name as mggcn, PyG or OGB spell it: case, "-" and "_" do not count. None without one."""
    return {_bare(known): dataset for known, dataset in DATASETS.items()}.get(_bare(name))


def read_elsewhere(name: str) -> str:
    """Return, as the end of a message, how PyG loads a data set that mggcn does not name; "" for other names."""
    bare = _bare(name)
    bare = next((bare.removeprefix(p) for p in ("amazon", "coauthor") if bare.removeprefix(p) in _OF_PYG), bare)
    call = _OF_PYG.get(bare)
    return f"; PyG has it: mggcn.load(torch_geometric.datasets.{call}[0])" if call else ""


def _bare(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
