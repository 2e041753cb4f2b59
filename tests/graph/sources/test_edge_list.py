from __future__ import annotations

import gzip
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mggcn.errors import GraphError
from mggcn.graph.build.staging import InFolder
from mggcn.graph.csr import Array
from mggcn.graph.sources import edge_list, packed
from mggcn.graph.sources.edge_header import NamesError


def read_edge_list(path: Path) -> tuple[Array, Array | None, str, Array | None]:
    """Edges [2, E], weights, header and types, as arrays."""
    found, header, *_ = edge_list.read_edge_list(path)
    more = (None if rows is None else rows.array() for rows in (found.weights, found.types))
    return np.stack([found.src.array(), found.dst.array()]), next(more), header, next(more)


EXPECTED = [[0, 1, 12], [1, 2, 0]]
GOOD = {
    "blanks": b"0 1\n1 2\n12 0\n",
    "tabs, no end of line": b"0\t1\n1\t2\n12\t0",
    "windows": b"0 1\r\n1 2\r\n12 0\r\n",
    "commas": b"0,1\n1, 2\n12 ,0\n",
    "comments": b"# SNAP: 3 edges\n% KONECT\n0 1\n\n  1   2  \n# 7 7\n12 0 # last\n",
    "header": b"from,to\n0,1\n1,2\n12,0\n",
    "header with digits": b"id_1,id_2\n0,1\n1,2\n12,0\n",
    "byte order mark": b"\xef\xbb\xbf0 1\n1 2\n12 0\n",
    "latin-1 comment": b"# caf\xe9\n0 1\n1 2\n12 0\n",
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", GOOD)
def test_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, packed: bool) -> None:
    """In one block and in blocks of a few bytes, so that block borders fall everywhere."""
    path = tmp_path / ("e.txt.gz" if packed else "e.txt")
    path.write_bytes(gzip.compress(GOOD[case]) if packed else GOOD[case])
    for block in (1 << 24, 1, 5, 11):
        monkeypatch.setattr(edge_list, "BLOCK_BYTES", block)
        edges, weights, _, _ = read_edge_list(path)
        np.testing.assert_array_equal(edges, EXPECTED)
        assert edges.dtype == np.int64
        assert weights is None


@pytest.mark.parametrize("text", ["0 1 .5\n1 2 -3e2\n12 0 7\n", "u,v,w\n0,1,.5\n1,2,-3e2\n12,0,7"])
def test_third_column_is_the_weight(tmp_path: Path, text: str) -> None:
    (tmp_path / "e.csv").write_text(text)
    edges, weights, _, _ = read_edge_list(tmp_path / "e.csv")
    np.testing.assert_array_equal(edges, EXPECTED)
    np.testing.assert_array_equal(weights, [0.5, -300, 7])


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n"])
def test_no_edges(tmp_path: Path, text: str) -> None:
    (tmp_path / "e.txt").write_text(text)
    edges, weights, _, _ = read_edge_list(tmp_path / "e.txt")
    assert edges.shape == (2, 0)
    assert weights is None


BAD = {
    "word": ("0 1\n1 x\n", "line 2: expected two vertex ids as in the first edge, got '1 x'"),
    "one column": ("0 1\n# c\n\n4\n", "line 4"),
    "one column at first": ("7\n", "line 1"),
    "too many columns": ("0 1\n1 2 3\n", "line 2"),
    "four columns": ("0 1 2 3\n", "line 1: expected two vertex ids and a weight, got '0 1 2 3'; leave further columns"),
    "weight lost": ("0 1 1.0\n1 2\n", "line 2: expected two vertex ids and a weight"),
    "fraction": ("0 1\n1.5 2\n", "line 2.*must be integers"),
    "fraction with weights": ("0 1 1\n1.0 2 1\n", "line 2"),
    "empty field": ("0,1\n,2\n", "line 2.*give the missing id"),
    "index and names of numbers": (",0,1\n0,5,6\n", "line 1.*leave out the index of a data frame"),
    "names for ids": ("a b\nb c\n", "line 1: expected two vertex ids, got 'a b'; ids must be integers from 0"),
    "names after a header": ("a b\nb 1\n", "line 2: expected two vertex ids, got 'b 1'; ids must be integers from 0"),
    "header at the end": ("0 1\nfrom to\n", "line 2"),
    "semicolons": ("# c\n0;1\n1;2\n", "line 2: expected two vertex ids, got '0;1'; semicolons are not read"),
    "semicolons after a header": ("u;v\n0;1\n", "line 1: semicolons are not read: put commas"),
    "semicolons and decimal commas": ("src;dst;weight\n0;1;0,5\n", "line 1: semicolons are not read: put commas"),
    "semicolons alone, decimal commas": ("0;1;0,5\n", "line 1.*semicolons are not read"),
    "bars after a header": ("src|dst\n0|1\n", r"line 1: bars \(\|\) are not read"),
    "carriage returns alone": ("0 1\r1 2\r", "line 1.*a carriage return alone ends no line"),
    "one carriage return, which would make a weight": ("0 1\n0 1 \r2 3\n", "line 2.*a carriage return alone"),
    "a header before a carriage return": ("src,dst\r0,1\r", "line 1.*a carriage return alone"),
    "a comment before a carriage return": ("# c\r0 1\n1 2\n", "line 1.*a carriage return alone"),
    "nothing but a comment": ("% c\r0 1\r1 2", "line 1.*a carriage return alone"),
    "UTF-16": ("\xff\xfe0\0 \0001\0", "is in UTF-16, expected UTF-8"),
    "relation second": ("subject,relation,weight\n0,1,2\n", "column 2 is named 'relation'"),
    "bars": ("0|1\n", r"line 1.*bars \(\|\) are not read: put blanks or commas"),
    "quotes": ('"1","2"\n"2","3"\n', "line 1.*double quotes are not read"),
    "only a header": ("from to\n", "found only 'from to'"),
    "huge": ("0 1\n99999999999999999999 2\n", "cannot be stored"),
    "binary": ("\0\1\2\3" * 9, "found only"),
}


@pytest.mark.parametrize("block", [1 << 24, 1, 5])
@pytest.mark.parametrize("case", BAD)
def test_malformed_line_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, block: int) -> None:
    text, message = BAD[case]
    (tmp_path / "e.txt").write_bytes(text.encode("latin-1"))
    monkeypatch.setattr(edge_list, "BLOCK_BYTES", block)
    with pytest.raises(GraphError, match=message):
        read_edge_list(tmp_path / "e.txt")


SKIPPED = {
    "names of places": "src,dst\n0,1\n",
    "camel case": "FromNodeId\tToNodeId\n0\t1\n",
    "blanks in names": "From node\tTo node\n0\t1\n",
    "quoted": '"source","target"\n0,1\n',
    "neutral": "paper_1 paper_2\n0 1\n",
    "one word for both": "v1 v2\n0 1\n",
    "other separator than the edges": "from to\n0,1\n",
    "weight": "u,v,edge_weight\n0,1,2.5\n",
    "after a comment of the same words": "# from to\nfrom to\n0 1\n",
}


@pytest.mark.parametrize("block", [1 << 24, 1, 5])
@pytest.mark.parametrize("case", SKIPPED)
def test_a_header_that_fits_is_skipped_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, block: int
) -> None:
    """Fails if a header that says what is read, or nothing, is refused, read as an edge, or forgotten."""
    (tmp_path / "e.csv").write_text(SKIPPED[case])
    monkeypatch.setattr(edge_list, "BLOCK_BYTES", block)
    edges, weights, header, _ = read_edge_list(tmp_path / "e.csv")
    np.testing.assert_array_equal(edges, [[0], [1]])
    assert header == SKIPPED[case].removeprefix("# from to\n").split("\n")[0]
    assert (weights is None) == (case != "weight")


CONTRADICTING = {
    "index of pandas": (",src,dst\n0,5,6\n1,6,7\n", "column 1 is named '', as that of an index"),
    "index of pandas, tabs": ("\tsrc\tdst\n0\t5\t6\n", "column 1 is named ''"),
    "index of pandas, blanks": (" src dst\n0 5 6\n", "2 names stand over 3 columns"),
    "index of pandas, neutral names": (",a,b\n0,5,6\n", "column 1 is named ''"),
    "index of pandas, read again": ("Unnamed: 0,src,dst\n0,5,6\n", "column 1 is named 'Unnamed: 0'"),
    "index before one column": ("index,dst\n0,5\n", "column 1 is named 'index'"),
    "number of the edge": ("id,src,dst\n0,5,6\n", "column 2 is named 'src'"),
    "target first": ("dst,src\n5,6\n", "column 1 is named 'dst'"),
    "target first, camel case": ("ToNodeId FromNodeId\n5 6\n", "column 1 is named 'ToNodeId'"),
    "target last": ("src,kind,dst\n5,1,6\n", "column 3 is named 'dst'"),
    "weight second": ("src,weight\n5,6\n", "column 2 is named 'weight'"),
    "time": ("src,dst,timestamp\n5,6,1600000000\n", "column 3 is named 'timestamp', not weight"),
    "unknown third": ("a,b,c\n5,6,7\n", "column 3 is named 'c', not weight"),
    "a title": ("all edges of it\n5 6\n", "4 names stand over 2 columns"),
}


@pytest.mark.parametrize("block", [1 << 24, 1, 5])
@pytest.mark.parametrize("case", CONTRADICTING)
def test_a_header_that_contradicts_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, block: int
) -> None:
    """Fails if a graph is made of columns that the header calls something else."""
    text, message = CONTRADICTING[case]
    (tmp_path / "e.csv").write_text("# made yesterday\n" + text)
    monkeypatch.setattr(edge_list, "BLOCK_BYTES", block)
    with pytest.raises(GraphError, match=f"line 2: columns are read as source, target.*{message}") as caught:
        read_edge_list(tmp_path / "e.csv")
    assert "\n" not in str(caught.value)


def test_truncated_gzip_and_missing_file(tmp_path: Path) -> None:
    (tmp_path / "e.txt.gz").write_bytes(gzip.compress(b"0 1\n" * 1000)[:-9])
    for name in ("e.txt.gz", "missing.txt"):
        with pytest.raises(GraphError, match="cannot read the edge list"):
            read_edge_list(tmp_path / name)
    (tmp_path / "f.txt.gz").write_bytes(b"0 1\n")
    with pytest.raises(GraphError, match="cannot read the edge list"):
        read_edge_list(tmp_path / "f.txt.gz")


NUMBERS = [
    "0.1",
    "-3.25e-7",
    "+4",
    "1e400",
    "-1e-400",
    "123456789012345678901234567890",
    "5.",
    ".5",
    "2.2250738585072014e-308",
]
NUMBERS += ["0.30000000000000004", "9007199254740993", "1.7976931348623157e308", "8.5e22", "1E5", "-0.0"]
NO_NUMBERS = ["0x10", "1_0", "1e", ".", "--1", "+-1", "1.2.3", "1;2", "\u0663", "\0", "1\0", "e5", "nan1"]


def test_weights_are_those_of_python(tmp_path: Path) -> None:
    """Fails if a number is rounded in another way, or digits, signs or exponents are read wrongly."""
    (tmp_path / "e.txt").write_text("".join(f"{k} 1 {text}\n" for k, text in enumerate(NUMBERS)))
    weights = read_edge_list(tmp_path / "e.txt")[1]
    assert weights is not None
    assert weights.tobytes() == np.array([float(text) for text in NUMBERS]).tobytes()


@pytest.mark.parametrize("text", NO_NUMBERS)
@pytest.mark.parametrize("column", [0, 2])
def test_what_is_no_number(tmp_path: Path, text: str, column: int) -> None:
    """Fails if a field that is no number is read as one, or any byte ends in anything but a line."""
    fields = ["7", "8", "9"]
    fields[column] = text
    (tmp_path / "e.txt").write_text("0 1 2\n" + " ".join(fields) + "\n")
    with pytest.raises(GraphError, match="line 2") as caught:
        read_edge_list(tmp_path / "e.txt")
    assert "\n" not in str(caught.value)


def test_random_bytes_and_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if some text is read in another way than a plain parser reads it, or crashes it."""
    rng = np.random.default_rng(4211)
    alphabet = np.frombuffer(b"0123456789   \n\n\t,#%-+.e\r\x00\xa0\xffa", np.uint8)
    monkeypatch.setattr(edge_list, "BLOCK_BYTES", 17)
    read = 0
    for _ in range(250):
        text = b"3 4\n" + rng.choice(alphabet[: rng.integers(11, alphabet.size)], 24).tobytes()
        (tmp_path / "e.txt").write_bytes(text)
        fields = [line.replace("%", "#").split("#")[0].split() for line in text.decode("latin-1").split("\n")]
        lines = [line for line in fields if line]
        plain = all(len(line) == 2 and all(re.fullmatch(r"[+-]?\d+", field, re.A) for field in line) for line in lines)
        plain = plain and all(abs(int(field)) < 2**63 for line in lines for field in line)
        lone = any("\r" in line.rstrip("\r") for line in text.decode("latin-1").split("\n"))
        expected = [[*map(int, line)] for line in lines] if plain and not lone else None
        try:
            found = read_edge_list(tmp_path / "e.txt")[0].T.tolist()
            read += len(found) > 1
        except GraphError:
            found = None
        assert found == expected, text
    assert read > 5


def test_pieces_of_threads_are_one_list(tmp_path: Path) -> None:
    """Fails if lines at the border of two threads' pieces, or behind comments, are lost; or the wrong line is named."""
    rng = np.random.default_rng(77)
    pairs = rng.integers(0, 10**6, (40_000, 2))
    lines = [f"{u}\t{v}" if u % 7 else f"{u} {v} # {'x' * (v % 50)}\n% c" for u, v in pairs.tolist()]
    (tmp_path / "e.txt").write_text("\n".join(lines))
    np.testing.assert_array_equal(read_edge_list(tmp_path / "e.txt")[0].T, pairs)
    lines[30_000] += "\nx"
    text = "\n".join(lines)
    (tmp_path / "e.txt").write_text(text)
    number = text[: text.index("\nx")].count("\n") + 2
    with pytest.raises(GraphError, match=f"line {number}: expected two vertex ids as in the first edge, got 'x'"):
        read_edge_list(tmp_path / "e.txt")


def test_zstd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if frames, or the rest of a cut file, are lost in silence, or the missing package is not named."""
    zstandard = pytest.importorskip("zstandard")
    frames = [zstandard.compress(part) for part in (b"0 1\n1 ", b"2\n", b"12 0\n" + b"# padding\n" * 9000)]
    (tmp_path / "e.txt.zst").write_bytes(b"".join(frames))
    monkeypatch.setattr(edge_list, "BLOCK_BYTES", 5)
    np.testing.assert_array_equal(read_edge_list(tmp_path / "e.txt.zst")[0], EXPECTED)
    for text in (b"".join(frames)[:-5], b"0 1\n"):
        (tmp_path / "e.txt.zst").write_bytes(text)
        with pytest.raises(GraphError, match="cannot read the edge list"):
            read_edge_list(tmp_path / "e.txt.zst")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(GraphError, match=r"pip install 'mggcn\[zstd\]'"):
        read_edge_list(tmp_path / "e.txt.zst")


@pytest.mark.parametrize("packed", [False, True])
def test_an_interrupted_parse_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    """Fails if lines are parsed twice or left out, the header is forgotten, or a line gets another number."""
    path = tmp_path / ("e.csv.gz" if packed else "e.csv")
    text = b"u,v,w\n" + b"".join(b"%d,%d,%d\n" % (k, k + 1, k % 3) for k in range(60))
    path.write_bytes(gzip.compress(text) if packed else text)
    monkeypatch.setattr(edge_list, "BLOCK_BYTES", 40)
    monkeypatch.setattr(edge_list, "SAVE_EVERY", 3)
    whole = read_edge_list(path)
    native, calls = edge_list.kernel, 0

    def failing(name: str) -> Any:
        nonlocal calls
        calls += 1
        if calls % 4 == 0:
            raise KeyboardInterrupt
        return native(name)

    monkeypatch.setattr(edge_list, "kernel", failing)
    for _ in range(20):
        try:
            found, header, *_ = edge_list.read_edge_list(path, InFolder(tmp_path / "s", {}))
            break
        except KeyboardInterrupt:
            continue
    np.testing.assert_array_equal(np.stack([found.src.array(), found.dst.array()]), whole[0])
    assert found.weights is not None
    np.testing.assert_array_equal(found.weights.array(), whole[1])
    assert header == "u,v,w"
    assert calls > 10


def test_numbers_of_a_text_are_estimated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if lines that grow longer, as those of sorted edges do, mislead the estimate, or a packed text gets one."""
    monkeypatch.setattr(packed, "SAMPLES", 32)
    monkeypatch.setattr(packed, "SAMPLE_BYTES", 256)
    for name, separator in (("e.txt", " "), ("e.csv", ",")):
        (tmp_path / name).write_text("".join(f"{at * at}{separator}{at}\n" for at in range(3_000)))
        assert packed.about_bytes(tmp_path / name) == pytest.approx(16 * 3_000, rel=0.1)
        assert packed.about_bytes(tmp_path / name) <= packed.most_bytes(tmp_path / name)
    (tmp_path / "e.txt").rename(tmp_path / "e.txt.gz")
    assert packed.about_bytes(tmp_path / "e.txt.gz") == 0


@pytest.mark.parametrize("first", ["007 1", "+7 1", "1 -0", "0000001\t2"])
def test_ids_that_are_more_than_their_numbers(tmp_path: Path, first: str) -> None:
    """Fails if what may be names is read as numbers without a word, or names after a parse of numbers lose edges."""
    path = tmp_path / "e.txt"
    path.write_text(f"3 4\n5 6\n{first}\n")
    (remark,) = edge_list.read_edge_list(path).remarks
    assert f"{first!r} in line 3 were read as numbers: --ids edges" in remark
    with pytest.raises(NamesError):
        edge_list.read_edge_list(path, plain=True)
    path.write_text("0 1\n10 -5\n100 007\n".replace("007", "7"))
    assert not edge_list.read_edge_list(path, plain=True).remarks


def test_a_parse_that_found_names_is_not_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a parse of numbers goes on where one that looked for names had stopped and given its columns up."""
    path = tmp_path / "e.txt"
    path.write_text("".join(f"{k} {k + 1}\n" for k in range(1, 90)) + "007 8\n")
    monkeypatch.setattr(edge_list, "BLOCK_BYTES", 40)
    monkeypatch.setattr(edge_list, "SAVE_EVERY", 2)
    staging = InFolder(tmp_path / "s", {})
    with pytest.raises(NamesError):
        edge_list.read_edge_list(path, staging, plain=True)
    found = edge_list.read_edge_list(path, staging).edges
    assert found.src.array().tolist() == [*range(1, 90), 7]


@pytest.mark.parametrize("filler", [b"\n", b"  \r\n", b"#\n", b"% x\n", b" \t # 1 2\n\n"])
@pytest.mark.parametrize("more", [b"", b"u v\n"])
def test_blocks_of_blanks_and_comments_before_the_first_edge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filler: bytes, more: bytes
) -> None:
    """Fails if Python looks at each of millions of lines without an edge, or the number of a line behind them is wrong."""
    split, seen = edge_list.split_header, []
    monkeypatch.setattr(edge_list, "BLOCK_BYTES", 1 << 17)
    monkeypatch.setattr(edge_list, "split_header", lambda *given: seen.append(given) or split(*given))
    lines = (1 << 20) // len(filler)
    text = filler * lines
    path = tmp_path / "x.txt.gz"
    with gzip.open(path, "wb", 1) as file:
        file.write(text + more + b"0 1\n" + filler * 9 + b"2 3\n")
    edges, weights, header, _ = read_edge_list(path)
    assert edges.tolist() == [[0, 2], [1, 3]]
    assert weights is None
    assert header == more.decode().strip()
    assert len(seen) <= 2  # of eight blocks
    with gzip.open(path, "ab", 1) as file:
        file.write(b"2 3 4\n")
    number = 3 + (lines + 9) * filler.count(b"\n") + bool(more)
    with pytest.raises(GraphError, match=f"line {number}: expected two vertex ids as in the first edge"):
        read_edge_list(path)
