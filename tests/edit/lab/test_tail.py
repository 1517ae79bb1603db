from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from aggregator.metrics import KEPT, MetricsLog, file_names
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


def write(path: Path, first: int, last: int) -> None:
    with ThreadPoolExecutor(1) as files:
        log = MetricsLog(path, files, file_bytes=100)  # two lines
        for number in range(first, last):
            log.line("round", 0, {"number": number})


def numbers(lines: JsonLines) -> list[int]:
    return [line["number"] for line in lines.read()]


def test_files_that_were_moved_aside_are_followed(tmp_path):
    path = tmp_path / "m.jsonl"
    lines = JsonLines(path)
    for first, last in ((0, 1), (1, 2), (2, 3), (3, 8), (8, 8), (8, 14)):
        write(path, first, last)
        assert numbers(lines) == list(range(first, last))
    assert lines.damaged == 0 and path.with_name("m.jsonl.3").exists()


def test_who_begins_late_reads_all_that_is_kept(tmp_path):
    path = tmp_path / "m.jsonl"
    write(path, 0, 20)
    assert numbers(JsonLines(path)) == list(range(20 - 2 * KEPT, 20))


def test_who_fell_behind_misses_what_was_removed_and_reads_nothing_twice(tmp_path):
    path = tmp_path / "m.jsonl"
    lines = JsonLines(path)
    write(path, 0, 3)
    assert numbers(lines) == [0, 1, 2]
    write(path, 3, 40)
    after = numbers(lines)
    assert after[-1] == 39 and len(after) == len(set(after)) and not {0, 1, 2} & set(after)


def test_a_file_that_is_being_moved_aside_is_found_under_its_new_name(tmp_path):
    path = tmp_path / "m.jsonl"
    lines = JsonLines(path)
    write(path, 0, 1)
    assert numbers(lines) == [0]
    write(path, 1, 2)
    path.rename(file_names(path)[1])
    assert numbers(lines) == [1]
    append(path, b'{"number": 2}\n')
    assert numbers(lines) == [2]


def test_half_a_line_at_the_end_of_a_file_moved_aside_is_counted(tmp_path):
    path = tmp_path / "m.jsonl"
    lines = JsonLines(path)
    append(path, b'{"number": 0}\n{"num')
    assert numbers(lines) == [0]
    path.rename(file_names(path)[1])
    append(path, b'{"number": 1}\n')
    assert numbers(lines) == [1] and lines.damaged == 1
