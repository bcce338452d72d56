"""Published files: every form is read, and what cannot be read is counted in its place."""
import gzip
import json
from datetime import date
from decimal import Decimal
from importlib.util import find_spec

import pytest
from toolstar.files import golds_of, plain, read_rows, splits_of

from runtime import Mistake
from toolstar.published import read_rows as read_by_converter
from toolstar.sets import read_rows as read_by_sets

NAN = float("nan")
ROWS = [{"question": "a", "answer": "b"}, {"question": "c", "answer": None}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


@pytest.mark.parametrize("name, text", [
    ("x.jsonl", LINES), ("x.json", LINES), ("x.json", json.dumps(ROWS)), ("x.jsonl", LINES.strip()),
    ("x.json", json.dumps(ROWS, indent=1)), ("x.json", json.dumps({"version": "1", "data": ROWS})),
    ("x.jsonl", "\ufeff" + LINES.replace("\n", "\r\n")), ("x.jsonl", LINES.replace("null", "NaN"))])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_rows_are_read_from_every_form_of_json(tmp_path, name, text, packed, ending):
    path, content = tmp_path / (name + ending), text.encode()
    path.write_bytes(gzip.compress(content) if packed else content)
    assert [row for _, row in read_rows(path)] == ROWS


def test_a_single_object_is_one_row(tmp_path):
    row = {"question": "a", "paragraphs": [{"text": "b"}]}
    (tmp_path / "x.json").write_text(json.dumps(row, indent=2))
    assert read_rows(tmp_path / "x.json") == [(1, row)]


def test_rows_are_read_from_a_csv_with_line_breaks_in_its_cells(tmp_path):
    (tmp_path / "x.csv").write_text('question,answer\n"a\nb","c ""d"""\n', encoding="utf-8-sig")
    assert read_rows(tmp_path / "x.csv") == [(1, {"question": "a\nb", "answer": 'c "d"'})]


def test_rows_of_parquet_have_none_in_place_of_nan(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"question": ["a", "b"], "level": [NAN, 2.0], "golds": [["c"], []]})
    parquet.write_table(table, tmp_path / "x.parquet")
    assert read_rows(tmp_path / "x.parquet") == [
        (1, {"question": "a", "level": None, "golds": ["c"]}),
        (2, {"question": "b", "level": 2.0, "golds": []})]


@pytest.mark.skipif(find_spec("pyarrow") is not None, reason="pyarrow is installed")
def test_without_pyarrow_the_line_says_what_to_do(tmp_path):
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(Mistake, match="pip install pyarrow"):
        read_rows(tmp_path / "x.parquet")


def test_values_that_json_cannot_hold_become_texts_or_none():
    assert plain({"a": [NAN, b"x", Decimal("1.5"), date(2020, 1, 2), (1, None)]}) == {
        "a": [None, "x", "1.5", "2020-01-02", [1, None]]}


def test_an_error_takes_the_place_of_a_broken_line(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n{"a": \n\n{"a": 2}\n')
    (first, one), (second, broken), (third, two) = read_rows(tmp_path / "x.jsonl")
    assert (first, one, second, third, two) == (1, {"a": 1}, 2, 4, {"a": 2})
    assert isinstance(broken, ValueError) and str(broken) == "not JSON"


@pytest.mark.parametrize("name, content, said", [
    ("x.json", b'[{"a": 1}, {"a"', "not JSON"), ("x.csv", b"question\n\xff\n", "not text in UTF-8"),
    ("x.jsonl", b"\x1f\x8bno gzip", "download it again"), ("x.jsonl", b"\xff", "not text in UTF-8"),
    ("x.jsonl.gz", gzip.compress(LINES.encode(), mtime=0)[:-9], "download it again")])
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Mistake, match=f"{name}: .*{said}"):
        read_rows(tmp_path / name)


def test_an_empty_file_has_no_rows(tmp_path):
    (tmp_path / "x.jsonl").write_text("\n")
    assert read_rows(tmp_path / "x.jsonl") == []


def test_all_folders_read_foreign_files_by_one_function():
    assert read_by_converter is read_by_sets is read_rows


def test_files_of_a_folder_are_sorted_by_split(tmp_path):
    for name in ("data/train-0.parquet", "data/test-0.parquet", "validation.jsonl.gz", "readme.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    lists, training = splits_of(tmp_path)
    assert [[path.name for path in files] for files in lists] == [
        ["test-0.parquet"], ["validation.jsonl.gz"], ["test-0.parquet", "validation.jsonl.gz"]]
    assert [path.name for path in training] == ["train-0.parquet"]


@pytest.mark.parametrize("value, golds", [
    # lists that numpy and pandas have printed
    ("['Paris' 'City of Paris']", ["Paris", "City of Paris"]), ("['1' '2']", ["1", "2"]),
    ("['a'\n 'b']", ["a", "b"]), ("array(['a', 'b'], dtype=object)", ["a", "b"]),
    ("[array(['a', 'b'], dtype=object)]", ["a", "b"]), ("['a' 'b' ... 'z']", ["a", "b", "z"]),
    # as Python and JSON print them
    ("['New York', 'NYC']", ["New York", "NYC"]), ('["a", "b"]', ["a", "b"]),
    ("""["it's" 'x']""", ["it's", "x"]), ("['O'Brien', 'x']", ["O'Brien", "x"]),
    ("('a', 'b')", ["a", "b"]), ("{'a', 'b'}", ["a", "b"]), ("[1, 'Paris']", ["1", "Paris"]),
    ("[['a', 'b'], ['c']]", ["a", "b", "c"]), (["['a' 'b']"], ["a", "b"]),
    ("[New York, NYC]", ["New York", "NYC"]), ("[u'a', u\"b\"]", ["a", "b"]),
    ("array(['a', 'b'], dtype='<U1')", ["a", "b"]), (r"['\frac{1}{2}' '\theta']",
                                                     [r"\frac{1}{2}", r"\theta"]),
    # as data sets keep them in objects
    ({"target": "['x' 'y']"}, ["x", "y"]), ("{'target': ['x']}", ["x"]),
    ({"text": ["x"], "answer_start": [7]}, ["x"]),
    ({"value": "x", "aliases": ["y"], "type": "Entity"}, ["x", "y"]),
    # nothing is no gold
    ("['Paris', nan]", ["Paris"]), ("['Paris', None]", ["Paris"]), (NAN, []), (["a", NAN], ["a"]),
    ([None], []), ("[None]", []), ("[nan]", []), (None, []), ("", []), ("[]", []), ([], []),
    # other values
    ("Hollin", ["Hollin"]), (["a b", "c"], ["a b", "c"]), (5, ["5"]), ([0], ["0"]),
    ([["a", "b"]], ["a", "b"]), ({"target": ["x", "y"]}, ["x", "y"]),
    # mathematics is no list
    ("[1, 2]", ["[1, 2]"]), ("[1,2)", ["[1,2)"]), ("[{{1}}]", ["[{{1}}]"]),
    (r"[-1, \infty)", [r"[-1, \infty)"]), ("(a, b)", ["(a, b)"]), ("{1, 2}", ["{1, 2}"])])
def test_golds_are_read_in_all_their_forms(value, golds):
    assert golds_of(value) == golds


@pytest.mark.parametrize("text", ["['" + "a" * 10**5, "[" * 10**5 + "'a'", "['a' " * 2 * 10**4,
                                  "[" + "' " * 10**5 + "]", "['a" + "\\" * 10**5 + "']"])
def test_no_text_of_a_gold_raises_or_takes_long(text):
    assert isinstance(golds_of(text), list)
