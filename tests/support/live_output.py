"""What has a long test shown? What it printed, shown as soon as it has passed; other tests say that
they passed, and no more."""

import pytest


class Showing:
    """A plugin of pytest, for `soak` tests."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal: pytest.TerminalReporter | None = self._config.pluginmanager.get_plugin(
            "terminalreporter"
        )
        if (
            terminal is None
            or "soak" not in report.keywords
            or not (report.when == "call" and report.passed)
        ):
            return
        terminal.ensure_newline()
        for line in report.capstdout.splitlines():
            terminal.write_line(f"    {line}")
        terminal.write_line(f"    {report.duration:.0f} s")
