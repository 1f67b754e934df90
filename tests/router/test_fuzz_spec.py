"""`docs/openapi.yaml` is right: what it allows, and much that it does not, is answered as it says."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import settings
from live_router import LIMIT_S, LiveRouter
from schemathesis import checks
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

# Times as many examples, and others each time, for a long run.
FACTOR = int(os.environ.get("CARRYBACK_FUZZ_FACTOR", "1"))
KEY = "the-key-of-one-tenant-0123456789"
CHECKS = [
    checks.not_a_server_error,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
]

SPEC = schemathesis.openapi.from_path(Path(__file__).parents[2] / "docs" / "openapi.yaml")
# Systematic and slow.
SPEC.config.phases.coverage.enabled = FACTOR > 1
# These take a router's engines away.
ENGINES = SPEC.include(path="/admin/engines", method="POST")
OTHERS = SPEC.exclude(path="/admin/engines", method="POST")
few = settings(max_examples=6 * FACTOR, derandomize=FACTOR == 1, database=None)


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRouter]:
    """A router with one tenant; when all is over, it has to be well."""
    with LiveRouter(tmp_path_factory.mktemp("router"), api_keys=f"one={KEY}") as router:
        yield router
        router.check_well(KEY)
        router.stop()
        router.check_log()


@OTHERS.parametrize()
@few
def test_the_router_answers_as_documented(case: schemathesis.Case, router: LiveRouter) -> None:
    is_admin = case.operation.path.startswith(("/admin", "/metrics", "/dashboard"))
    case.call_and_validate(
        base_url=router.admin_url if is_admin else router.url,
        headers={"Authorization": f"Bearer {KEY}"},
        checks=CHECKS,
        timeout=LIMIT_S,
    )


@pytest.fixture(scope="module")
def lost_router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRouter]:
    """One whose engines are not those that are there."""
    with LiveRouter(tmp_path_factory.mktemp("lost")) as router:
        yield router
        router.stop()
        router.check_log()


@ENGINES.parametrize()
@few
def test_engines_are_set_as_documented(case: schemathesis.Case, lost_router: LiveRouter) -> None:
    if isinstance(case.body, dict) and isinstance(engines := case.body.get("engines"), list):
        for engine in engines:
            for name in ("url", "events"):  # nothing is to be asked of other machines
                if isinstance(engine, dict) and isinstance(address := engine.get(name), str):
                    engine[name] = re.sub(r"^(\w+)://[^/]*", r"\1://127.0.0.1:9", address)
    case.call_and_validate(base_url=lost_router.admin_url, checks=CHECKS, timeout=LIMIT_S)
