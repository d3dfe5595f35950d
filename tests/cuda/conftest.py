"""The kernels of a user's runs, which the tests of this folder are about; and failures are told at once."""

import os

import pytest


@pytest.fixture(autouse=True)
def _as_users_run(own_kernels: None) -> None:
    pass


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print why a test failed as soon as it has: time on a GPU may be over before pytest's summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:  # whose prints nobody sees: its report comes again
        print(f"\nFAILED {report.nodeid}\n{report.longreprtext}", flush=True)
