"""`ipujax run` with scripts that use no JAX: output, exit codes, and that no process is ever left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from ipujax.cli import main
from tests.ipujax.distributed.distributed_helpers import (
    PATIENCE_SECONDS,
    ROOT,
    Runner,
    children_of,
    clear_of,
    in_sessions,
    run,
    soon,
)

__all__ = ["run"]  # a fixture

# What every script here can say: which instance it is, and which process; a helper of its own that never ends.
# A process and its number are one write: instances are killed between two.
PREAMBLE = """
import os, signal, subprocess, sys, time
index = int(os.environ["IPUJAX_INSTANCE_INDEX"])
print(f"pid{os.getpid()}")
def start_helper():
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10000)"])
    print(f"pid{helper.pid}")
def wait_for_all():
    open(f"{__file__}.{index}", "w").close()
    while not all(os.path.exists(f"{__file__}.{n}") for n in range(int(os.environ["IPUJAX_NUM_INSTANCES"]))):
        time.sleep(0.01)
def hang():
    while True:
        time.sleep(10000)
"""


# --- output -----------------------------------------------------------------------------------------------------------


def test_every_line_has_its_instance(run: Runner):
    source = "import os, sys\nfor n in range(3): print('line', n); print('error', n, file=sys.stderr)"
    assert run(source, instances=3) == 0
    assert sorted(run.out) == [f"[{i}] line {n}" for i in range(3) for n in range(3)]
    assert sorted(run.err) == [f"[{i}] error {n}" for i in range(3) for n in range(3)]
    for index in range(3):
        assert [line[-1] for line in run.out if line.startswith(f"[{index}]")] == ["0", "1", "2"]


def test_lines_of_instances_do_not_mix(run: Runner):
    source = "import sys\nfor _ in range(200):\n    for _ in range(10): sys.stdout.write('x' * 50)\n    print()"
    assert run(source, instances=4) == 0
    assert sorted(run.out) == sorted(f"[{i}] {'x' * 500}" for i in range(4) for _ in range(200))


def test_prefix_is_chosen_or_left_out(run: Runner):
    source = "import sys; print('a'); print('b', file=sys.stderr)"
    assert run(source, "--prefix", "{instance}/{instances}.{stream}: ") == 0
    assert sorted(run.out + run.err) == ["0/2.err: b", "0/2.out: a", "1/2.err: b", "1/2.out: a"]
    assert run("print('a')", "--prefix", "") == 0
    assert run.out == ["a", "a"]


def test_output_of_one_instance_and_errors_of_all(run: Runner):
    source = "import sys; print('out'); print('err', file=sys.stderr)"
    assert run(source, "--only-stdout-from-instance", "1") == 0
    assert run.out == ["[1] out"] and sorted(run.err) == ["[0] err", "[1] err"]


def test_a_last_line_without_end_is_shown(run: Runner):
    assert run("import os; os.write(1, b'half a line'); os._exit(0)", instances=1) == 0
    assert run.out == ["[0] half a line"]


def test_reader_that_goes_away_ends_all(run: Runner):
    process = run.start(PREAMBLE + "while True: print('more')")
    assert process.stdout is not None and process.stderr is not None
    pids = {int(process.stdout.readline().split("pid")[1])}
    process.stdout.close()
    assert process.wait(PATIENCE_SECONDS) == 128 + signal.SIGPIPE
    assert "nobody reads the output any more" in process.stderr.read()
    process.stderr.close()
    assert clear_of(pids)


# --- what a script finds ----------------------------------------------------------------------------------------------


def test_script_runs_as_python_would_run_it(run: Runner):
    run.script("value = 7", "neighbour.py")
    source = """
        import multiprocessing, neighbour, pickle, sys
        class Thing: pass
        def double(x): return 2 * x
        if __name__ == "__main__":
            assert sys.modules["__main__"].Thing is Thing and pickle.loads(pickle.dumps(Thing)) is Thing
            assert __file__ == sys.argv[0] and sys.stdin.read() == ""
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(neighbour.value, sys.argv[1:], pool.map(double, [4]))
    """
    assert run(source, arguments=["--instances", "5", "-m", "x"], instances=1) == 0, run.err
    assert run.out == ["[0] 7 ['--instances', '5', '-m', 'x'] [8]"]


def test_module_is_run(run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    package = tmp_path / "package_of_test"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text("import sys; from . import __name__ as name; print(name, __name__, sys.argv[1:])")
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--instances", "2", "-m", "package_of_test.train", "--epochs", "3"]) == 0
    line = "package_of_test __main__ ['--epochs', '3']"
    assert sorted(capfd.readouterr().out.splitlines()) == [f"[0] {line}", f"[1] {line}"]


def test_environment_of_instances(run: Runner):
    source = """
        import json, os
        print(json.dumps({k: v for k, v in os.environ.items() if k.startswith("IPUJAX_")}))
    """
    assert run(source, "--replicas", "6", instances=3) == 0
    actual = [json.loads(line.split(" ", 1)[1]) for line in sorted(run.out)]
    assert [f["IPUJAX_INSTANCE_INDEX"] for f in actual] == ["0", "1", "2"]
    assert {f["IPUJAX_NUM_INSTANCES"] for f in actual} == {"3"} and {f["IPUJAX_NUM_REPLICAS"] for f in actual} == {"6"}
    assert len({f["IPUJAX_COORDINATOR"] for f in actual}) == 1


# --- exit codes -------------------------------------------------------------------------------------------------------

FAILURES = (
    ("sys.exit(3)", 3, "failed with exit code 3"),
    ("sys.exit('no data')", 1, "failed with exit code 1"),
    ("raise ValueError('no data')", 1, "failed with exit code 1"),
    ("os._exit(4)", 4, "failed with exit code 4"),
    ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by signal 9 (SIGKILL)"),
    ("os.abort()", 134, "was killed by signal 6 (SIGABRT)"),
    ("import atexit; atexit.register(os._exit, 5)", 5, "failed with exit code 5"),
    ("raise KeyboardInterrupt", 130, "was killed by signal 2 (SIGINT)"),
)


@pytest.mark.parametrize(("statement", "code", "how"), FAILURES)
def test_first_failure_ends_all_and_gives_the_exit_code(run: Runner, statement: str, code: int, how: str):
    source = PREAMBLE + f"start_helper()\nwait_for_all()\nif index != 1: hang()\n{statement}"
    assert run(source, "--grace", "10000", instances=3) == code, "SIGTERM was not enough"
    assert f"ipujax run: instance 1 {how}; ending instances 0, 2" in run.err
    assert len(run.printed("pid")) == 6 and clear_of(run.printed("pid"))


def test_exit_handlers_of_the_first_failure_run(run: Runner):
    source = "import atexit, os, time\natexit.register(lambda: (time.sleep(0.5), print('saved')))\nraise ValueError"
    assert run(source, instances=1) == 1
    assert run.out == ["[0] saved"]


def test_exit_codes_of_success(run: Runner):
    for statement in ("pass", "sys.exit()", "sys.exit(0)", "os._exit(0)"):
        assert run(f"import os, sys\n{statement}") == 0
        assert run.err == []


def test_helpers_of_a_script_that_ended_are_ended(run: Runner):
    assert run(PREAMBLE + "start_helper()") == 0
    assert len(run.printed("pid")) == 4 and clear_of(run.printed("pid"))


def test_instance_that_ignores_sigterm_is_killed_after_the_grace(run: Runner):
    source = PREAMBLE + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwait_for_all()\nif index: hang()\nsys.exit(3)"
    assert run(source, "--grace", "0.5") == 3
    assert clear_of(run.printed("pid"))


# --- ends from outside ------------------------------------------------------------------------------------------------


def running(run: Runner, source: str, *options: str, processes: int = 4) -> tuple[subprocess.Popen[str], set[int]]:
    """A launcher of two instances that print the numbers of their processes, and these."""
    process = run.start(PREAMBLE + source, *options)
    assert process.stdout is not None
    pids = {int(process.stdout.readline().split("pid")[1]) for _ in range(processes)}
    assert pids <= set(in_sessions(pids))
    return process, pids


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code of a launcher, and its output."""
    _, err = process.communicate(timeout=PATIENCE_SECONDS)
    return process.returncode, err


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, signal.SIGTERM, signal.SIGHUP],
)
def test_signal_to_the_launcher_ends_all(run: Runner, number: signal.Signals):
    process, pids = running(run, "start_helper()\nhang()")
    process.send_signal(number)
    code, err = ended(process)
    assert code == 128 + number and f"ipujax run: received {number.name}; ending all" in err
    assert ("KeyboardInterrupt" in err) == (number == signal.SIGINT)
    assert clear_of(pids)


def test_after_ctrl_c_each_may_end_in_its_own_time(run: Runner):
    save = "time.sleep(index)\n    print('saved', index)\n    raise"
    source = f"try:\n    start_helper()\n    hang()\nexcept KeyboardInterrupt:\n    {save}"
    process, pids = running(run, source, "--grace", "100")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 130 and "[0] saved 0" in out and "[1] saved 1" in out
    assert clear_of(pids)


def test_second_signal_kills_at_once(run: Runner):
    source = "signal.signal(signal.SIGINT, lambda *_: print('no'))\nstart_helper()\nhang()"
    process, pids = running(run, source, "--grace", "10000")
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None and process.stdout.readline().endswith("no\n")
    assert len(in_sessions(pids)) >= 2
    process.send_signal(signal.SIGINT)
    assert ended(process)[0] == 130
    assert clear_of(pids)


def test_killed_launcher_leaves_nothing(run: Runner):
    source = "start_helper()\nfor n in (signal.SIGINT, signal.SIGTERM): signal.signal(n, signal.SIG_IGN)\nhang()"
    process, pids = running(run, source)
    process.kill()
    assert clear_of(pids)
    assert ended(process)[0] == -signal.SIGKILL


def test_launcher_has_no_other_process_whose_end_would_leave_instances(run: Runner):
    process, pids = running(run, "start_helper()\nhang()")
    assert children_of(process.pid) == {os.getpgid(pid) for pid in pids}
    process.kill()
    assert clear_of(pids)
    ended(process)


# --- stuck instances --------------------------------------------------------------------------------------------------


def test_silence_ends_all_and_says_where_they_are(run: Runner):
    source = PREAMBLE + "def stuck_here(): hang()\nstuck_here()"
    assert run(source, "--timeout", "2") == 124
    assert "ipujax run: no sign of life for 2 seconds of instance 0, 1; ending all" in run.err
    assert "ipujax run:   instance 1: last sign of life: output" in run.err
    assert sum("in stuck_here" in line for line in run.err) == 2
    assert clear_of(run.printed("pid"))


def test_one_silent_instance_is_named(run: Runner):
    source = PREAMBLE + "def stuck_here(): hang()\nif index: stuck_here()\nwhile True: print('x'); time.sleep(0.1)"
    assert run(source, "--timeout", "3") == 124
    assert "ipujax run: no sign of life for 3 seconds of instance 1; ending all" in run.err
    assert sum("in stuck_here" in line for line in run.err) == 1
    assert clear_of(run.printed("pid"))


def test_each_instance_may_be_silent_in_turn(run: Runner):
    source = "import os, time\nfor n in range(3): time.sleep(1 + int(os.environ['IPUJAX_INSTANCE_INDEX'])); print(n)"
    assert run(source, "--timeout", "4") == 0


def test_silence_may_last_for_ever(run: Runner):
    assert run("import time; time.sleep(1)", "--timeout", "0") == 0


def test_time_in_which_the_launcher_is_held_up_is_no_silence(run: Runner):
    lines = "if index: hang()\nfor _ in range(1000): print('x' * 1000)\nos.kill(os.getppid(), signal.SIGINT)"
    process = run.start(PREAMBLE + lines, "--timeout", "3")
    time.sleep(6)  # nobody reads the output, and the launcher waits for its reader
    code, err = ended(process)
    assert code == 130 and "sign of life" not in err


def test_time_in_which_the_launcher_is_stopped_is_no_silence(run: Runner):
    process, pids = running(run, "hang()", "--timeout", "4", processes=2)
    process.send_signal(signal.SIGSTOP)
    time.sleep(6)
    process.send_signal(signal.SIGCONT)
    time.sleep(1.5)
    assert process.poll() is None and pids <= set(in_sessions(pids))
    code, err = ended(process)
    assert code == 124 and "sign of life" in err


# --- bad arguments ----------------------------------------------------------------------------------------------------

BAD = (
    ((), "no script is given"),
    (("nowhere.py",), "there is no file nowhere.py"),
    (("python", "train.py"), "leave the interpreter out"),
    (("-m",), "no module is named"),
    (("-m", "nowhere.at.all"), "there is no module nowhere"),
    (("--instances", "2", "--replicas", "3", __file__), "3 replicas cannot be shared equally by 2 instances"),
    (
        ("--instances", "0", __file__),
        "argument --instances/--num-instances: expected a whole number of at least 1, got '0'",
    ),
    (("--instances", "two", __file__), "expected a whole number of at least 1, got 'two'"),
    (("--replicas", "-1", __file__), "argument --replicas/--num-replicas: expected a whole number"),
    (("--timeout", "-1", __file__), "argument --timeout: expected a finite number of at least 0"),
    (("--timeout", "nan", __file__), "argument --timeout: expected a finite number of at least 0, got 'nan'"),
    (("--grace", "inf", __file__), "argument --grace: expected a finite number of at least 0, got 'inf'"),
    (("--prefix", "{rank}", __file__), "cannot be filled in"),
    (("--only-stdout-from-instance", "2", "--instances", "2", __file__), "must be the number of an instance"),
    (("--instance", "2", __file__), "unrecognized arguments"),
)


@pytest.mark.parametrize(("arguments", "text"), BAD, ids=[text for _, text in BAD])
def test_bad_arguments_are_refused(arguments: tuple[str, ...], text: str, capfd: pytest.CaptureFixture[str]):
    try:
        code = main(["run", *arguments])
    except SystemExit as exit:
        code = exit.code
    captured = capfd.readouterr()
    assert code == 2 and text in captured.err and captured.out == ""
    assert captured.err.startswith("usage: ipujax")


def test_help_names_every_option(capfd: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="0"):
        main(["run", "--help"])
    text = capfd.readouterr().out
    options = "--instances", "--replicas", "--timeout", "--grace", "--prefix", "--only-stdout-from-instance", "-m"
    for option in options:
        assert f"  {option}" in text
    assert "exit code" in text


def test_both_ways_to_start():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"ipujax": "ipujax.cli:main"} and callable(main)
    done = subprocess.run([sys.executable, "-m", "ipujax"], capture_output=True, text=True)
    assert done.returncode == 2 and "usage: ipujax [-h] [--version] COMMAND" in done.stderr


def test_launcher_leaves_signals_and_files_as_they_were(run: Runner):
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)}
    files = len(os.listdir("/proc/self/fd"))
    assert run("pass") == 0 and run("raise SystemExit(1)") == 1
    assert {number: signal.getsignal(number) for number in before} == before
    assert soon(lambda: len(os.listdir("/proc/self/fd")) == files)
