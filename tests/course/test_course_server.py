"""The server of a course imports the libraries once, for all processes of the course.

It forks itself to perform an experiment or to run a Python module.
"""

import contextlib
import itertools
import os
import subprocess
import sys

import psutil
import pytest

from perf_helpers.course import course_server


@pytest.mark.nightly
def test_processes_of_a_course_share_one_server_which_ends_their_experiments_with_them():
    code = "from trainmem.measure import processes; from trainmem.measure.forkserver import CleanProcess\n"
    code += "import os, time\n"
    code += "ask = lambda tell: [os.getppid(), 'PERF_HELPERS_SERVER' in os.environ]\n"
    code += "last = CleanProcess(lambda tell: time.sleep(600))\n"
    code += "print(*processes.call(ask, timeout=300), last.pid, flush=True); input()"
    with course_server.shared() as variables:
        options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": os.environ | variables}
        two = [subprocess.Popen([sys.executable, "-c", code], **options) for _ in range(2)]
        answers = [one.stdout.readline().split() for one in two]
        servers = {server for server, *_ in answers}
        assert len(servers) == 1 and all(has_address == "False" for _, has_address, _ in answers)
        experiments = [psutil.Process(int(experiment)) for *_, experiment in answers]
        two[0].kill()  # with its connections its experiment ends, and no other
        two[0].wait()
        experiments[0].wait(30)
        assert experiments[1].is_running()
        server_of_course = psutil.Process(int(servers.pop()))
    for process in (experiments[1], server_of_course):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.wait(30)
    two[1].communicate("\n")
    assert two[1].returncode == 0


EXITS = {"import sys; sys.exit(3)": 3, "1 / 0": 1, "": 0, "import os; os.abort()": -6}


def test_a_module_is_run_in_a_fork_of_the_courses_server_as_python_would(tmp_path):
    for number, code in enumerate(EXITS):
        begin = "import os, sys; print(__name__, sys.argv[1:], os.getcwd(), os.environ['SAYS'], flush=True)\n"
        (tmp_path / f"program{number}.py").write_text(begin + code)
    with course_server.shared() as variables:
        for (number, exit_code), is_fork in itertools.product(enumerate(EXITS.values()), (True, False)):
            environment = os.environ | {"SAYS": "hello"} | (variables if is_fork else {})
            with (tmp_path / "output").open("w") as output:
                arguments = ["a", "b"], environment, output.fileno(), str(tmp_path)
                process = course_server.python_module(f"program{number}", *arguments)
                assert process.wait(60) == process.poll() == process.returncode == exit_code
            assert isinstance(process, subprocess.Popen) is not is_fork
            lines = (tmp_path / "output").read_text().splitlines()
            assert lines[0] == f"__main__ ['a', 'b'] {tmp_path} hello"
            assert "ZeroDivisionError" in lines[-1] or exit_code != 1


@pytest.mark.nightly
def test_without_its_course_a_process_starts_a_server_of_its_own():
    with course_server.shared() as variables:
        pass
    code = "from trainmem.measure import processes; import os\nask = lambda tell: os.getppid()\n"
    code += "print(processes.call(ask, timeout=300), os.getpid())"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | variables, capture_output=True, text=True)
    server, caller = done.stdout.split()
    assert server != caller
