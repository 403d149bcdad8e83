"""schemathesis against the OpenAPI document of every service of a running stack: no 5xx, and answers as described."""

import asyncio
from collections.abc import Iterator

import httpx
import pytest

pytest.importorskip("torch")
pytest.importorskip("schemathesis")

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi import checks

from fuzz.stand import Stand, standing

EXAMPLES = 20
"""Of each operation, of good bodies and of bad ones together."""
OBEYED = {("POST", "/drain"), ("POST", "/pause_generation")}
"""To obey is right, and would end the work of the others: `test_fuzz` pauses, and goes on."""
LONELY = "other_leg_missing"
"""A leg of prefill's that is right has nobody to meet here: it must be told so, with 504."""
CHECKS = (
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
)


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    with standing(tmp_path_factory.mktemp("openapi")) as running:
        asyncio.run(running.begin())
        yield running


@pytest.mark.parametrize("service", ["router", "admin", "registry", "own registry", "prefill", "decode"])
def test_no_operation_fails_whatever_it_is_given_and_all_answers_are_as_described(stand: Stand, service: str) -> None:
    url = f"http://127.0.0.1:{stand.port(service)}"
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) >= 6
    for operation in operations:
        if (operation.method.upper(), operation.path) in OBEYED:
            continue
        for mode in GenerationMode:
            if mode is GenerationMode.NEGATIVE and not (operation.body or operation.query):
                continue  # there is nothing to get wrong

            @settings(
                max_examples=EXAMPLES // 2,
                deadline=None,
                database=None,
                derandomize=True,
                phases=(Phase.explicit, Phase.generate),
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def holds(case: schemathesis.Case) -> None:
                response = case.call(base_url=url, timeout=30)
                is_lonely = response.status_code == 504 and LONELY in response.text
                assert response.status_code < 500 or is_lonely or _is_state(case, response), response.text
                case.validate_response(response, checks=CHECKS)

            holds()
    asyncio.run(stand.whole())


def _is_state(case: "schemathesis.Case", response: object) -> bool:
    """A registry without workers is asked where one is: SGLang's word for it is 503, and no failure."""
    return case.operation.path == "/route" and response.status_code == 503  # type: ignore[attr-defined]


def test_documents_are_there_without_a_running_stack_and_name_what_is_served(stand: Stand) -> None:
    for service, path in (("router", "/v1/chat/completions"), ("registry", "/route"), ("decode", "/generate")):
        answer = httpx.get(f"http://127.0.0.1:{stand.port(service)}/openapi.json")
        assert answer.status_code == 200
        assert path in answer.json()["paths"]
