"""Edge lists whose ids are strings or have gaps: numbered as arrays are, and the ids kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mggcn import load
from mggcn.api.load import load_source
from mggcn.errors import GraphError
from mggcn.graph import edges
from mggcn.graph.facts import describe
from mggcn.graph.ids import ids_of
from mggcn.graph.layout import graph_sha256
from mggcn.graph.sources import edge_list
from mggcn.graph.store import open_store
from mggcn.interop.objects import from_object
from tests.cli.runs import refused, run_main

PAIRS = [("u7", "u10"), ("u10", "\u00e4"), ("u7", "\u00e4"), ("b", "u7")]
NAMES = np.array(PAIRS).T


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edges, "WINDOW", 2)
    monkeypatch.setattr("mggcn.graph.ids.WINDOW", 2)
    monkeypatch.setattr(edge_list, "BLOCK_BYTES", 11)


def text(path: Path, pairs: Any, header: str = "", separator: str = ",", more: Any = ()) -> Path:
    rows = [
        separator.join(map(str, (*pair, *extra))) for pair, extra in zip(pairs, more or [()] * len(pairs), strict=True)
    ]
    path.write_text("\n".join([header, "# c", *rows]), encoding="utf-8")
    return path


@pytest.mark.parametrize("separator", [",", " ", "\t"])
@pytest.mark.parametrize("header", ["", "source{}target"])
def test_names_are_numbered_as_in_arrays(tmp_path: Path, separator: str, header: str) -> None:
    """Fails if a name gets another row than an array's, a header is taken for an edge, or the ids are lost."""
    path = text(tmp_path / "e.csv", PAIRS, header.format(separator), separator)
    expected = from_object(NAMES)
    graph = load_source(path, ids="edges")
    assert graph_sha256(graph) == graph_sha256(expected)
    assert ids_of(graph).tolist() == ids_of(expected).tolist() == ["b", "u10", "u7", "\u00e4"]
    assert graph.meta.get("input", {}).get("header", "") == header.format(separator)


def test_rows_in_a_given_order(tmp_path: Path) -> None:
    """Fails if rows of features, or ids in a split, belong to another vertex than the edges' name says."""
    ids = np.array(["x", "u10", "\u00e4", "b", "u7"])
    weights = [(1.5,), (2,), (3,), (1,)]
    path = text(tmp_path / "e.csv", PAIRS, "from,to,weight", more=weights)
    arrays = {"features": np.eye(5, dtype=np.float32), "labels": np.arange(5), "splits": {"train": ["b", "x"]}}
    np.save(tmp_path / "ids.npy", ids)
    graph = load(path, ids=str(tmp_path / "ids.npy"), **arrays)
    expected = from_object(NAMES, ids=ids, weights=np.array(weights)[:, 0], **arrays)
    assert graph_sha256(graph) == graph_sha256(expected)
    assert ids_of(graph).tolist() == ids.tolist()
    with pytest.raises(GraphError, match="edges hold 'u7', which ids do not have"):
        load_source(path, ids=ids[:4])


@pytest.mark.parametrize("suffix", [".txt", ".npy", ".i64"])
def test_numbers_with_gaps(tmp_path: Path, suffix: str) -> None:
    """Fails if gaps become vertices, or ids beyond 2^31 are refused though they are names."""
    pairs = np.array([[7, 10**12], [10**12, -3], [7, -3]])
    path = tmp_path / f"e{suffix}"
    text(tmp_path / "e.txt", pairs)
    np.save(tmp_path / "e.npy", np.ascontiguousarray(pairs.T))
    pairs.tofile(tmp_path / "e.i64")
    graph = load_source(path, ids="edges")
    assert graph_sha256(graph) == graph_sha256(from_object(pairs.T, ids="edges"))
    assert ids_of(graph).tolist() == [-3, 7, 10**12]


def test_prepare_keeps_the_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if the command does not pass ids on, writes them nowhere, or takes rows that nobody named."""
    path, store = text(tmp_path / "e.tsv", PAIRS, separator="\t"), tmp_path / "store"
    assert run_main("prepare", path, store, "--ids", "edges") == 0
    assert ids_of(open_store(store, verify=True)).tolist() == ["b", "u10", "u7", "\u00e4"]
    np.save(tmp_path / "x.npy", np.ones((4, 2), np.float32))
    more = ("prepare", path, tmp_path / "other")
    assert "the edges name vertices by ids" in refused(
        capsys, *more, "--ids", "edges", "--features", tmp_path / "x.npy"
    )
    assert "cannot load" in refused(capsys, *more, "--ids", tmp_path / "nothing.npy")
    assert "ids must be integers from 0" in refused(capsys, *more)


BAD = {
    "three fields": ("a,b\nb,c,1\n", "line 2: expected two names as in the first edge"),
    "one field": ("a b\nb\n", "line 2"),
    "empty": ("a,b\n,c\n", "line 2"),
    "text behind a quote": ('a,b\n"a"b,c\n', "line 2.*after a closing quote"),
    "a quote that stays open": ('a,b\n"a,c\nb,c\n', "line 2: a double quote is not closed"),
    "an empty name in quotes": ('a,b\n"",c\n', "line 2: expected two names"),
    "an index between tabs": ("a\tb\n\tb\n", "line 2: expected two names"),
    "triples": ("ann likes bob\nbob likes eve\n", "line 1.*'bob' is not a number; of triples"),
    "named triples": ("source,target,type\nann,bob,likes\n", "line 2.*number relations first"),
    "triples of numbers": ("head,relation,object\n0,1,5\n", "line 1: columns are read as source, target"),
    "semicolons": ("Ann;Bob\n", "line 1: semicolons are not read"),
    "semicolons and blanks": ("Ann;Bob Ray\n", "line 1: semicolons are not read"),
    "semicolons and decimal commas": ("src;dst;w\nAnn;Bob;0,5\n", "line 1: semicolons are not read"),
    "bars": ("Ann Lee|Bob\n", "line 1: bars"),
    "carriage returns alone": ("a b\rb c\r", "line 1.*a carriage return alone"),
    "one carriage return": ("a,b\nb,c\rc,d\n", "line 2: a carriage return alone"),
    "a zero byte": ("a b\nb a\0\n", "line 2: a name holds a zero byte"),
    "a room or a comment": ("a\tb\nb\tRoom #5\n", "line 2.*comment or a name"),
    "a tag or a comment": ("ml,ai\n#ai,ml\n", "line 2.*comment or a name"),
    "the header again": ("source,target\na,b\nsource,target\n", "line 3: the header stands here again"),
    "a weight of Python": ("a b 1\na c 1_0\n", "line 2: expected two names and a weight"),
    "weight": ("a b 1\na c x\n", "line 2: expected two names and a weight"),
    "four": ("a b 1 2\n", "line 1"),
    "order": ("target,source\na,b\n", "line 1: columns are read as source, target"),
    "no text": ("a b\nb \udcff\n", "line 2: names must be UTF-8"),
    "only a header": ("source target\n", "found none"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_lines_are_named(tmp_path: Path, case: str) -> None:
    """Fails if a line of another form passes or is not named."""
    (tmp_path / "e.txt").write_bytes(BAD[case][0].encode("utf-8", "surrogateescape"))
    with pytest.raises(GraphError, match=BAD[case][1]) as caught:
        load_source(tmp_path / "e.txt", ids="edges")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("separator", [",", " ", "\t"])
def test_marks_of_comments_within_names(tmp_path: Path, separator: str) -> None:
    """Fails if a name is cut at # or %, so that vertices merge, or a comment behind a blank becomes part of one."""
    pairs = [("C", "C#"), ("Caf%C3%A9", "Caf%20x"), ("C#", "F#%")]
    path = text(tmp_path / "e.txt", pairs, separator=separator)
    path.write_text(path.read_text().replace("%20x", "%20x # why\n% c\n  #c"))
    graph = load_source(path, ids="edges")
    assert graph_sha256(graph) == graph_sha256(from_object(np.array(pairs).T))
    assert ids_of(graph).tolist() == ["C", "C#", "Caf%20x", "Caf%C3%A9", "F#%"]


def test_a_mark_behind_a_number(tmp_path: Path) -> None:
    """Fails if what may be a name or a comment is taken for either in silence."""
    (tmp_path / "e.txt").write_text("u v\n1 2#x\n1 2#y\n")
    with pytest.raises(GraphError, match="got '1 2#x', which may be either; put a blank"):
        load_source(tmp_path / "e.txt", ids="edges")
    (tmp_path / "e.txt").write_text("1 3 #x\n1#x 3#y\n")
    assert ids_of(load_source(tmp_path / "e.txt", ids="edges")).tolist() == ["1", "1#x", "3", "3#y"]


def test_a_name_of_many_letters(tmp_path: Path) -> None:
    """Fails if one name makes gigabytes of many short ones, or some long names are refused."""
    long = "n" * 60_000
    text(tmp_path / "e.txt", [("a", long), *((f"u{at}", "a") for at in range(1_200))])
    with pytest.raises(
        GraphError, match=r"all 1,202 names would take the 60,000 letters of the longest, 'nnn.*shorten"
    ):
        load_source(tmp_path / "e.txt", ids="edges")
    text(tmp_path / "e.txt", [("a", long), ("a", "b")])
    assert ids_of(load_source(tmp_path / "e.txt", ids="edges")).tolist() == ["a", "b", long]


def test_a_matrix_has_no_ids(tmp_path: Path) -> None:
    """Fails if ids beside a source that numbers its vertices are dropped in silence."""
    (tmp_path / "m.mtx").write_text("%%MatrixMarket matrix coordinate real general\n3 3 1\n1 2 0.5\n")
    with pytest.raises(GraphError, match="numbers its vertices itself"):
        load_source(tmp_path / "m.mtx", ids="edges")


READ: dict[str, tuple[str, list[tuple[Any, ...]]]] = {
    "leading zeros": ("0501 501\n501 77\n", [("0501", "501"), ("501", "77")]),
    "a plus": ("5 +5\n", [("5", "+5")]),
    "floats": ("1 1.0\n1.0 1e3\n1e3 1000\n", [("1", "1.0"), ("1.0", "1e3"), ("1e3", "1000")]),
    "hexadecimal": ("0x10 16\n", [("0x10", "16")]),
    "two zeros": ("-0 0\n", [("-0", "0")]),
    "beyond int64": (f"1 {2**64 - 1}\n{2**63} 1\n", [("1", str(2**64 - 1)), (str(2**63), "1")]),
    "a name at the end": ("1 2\n" * 40 + "2 x9\n", [("1", "2"), ("2", "x9")]),
    "a name with a weight": ("1,2,5\n1,x,5\n", [("1", "2"), ("1", "x")]),
    "a name below a header": ("source\ttarget\n1\t2\n2\tAcme 3\n", [("1", "2"), ("2", "Acme 3")]),
    "names first": ("alpha beta\n100 200\n200 gamma\n", [("alpha", "beta"), ("100", "200"), ("200", "gamma")]),
    "numbers": ("1 2\n2 30\n", [(1, 2), (2, 30)]),
    "numbers in quotes": ('"source","target"\n"1","2"\n"2","30"\n', [(1, 2), (2, 30)]),
    "commas in quotes": ('"Stone, A.",Hill\nHill, "Reed, B."\n', [("Stone, A.", "Hill"), ("Hill", "Reed, B.")]),
    "quotes in quotes": ('"the ""old"" mill",b\n', [('the "old" mill', "b")]),
    "a line end in quotes": ('"Upper\nTown",b\nb,"x\n\ny"\n', [("Upper\nTown", "b"), ("b", "x\n\ny")]),
    "quotes between tabs": ('"a\tb"\tc, d\n', [("a\tb", "c, d")]),
    "quotes between blanks": ('"Upper Town"  "Low Hill" 2\n', [("Upper Town", "Low Hill")]),
    "marks in quotes": ('"Room #5","#ai"\n"#ai","50 % off"\n', [("Room #5", "#ai"), ("#ai", "50 % off")]),
    "blanks in quotes": ('" a",a\n', [(" a", "a")]),
    "quotes within a name": ('5" pipe,3" valve\n', [('5" pipe', '3" valve')]),
    "apostrophes": ("O'Neil 'n-Sync\n'n-Sync d'Arc\n", [("O'Neil", "'n-Sync"), ("'n-Sync", "d'Arc")]),
    "commas between tabs": ("Stone, A.\tReed, B.\nReed, B.\tHill\n", [("Stone, A.", "Reed, B."), ("Reed, B.", "Hill")]),
    "a weight behind tabs": ("Upper Town\tLow Hill\t2.5\n", [("Upper Town", "Low Hill")]),
    "commas before tabs": ("a,\tb\n", [("a", "b")]),
    "a byte order mark within": ("a,b\n\ufeffb,a\n", [("a", "b"), ("b", "a")]),
    "Windows": ('a,"b c"\r\n"b c",d\r\n', [("a", "b c"), ("b c", "d")]),
    "bars between tabs": ("sp|P1|A\tX\n", [("sp|P1|A", "X")]),
}


@pytest.mark.parametrize("case", READ)
def test_each_id_is_as_it_is_written(tmp_path: Path, case: str) -> None:
    """Fails if two names become one, one becomes two, or an edge is lost: what stands in the file counts."""
    source, expected = READ[case]
    (tmp_path / "e.txt").write_bytes(source.encode())
    graph = load_source(tmp_path / "e.txt", ids="edges")
    ids, indptr = ids_of(graph).tolist(), graph.adj.indptr.array()
    rows = np.repeat(np.arange(len(ids)), np.diff(indptr)).tolist()
    found = {(ids[u], ids[v]) for u, v in zip(rows, graph.adj.indices.array().tolist(), strict=True)}
    assert found == set(expected)


def test_given_ids_say_whether_numbers_are_names(tmp_path: Path) -> None:
    """Fails if 0501 is taken for 501 where ids are numbers, or numbers of a list are no names where ids are strings."""
    path = tmp_path / "e.txt"
    path.write_text("501 77\n77 501\n")
    for ids in (np.array(["77", "501"]), np.array([77, 501])):
        graph = load_source(path, ids=ids, labels=np.array([0, 1]))
        assert ids_of(graph).tolist() == ids.tolist()
        assert graph.num_edges == 2
    path.write_text("0501 77\n77 501\n")
    with pytest.raises(GraphError, match="edges hold <U4, ids int64"):
        load_source(path, ids=np.array([77, 501]))
    assert load_source(path, ids=np.array(["501", "77", "0501"])).num_edges == 2


REMARKS = {
    "a header that is not known": (
        "person1,person2\nann,bob\nbob,eve\n",
        "'person1,person2', was read as an edge",
    ),
    "a header behind a mark": ("#Gene1\tGene2\nBRCA 1\tTP 53\nTP 53\tX\n", "a header was skipped: '#Gene1\\tGene2'"),
    "more than a number": ("a 07\n07 7\n", "ids are names, as '07' is one"),
    "nothing": ("a b\nb c\n", ""),
    "names first, as numbers": ("7 8\n8 x\n", ""),
}


@pytest.mark.parametrize("case", REMARKS)
def test_what_may_be_another_reading_is_told(tmp_path: Path, case: str) -> None:
    """Fails if a first line that may be a header, or a name that may be a number, is taken without a word."""
    source, expected = REMARKS[case]
    (tmp_path / "e.txt").write_text(source)
    remarks = describe(load_source(tmp_path / "e.txt", ids="edges")).remarks()
    assert any(expected in remark for remark in remarks) if expected else not remarks


def test_records_across_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a name with a line end, or the number of its line, is lost where a block ends or edges are written."""
    monkeypatch.setattr(edge_list, "BLOCK_BYTES", 3)
    monkeypatch.setattr("mggcn.graph.sources.named_edges.MOST_WAITING", 2)
    source = "".join(f'"n{k}\n,x",n{k + 1}\n' for k in range(20))
    (tmp_path / "e.csv").write_text(source)
    graph = load_source(tmp_path / "e.csv", ids="edges")
    assert graph.num_edges == 20
    assert {f"n{k}\n,x" for k in range(20)} | {f"n{k}" for k in range(1, 21)} == set(ids_of(graph).tolist())
    (tmp_path / "e.csv").write_text(source + "a,b,c\n")
    with pytest.raises(GraphError, match="line 41: expected two names"):
        load_source(tmp_path / "e.csv", ids="edges")
