"""``pytest --cpu-times``: what each test costs the processors, its ranks and commands included.

Seconds on a clock say little on a busy machine; those of the processors stay. A fixture counts for the test that
made it.
"""

from __future__ import annotations

import json
import os
import resource
from collections import Counter
from pathlib import Path

import pytest


def spent() -> float:
    """CPU seconds of this process, of its descendants that live, and of those that have been waited for."""
    import psutil  # which a GPU machine may lack

    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    total = sum(one.ru_utime + one.ru_stime for one in usage)
    for process in psutil.Process().children(recursive=True):
        try:
            total += sum(process.cpu_times()[:4])  # its own and those of its children that have ended
        except psutil.Error:  # it has ended meanwhile
            continue
    return total


class CpuTimes:
    """Adds ``cpu_s`` to each report, which carries it from workers to the process that prints."""

    def __init__(self, out: str) -> None:
        self.out = out
        self.before = 0.0
        self.tests: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        report = yield
        now = spent()
        report.cpu_s, self.before = max(0.0, now - self.before), now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.tests[report.nodeid] += getattr(report, "cpu_s", 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        files: Counter[str] = Counter()
        for test, seconds in self.tests.items():
            files[test.partition("::")[0]] += seconds
        terminalreporter.section(f"{sum(files.values()):.0f} CPU seconds, by file and by test")
        for name, seconds in [*files.most_common(20), *self.tests.most_common(20)]:
            terminalreporter.write_line(f"{seconds:8.1f}  {name}")
        if self.out != "-":
            Path(self.out).write_text(json.dumps(self.tests.most_common(), indent=0))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-times", nargs="?", const="-", help="CPU seconds by file and test; to a JSON file if given")


def pytest_configure(config: pytest.Config) -> None:
    out = config.getoption("--cpu-times")
    if out:
        config.pluginmanager.register(CpuTimes(os.fspath(out)))
