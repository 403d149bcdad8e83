"""Configuration: where a value may come from, who wins, and what a mistake is told."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from baton_core.limits import Limits
from baton_io.config import ConfigError, describe, from_json, load, option, resolve, to_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    port: int = option(8000, "port to listen on")
    model: str = option("smollm2", "name or path; 100 % local")
    dtype: Literal["bfloat16", "float32"] = option("bfloat16", "type of weights")
    transfer: str = option("auto", "how the cache travels", choices=("auto", "tcp"))
    api_key: str | None = option(None, "who may call")
    tp: int | None = option(None, "ranks")
    ratio: float = option(0.5, "share of memory")
    prefill: tuple[str, ...] = option((), "addresses of prefill workers")
    prefill_policy: str = option("random", "how a prefill worker is chosen")
    graphs: bool = option(True, "capture graphs")
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.port > 65535:
            raise ValueError(f"port must be at most 65535, not {self.port}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Strict:
    registry: str = option(MISSING, "where the workers are")


def read(*argv: str, env: Mapping[str, str] | None = None, role: str = "decode") -> Worker:
    return resolve(Worker, role, argv, env or {})


def mistake(*argv: str, env: Mapping[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        read(*argv, env=env)
    return str(caught.value)


def toml(folder: Path, text: str) -> str:
    path = folder / "baton.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_without_anything_the_defaults_hold() -> None:
    assert read() == Worker()


def test_a_flag_beats_a_variable_beats_the_file_beats_the_default(tmp_path: Path) -> None:
    file = toml(tmp_path, "port = 1\nmodel = 'file'\ntransfer = 'tcp'")
    config = read("--config", file, "--port", "3", env={"BATON_PORT": "2", "BATON_MODEL": "env"})
    assert (config.port, config.model, config.transfer, config.dtype) == (3, "env", "tcp", "bfloat16")


def test_a_variable_of_the_role_beats_the_variable_of_all_roles() -> None:
    env = {"BATON_DECODE_PORT": "2", "BATON_PORT": "1"}
    assert read(env=env).port == 2
    assert read(env=env, role="prefill").port == 1


def test_an_empty_variable_counts_as_unset() -> None:
    assert read(env={"BATON_PORT": "", "BATON_DECODE_PORT": ""}).port == 8000


def test_a_table_of_the_role_beats_the_top_level_and_other_roles_tables_are_ignored(tmp_path: Path) -> None:
    file = toml(tmp_path, "port = 1\n[decode]\nport = 2\n[prefill]\nchunks = 3\n[decode.limits]\nlookup_ms = 7")
    assert read("--config", file).port == 2
    assert read("--config", file).limits.lookup_ms == 7


@pytest.mark.parametrize("name", ["BATON_CONFIG", "BATON_DECODE_CONFIG"])
def test_the_file_can_be_named_by_a_variable(tmp_path: Path, name: str) -> None:
    assert read(env={name: toml(tmp_path, "prefill = ['a', 'b']\ngraphs = false")}) == Worker(
        prefill=("a", "b"), graphs=False
    )


def test_every_type_can_be_written_as_text() -> None:
    config = read(
        *("--prefill", "a, b", "--prefill", "c", "--tp", "2", "--ratio", "0.25", "--no-graphs", "--api-key", "k")
    )
    assert (config.prefill, config.tp, config.ratio, config.graphs, config.api_key) == (
        ("a", "b", "c"), 2, 0.25, False, "k",
    )  # fmt: skip
    assert read(env={"BATON_GRAPHS": "off", "BATON_TP": "none", "BATON_PREFILL": "a,b"}) == Worker(
        graphs=False, prefill=("a", "b")
    )


def test_the_limits_are_options_of_their_own() -> None:
    config = read("--lookup-ms", "5", env={"BATON_STEP_MS": "6"})
    assert config.limits == Limits(lookup_ms=5, step_ms=6)


@pytest.mark.parametrize(
    ("argv", "env", "told"),
    [
        (["--port", "x"], {}, "port = 'x' (flag --port): must be a whole number"),
        ([], {"BATON_PORT": "x"}, "port = 'x' (environment variable BATON_PORT): must be a whole number"),
        (["--dtype", "int8"], {}, "dtype = 'int8' (flag --dtype): must be one of bfloat16, float32"),
        (["--transfer", "shm"], {}, "transfer = 'shm' (flag --transfer): must be one of auto, tcp"),
        (["--ratio", "nan"], {}, "ratio = 'nan' (flag --ratio): must be a number"),
        ([], {"BATON_GRAPHS": "maybe"}, "must be true or false"),
        (["--tp", "two"], {}, "must be a whole number (or none)"),
        (["--prot", "1"], {}, "unknown argument --prot; did you mean --port?"),
        ([], {"BATON_DECODE_PROT": "1"}, "BATON_DECODE_PROT: decode has no such key; did you mean BATON_DECODE_PORT?"),
        (["--lookup-ms", "0"], {}, "lookup_ms comes from flag --lookup-ms"),
        (["--port", "70000"], {}, "at most 65535, not 70000; port comes from flag --port"),
        (["--config", "/no/such/file"], {}, "file /no/such/file (from flag --config): No such file"),
    ],
)
def test_a_mistake_is_told_with_key_source_value_and_what_is_allowed(
    argv: list[str], env: dict[str, str], told: str
) -> None:
    assert told in mistake(*argv, env=env)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("prot = 1", "decode has no such key; did you mean port?"),
        ("queue = 1", "belong in their [role] tables"),
        ("port = true", "port = True"),
        ("port = 1.5", "must be a whole number"),
        ("model = 3", "must be a text"),
        ("graphs = 1", "must be true or false"),
        ("prefill = [1]", "must be a text"),
        ("port = ", "not valid TOML"),
    ],
)
def test_a_mistake_in_the_file_names_the_file(tmp_path: Path, text: str, told: str) -> None:
    file = toml(tmp_path, text)
    said = mistake("--config", file)
    assert told in said
    assert file in said


def test_a_variable_that_no_field_has_may_belong_to_another_role() -> None:
    assert read(env={"BATON_POLICY": "random", "BATON_PREFILL_CHUNKS": "1"}) == Worker()


def test_a_key_that_begins_with_a_roles_name_is_set_by_the_variable_of_its_own_role_only() -> None:
    assert read(env={"BATON_PREFILL_POLICY": "x"}).prefill_policy == "random"
    assert read(env={"BATON_DECODE_PREFILL_POLICY": "x"}).prefill_policy == "x"
    assert read(env={"BATON_PREFILL": "a"}, role="prefill").prefill == ("a",)


def test_a_required_option_that_is_missing_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="registry is required: give --registry, BATON_REGISTRY"):
        resolve(Strict, "router", [], {})


def test_a_mistake_ends_the_program_with_code_2_and_a_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load(Worker, "decode", ["--port", "x"], {}, program="baton-decode", description="")
    assert ended.value.code == 2
    assert "baton-decode: port = 'x'" in capsys.readouterr().err


def test_help_shows_defaults_variables_and_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load(Worker, "decode", ["--help"], {}, program="baton-decode", description="Decodes.")
    shown = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    for text in ("main options", "limits:", "[default 8000; env BATON_PORT]", "100 % local", "--no-graphs"):
        assert text in shown


def test_secrets_are_never_shown() -> None:
    config = read("--api-key", "hush", "--prefill", "redis://me:hush@host/0")
    assert "hush" not in describe(config)
    assert "api_key=***" in describe(config)


def test_the_description_names_only_the_limits_that_differ() -> None:
    assert describe(read("--lookup-ms", "5")).endswith(" lookup_ms=5")
    assert describe(read()).endswith(" limits=default")


def test_a_configuration_survives_the_way_to_a_child_process() -> None:
    config = read("--prefill", "a,b", "--lookup-ms", "5", "--api-key", "k")
    assert from_json(Worker, to_json(config)) == config


@pytest.mark.parametrize("text", ["", "{", '{"port": "x"}', '{"limits": {"lookup_ms": 0}}'])
def test_text_that_is_no_configuration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a Worker"):
        from_json(Worker, text)
