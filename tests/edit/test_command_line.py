"""How commands log and end. In processes of their own: both change the process that they run in."""

import fcntl
import importlib
import json
import logging
import os
import queue
import re
import subprocess
import sys
import threading
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

import edit
from edit import command_line
from edit.command_line import run_command
from edit.errors import ConfigError

WORDS = "left (\x1b[2J\x1b]0;title\x07 gone\r I all is well \u202e)"
SHOWN = "left ( [2J ]0;title  gone  I all is well  )"
LOGGED = f"""
import logging
from edit.command_line import log_to_stderr
log_to_stderr(logging.INFO, "rank 1: ")
logging.getLogger("a").info("%s: %s", "peer\\nanother line", {WORDS!r})
try:
    raise ValueError({WORDS!r})
except ValueError:
    logging.getLogger("a").exception("a bug")
"""


def ended_by(error: str) -> str:
    return f"""
from edit import errors
from edit.command_line import run_command
def command():
    raise {error}({WORDS!r})
run_command("program", command)
"""


def stderr_of(program: str, code: int = 0) -> list[str]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    return done.stderr.decode().split("\n")


def test_a_message_is_one_line_whatever_is_in_it():
    first, second, *trace = stderr_of(LOGGED)
    assert re.match(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d I ", first)
    assert first.endswith(f" I rank 1: peer another line: {SHOWN}")
    assert second.endswith(" E rank 1: a bug")
    assert trace[0] == "Traceback (most recent call last):" and trace[-2] == f"ValueError: {SHOWN}"
    assert all(line.isprintable() for line in trace)


def test_as_json_a_message_is_one_object_whatever_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDIT_LOG_FORMAT", "json")
    first, second = map(json.loads, filter(None, stderr_of(LOGGED)))
    assert (first["level"], first["logger"], first["message"]) == ("INFO", "a", f"rank 1: peer another line: {SHOWN}")
    assert datetime.fromisoformat(first["time"]).utcoffset() == timedelta(0)
    assert (second["level"], second["message"]) == ("ERROR", "rank 1: a bug")
    assert second["traceback"].startswith("Traceback") and second["traceback"].endswith(f"ValueError: {SHOWN}")


def test_the_last_line_of_a_command_comes_after_its_log_and_that_of_a_process_that_it_forked() -> None:
    program = f"""
import logging, os
from edit.command_line import log_to_stderr
log_to_stderr()
logging.info("before")
if not (child := os.fork()):
    logging.info("the child's")
    logging.shutdown()
    os._exit(0)
os.waitpid(child, 0)
logging.info("after")
{ended_by("errors.ConfigError")}"""
    *logged, last, end = stderr_of(program, 2)
    *by_two, after = (line.partition(" I ")[2] for line in logged)  # each process writes its own, whichever comes first
    assert (sorted(by_two), after) == (["before", "the child's"], "after")
    assert last.startswith("program: left") and end == ""


def full_pipe() -> tuple[int, int]:
    """Return both ends of a pipe that has no room."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writer, b"." * 4096)
    return reader, writer


def test_a_stderr_that_nobody_reads_stops_neither_a_command_nor_its_end() -> None:
    program = f"""
import logging
from edit import command_line
command_line.FLUSH_S = 0.01
command_line.log_to_stderr()
for k in range(100):
    logging.info("line %d", k)
{ended_by("errors.ConfigError")}"""
    reader, writer = full_pipe()
    try:
        done = subprocess.run([sys.executable, "-c", program], stderr=writer, timeout=60, check=False)
        assert done.returncode == 2
    finally:
        os.close(reader)
        os.close(writer)


def test_lines_that_nobody_read_are_counted_where_they_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "MOST_LINES", 3)
    reader, writer = full_pipe()
    handler = command_line._Lines(writer)

    def log(text: str) -> None:
        handler.handle(logging.makeLogRecord({"msg": text}))

    for k in range(10):
        log(f"line {k}")
    os.read(reader, 4096)
    handler.flush()
    log("read again")
    handler.flush()
    *written, gap, last = os.read(reader, 4096).decode().splitlines()
    os.close(reader)
    log("the reader has gone")
    handler.flush()
    assert written == [f"line {k}" for k in range(len(written))] and len(written) in (3, 4)  # the thread may have had one
    assert gap == f"{10 - len(written)} lines of the log were not written: nobody read them" and last == "read again"
    os.close(writer)


def test_lines_that_a_process_logged_which_multiprocessing_forked_are_written() -> None:
    program = """
import logging, multiprocessing
from edit.command_line import log_to_stderr
log_to_stderr()
children = [multiprocessing.get_context("fork").Process(target=logging.info, args=("child %d", k)) for k in range(5)]
for child in children:
    child.start()
    child.join()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert [line.partition(" I ")[2] for line in done.stderr.splitlines()] == [f"child {k}" for k in range(5)]


def test_who_reads_slowly_gets_all_also_from_a_pipe_that_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "FLUSH_S", 60.0)
    reader, writer = full_pipe()
    os.set_blocking(writer, False)
    handler = command_line._Lines(writer)
    lines = [f"{k:04} {'x' * 100}" for k in range(400)]
    for line in lines:
        handler.handle(logging.makeLogRecord({"msg": line}))
    flushing = threading.Thread(target=handler.flush)
    flushing.start()
    got = b""
    while got.count(b"\n") < len(lines):
        got += os.read(reader, 512)
    flushing.join()
    os.close(reader)
    os.close(writer)
    assert got.lstrip(b".").decode().splitlines() == lines


def test_a_wait_for_who_reads_ends_only_where_nothing_was_read_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = full_pipe()
    handler = command_line._Lines(writer)
    for k in range(5):
        handler.handle(logging.makeLogRecord({"msg": f"{k}{'.' * 4094}"}))
    seen = list[int]()

    class Slow(queue.SimpleQueue[None]):
        """One line is read and the next fits in, in each of the first three waits."""

        def get(self, block: bool = True, timeout: float | None = None) -> None:
            assert handler._writer is not None
            seen.append(written := handler._writer.written)
            if len(seen) <= 3:
                os.read(reader, 4096)
                while handler._writer.written == written:
                    threading.Event().wait(0.01)
            raise queue.Empty

    monkeypatch.setattr(command_line, "SimpleQueue", Slow)
    handler.flush()
    assert seen == [0, 1, 2, 3] and handler._patience_s == 0.0
    os.close(reader)
    os.close(writer)


def test_a_destructor_that_logs_while_a_line_is_logged_does_not_stop_the_process() -> None:
    program = """
import gc, logging, sys
from edit.command_line import log_to_stderr
log_to_stderr()
class Logs:
    def __del__(self):
        logging.info("ended")
gc.set_threshold(1)
for k in range(2000):
    one = Logs()
    one.itself = one
    del one
    logging.info("line %d", k)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    lines = [line.partition(" I ")[2] for line in done.stderr.splitlines()]
    assert [line for line in lines if line != "ended"] == [f"line {k}" for k in range(2000)] and lines.count("ended") > 1000


def test_the_format_of_logs_is_an_option_of_every_program(monkeypatch: pytest.MonkeyPatch) -> None:
    app = importlib.import_module("aggregator.cli").app
    monkeypatch.setenv("EDIT_LOG_FORMAT", "text")
    assert CliRunner().invoke(app, ["--log-format", "json", "init", "--help"]).exit_code == 0
    assert os.environ["EDIT_LOG_FORMAT"] == "json"
    refused = CliRunner().invoke(app, ["--log-format", "xml", "members"]).exception
    assert isinstance(refused, ConfigError) and str(refused) == "--log-format xml: must be text or json"


@pytest.mark.parametrize("module", ["aggregator.cli", "peers.cli", "edit.lab.cli"])
def test_help_comes_at_once_without_torch(module: str) -> None:
    program = f"""
import sys
from typer.testing import CliRunner
from {module} import app
assert CliRunner().invoke(app, ["--help"]).exit_code == 0
assert not {{"torch", "numpy", "grpc"}} & sys.modules.keys()
"""
    assert stderr_of(program) == [""]


@pytest.mark.parametrize(
    ("module", "begun", "completed"),
    [
        ("aggregator.cli", "edit-coordinator ev", "evict"),
        ("peers.cli", "edit-peer swarm share", "share-authority"),
        ("edit.lab.cli", "edit-lab sim", "simulate"),
    ],
)
def test_a_shell_completes_commands_and_imports_no_torch_for_it(
    module: str, begun: str, completed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = begun.split()
    monkeypatch.setenv(f"_{words[0].replace('-', '_').upper()}_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", begun)
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    program = f"""
import atexit, sys
from {module} import main
sys.argv = [{words[0]!r}]
atexit.register(lambda: print(sorted({{"torch", "numpy", "grpc"}} & sys.modules.keys())))
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == (f"{completed}\n[]\n", "")


def test_a_command_is_loaded_without_garbage_collection_and_goes_on_with_it() -> None:
    program = """
import gc, sys
from edit.command_line import loading
try:
    with loading():
        assert not gc.isenabled() and not gc.get_freeze_count()
        sys.modules["torch"] = sys
        raise ImportError
except ImportError:
    assert gc.isenabled() and gc.get_freeze_count()
gc.unfreeze()
with loading():
    assert gc.isenabled()
assert not gc.get_freeze_count(), "torch was there already"
"""
    assert stderr_of(program) == [""]


@pytest.mark.parametrize(
    ("module", "missing", "extra"), [("transformers", "transformers", "hf"), ("lightning", "lightning.pytorch", "lightning")]
)
def test_an_integration_whose_package_is_missing_says_in_one_line_what_to_install(
    module: str, missing: str, extra: str
) -> None:
    *_, last, end = stderr_of(f"import sys; sys.modules[{missing!r}] = None; import edit.integrations.{module}", 1)
    assert last.startswith(f"ImportError: edit.integrations.{module} needs {module} (") and end == ""
    assert last.endswith(f"): pip install 'edit-localsgd[{extra}]'")


@pytest.mark.parametrize(("error", "code"), [("RefusedError", 3), ("EvictedError", 4), ("TransportError", 69)])
def test_what_an_error_quotes_cannot_move_the_cursor(error: str, code: int):
    said = f"evicted from the run: {SHOWN}" if code == 4 else SHOWN
    assert stderr_of(ended_by(f"errors.{error}"), code) == [f"program: {said}", ""]


def test_an_eviction_is_said_once():
    for reason, said in (("evicted by the operator", ""), ("key lost", "evicted from the run: ")):
        program = f"""
from edit.command_line import run_command
from edit.errors import EvictedError

def end():
    raise EvictedError({reason!r})

run_command("program", end)
"""
        assert stderr_of(program, 4) == [f"program: {said}{reason}", ""]


@pytest.mark.parametrize("size", [10, 100_000])
@pytest.mark.parametrize("say", ["typer.echo", "print"])
def test_output_that_cannot_be_written_is_one_line_or_the_code_of_a_closed_pipe(say: str, size: int) -> None:
    program = f"""
import typer
from edit.command_line import run_command
app = typer.Typer()
@app.command()
def command():
    {say}("x" * {size})
run_command("program", app)
"""
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, timeout=60, check=False)
    said = done.stderr.decode()
    assert (done.returncode, said) == (2, "program: stdout cannot be written (No space left on device)\n")
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", program], stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(("error", "code"), [("errors.RefusedError", 3), ("KeyError", 70), ("typer.echo", 2)])
def test_where_stderr_cannot_be_written_the_exit_code_is_the_same(error: str, code: int) -> None:
    with Path("/dev/full").open("wb") as full:
        program = ended_by(error).replace("raise typer.echo(", "import typer; typer.echo(err=True, message=")
        done = subprocess.run([sys.executable, "-c", program], stdout=-1, stderr=full, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (code, b"")


def test_where_stdout_is_closed_nothing_is_written_into_the_file_that_has_its_descriptor(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("0123456789")
    program = f"""
import os
from edit.command_line import run_command
def command():
    assert os.open({str(kept)!r}, os.O_RDWR) == 1
    os.write(os.open("/dev/full", os.O_WRONLY), b"x")
run_command("program", command)
"""
    closed = 'exec "$@" >&-'
    done = subprocess.run(["sh", "-c", closed, "sh", sys.executable, "-c", program], stderr=-1, timeout=60, check=False)
    assert done.returncode == 70 and b"No space left on device" in done.stderr
    assert kept.read_text() == "0123456789"


def test_grpc_looks_names_up_as_the_system_does_unless_the_environment_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for environment, said in (dict[str, str](), "native"), ({"GRPC_DNS_RESOLVER": "ares"}, "ares"):
        monkeypatch.setattr(os, "environ", environment)
        run_command("program", lambda: None)
        assert environment["GRPC_DNS_RESOLVER"] == said


@pytest.mark.parametrize(
    ("name", "why"),
    [("a" * 300, "File name too long"), ("loop", "Too many levels of symbolic links"), ("file/x", "Not a directory")],
)
def test_a_path_that_cannot_be_used_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, why: str
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        run_command("program", (tmp_path / name).read_bytes)
    assert (ended.value.code, capsys.readouterr().err) == (2, f"program: {tmp_path / name}: cannot be used ({why})\n")


def test_a_bug_prints_its_traceback_and_nothing_else_that_a_terminal_obeys():
    first, *lines = stderr_of(ended_by("OSError"), 70)
    assert first == "Traceback (most recent call last):" and lines[-2] == f"OSError: {SHOWN}"
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize(
    ("module", "program"), [("aggregator.cli", "edit-coordinator"), ("peers.cli", "edit-peer"), ("edit.lab.cli", "edit-lab")]
)
def test_every_program_says_its_version_and_helps_in_short(module: str, program: str) -> None:
    app = importlib.import_module(module).app
    said = CliRunner().invoke(app, ["--version"])
    assert (said.exit_code, said.output) == (0, f"{program} {edit.__version__}\n")
    short, long = (CliRunner().invoke(app, [option]) for option in ("-h", "--help"))
    assert short.exit_code == 0
    assert short.output == long.output


@pytest.mark.parametrize("module", ["aggregator.cli", "peers.cli"])
def test_a_help_says_what_to_install_in_full(module: str) -> None:
    told = CliRunner().invoke(importlib.import_module(module).app, ["web", "--help"]).output
    assert "pip install 'edit-localsgd[web]'" in " ".join(told.split()), "what is in brackets is text, no markup"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8:strict", "utf-8:surrogateescape", "ascii:surrogateescape"])
def test_what_the_encoding_of_stdout_lacks_is_an_escape(encoding: str) -> None:
    program = """
from edit.command_line import run_command
run_command("program", lambda: print("a\\u015f\\u2026\\udcff"))
"""
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, env=environment, check=False)
    name, _, errors = encoding.partition(":")
    kept = (name, errors) == ("utf-8", "surrogateescape")
    told = "a\u015f\u2026\udcff".encode(name, "surrogateescape" if kept else "backslashreplace")
    assert (done.returncode, done.stdout.rstrip(b"\n"), done.stderr) == (0, told, b"")


def test_where_the_system_refuses_a_thread_the_last_line_and_the_log_are_written_nevertheless() -> None:
    program = f"""
import logging, threading
from edit.command_line import log_to_stderr
def refused(self):
    raise RuntimeError("can't start new thread")
threading.Thread.start = refused
log_to_stderr(logging.INFO)
logging.getLogger("a").info("before")
{ended_by("errors.ConfigError")}
"""
    first, *rest = stderr_of(program, 2)
    assert first.endswith(" I before") and rest == [f"program: {SHOWN}", ""]
    program = program.replace(f"raise errors.ConfigError({WORDS!r})", "threading.Thread().start()")
    why = "program: the system refuses another thread; raise the limit of its user (ulimit -u) or of its container"
    assert stderr_of(program, 2)[1:] == [why, ""]
