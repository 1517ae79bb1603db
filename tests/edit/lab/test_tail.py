from pathlib import Path

from edit.lab.tail import JsonLines


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_a_file_that_does_not_exist_yet_has_no_lines(tmp_path):
    assert JsonLines(tmp_path / "no").read() == []


def test_half_a_line_waits_for_its_end(tmp_path):
    path = tmp_path / "m.jsonl"
    lines = JsonLines(path)
    append(path, b'{"a": 1}\n{"a"')
    assert lines.read() == [{"a": 1}]
    assert lines.read() == []
    append(path, b': 2}\n{"a": 3}')
    assert lines.read() == [{"a": 2}]
    append(path, b"\n")
    assert lines.read() == [{"a": 3}]
    assert lines.damaged == 0


def test_a_character_cut_in_the_middle_of_its_bytes_survives(tmp_path):
    path = tmp_path / "m.jsonl"
    lines = JsonLines(path)
    data = '{"a": "é"}\n'.encode()
    for byte in data[:-1]:
        append(path, bytes([byte]))
        assert lines.read() == []
    append(path, data[-1:])
    assert lines.read() == [{"a": "é"}]


def test_a_line_torn_by_a_kill_is_skipped_and_counted(tmp_path):
    path = tmp_path / "m.jsonl"
    lines = JsonLines(path)
    append(path, b'{"a": 1, "b{"a": 2}\n{"a": 3}\n[1]\n\n')
    assert lines.read() == [{"a": 3}]
    assert lines.damaged == 2


def test_a_file_begun_anew_is_read_from_its_start(tmp_path):
    path = tmp_path / "m.jsonl"
    lines = JsonLines(path)
    append(path, b'{"a": 1, "long": "xxxxxxxx"}\n{"half')
    assert len(lines.read()) == 1
    path.write_bytes(b'{"a": 2}\n')
    assert lines.read() == [{"a": 2}]
