"""What `baton up` would start: pure, no process is touched."""

from dataclasses import replace
from pathlib import Path

import pytest

from baton_cli.errors import UsageError
from baton_cli.layout import Host, ProcessSpec, UpOptions, parse_setting, plan, worker_cores

HOST = Host(python="python", cwd="/home/me", logs=Path("/home/me/.baton/logs"), env={}, cores=(0, 1, 2, 3))
PORTS = list(range(20000, 20100))


def planned(options: UpOptions, host: Host = HOST) -> dict[str, ProcessSpec]:
    return {spec.name: spec for spec in plan(options, host, PORTS)}


def flag(spec: ProcessSpec, name: str) -> str | None:
    return spec.argv[spec.argv.index(name) + 1] if name in spec.argv else None


def with_settings(*texts: str) -> UpOptions:
    return UpOptions(settings=tuple(parse_setting(text) for text in texts))


def test_one_of_each_is_the_default() -> None:
    assert list(planned(UpOptions())) == ["router 0", "bootstrap 0", "prefill 0", "decode 0"]


def test_the_router_knows_every_worker_and_the_registry() -> None:
    specs = planned(UpOptions(prefill=2, decode=2, port=9000))
    router = specs["router 0"]
    assert router.url == "http://127.0.0.1:9000"
    assert flag(router, "--prefill") == f"{specs['prefill 0'].url},{specs['prefill 1'].url}"
    assert flag(router, "--decode") == f"{specs['decode 0'].url},{specs['decode 1'].url}"
    assert flag(router, "--registry") == specs["bootstrap 0"].url


def test_no_two_processes_share_a_port() -> None:
    specs = planned(UpOptions(prefill=3, decode=2, colocated=1)).values()
    ports = [spec.url for spec in specs] + [
        f"http://127.0.0.1:{spec.bootstrap_port}" for spec in specs if spec.bootstrap_port
    ]
    assert len(set(ports)) == len(ports) == 11


def test_a_worker_is_told_model_dtype_transfer_registry_and_its_bootstrap_port() -> None:
    specs = planned(UpOptions(model="/models/a", dtype="float32", transfer="tcp"))
    prefill, decode = specs["prefill 0"], specs["decode 0"]
    assert prefill.argv[:3] == ("python", "-m", "baton_prefill")
    assert flag(prefill, "--bootstrap-port") == str(prefill.bootstrap_port)
    assert decode.bootstrap_port is None
    for spec in (prefill, decode):
        told = [flag(spec, name) for name in ("--model", "--dtype", "--transfer", "--registry")]
        assert told == ["/models/a", "float32", "tcp", specs["bootstrap 0"].url]


def test_a_colocated_worker_alone_is_a_decode_worker_and_the_router_knows_no_prefill() -> None:
    specs = planned(UpOptions(prefill=0, decode=0, colocated=1))
    assert list(specs) == ["router 0", "bootstrap 0", "decode 0"]
    assert flag(specs["router 0"], "--prefill") is None
    assert flag(specs["router 0"], "--decode") == specs["decode 0"].url


@pytest.mark.parametrize(
    "wrong", [{"prefill": 1, "decode": 0}, {"prefill": -1}, {"prefill": 0, "decode": 0}, {"port": 70000}]
)
def test_what_could_not_serve_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        UpOptions(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prefill", "decode", "cores", "expected"),
    [
        (1, 1, (0, 1), ["0", "1"]),
        (1, 1, (0, 1, 2, 3), ["0,1", "2,3"]),
        (2, 2, (4, 6), ["4", "4", "6", "6"]),
        (1, 2, (0, 1), ["0", "0", "1"]),
        (1, 2, (0, 1, 2, 3), ["0", "1", "2,3"]),
        (1, 1, (0,), [None, None]),
    ],
)
def test_workers_get_disjoint_cores_while_there_are_enough(
    prefill: int, decode: int, cores: tuple[int, ...], expected: list[str | None]
) -> None:
    assert worker_cores(UpOptions(prefill=prefill, decode=decode), replace(HOST, cores=cores)) == expected


@pytest.mark.parametrize(
    ("settings", "env", "expected"),
    [
        (("prefill.tp=3",), {}, ["0,1,2", "3"]),
        (("prefill.tp=2", "decode.dp=2"), {}, ["0,1", "2,3"]),
        ((), {"BATON_TP": "2", "BATON_PREFILL_PP": "3"}, ["0,1,2", "3"]),
        (("decode.tp=7",), {"BATON_DECODE_TP": "1"}, ["0", "0,1,2,3"]),
        (("prefill.tp=many",), {}, ["0,1", "2,3"]),
    ],
)
def test_a_worker_of_many_ranks_gets_more_cores(
    settings: tuple[str, ...], env: dict[str, str], expected: list[str | None]
) -> None:
    assert worker_cores(with_settings(*settings), replace(HOST, env=env)) == expected


def test_layouts_and_switches_of_a_role_reach_its_workers() -> None:
    specs = planned(with_settings("prefill.tp=2", "prefill.dp-attention=true", "decode.load_balance_method=least_load"))
    assert specs["prefill 0"].env == {"BATON_PREFILL_TP": "2", "BATON_PREFILL_DP_ATTENTION": "true"}
    assert specs["decode 0"].env == {"BATON_DECODE_LOAD_BALANCE_METHOD": "least_load"}


def test_cores_are_left_to_a_user_who_sets_any() -> None:
    assert worker_cores(with_settings("decode.cores=0"), HOST) == [None, None]
    assert worker_cores(UpOptions(), replace(HOST, env={"BATON_CORES": "0"})) == [None, None]


def test_a_setting_reaches_all_processes_of_its_role_as_a_variable() -> None:
    specs = planned(replace(with_settings("prefill.tp=2"), prefill=2))
    assert specs["prefill 0"].env == specs["prefill 1"].env == {"BATON_PREFILL_TP": "2"}
    assert specs["decode 0"].env == specs["router 0"].env == {}


def test_a_setting_is_not_beaten_by_the_flag_of_the_same_key() -> None:
    specs = planned(replace(with_settings("prefill.dtype=float32"), dtype="bfloat16"))
    assert flag(specs["prefill 0"], "--dtype") is None
    assert flag(specs["decode 0"], "--dtype") == "bfloat16"


def test_a_cpu_without_bfloat16_serves_in_float32_unless_it_is_asked_for_or_a_gpu_does_the_work() -> None:
    host = replace(HOST, multiplies_bfloat16=False)
    for specs in (planned(UpOptions(), host), planned(UpOptions(), replace(host, env={"BATON_DEVICE": "cpu"}))):
        assert {flag(specs[name], "--dtype") for name in ("prefill 0", "decode 0")} == {"float32"}
    assert flag(planned(UpOptions(dtype="bfloat16"), host)["decode 0"], "--dtype") == "bfloat16"
    on_gpus = (
        planned(with_settings("prefill.device=cuda", "decode.device=cuda"), host),
        planned(UpOptions(), replace(host, env={"BATON_DECODE_DEVICE": "cuda"})),
    )
    for specs in on_gpus:
        assert {flag(specs[name], "--dtype") for name in ("prefill 0", "decode 0")} == {"bfloat16"}


def test_a_default_does_not_beat_the_users_environment_but_a_flag_does() -> None:
    host = replace(HOST, env={"BATON_DECODE_DTYPE": "float32", "BATON_MODEL": "mine"})
    specs = planned(UpOptions(), host)
    assert [flag(specs["prefill 0"], "--model"), flag(specs["prefill 0"], "--dtype")] == [None, "bfloat16"]
    assert flag(specs["decode 0"], "--dtype") is None
    assert flag(planned(UpOptions(dtype="bfloat16"), host)["decode 0"], "--dtype") == "bfloat16"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("prefill", "write it as role.key=value"),
        ("prefill=2", "write it as role.key=value"),
        ("prefil.tp=2", "the role must be one of router, bootstrap, prefill, decode"),
        ("router.port=1", "use --port"),
        ("decode.registry=x", "`baton up` chooses registry itself"),
    ],
)
def test_a_setting_that_means_nothing_is_refused_with_the_reason(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told.replace(".", r"\.")):
        parse_setting(text)


def test_a_setting_may_be_spelt_like_a_flag_and_hold_any_text() -> None:
    setting = parse_setting("decode.Chunk-Tokens=a=b")
    assert (setting.variable, setting.value) == ("BATON_DECODE_CHUNK_TOKENS", "a=b")
