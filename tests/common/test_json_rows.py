"""The rows of JSON files: every form that people have, each value as it stands there, and the line of what is wrong."""

import codecs
import json
import re
from pathlib import Path
from typing import Any

import pytest

from verl_vcpo.common.json_rows import json_rows
from verl_vcpo.dataset.files import JsonTable

ROW = {"truth": "2020-01-01", "n": 1}
OTHER: dict[str, Any] = {"truth": {"a": [1, "x", 10**25]}, "more": "1"}
LINE, BOTH = json.dumps(ROW).encode(), json.dumps([ROW, OTHER]).encode()
LINES = LINE + b"\n" + json.dumps(OTHER).encode()
FORMS = {
    "lines": LINES,
    "CRLF and empty lines": LINES.replace(b"\n", b"\r\n\r\n") + b"\r\n",
    "a list": BOTH,
    "a list after spaces": b"\n  " + BOTH,
    "an indented list": json.dumps([ROW, OTHER], indent=1).encode(),
    "a list with a mark": codecs.BOM_UTF8 + BOTH,
    "joined files with marks": codecs.BOM_UTF8 + LINES.replace(b"\n", b"\n" + codecs.BOM_UTF8),
}
WRONG = {
    "latin-1": ('{"a": "é"}'.encode("latin-1"), "line 2: not text in UTF-8 (byte 0xe9); save the file as UTF-8"),
    "cp1252": ('{"a": "„"}'.encode("cp1252"), "line 2: not text in UTF-8 (byte 0x84)"),
    "gbk": ('{"a": "数"}'.encode("gbk"), "line 2: not text in UTF-8"),
    "shift-jis": ('{"a": "数"}'.encode("shift-jis"), "line 2: not text in UTF-8"),
    "utf-16": ('{"a": 1}'.encode("utf-16-be"), "line 2: not text in UTF-8 (a zero byte"),
    "half a character": (rb'{"a": "\ud83d"}', r"line 2: \ud83d is half a character"),
    "half a key": (rb'{"\uDC00": 1}', r"line 2: \udc00 is half a character"),
    "a key twice": (b'{"a": {"b": 1, "b": 2}}', "line 2: the key 'b' is there twice"),
    "cut off": (b'{"a": 1, "b', "line 2: not JSON (Unterminated string starting at, at character 10); mend it"),
    "two objects": (b'{"a": 1} {"a": 2}', "line 2: not JSON (Extra data, at character 10)"),
    "no object": (b'["a"]', "line 2: ['a'] is no JSON object"),
    "nested": (b'{"a":' + b"[" * 100_000, "line 2: lists or objects within one another are too many"),
    "digits": (b'{"a": ' + b"1" * 5000 + b"}", "line 2: Exceeds the limit"),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_same_values(form: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_bytes(FORMS[form])
    assert [row for _, row in json_rows(file)] == [ROW, OTHER]
    table = JsonTable.of(file)
    assert (table.column_names, table[0], table[1]) == (["truth", "n", "more"], ROW, OTHER)
    assert table["n"] == [1, None] and len(table.select([1])) == 1
    assert [row["truth"] for row in table.filter(lambda row: "n" in row)] == ["2020-01-01"]


@pytest.mark.parametrize("case", WRONG)
def test_the_line_of_what_is_wrong(case: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    line, expected = WRONG[case]
    file.write_bytes(LINE + b"\n" + line)
    with pytest.raises(ValueError, match=re.escape(expected)) as refused:
        list(json_rows(file))
    assert "\n" not in str(refused.value)
    file.write_bytes(b"[\n" + line + b"\n]")  # in a list, some have no line
    with pytest.raises(ValueError, match="^(line 2|row 1|its one list or object): "):
        list(json_rows(file))
