"""The kernels of a user's runs, which the tests of this folder are about."""

import pytest


@pytest.fixture(autouse=True)
def _as_users_run(own_kernels: None) -> None:
    pass
