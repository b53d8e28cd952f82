"""The server of a course imports the libraries once, for all processes of the course.

It forks itself to run a Python module, or to give a process of the course a fork server of its own.
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
def test_processes_of_a_course_share_one_import_and_each_has_a_server_of_its_own():
    code = "from trainmem.measure import processes; import os\n"
    code += "ask = lambda tell: [os.getppid(), 'PERF_HELPERS_SERVER' in os.environ]\n"
    code += "print(*processes.call(ask, timeout=300), *processes.call(ask, timeout=300), flush=True); input()"
    with course_server.shared() as variables:
        options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": os.environ | variables}
        two = [subprocess.Popen([sys.executable, "-c", code], **options) for _ in range(2)]
        answers = [one.stdout.readline().split() for one in two]
        servers = [psutil.Process(int(answer[0])) for answer in answers]
        assert all(answer[0] == answer[2] and answer[1] == answer[3] == "False" for answer in answers)
        assert servers[0].pid != servers[1].pid and servers[0].ppid() == servers[1].ppid()
        server_of_course = servers[0].parent()
        two[0].kill()  # with the connection its server ends, and no other
        two[0].wait()
        servers[0].wait(30)
        assert servers[1].is_running()
    for process in (servers[1], server_of_course):
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
