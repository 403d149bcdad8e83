"""Which hosts a request may name as `bootstrap_host`."""

import pytest

from baton_io.peers import BootstrapAllow


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]", "127.8.8.8", "registry.local", "10.1.2.3"])
def test_hosts_on_the_list_may_be_named(host: str) -> None:
    allow = BootstrapAllow(["http://registry.local:8990"], ["10.1.0.0/16", "other:9000"])
    assert allow.check(host, 8_998) is None


@pytest.mark.parametrize(("host", "port"), [("10.2.0.1", 1), ("other", 1), ("example.org", 80), ("127.0.0.1.x.org", 1)])
def test_other_hosts_are_400_naming_host_and_flag(host: str, port: int) -> None:
    verdict = BootstrapAllow([], ["10.1.0.0/16", "other:9000"]).check(host, port)
    assert verdict is not None and verdict.status == 400
    assert f"{host}:{port}" in verdict.text and "--bootstrap-allow" in verdict.text


def test_a_port_on_the_list_and_the_wildcard_count() -> None:
    assert BootstrapAllow([], ["other:9000"]).check("other", 9_000) is None
    assert BootstrapAllow([], ["*"]).check("anything", 1) is None


@pytest.mark.parametrize(("registries", "extra"), [(["registry:8990"], []), ([], ["10.0.0.0/99"]), ([], [""])])
def test_an_entry_that_is_none_is_refused_at_start(registries: list[str], extra: list[str]) -> None:
    with pytest.raises(ValueError):
        BootstrapAllow(registries, extra)
