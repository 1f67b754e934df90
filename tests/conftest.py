"""Settings for all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Machines that run engines beside the tests are slow at times; that is no fault of a test.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")
